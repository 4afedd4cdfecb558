"""Critics fitted to a task's few episodes by L-BFGS, with a fixed number of iterations and of kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from safeicrl.envs.api import PyTree, record
from safeicrl.errors import UserError, check_integer, check_number


@dataclass(frozen=True)
class CriticConfig:
    """How critics are fitted."""

    steps: int = 20  # L-BFGS iterations
    memory: int = 8  # pairs of steps and gradient differences that are kept
    rates: tuple[float, float] = (0.03, 0.1)  # step sizes, before and after adaptation
    decay: float = 1e-5  # weight of the parameters' squared norm

    def __post_init__(self) -> None:
        for name in ("steps", "memory"):
            check_integer(name, getattr(self, name), 1)
        if len(self.rates) != 2:
            raise UserError(f"rates must be two numbers, got {self.rates}")
        for rate in self.rates:
            check_number("rates", rate, 0.0, strict=True)
        check_number("decay", self.decay, 0.0)


@record
class Pairs:
    """The latest steps of L-BFGS and the changes of the gradient along them, in a ring.

    Reading the long rows takes most of a fit's time. So their products are kept, and a new pair costs one pass over
    the rows here and one in the next step.
    """

    steps: jax.Array  # S [pair, parameter]
    changes: jax.Array  # Y [pair, parameter]
    mixed: jax.Array  # S·Y [pair, pair], right where the step is not newer than the change
    square: jax.Array  # Y·Y [pair, pair]
    along_steps: jax.Array  # S·g [pair], with the gradient g after the newest pair
    along_changes: jax.Array  # Y·g [pair]

    @staticmethod
    def empty(memory: int, size: int) -> "Pairs":
        """No pairs yet."""
        long, small, row = jnp.zeros((memory, size)), jnp.zeros((memory, memory)), jnp.zeros(memory)
        return Pairs(steps=long, changes=long, mixed=small, square=small, along_steps=row, along_changes=row)

    def with_pair(self, row: jax.Array, step: jax.Array, change: jax.Array, gradient: jax.Array) -> "Pairs":
        """With a new pair in the place of the oldest, `row`, and the `gradient` after it."""
        put = lambda rows, new: jax.lax.dynamic_update_index_in_dim(rows, new, row, 0)  # noqa: E731
        steps, changes = put(self.steps, step), put(self.changes, change)
        # Sums and not matrix products: these would first be copied into a padded shape.
        products = lambda vector: ((steps * vector).sum(-1), (changes * vector).sum(-1))  # noqa: E731
        (mixed, square), (along_steps, along_changes) = products(change), products(gradient)
        here = jnp.arange(len(mixed)) == row
        return Pairs(
            steps=steps, changes=changes, mixed=jnp.where(here, mixed[:, None], self.mixed),
            square=jnp.where(here, square[:, None], jnp.where(here[:, None], square, self.square)),
            along_steps=along_steps, along_changes=along_changes,
        )  # fmt: skip


def lbfgs(
    loss: Callable[[PyTree], jax.Array], start: PyTree, *, steps: int, rate: float, memory: int,
    decay: PyTree | None = None,
) -> PyTree:  # fmt: skip
    """Minimise by `steps` quasi-Newton steps of size `rate`.

    Instead of a line search, a step that makes the loss larger is not taken, and the curvature is learned anew.
    While nothing is known of it, a step is one along the gradient, of at most `rate` in length. `decay`, arrays
    like those of `start`, weighs the square of each parameter, which is added to the loss.
    """
    begin, unflatten = ravel_pytree(start)
    weight = None if decay is None else ravel_pytree(decay)[0]
    penalty = lambda x: 0.0 if weight is None else (weight * x**2).sum()  # noqa: E731
    look = jax.value_and_grad(lambda x: loss(unflatten(x)) + penalty(x))

    def body(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        x, value, gradient, pairs, known = carry
        first = jnp.minimum(1.0, 1.0 / jnp.maximum(jnp.abs(gradient).sum(), 1e-30)) * gradient
        newton = inverse_hessian(pairs, number, known, gradient)
        new = x - rate * jnp.where(known > 0, newton, first)
        now, slope = look(new)
        pairs = pairs.with_pair(number % memory, new - x, slope - gradient, slope)
        better = now <= value + 1e-6 * jnp.abs(value)  # but for rounding; false for nan
        known = jnp.where(better, jnp.minimum(known + 1, memory), 0)
        pick = lambda a, b: jnp.where(better, a, b)  # noqa: E731
        return (pick(new, x), pick(now, value), pick(slope, gradient), pairs, known), None

    # The first round only looks at the start: its gradient of 0 leads nowhere. One copy of `look` compiles faster.
    empty = Pairs.empty(memory, begin.size)
    unseen = (begin, jnp.float32(jnp.finfo(jnp.float32).max), jnp.zeros_like(begin), empty, jnp.int32(-1))
    (found, *_), _ = jax.lax.scan(body, unseen, jnp.arange(steps + 1))
    return unflatten(found)


def inverse_hessian(pairs: Pairs, number: jax.Array, known: jax.Array, gradient: jax.Array) -> jax.Array:
    """H g, where H is the L-BFGS approximation of the inverse Hessian by `pairs`, in its compact form.

    `gradient` is the one that `pairs` knows. `number` pairs were seen, of which the newest `known` count. With R
    the upper triangle of S·Y, oldest pair first, and D its diagonal,

        H g = γ g + S R⁻ᵀ ((D + γ Y·Y) p − γ Y·g) − γ Y p,   p = R⁻¹ S·g     (Byrd, Nocedal and Schnabel 1994)
    """
    memory = len(pairs.mixed)
    order = (number + jnp.arange(memory)) % memory  # the row of each pair, from the oldest to the newest
    age = (jnp.arange(memory) - number) % memory  # the other way round
    mixed, square = (x[order[:, None], order] for x in (pairs.mixed, pairs.square))
    along_steps, along_changes = pairs.along_steps[order], pairs.along_changes[order]
    curvature = jnp.diag(mixed)
    usable = (curvature > 1e-10) & (jnp.arange(memory) >= memory - known)
    both = usable[:, None] & usable
    triangle = jnp.where(both, mixed, 0.0) + jnp.diag(jnp.where(usable, 0.0, 1.0))
    square = jnp.where(both, square, 0.0)
    along_steps, along_changes = (jnp.where(usable, x, 0.0) for x in (along_steps, along_changes))
    newest = usable[-1] & (square[-1, -1] > 0)
    scale = jnp.where(newest, curvature[-1] / jnp.maximum(square[-1, -1], 1e-30), 1.0)

    of_changes = solve_upper(triangle, along_steps)
    inner = jnp.where(usable, curvature, 0.0) * of_changes + scale * (square @ of_changes - along_changes)
    of_steps = solve_upper(triangle[::-1, ::-1].T, inner[::-1])[::-1]  # the transpose, from the other end
    back = lambda weights, rows: (weights[age][:, None] * rows).sum(0)  # noqa: E731
    return scale * gradient + back(of_steps, pairs.steps) - scale * back(of_changes, pairs.changes)


def solve_upper(triangle: jax.Array, target: jax.Array) -> jax.Array:
    """Solve R x = `target`, where R is the upper triangle of a small matrix.

    Written out, number by number, so that on a GPU it is one kernel for all tasks; the library's routine is slower.
    """
    size = len(target)
    found: list[jax.Array] = [jnp.zeros(())] * size
    for row in reversed(range(size)):
        rest = sum((triangle[row, column] * found[column] for column in range(row + 1, size)), jnp.zeros(()))
        found[row] = (target[row] - rest) / triangle[row, row]
    return jnp.stack(found)

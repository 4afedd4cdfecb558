"""Critics fitted to a task's few episodes by L-BFGS, with a fixed number of iterations and of kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular

from safeicrl.envs.api import PyTree
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


def lbfgs(loss: Callable[[PyTree], jax.Array], start: PyTree, *, steps: int, rate: float, memory: int) -> PyTree:
    """Minimise by `steps` quasi-Newton steps of size `rate`.

    Instead of a line search, a step that makes the loss larger is not taken, and the curvature is learned anew.
    While nothing is known of it, a step is one along the gradient, of at most `rate` in length.
    """
    begin, unflatten = ravel_pytree(start)
    look = jax.value_and_grad(lambda x: loss(unflatten(x)))

    def body(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        x, value, gradient, pairs, known = carry
        first = jnp.minimum(1.0, 1.0 / jnp.maximum(jnp.abs(gradient).sum(), 1e-30)) * gradient
        newton = inverse_hessian(pairs, (number + jnp.arange(memory)) % memory, known, gradient)
        new = x - rate * jnp.where(known > 0, newton, first)
        now, slope = look(new)
        row = number % memory
        pairs = pairs.at[0, row].set(new - x).at[1, row].set(slope - gradient)
        better = now <= value + 1e-6 * jnp.abs(value)  # but for rounding; false for nan
        known = jnp.where(better, jnp.minimum(known + 1, memory), 0)
        pick = lambda a, b: jnp.where(better, a, b)  # noqa: E731
        return (pick(new, x), pick(now, value), pick(slope, gradient), pairs, known), None

    # The first round only looks at the start: its gradient of 0 leads nowhere. One copy of `look` compiles faster.
    empty = jnp.zeros((2, memory, begin.size))
    unseen = (begin, jnp.float32(jnp.finfo(jnp.float32).max), jnp.zeros_like(begin), empty, jnp.int32(-1))
    (found, *_), _ = jax.lax.scan(body, unseen, jnp.arange(steps + 1))
    return unflatten(found)


def inverse_hessian(pairs: jax.Array, order: jax.Array, known: jax.Array, vector: jax.Array) -> jax.Array:
    """H v, where H is the L-BFGS approximation of the inverse Hessian by `pairs`, in its compact form.

    `pairs` [2, pair, parameter] are steps S and the changes Y of the gradient along them. `order` [pair] lists them
    from the oldest to the newest; only the newest `known` count. With R the upper triangle of S·Y and D its
    diagonal,

        H v = γ v + S R⁻ᵀ ((D + γ Y·Y) p − γ Y·v) − γ Y p,   p = R⁻¹ S·v     (Byrd, Nocedal and Schnabel 1994)

    Two passes over the pairs and two tiny triangular systems, instead of the usual loops over pairs.
    """
    steps, changes = pairs
    mixed, square = ((x @ changes.T)[order][:, order] for x in (steps, changes))
    along_steps, along_changes = (pairs @ vector)[:, order]
    curvature = jnp.diag(mixed)
    usable = (curvature > 1e-10) & (jnp.arange(len(order)) >= len(order) - known)
    both = usable[:, None] & usable
    triangle = jnp.where(both, jnp.triu(mixed), 0.0) + jnp.diag(jnp.where(usable, 0.0, 1.0))
    square = jnp.where(both, square, 0.0)
    along_steps, along_changes = (jnp.where(usable, x, 0.0) for x in (along_steps, along_changes))
    newest = usable[-1] & (square[-1, -1] > 0)
    scale = jnp.where(newest, curvature[-1] / jnp.maximum(square[-1, -1], 1e-30), 1.0)

    of_changes = solve_triangular(triangle, along_steps)
    inner = jnp.where(usable, curvature, 0.0) * of_changes + scale * (square @ of_changes - along_changes)
    of_steps = solve_triangular(triangle, inner, trans="T")
    back = jnp.zeros((2, len(order))).at[:, order].set(jnp.stack([of_steps, -scale * of_changes]))
    return scale * vector + jnp.einsum("ip,ipn->n", back, pairs)

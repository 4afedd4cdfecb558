"""A TRPO step: the natural gradient by conjugate gradients, then a line search within a trust region.

max_x surrogate(π(x)) subject to divergence(π(x)) ≤ max_kl, where π(x) are the numbers that describe the policy
(logits, means, spreads). The divergence is the mean KL from the policy at the start. Its value and slope are 0
there, so its curvature in x, the Fisher matrix F, is JᵀCJ: J is the derivative of π, and C the curvature of the
divergence in π. The direction F⁻¹g needs only products with F. (Schulman et al. 2015)
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from safeicrl.envs.api import PyTree
from safeicrl.errors import check_integer, check_number

Vector = jax.Array
SMALLEST = 1e-10  # a squared norm below this is nothing in float32


@dataclass(frozen=True)
class TrustRegionConfig:
    """How far and how carefully a step goes."""

    max_kl: float = 1e-3  # size of the trust region
    iterations: int = 10  # of conjugate gradients
    damping: float = 1e-3  # added to the diagonal of F: float32 cannot resolve its small eigenvalues
    halvings: int = 10  # step sizes of the line search, each half of the one before

    def __post_init__(self) -> None:
        check_number("max_kl", self.max_kl, 0.0, strict=True)
        check_number("damping", self.damping, 0.0)
        for name in ("iterations", "halvings"):
            check_integer(name, getattr(self, name), 1)


def conjugate_gradient(product: Callable[[Vector], Vector], target: Vector, iterations: int) -> Vector:
    """Solve A x = `target` for a symmetric positive A, of which only products with vectors are known."""

    def body(_: int, carry: tuple) -> tuple:
        x, residual, direction, squared = carry
        along = product(direction)
        curvature = direction @ along
        # Converged, or rounding has made the curvature meaningless: stay.
        step = jnp.where((squared > SMALLEST) & (curvature > 0), squared / jnp.maximum(curvature, 1e-30), 0.0)
        x, residual = x + step * direction, residual - step * along
        now = residual @ residual
        direction = residual + jnp.where(squared > SMALLEST, now / jnp.maximum(squared, 1e-30), 0.0) * direction
        return x, residual, direction, now

    start = (jnp.zeros_like(target), target, target, target @ target)
    return jax.lax.fori_loop(0, iterations, body, start)[0]


def fisher_products(
    policy: Callable[[Vector], PyTree], divergence: Callable[[PyTree], jax.Array], start: Vector
) -> tuple[PyTree, Callable[[PyTree], Vector], Callable[[Vector], Vector]]:
    """π at the start, the products with Jᵀ, and those with F.

    All is linearised once: what does not depend on the vector is not computed again for each product.
    """
    here, push = jax.linearize(policy, start)
    pull = jax.linear_transpose(push, start)
    _, bend = jax.linearize(jax.grad(divergence), here)
    return here, lambda change: pull(change)[0], lambda vector: pull(bend(push(vector)))[0]


def trust_region_step(
    params: PyTree,
    policy: Callable[[PyTree], PyTree],
    surrogate: Callable[[PyTree], jax.Array],
    divergence: Callable[[PyTree], jax.Array],
    config: TrustRegionConfig,
) -> tuple[PyTree, dict[str, jax.Array]]:
    """The largest of the halved natural-gradient steps that improves the surrogate within the trust region.

    `policy` maps parameters to π, the other two judge π. All step sizes are tried at once. If none is good, the
    parameters stay. Also returns what happened.
    """
    start, unflatten = ravel_pytree(params)
    here, pull, product = fisher_products(lambda x: policy(unflatten(x)), divergence, start)
    value, slope = jax.value_and_grad(surrogate)(here)
    gradient = pull(slope)
    fisher = lambda vector: product(vector) + config.damping * vector  # noqa: E731
    direction = conjugate_gradient(fisher, gradient, config.iterations)
    length = direction @ fisher(direction)  # twice the KL of a whole step
    whole = jnp.sqrt(2 * config.max_kl / jnp.maximum(length, SMALLEST)) * direction
    sizes = 0.5 ** jnp.arange(config.halvings)

    def attempt(size: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = policy(unflatten(start + size * whole))
        return surrogate(there) - value, divergence(there)

    gains, distances = jax.vmap(attempt)(sizes)
    good = (gains > 0) & (distances <= config.max_kl)
    size = jnp.where(good.any(), sizes[good.argmax()], 0.0)
    chosen = jnp.where(good.any(), start + size * whole, start)  # not 0 · whole, which may be infinite
    told = {
        "step_size": size,
        "step_kl": jnp.where(good.any(), distances[good.argmax()], 0.0),
        "grad_norm": jnp.sqrt(gradient @ gradient),
    }
    return unflatten(chosen), told

"""The train state of an algorithm: checked before training, made for one seed or several, taken apart again."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.algos.api import Algorithm
from safeicrl.envs.api import PyTree
from safeicrl.errors import UserError
from safeicrl.policies.catalogue import check_card
from safeicrl.training.settings import TrainConfig


def check_parts(algorithm: Algorithm) -> None:
    """Refuse an algorithm without one of its parts."""
    parts = ("env", "config", "init", "update", "agent", "card")
    missing = [name for name in parts if not hasattr(algorithm, name)]
    if missing:
        raise UserError(f"{type(algorithm).__name__} has no {missing[0]!r}: an algorithm has {', '.join(parts)}")


def check_state(algorithm: Algorithm, config: TrainConfig, template: PyTree) -> None:
    """Refuse a state that cannot be trained, or whose policy could not be loaded."""
    who = type(algorithm).__name__
    if not hasattr(template, "key"):
        raise UserError(f"{who}.init must return a state with a field 'key', got a {type(template).__name__}")
    one = template if config.seeds == 1 else eqx.filter_eval_shape(first_state, algorithm, config.seed, 1)
    agent = eqx.filter_eval_shape(algorithm.agent, one)
    check_card(f"{who}.card", algorithm.card(), algorithm.env, agent)


def first_state(algorithm: Algorithm, seed: int, seeds: int) -> PyTree:
    """The first train state; several are stacked on axis 0, each the same as when it trains alone."""
    if seeds == 1:
        state = algorithm.init(jax.random.key(seed))
    else:
        each = np.arange(seed, seed + seeds, dtype=np.uint32)  # int32 would wrap
        state = eqx.filter_vmap(algorithm.init)(jax.vmap(jax.random.key)(each))

    def strong(leaf: Any) -> Any:
        """Without JAX's weak types, which a checkpoint does not keep: they would change the compiled program."""
        floating = eqx.is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jnp.asarray(leaf, leaf.dtype) if floating else leaf

    return jax.tree.map(strong, state)


def select(state: PyTree, index: int, seeds: int) -> PyTree:
    """The state of the seed at this index, of several that are stacked."""
    return state if seeds == 1 else jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, state)

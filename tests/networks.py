"""Networks and rows of tokens for the tests of what reads them."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.reference import RandomAgent
from safeicrl.envs.api import Env
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.nets.transformer import Transformer
from safeicrl.tokens import Token
from safeicrl.trial import Trials, run_trials, sample_queue

ROOM = SafeDarkRoom(size=4, obstacles=4, max_steps=7, episodes=2, train_budget=(1.0, 4.0))
ROWS, QUEUE, STEPS = 24, 4, 36


def random_weights(module, *args, scale: float = 1.0, seed: int = 0, **kwargs):
    """A network whose arrays are all random, biases and norms too; no program to compile for its own start."""
    rng = np.random.default_rng(seed)
    shapes = eqx.filter_eval_shape(module, *args, key=jax.random.key(0), **kwargs)

    def fill(x):
        size = scale / np.sqrt(x.shape[0]) if len(x.shape) > 1 else 0.3
        values = size * rng.normal(size=x.shape) + (len(x.shape) == 1)
        return jax.device_put(values.astype(x.dtype))  # jnp.asarray compiles a program for every shape

    return jax.tree.map(lambda x: fill(x) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes)


@functools.cache
def random_rows(env: Env = ROOM) -> Trials:
    """Random play in packed rows: trials of two episodes, which in the room end at different times in every row."""

    @jax.jit
    def play(key: jax.Array) -> Trials:
        tasks, budgets = sample_queue(env, "train", env.spec.train_budget, (ROWS, QUEUE), key)
        return run_trials(env, RandomAgent(env.spec.action), tasks, budgets, key, episodes=2, steps=STEPS)

    return play(jax.random.key(1))


@eqx.filter_jit
def forward(net: Transformer, tokens: Token, trial: jax.Array) -> jax.Array:
    return net.forward(tokens, trial)


@eqx.filter_jit
def step_by_step(net: Transformer, tokens: Token, cuts: tuple[int, ...] = ()) -> jax.Array:
    """Features of every token, read one after another, [row, time, width]; at each of `cuts` the cache grows."""
    rows, steps = tokens.reward.shape
    cache = net.init_cache(rows, 0)
    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tokens)
    parts = []
    for begin, end in itertools.pairwise((0, *cuts, steps)):
        cache = net.extend_cache(cache, end)
        here = jax.tree.map(lambda x: x[begin:end], by_time)  # noqa: B023
        cache, features = jax.lax.scan(lambda c, token: net.step(c, token, token.first), cache, here)
        parts.append(features)
    return jnp.swapaxes(jnp.concatenate(parts), 0, 1)

"""Whole episodes of many tasks side by side, and the points at which networks are evaluated on them.

For policies that see only the observation. On a small grid with discrete actions the points are all its cells, and
every loss is a sum over cells and actions, whatever the number of steps. Elsewhere each step is a point of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, record
from safeicrl.envs.faults import find_fault
from safeicrl.envs.spaces import Discrete, Grid
from safeicrl.nets.feedforward import Actor, Normaliser, encode
from safeicrl.nets.heads import Categorical, Distribution
from safeicrl.optimisers.lagrangian import TABLE

Act = Callable[[jax.Array, Key], jax.Array]  # observations [task, episode, obs], key → actions [task, episode, ...]


@record
class Played:
    """Whole episodes, [task, episode, time, ...]; reward and cost are 0 after an episode's end."""

    observation: jax.Array  # before the action
    action: jax.Array
    reward: jax.Array
    cost: jax.Array
    valid: jax.Array  # bool: the episode was still going on
    done: jax.Array  # bool: the step ended it

    @property
    def returns(self) -> jax.Array:
        """Undiscounted, [task, episode]."""
        return self.reward.sum(-1)

    @property
    def costs(self) -> jax.Array:
        """Undiscounted, [task, episode]."""
        return self.cost.sum(-1)

    @property
    def lengths(self) -> jax.Array:
        """Steps, [task, episode]."""
        return self.valid.sum(-1)


def first_fault(played: Played, spec: EnvSpec) -> jax.Array:
    """The first number of the environment that breaks its contract, for each task, [task, 5] (envs/faults.py)."""

    def of_task(played: Played) -> jax.Array:
        episodes, steps = played.valid.shape
        time = jnp.broadcast_to(jnp.arange(steps), (episodes, steps))
        return find_fault(
            cost=played.cost, reward=played.reward, observation=played.observation, first=played.observation,
            start=jnp.zeros_like(played.valid), valid=played.valid,
            episode=jnp.broadcast_to(jnp.arange(episodes)[:, None], (episodes, steps)),
            time=time, spec=spec, age=jnp.where(played.done, 0, time + 1),
        )  # fmt: skip

    found = jax.vmap(of_task)(played)
    return found.at[:, 1].set(jnp.arange(len(found)))


def play(env: Env, act: Act, tasks: PyTree, key: Key, episodes: int) -> Played:
    """`episodes` whole episodes of each of the `tasks`, [task]."""
    shape = (jax.tree.leaves(tasks)[0].shape[0], episodes)
    reset_key, scan_key = jax.random.split(key)
    reset = jax.vmap(jax.vmap(env.reset, (0, None)))
    advance = jax.vmap(jax.vmap(env.step, (0, 0, 0, None)))
    state, observation = reset(jax.random.split(reset_key, shape), tasks)

    def step(carry: tuple, keys: Key) -> tuple[tuple, Played]:
        state, observation, going = carry
        action = act(observation, keys[0])
        new, out = advance(jax.random.split(keys[1], shape), state, action, tasks)
        done = out.terminated | out.truncated
        played = Played(
            observation=observation, action=action, valid=going, done=done,
            reward=jnp.where(going, out.reward, 0.0), cost=jnp.where(going, out.cost, 0.0),
        )  # fmt: skip
        # A finished episode stays where it ended, so that its physics cannot diverge.
        hold = lambda a, b: jnp.where(going.reshape(going.shape + (1,) * (a.ndim - 2)), a, b)  # noqa: E731
        state = jax.tree.map(hold, new, state)
        return (state, hold(out.observation, observation), going & ~done), played

    keys = jax.random.split(scan_key, (env.spec.max_steps, 2))
    _, played = jax.lax.scan(step, (state, observation, jnp.ones(shape, bool)), keys)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), played)


@record
class Points:
    """Where networks are evaluated on a task's episodes."""

    inputs: jax.Array  # [point, in]
    weight: jax.Array  # [point] share of the steps
    action: jax.Array | None  # [point, ...]; None: the points are cells, and every action of each is looked at
    place: jax.Array  # [episode, time] int32, the point of each step

    def at_steps(self, values: jax.Array) -> jax.Array:
        """Values of points, [..., point], as values of steps, [..., episode, time]."""
        return values[..., self.place]

    def log_prob(self, policy: Distribution) -> jax.Array:
        """Log-probabilities of the action of each point, [point], or of every action, [point, action]."""
        if self.action is not None:
            return policy.log_prob(self.action)
        assert isinstance(policy, Categorical)
        return jax.nn.log_softmax(policy.logits)


@dataclass(frozen=True)
class View:
    """How networks look at a world: all cells of a small grid at once, or every observation by itself."""

    spec: EnvSpec

    @property
    def cells(self) -> np.ndarray | None:
        """All cells, [cell, coordinate], where the points are cells."""
        space = self.spec.observation
        small = isinstance(space, Grid) and np.prod(space.sizes) <= TABLE and isinstance(self.spec.action, Discrete)
        return space.cells() if small else None  # type: ignore[union-attr]

    def actor(self, actors: Actor, normaliser: Normaliser | None, temperature: float = 1.0) -> Act:
        """How the policies of several tasks, `actors` [task], act."""
        policy: Callable[[jax.Array], Distribution]
        if self.cells is None:
            policy = lambda seen: jax.vmap(Actor.__call__)(actors, encode(seen, self.spec, normaliser))  # noqa: E731
        else:
            inputs = encode(jnp.asarray(self.cells), self.spec, None)
            logits = jax.vmap(lambda actor: actor(inputs).logits)(actors)  # type: ignore[union-attr]  # [task, cell, action]
            tasks = jnp.arange(len(logits))[:, None]
            policy = lambda seen: Categorical(logits=logits[tasks, self._flat(seen)])  # noqa: E731

        def act(observation: jax.Array, key: Key) -> jax.Array:
            chosen = policy(observation)
            if temperature == 0:
                return chosen.mode()
            return (chosen if temperature == 1 else chosen.tempered(temperature)).sample(key)

        return act

    def points(self, played: Played, normaliser: Normaliser | None) -> Points:
        """The points of one task's episodes, [episode, time]."""
        share = played.valid / jnp.maximum(played.valid.sum(), 1)
        if self.cells is None:
            flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
            return Points(
                inputs=flat(encode(played.observation, self.spec, normaliser)), weight=share.ravel(),
                action=flat(played.action), place=jnp.arange(share.size).reshape(share.shape),
            )  # fmt: skip
        place = self._flat(played.observation)
        inputs = encode(jnp.asarray(self.cells), self.spec, None)
        weight = self._collect(share, place, len(inputs))
        return Points(inputs=inputs, weight=weight, action=None, place=place)

    def sums(self, values: jax.Array, points: Points) -> jax.Array:
        """Values of steps, [episode, time], added up at their points, [point]."""
        if points.action is not None:
            return values.ravel()
        return self._collect(values, points.place, len(points.weight))

    def signal(self, values: jax.Array, points: Points, played: Played) -> jax.Array:
        """Values of steps, [episode, time], added up at their points and actions, like `Points.log_prob`."""
        if points.action is not None:
            return values.ravel()
        actions = self.spec.action.encode(played.action)  # [episode, time, action]
        one_hot = jax.nn.one_hot(points.place, len(points.weight))
        return jnp.einsum("etc,eta->ca", one_hot, actions * values[..., None])

    def _collect(self, values: jax.Array, place: jax.Array, count: int) -> jax.Array:
        # a product instead of a scatter, which is slow and, on a GPU, not reproducible
        return values.ravel() @ jax.nn.one_hot(place.ravel(), count)

    def _flat(self, observation: jax.Array) -> jax.Array:
        assert isinstance(self.spec.observation, Grid)
        return self.spec.observation.flat(observation)

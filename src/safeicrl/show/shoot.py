"""A robot's trial as a film: what it does on one unseen task, with pictures of its first and last episode."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from safeicrl.agents.api import WrappedAgent
from safeicrl.envs.api import Box, Env, EnvSpec, Key, PyTree, Split, Step, replace
from safeicrl.envs.mujoco import models, scene
from safeicrl.envs.wrappers import Wrapped
from safeicrl.errors import UserError
from safeicrl.policies.contenders import Contender
from safeicrl.show.robot_film import Film, chosen_steps
from safeicrl.tokens import Token
from safeicrl.trial import run_trials


@dataclass(frozen=True)
class _Watched:
    """A robot's world whose observations end with its joint positions, for the camera."""

    env: Env

    @property
    def spec(self) -> EnvSpec:
        own = self.env.spec
        return replace(own, observation=Box(own.observation.size + self._joints))  # type: ignore[union-attr]

    @property
    def _joints(self) -> int:
        return models.load(_robot(self.env).robot).nq

    def sample_task(self, key: Key, split: Split) -> PyTree:
        return self.env.sample_task(key, split)

    def reset(self, key: Key, task: PyTree) -> tuple[PyTree, jax.Array]:
        state, observation = self.env.reset(key, task)
        return state, jnp.concatenate([observation, state.physics.qpos])

    def step(self, key: Key, state: PyTree, action: jax.Array, task: PyTree) -> tuple[PyTree, Step]:
        state, step = self.env.step(key, state, action, task)
        return state, replace(step, observation=jnp.concatenate([step.observation, state.physics.qpos]))

    def task_features(self, task: PyTree) -> jax.Array:
        return self.env.task_features(task)


class _Unaware(WrappedAgent):
    """An agent in a watched world: it sees what it always sees."""

    size: int = eqx.field(static=True)  # of its own observations

    def act(self, memory: PyTree, token: Token, key: Key) -> tuple[PyTree, jax.Array, PyTree]:
        own = replace(token, observation=token.observation[:, : self.size], previous=token.previous[:, : self.size])
        return self.agent.act(memory, own, key)


def _robot(env: Env) -> Any:
    """The MuJoCo world itself, without what it may be wrapped in."""
    return env.inner if isinstance(env, Wrapped) else env


def shoot(contender: Contender, budget: float, *, seed: int = 0, console: Console | None = None) -> Film:
    """One trial of a robot on one unseen task, with pictures of its first and last episode."""
    env, robot = contender.env, _robot(contender.env)
    size = env.spec.observation.size  # type: ignore[union-attr]
    task_key, key = jax.random.split(jax.random.key(seed))
    task = env.sample_task(task_key, "test")
    trials = run_trials(
        _Watched(env), _Unaware(agent=contender.agent, size=size), jax.tree.map(lambda x: x[None, None], task),
        jnp.full((1, 1), budget), key, episodes=env.spec.episodes, steps=env.spec.trial_steps,
    )  # fmt: skip
    trials = jax.tree.map(lambda x: np.asarray(x[0]), trials)  # [time, ...]
    rewards, costs, poses = [], [], []
    for episode in range(env.spec.episodes):
        here = trials.valid & (trials.token.episode == episode)
        seen = np.concatenate([trials.token.observation[here][:1], trials.final_observation[here]])
        poses.append(seen[:, size:])
        rewards.append(trials.reward[here])
        costs.append(trials.cost[here])
    shown = {episode: poses[episode] for episode in (0, env.spec.episodes - 1)}
    steps = chosen_steps(max(len(path) - 1 for path in shown.values()))
    pictures = _pictures(robot, task, shown, steps, console or Console())
    return Film(
        label=contender.label, world=type(robot).__name__, budget=budget, rewards=rewards, costs=costs,
        steps=steps, pictures=pictures,
    )  # fmt: skip


def _pictures(
    robot: Any, task: PyTree, poses: dict[int, np.ndarray], steps: list[int], console: Console
) -> dict[int, list[np.ndarray]]:
    """Rendered where that works here, else drawn from the robot's positions."""

    def take(camera: Callable[[np.ndarray], np.ndarray]) -> dict[int, list[np.ndarray]]:
        ends = {episode: np.minimum(steps, len(path) - 1) for episode, path in poses.items()}
        return {episode: [camera(path[: end + 1]) for end in ends[episode]] for episode, path in poses.items()}

    try:
        return take(lambda path: scene.picture(robot, task, path[-1])[::2, ::2])  # every second pixel is enough
    except UserError as error:
        console.print(f"{error}; drawn from positions instead", style="yellow", highlight=False, soft_wrap=True)
    return take(lambda path: scene.drawing(robot, task, list(path)))

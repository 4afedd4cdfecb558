"""One trial on one unseen task, played for the camera: the films of `films.py`, of a room or of a robot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from safeicrl.agents.api import Agent, WrappedAgent, lasting
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, Split, Step, replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.mujoco import models, scene
from safeicrl.envs.spaces import Box
from safeicrl.envs.wrappers import Wrapped
from safeicrl.errors import UserError
from safeicrl.policies.contenders import Contender
from safeicrl.show.films import RobotFilm, RoomFilm, chosen_steps
from safeicrl.tokens import Token
from safeicrl.trial import Trials, run_trials


def unwrapped(env: Env) -> Any:
    """The world itself, without what it may be wrapped in."""
    return env.inner if isinstance(env, Wrapped) else env


def shoot_room(contender: Contender, budget: float, *, seed: int = 0) -> RoomFilm:
    """One trial in one unseen room."""
    room = unwrapped(contender.env)
    if not isinstance(room, SafeDarkRoom):
        raise UserError(f"a room's film is shot in SafeDarkRoom, not in {type(room).__name__}")
    task, episodes = _play(contender.env, lasting(contender.agent, False), budget, seed)
    cells = np.argwhere(np.asarray(task.obstacles).reshape(room.size, room.size))
    return RoomFilm(
        label=contender.label,
        size=room.size,
        goal=divmod(int(task.goal), room.size),
        obstacles=[(int(row), int(column)) for row, column in cells],
        budget=budget,
        paths=[[(int(row), int(column)) for row, column in _seen(episode)] for episode in episodes],
        step_costs=[episode.cost.tolist() for episode in episodes],
        reached=[bool(episode.terminated.any()) for episode in episodes],
    )


def shoot_robot(contender: Contender, budget: float, *, seed: int = 0, console: Console | None = None) -> RobotFilm:
    """One trial of a robot on one unseen task, with pictures of its first and last episode."""
    env, robot = contender.env, unwrapped(contender.env)
    size = env.spec.observation.size  # type: ignore[union-attr]
    task, episodes = _play(_Watched(env), _Unaware(agent=lasting(contender.agent, False), size=size), budget, seed)
    poses = {index: _seen(episodes[index])[:, size:] for index in (0, len(episodes) - 1)}
    steps = chosen_steps(max(len(path) - 1 for path in poses.values()))
    return RobotFilm(
        label=contender.label,
        world=type(robot).__name__,
        budget=budget,
        rewards=[np.asarray(episode.reward) for episode in episodes],
        costs=[np.asarray(episode.cost) for episode in episodes],
        steps=steps,
        pictures=_pictures(robot, task, poses, steps, console or Console()),
    )


def _play(env: Env, agent: Agent, budget: float, seed: int) -> tuple[Any, list[Trials]]:
    """An unseen task, and the trial on it as one record per episode, [time, ...]."""
    task, trials = _trial(env, agent, budget, jax.random.key(seed))
    trial = jax.tree.map(lambda x: np.asarray(x)[0], trials)
    here = [trial.valid & (trial.token.episode == index) for index in range(env.spec.episodes)]
    return task, [jax.tree.map(lambda x, mask=mask: x[mask], trial) for mask in here]


@eqx.filter_jit
def _trial(env: Env, agent: Agent, budget: float, key: Key) -> tuple[PyTree, Trials]:
    """A task and a trial on it, [1, time, ...]. One program: compiling many small ones would take longer."""
    task_key, key = jax.random.split(key)
    task = env.sample_task(task_key, "test")
    queue = jax.tree.map(lambda x: x[None, None], task)
    episodes, steps = env.spec.episodes, env.spec.trial_steps
    return task, run_trials(env, agent, queue, jnp.full((1, 1), budget), key, episodes=episodes, steps=steps)


def _seen(episode: Trials) -> np.ndarray:
    """All observations of an episode, from its first to what its last step led to."""
    return np.concatenate([episode.token.observation[:1], episode.final_observation])


# -- a robot's joints and pictures --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Watched:
    """A robot's world whose observations end with its joint positions, for the camera."""

    env: Env

    @property
    def spec(self) -> EnvSpec:
        own = self.env.spec
        joints = models.load(unwrapped(self.env).robot).nq
        return replace(own, observation=Box(own.observation.size + joints))  # type: ignore[union-attr]

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

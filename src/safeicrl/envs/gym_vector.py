"""Many environments behind Gymnasium's vector interface, stepped by one compiled program.

    envs = gymnasium.make_vec("safeicrl/SafeDarkRoom-v0", num_envs=256)       # or autoreset_mode="SameStep"

Everything is as in Gymnasium's own `SyncVectorEnv` of the same environments and seeds, in all its autoreset modes,
and many times faster. As with single environments, an autoreset never changes a task.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from safeicrl.envs.api import Env, PyTree, Split, check_split
from safeicrl.envs.gym import cpu, face_of, gym_space, precision, refuse_fork, world
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.errors import UserError, check_integer, unknown_name


class GymVectorEnv(gymnasium.vector.VectorEnv):
    """`num_envs` environments of one kind, each with a task of its own."""

    def __init__(
        self,
        env: str | Env,
        num_envs: int = 1,
        *,
        split: str = "train",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **parameters: Any,
    ) -> None:
        if render_mode is not None:
            raise UserError("frames show single environments: leave out render_mode, or use the mode 'sync'")
        self.num_envs = check_integer("num_envs", num_envs, 1)
        self.env, self.split = world(env, parameters), check_split(split)
        self.face = face_of(self.env)
        try:
            self.mode = AutoresetMode(autoreset_mode)
        except ValueError:
            raise unknown_name("autoreset mode", autoreset_mode, [mode.value for mode in AutoresetMode]) from None
        self.metadata = {"autoreset_mode": self.mode, "render_modes": list(self.face.render_modes)}
        self.single_observation_space = gym_space(self.env.spec.observation, self.face.dtype)
        self.single_action_space = gym_space(self.env.spec.action, self.face.dtype)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.task: PyTree = None  # [env] what an agent must not see
        self._compiled = _compiled(self.env)  # type: ignore[arg-type]  # a frozen dataclass hashes
        self._randoms = [np.random.default_rng() for _ in range(self.num_envs)]
        self._key: Any = None  # [env] of each one's episode
        self._state: PyTree = None
        self._observation: Any = None
        self._time = np.zeros(self.num_envs, np.uint32)  # [env] steps of the episode
        self._over = np.ones(self.num_envs, bool)  # [env] the episode has ended and no other has begun

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple:
        """Start an episode in every environment, or where `options["reset_mask"]` says so; tasks as in gym.py."""
        refuse_fork()
        options = dict(options or {})
        mask = _mask(options.pop("reset_mask", None), self.num_envs)
        layout, new_task = options.pop("task", None), options.pop("new_task", False)
        for name in options:
            raise unknown_name("reset option of many environments", name, ("task", "new_task", "reset_mask"))
        if self._state is None and not mask.all():
            raise UserError("the first reset must be of all environments: leave out reset_mask")
        seeds = _seeds(seed, self.num_envs)
        for index in np.flatnonzero(mask):
            if seeds[index] is not None:
                self._randoms[index], _ = gymnasium.utils.seeding.np_random(seeds[index])
        fresh = mask & (new_task | np.array([one is not None for one in seeds]))
        with precision(self.face):
            self._begin(mask, fresh if self.task is not None else mask, layout)
        return self._seen(), self._information(np.zeros((self.num_envs, *self.env.spec.cost_shape)), mask)

    def step(self, actions: Any) -> tuple:
        """One step of each: observations, rewards, terminated, truncated, info with the costs of the step."""
        if self._state is None or (self.mode is AutoresetMode.DISABLED and self._over.any()):
            raise UserError("an episode is over; call reset() before step()")
        actions = _check_actions(actions, self.env.spec.action, self.num_envs, self.face.dtype)
        waiting = self._over if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        with precision(self.face):
            self._time = self._time + np.uint32(1)  # a new array: the compiled step may still read the old one
            stepped = self._compiled.step(self._key, self._time, self._state, actions, self.task)
            self._state, self._observation, outcome = stepped
            reward, *costs, terminated, truncated = np.array(outcome, np.float64)
            cost = np.stack(costs, -1) if self.env.spec.several else costs[0]  # [env], or [env, cost]
            reward[waiting], cost[waiting], terminated[waiting], truncated[waiting] = 0, 0, 0, 0
            self._over = (terminated + truncated) > 0
            info: dict[str, Any] = {}
            if self.mode is AutoresetMode.SAME_STEP and self._over.any():
                info |= self._final(cost)
                cost[self._over] = 0
                waiting = self._over
            if waiting.any():
                self._begin(waiting, np.zeros(self.num_envs, bool), None)
            if self.mode is AutoresetMode.SAME_STEP:
                self._over = np.zeros(self.num_envs, bool)
        info |= self._information(cost, np.ones(self.num_envs, bool))
        return self._seen(), reward, terminated > 0, truncated > 0, info

    def _begin(self, mask: np.ndarray, fresh: np.ndarray, layout: Any) -> None:
        """Start an episode where `mask` says so, of a new task where `fresh` does."""
        draws = np.zeros(self.num_envs, np.uint32)
        for index in np.flatnonzero(mask):
            draws[index] = self._randoms[index].integers(2**32, dtype=np.uint32)
        task_key, key = self._compiled.keys(jax.device_put(draws, cpu()))
        if layout is not None:
            laid = jax.device_put(self.face.make_task(self.env, layout), cpu())
            task = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.num_envs, *jnp.shape(x))), laid)
            fresh = mask
        elif fresh.any():
            task = self._compiled.sample(task_key, self.split)
        else:
            task = self.task
        pick = self._compiled.pick
        self.task = task if self.task is None else pick(fresh, task, self.task)
        state, observation = self._compiled.reset(key, self.task)
        if self._state is None:
            self._key, self._state, self._observation = key, state, observation
        else:
            old = (self._key, self._state, self._observation)
            self._key, self._state, self._observation = pick(mask, (key, state, observation), old)
        self._time = np.where(mask, np.uint32(0), self._time)
        self._over = self._over & ~mask

    def _final(self, cost: np.ndarray) -> dict[str, Any]:
        """What the episodes that have just ended leave behind, as Gymnasium's own vector environments say it."""
        over, seen = self._over.copy(), self._seen()
        last = np.full(self.num_envs, None, dtype=object)
        for index in np.flatnonzero(over):
            last[index] = seen[index]
        final = self._information(cost, over)
        return {"final_obs": last, "_final_obs": over, "final_info": final, "_final_info": over.copy()}

    def _information(self, cost: np.ndarray, where: np.ndarray) -> dict[str, Any]:
        """Gymnasium's form of a vector info: zeros except `where`, and a mask beside each entry."""
        info = _shown({"cost": cost, **self.face.info(self.env, self._state)}, where)
        if self.env.spec.several:
            named = dict(zip(self.env.spec.costs, np.moveaxis(cost, -1, 0), strict=True))
            info |= {"costs": _shown(named, where), "_costs": where.copy()}
        return info

    def _seen(self) -> np.ndarray:
        return np.array(self._observation, self.single_observation_space.dtype)  # a copy: callers may keep it


def _shown(entries: Mapping[str, np.ndarray], where: np.ndarray) -> dict[str, Any]:
    """Each entry, zeros except `where`, and the mask beside it."""
    info: dict[str, Any] = {}
    for name, values in entries.items():
        shown = where.reshape((-1,) + (1,) * (values.ndim - 1))
        info |= {name: np.where(shown, values, 0).astype(values.dtype), f"_{name}": where.copy()}
    return info


def _mask(mask: Any, count: int) -> np.ndarray:
    if mask is None:
        return np.ones(count, bool)
    if not isinstance(mask, np.ndarray) or mask.shape != (count,) or mask.dtype != bool or not mask.any():
        raise UserError(f"reset_mask must be {count} booleans in an array, at least one of them true, got {mask!r}")
    return mask


def _seeds(seed: Any, count: int) -> list[int | None]:
    """The seed of each environment: counted up from one seed, or a list of them."""
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        return [int(seed) + index for index in range(count)]
    if len(seed) != count:
        raise UserError(f"{len(seed)} seeds were given for {count} environments")
    return list(seed)


def _check_actions(actions: Any, space: Discrete | Box, count: int, real: type) -> np.ndarray:
    """Actions of all environments, or an error that says what an action is."""
    values = np.asarray(actions)
    if values.shape != (count, *space.shape):
        raise UserError(f"actions must have shape {(count, *space.shape)}, got {values.shape}")
    low, high = (0, space.n - 1) if isinstance(space, Discrete) else (space.low, space.high)
    kinds = "iu" if isinstance(space, Discrete) else "iuf"
    right = (values >= low) & (values <= high) if values.dtype.kind in kinds else np.zeros(values.shape, bool)
    if not right.all():
        first = int(np.flatnonzero(~right.reshape(count, -1).all(1))[0])
        space.check_action(values[first], real)  # says what is wrong with it
    return values.astype(np.int32 if isinstance(space, Discrete) else real)


class _Compiled(NamedTuple):
    keys: Callable
    sample: Callable
    reset: Callable
    step: Callable
    pick: Callable


@lru_cache(maxsize=64)
def _compiled(env: Env) -> _Compiled:
    """The functions of gym.py's `compiled`, each for a batch: the same keys, so the same episodes."""

    def step(key: jax.Array, time: jax.Array, state: PyTree, action: jax.Array, task: PyTree) -> tuple:
        state, step = env.step(jax.random.fold_in(key, time), state, action, task)
        numbers = (step.reward, *env.spec.each_cost(step.cost), step.terminated, step.truncated)
        return state, step.observation, jnp.stack([jnp.asarray(x, jnp.result_type(float)) for x in numbers])

    def pick(mask: jax.Array, new: PyTree, old: PyTree) -> PyTree:
        choose = lambda x, y: jnp.where(mask.reshape((-1,) + (1,) * (x.ndim - 1)), x, y)  # noqa: E731
        return jax.tree.map(choose, new, old)

    def sample(keys: jax.Array, split: Split) -> PyTree:
        return jax.vmap(lambda key: env.sample_task(key, split))(keys)

    return _Compiled(
        keys=jax.jit(jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)), out_axes=1)),
        sample=jax.jit(sample, static_argnums=1),
        reset=jax.jit(jax.vmap(lambda key, task: env.reset(jax.random.fold_in(key, 0), task))),
        step=jax.jit(jax.vmap(step, out_axes=(0, 0, 1))),
        pick=jax.jit(pick),
    )

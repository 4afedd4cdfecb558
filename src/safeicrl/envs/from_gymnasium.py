"""Gymnasium environments of others, to train and evaluate in: `from_gymnasium(make_env, tasks=...)`.

The environments live on the host, one for each row of a batch, and are stepped in plain Python: one callback of the
compiled program steps all rows. What JAX carries is a ticket: which environment, and how many times it was called.
A ticket is good for one call, so an environment that is asked to go back in time says so instead of giving wrong
numbers. `restart` resets only the environments whose episode has ended (trial.py).

Nothing resets itself: the observation, reward, cost and flags of an episode's last step are those that the
environment returned, and the next episode's first observation comes after them.
"""

import contextlib
import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from safeicrl.budgets import Ranges, check_ranges
from safeicrl.envs.api import EnvSpec, Key, Split, Step, record
from safeicrl.envs.registry import WORLDS, World
from safeicrl.envs.spaces import Box, Discrete, Grid, as_array
from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.machine.callbacks import remembered

ONE_CALL = np.array([0, 0, 1], np.int32)  # what a call adds to a ticket
FLEETS = 4  # groups of environments that are kept: training and an evaluation need two


@dataclass(frozen=True, kw_only=True)
class GymTask:
    """One task: how its environment is made and reset."""

    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for make_env
    options: Mapping[str, Any] | None = None  # for every reset
    seed: int | None = None  # for every reset; None: one for each trial, drawn from the run's own seed


Tasks = Sequence[Any] | Callable[[np.random.Generator], Any]  # each a GymTask, its kwargs, or its seed


def from_gymnasium(
    make_env: Callable[..., gymnasium.Env],
    tasks: Tasks,
    *,
    name: str,
    budget: Ranges,
    episodes: int,
    test_tasks: Tasks | None = None,
    test_budget: Ranges | None = None,
    max_steps: int | None = None,
    cost_unit: float = 0.0,
    max_cost: float = math.inf,
    features: Callable[[Any], Sequence[float]] | None = None,
    costs: tuple[str, ...] = ("cost",),
) -> "GymnasiumEnv":
    """An environment of this library, known as `name`, whose tasks are Gymnasium environments with `info["cost"]`.

    `tasks` is a list of tasks, or a function that draws one from a `numpy.random.Generator`. A task is an integer
    (a seed: every episode is reset with it), a dictionary (keyword arguments for `make_env`) or a `GymTask` (both,
    and reset options). `test_tasks` are those of the split `test`; by default the same.

    `budget` is the range of budgets in training, `episodes` the number of episodes in a trial, and `max_steps` the
    time limit of an episode, by default the environment's own. Every cost is a multiple of `cost_unit` (0: any real
    number), and at most `max_cost`, which a guard needs. `features` turns a listed task into numbers for the
    critics, which are thrown away after training; the policy never sees them.

    `costs` names several costs, as in `("heat", "noise")`. The environment then puts those of every step into
    `info["costs"]`, by name. Each has a budget of its own: `budget` is one range for all of them, or one for each.
    """
    if name in WORLDS and name not in _FLOTILLAS:
        raise UserError(f"environment {name!r} is registered already")
    flotilla = _Flotilla(name, make_env, tasks, tasks if test_tasks is None else test_tasks, features)
    limit = max_steps or getattr(flotilla.example.spec, "max_episode_steps", None)
    if limit is None:
        raise UserError("the environment has no time limit: give max_steps, the most steps of an episode")
    flotilla.spec = EnvSpec(
        observation=flotilla.observation,
        action=flotilla.action,
        max_steps=check_integer("max_steps", limit, 1),
        episodes=check_integer("episodes", episodes, 1),
        train_budget=check_ranges(budget, costs, "budget"),
        test_budget=check_ranges(test_budget or budget, costs, "test_budget"),
        cost_unit=check_number("cost_unit", cost_unit, 0.0),
        task_features=flotilla.features["train"].shape[1],
        max_cost=max_cost,
        costs=costs,
    )
    _FLOTILLAS[name] = flotilla
    summary = (make_env.__doc__ or "A Gymnasium environment.").partition("\n")[0]
    WORLDS[name] = World(maker=lambda registered=name: GymnasiumEnv(registered), summary=summary)
    return GymnasiumEnv(name)


@record
class _Task:
    """A task as JAX sees it."""

    number: jax.Array  # [] uint32: the index of a listed task, or the seed that a function draws one from
    test: jax.Array  # [] int32: 1 in the split `test`


@record
class _State:
    ticket: jax.Array  # [3] int32: fleet, place in it, number of the call
    time: jax.Array  # [] int32, steps of this episode


@dataclass(frozen=True, eq=False)
class GymnasiumEnv:
    """What `from_gymnasium` returns."""

    registered: str  # the name that it is known by

    if TYPE_CHECKING:
        _host: ClassVar["_Flotilla"]  # set for each object; a field would be copied into cards

    def __post_init__(self) -> None:
        if self.registered not in _FLOTILLAS:
            raise UserError(f"{self.registered!r} was not made by from_gymnasium")
        object.__setattr__(self, "_host", _FLOTILLAS[self.registered])

    # Equal if they are of one call of `from_gymnasium`: a second one under the same name is another environment.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, GymnasiumEnv) and other._host is self._host

    def __hash__(self) -> int:
        return id(self._host)

    @property
    def spec(self) -> EnvSpec:
        """Spaces, limits and budget ranges."""
        return self._host.spec

    def sample_task(self, key: Key, split: Split) -> _Task:
        """One task of the list, or a seed for the function that draws them."""
        count = self._host.count(split)
        number = jax.random.bits(key) if count is None else jax.random.randint(key, (), 0, count)
        return _Task(number=number.astype(jnp.uint32), test=jnp.int32(split == "test"))

    def reset(self, key: Key, task: _Task) -> tuple[_State, jax.Array]:
        """Start a trial: a new environment on the host."""
        ticket, observation = self._call(self._host.launch, self._order(key, task))
        return _State(ticket=ticket, time=jnp.int32(0)), observation

    def step(self, key: Key, state: _State, action: jax.Array, task: _Task) -> tuple[_State, Step]:
        """Advance one step."""
        ticket, observation, outcome = self._call(self._host.step, state.ticket, action, outcome=True)
        reward, *costs, terminated, truncated = outcome
        time = state.time + 1
        late = (truncated > 0) | (time >= self.spec.max_steps)
        return _State(ticket=ticket, time=time), Step(
            observation=observation,
            reward=reward,
            cost=jnp.stack(costs) if self.spec.several else costs[0],
            terminated=terminated > 0,
            truncated=late & ~(terminated > 0),
        )

    def restart(
        self, key: Key, state: _State, observation: jax.Array, task: _Task, done: jax.Array
    ) -> tuple[_State, jax.Array]:
        """Where `done`: the next episode, of `task`; elsewhere everything stays as it is."""
        ticket, first = self._call(self._host.restart, state.ticket, self._order(key, task), observation, done)
        return _State(ticket=ticket, time=jnp.where(done, 0, state.time)), first

    def task_features(self, task: _Task) -> jax.Array:
        """Of a listed task: what `features` said of it; otherwise zeros."""
        train, test = (jnp.asarray(self._host.features[split]) for split in ("train", "test"))
        pick = lambda table: table[jnp.minimum(task.number, len(table) - 1).astype(jnp.int32)]  # noqa: E731
        return jnp.where(task.test > 0, pick(test), pick(train))

    def _order(self, key: Key, task: _Task) -> jax.Array:
        """What the host needs for a reset, [3] uint32: task, split, seed."""
        return jnp.stack([task.number, task.test.astype(jnp.uint32), jax.random.bits(key)])

    def _call(self, host: Callable, *arguments: jax.Array, outcome: bool = False) -> tuple[jax.Array, ...]:
        seen = self.spec.observation
        shapes = [jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct(seen.shape, seen.dtype)]
        shapes += [jax.ShapeDtypeStruct((3 + len(self.spec.costs),), jnp.float32)] * outcome
        if not any(isinstance(x, jax.core.Tracer) for x in arguments):  # no program: what it raises needs no help
            return tuple(jnp.asarray(x) for x in host(*arguments))
        return jax.pure_callback(host, tuple(shapes), *arguments, vmap_method="broadcast_all")


@dataclass
class _Member:
    """One environment on the host."""

    env: gymnasium.Env
    task: GymTask
    number: tuple[int, int]  # which task: its number and split
    calls: int = 0  # so far; a ticket says what it must be


class _Flotilla:
    """All environments of one `from_gymnasium`; every method that JAX calls takes arrays of any leading shape."""

    spec: EnvSpec

    def __init__(
        self, name: str, make_env: Callable, tasks: Tasks, test_tasks: Tasks, features: Callable | None
    ) -> None:
        self.name, self.make_env, self.tasks = name, make_env, {"train": tasks, "test": test_tasks}
        for split, those in self.tasks.items():
            if not callable(those) and not len(those):
                raise UserError(f"there are no tasks to {split} on")
        if features is not None and any(callable(those) for those in self.tasks.values()):
            raise UserError("features are of listed tasks: leave them out where a function draws the tasks")
        self.features = {split: _table(those, features) for split, those in self.tasks.items()}
        self.example = self._make(self._task(0, 0))
        self.observation, self.encode = _observation(self.example.observation_space)
        self.action, self.decode = _action(self.example.action_space)
        self.fleets: OrderedDict[int, list[_Member]] = OrderedDict()
        self.launched = 0
        self.lock = threading.Lock()

    def count(self, split: str) -> int | None:
        """The number of listed tasks; None where a function draws them."""
        tasks = self.tasks[split]
        return None if callable(tasks) else len(tasks)

    @remembered
    def launch(self, orders: Any) -> tuple[np.ndarray, np.ndarray]:
        """A new fleet, an environment for each order; the oldest one is given up."""
        orders = np.asarray(orders)
        flat = orders.reshape(-1, 3)
        with self.lock:
            number, self.launched = self.launched, self.launched + 1
            members, seen = [], []
            for task, test, seed in flat.tolist():
                found = self._task(task, test)
                member = _Member(env=self._make(found), task=found, number=(task, test))
                members.append(member)
                seen.append(self._reset(member, seed))
            self.fleets[number] = members
            while len(self.fleets) > FLEETS:
                for member in self.fleets.popitem(last=False)[1]:
                    member.env.close()
        tickets = np.array([[number, place, 0] for place in range(len(flat))], np.int32)
        return self._shaped(orders.shape[:-1], tickets, seen)

    @remembered
    def step(self, tickets: Any, actions: Any) -> tuple[np.ndarray, ...]:
        """One step of each environment."""
        tickets, actions = np.asarray(tickets), np.asarray(actions)
        flat, leading = tickets.reshape(-1, 3), tickets.shape[:-1]
        seen, outcomes = [], np.empty((len(flat), 3 + len(self.spec.costs)), np.float32)
        chosen = actions.reshape(len(flat), *self.action.shape)
        with self.lock:
            for row, member in enumerate(self._members(flat)):
                with self._naming("step"):
                    played = member.env.step(self.decode(chosen[row]))
                if not isinstance(played, tuple) or len(played) != 5:
                    words = "observation, reward, terminated, truncated and info"
                    raise UserError(f"step of {self.name} must return {words}, got {_brief(played)}")
                observation, reward, terminated, truncated, info = played
                seen.append(self._seen(observation))
                ends = self._number("terminated", terminated), self._number("truncated", truncated)
                outcomes[row] = self._number("reward", reward), *self._costs(info), *ends
        return *self._shaped(leading, flat + ONE_CALL, seen), outcomes.reshape(*leading, outcomes.shape[-1])

    def _costs(self, info: Any) -> list[float]:
        """What a step cost, of each kind."""
        told = info if isinstance(info, Mapping) else {}
        if not self.spec.several:
            if "cost" not in told:
                raise UserError(f"{self.name} must put the cost of every step in info['cost']")
            return [self._number("info['cost']", told["cost"])]
        costs = told.get("costs")
        missing = [name for name in self.spec.costs if not isinstance(costs, Mapping) or name not in costs]
        if missing:
            raise UserError(f"{self.name} must put every cost of a step in info['costs']: {missing[0]} is missing")
        return [self._number(f"info['costs'][{name!r}]", costs[name]) for name in self.spec.costs]  # type: ignore[index]

    def _number(self, what: str, value: Any) -> float:
        """A number that the environment told."""
        array = as_array(value)
        if array.dtype.kind not in "biuf" or array.size != 1:
            raise UserError(f"{what} of {self.name} must be a number, got {_brief(value)}")
        return float(array.reshape(()))

    def _seen(self, observation: Any) -> np.ndarray:
        """An observation as the library's space has it."""
        try:
            return self.encode(observation).reshape(self.observation.shape)
        except Exception:  # whatever it is, it is no value of the space
            space = self.example.observation_space
            raise UserError(f"observations of {self.name} must be in {space}, got {_brief(observation)}") from None

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Around code of the user's: what it raises as one line, with the exception itself as the cause."""
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split())
            raise UserError(f"{what} of {self.name} raised {type(error).__name__}: {text}") from error

    @remembered
    def restart(self, tickets: Any, orders: Any, observations: Any, done: Any) -> tuple[np.ndarray, np.ndarray]:
        """A reset of each environment whose episode is over; what the others see stays."""
        tickets, done, orders = np.asarray(tickets), np.asarray(done), np.asarray(orders).reshape(-1, 3)
        flat, seen = tickets.reshape(-1, 3), np.array(observations).reshape(-1, *self.observation.shape)
        with self.lock:
            for row, member in enumerate(self._members(flat) if done.any() else ()):
                if done.reshape(-1)[row]:
                    task, test, seed = orders[row].tolist()
                    another = member.number != (task, test)
                    if another:
                        self._change(member, (task, test))
                    seen[row] = self._reset(member, seed if another else None)
        after = flat + ONE_CALL if done.any() else flat
        return self._shaped(tickets.shape[:-1], after, seen)

    def _members(self, tickets: np.ndarray) -> list[_Member]:
        """The environments of some tickets, which are good for this one call."""
        found = []
        for fleet, place, call in tickets.tolist():
            if fleet not in self.fleets:
                raise UserError(f"more than {FLEETS} groups of environments are in use at the same time")
            member = self.fleets[fleet][place]
            if member.calls != call:
                raise UserError("a Gymnasium environment cannot go back to an earlier state")
            member.calls += 1
            found.append(member)
        for fleet in {int(number) for number in tickets[:, 0]}:
            self.fleets.move_to_end(fleet)
        return found

    def _change(self, member: _Member, number: tuple[int, int]) -> None:
        """Give an environment another task; made anew only if it is made in another way."""
        task = self._task(*number)
        if task.kwargs != member.task.kwargs:
            member.env.close()
            member.env = self._make(task)
        member.task, member.number = task, number

    def _reset(self, member: _Member, seed: int | None) -> np.ndarray:
        """The first observation of an episode. A trial's first one is seeded, which is slow."""
        task = member.task
        options = None if task.options is None else dict(task.options)
        with self._naming("reset"):
            began = member.env.reset(seed=seed if task.seed is None else task.seed, options=options)
        if not isinstance(began, tuple) or len(began) != 2:
            raise UserError(f"reset of {self.name} must return observation and info, got {_brief(began)}")
        return self._seen(began[0])

    def _task(self, number: int, test: int) -> GymTask:
        tasks = self.tasks["test" if test else "train"]
        task = tasks(np.random.default_rng([number, test])) if callable(tasks) else tasks[number]
        if isinstance(task, GymTask):
            return task
        if isinstance(task, int | np.integer) and not isinstance(task, bool):
            return GymTask(seed=int(task))
        if isinstance(task, Mapping):
            return GymTask(kwargs=task)
        raise UserError(f"a task must be a seed, keyword arguments or a GymTask, got {task!r}")

    def _make(self, task: GymTask) -> gymnasium.Env:
        if not callable(self.make_env):
            raise UserError(f"make_env must be a function that makes a gymnasium.Env, got {self.make_env!r}")
        with self._naming("make_env"):
            env = self.make_env(**task.kwargs)
        if not isinstance(env, gymnasium.Env):
            raise UserError(f"make_env must return a gymnasium.Env, got {type(env).__name__}")
        return env

    def _shaped(self, leading: tuple[int, ...], tickets: np.ndarray, seen: Any) -> tuple[np.ndarray, np.ndarray]:
        observations = np.asarray(seen, self.observation.dtype)
        return tickets.astype(np.int32).reshape(*leading, 3), observations.reshape(
            *leading, *self.observation.shape
        )


_FLOTILLAS: dict[str, _Flotilla] = {}  # by name


def _brief(value: Any) -> str:
    """What a user gave, in a line."""
    return f"{' '.join(repr(value).split()):.60}"


def _table(tasks: Tasks, features: Callable | None) -> np.ndarray:
    """What the critics see of each listed task, [task, feature]."""
    if features is None or callable(tasks):
        return np.zeros((1, 1), np.float32)
    table = np.asarray([features(task) for task in tasks], np.float32)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise UserError(f"features must be finite numbers, equally many for every task, got shape {table.shape}")
    return table


def _observation(space: spaces.Space) -> tuple[Grid | Box, Callable[[Any], np.ndarray]]:
    """The library's space for a space of observations, and what turns one into it."""
    if isinstance(space, spaces.Discrete):
        return Grid((int(space.n),)), lambda value: np.array([int(value) - int(space.start)], np.int32)
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start).ravel()
        sizes = tuple(int(n) for n in np.ravel(space.nvec))
        return Grid(sizes), lambda value: (np.ravel(value) - start).astype(np.int32)
    if isinstance(space, spaces.Box):
        size = int(np.prod(space.shape))
        low, high = float(np.min(space.low)), float(np.max(space.high))
        return Box(size, low, high), lambda value: np.ravel(value).astype(np.float32)
    try:
        size = int(spaces.flatdim(space))
    except (NotImplementedError, ValueError):
        raise UserError(f"observations must have a fixed size, got {space}") from None
    return Box(size), lambda value: np.asarray(spaces.flatten(space, value), np.float32)


def _action(space: spaces.Space) -> tuple[Discrete | Box, Callable[[np.ndarray], Any]]:
    """The library's space for a space of actions, and what turns the policy's action into the environment's.

    Real-valued actions are in [−1, 1] here, since each number may have bounds of its own there.
    """
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), lambda value: int(value) + int(space.start)
    if not isinstance(space, spaces.Box):
        raise UserError(f"actions must be Discrete or a Box, got {space}")
    low, high = np.asarray(space.low, float), np.asarray(space.high, float)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise UserError(f"actions must have finite bounds, got {space}")

    def decode(value: np.ndarray) -> np.ndarray:
        share = (np.clip(value, -1.0, 1.0).reshape(space.shape) + 1) / 2
        return (low + (high - low) * share).astype(space.dtype)

    return Box(int(np.prod(space.shape)), -1.0, 1.0), decode

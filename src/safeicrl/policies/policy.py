"""A frozen, pretrained agent for any loop: `load_policy(name_or_path)`, then `start` and `act`.

    policy = safeicrl.load_policy("safe-dark-room")
    policy.start(budget=3)
    action = policy.act(observation)
    while True:
        ...  # step the world; when an episode has ended, reset it
        action = policy.act(observation, reward, cost, terminated, truncated)

A policy plays one trial at a time, in one thread at a time. `copy.copy(policy)` is another one, with the same
weights and without a trial. docs/deploy.md has all of it: budgets that change, saved contexts, the hard stop.
"""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent, with_options
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree
from safeicrl.errors import (
    MOST_ROWS,
    BeyondTraining,
    UserError,
    check_budget,
    check_integer,
    check_seed,
    check_sound,
)
from safeicrl.policies import contexts
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import find_policy, load_agent, trained_env, trained_episodes
from safeicrl.tokens import Token, first_token, next_token, usable_budget


def load_policy(
    name_or_path: str | Path,
    *,
    temperature: float | None = None,
    greedy: bool = False,
    risk: float | None = None,
    guard: bool = True,
) -> "Policy":
    """A released policy, by its name or the path of its files. For a run folder: the best one of its lowest seed.

    Actions are sampled at the `temperature` given here or in its card; `greedy` takes the most probable ones.
    A guard works at the `risk` given here or in its card; `guard=False` switches it off.
    """
    path = find_policy(name_or_path)
    card = read_card(path)
    env, agent = load_agent(path, card)
    if temperature is None and not greedy:
        temperature = card.get("temperature")
    agent, how = with_options(env, agent, temperature=temperature, greedy=greedy, risk=risk, guard=guard)
    return Policy(env=env, agent=agent, card={**card, **how})


@dataclasses.dataclass(kw_only=True)
class _Trial:
    """A trial under way, all rows."""

    batched: bool
    budget: jax.Array  # [row], with several costs [row, cost]
    agent: Agent  # with the risk of this trial
    ready: "_Ready"  # the same, as its compiled program takes it
    memory: PyTree
    key: Key
    fallback: np.ndarray | None = None  # the action that takes over once a budget is used up
    stop: "StopReport | None" = None  # how often it did
    guard: "GuardReport | None" = None  # what the guard has done so far
    token: Token | None = None  # the last one, [row]; None before the first call of `act`
    action: np.ndarray | None = None  # [row]
    warned: bool = False  # about going beyond what the policy was trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardReport:
    """What the guard did; in a batch every number is an array [row]."""

    risk: Any  # predicted chance that the last action breaks the budget within the guard's depth
    stepped_in: Any  # whether the guard replaced the policy's last action
    steps: Any  # actions of this trial so far
    interventions: Any  # how many of them the guard replaced


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopReport:
    """What the hard stop did; in a batch every number is an array [row]."""

    stopped: Any  # whether the last action was the fallback
    steps: Any  # actions of this trial so far
    fallbacks: Any  # how many of them were the fallback
    episodes: Any  # in how many episodes the budget was used up


class Policy:
    """A frozen agent that learns each new task from its own history, under a budget."""

    def __init__(self, *, env: Env, agent: Agent, card: dict[str, Any]) -> None:
        self.env, self.agent, self.card = env, agent, card
        self.trained = trained_env(card, env).spec
        self._be_idle()

    def _be_idle(self) -> None:
        self._trial: _Trial | None = None
        self._acting = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no trial: the memory of this one is updated in place, so two policies must not share it."""
        return {name: value for name, value in vars(self).items() if name not in ("_trial", "_acting")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._be_idle()

    def __repr__(self) -> str:
        return f"Policy({self.card.get('name', self.card['kind'])} for {self.card['env']['name']})"

    def start(
        self,
        budget: float | Sequence[float] | Sequence[Sequence[float]],
        *,
        batch: int | None = None,
        seed: int = 0,
        risk: float | None = None,
        guard: bool = True,
        fallback: Any = None,
    ) -> None:
        """Begin a trial on a new task (or on `batch` of them): forget everything, take the cost budget(s).

        `budget` is the limit on the cost of each episode. A list of budgets, or `batch`, makes it a batch: then
        every argument and result of `act` has a leading axis of that length. In an environment with several costs
        a budget is one number for each of them, as in `budget=(3, 5)`, and a batch is a list of such budgets.

        With a guard, `risk` is the chance of breaking the budget that is tolerable at a step; left out, it is the
        one the policy was loaded with. `guard=False` switches the guard off for this trial.

        `fallback` is a hard stop: this action is taken in place of the policy's own whenever nothing is left of an
        episode's budget. It needs no learning and works for any policy; `policy.stop` counts it.

        The same seed, budgets and calls give the same actions on the same machine.
        """
        agent, _ = with_options(self.env, self.agent, risk=risk, guard=guard)
        budgets = check_budget(budget)
        batched = batch is not None or budgets.ndim > len(self.env.spec.cost_shape)
        count = len(budgets) if batched and batch is None else 1
        rows = check_integer("batch", count if batch is None else batch, 1, MOST_ROWS)
        budgets = _budget_per_row(budgets, rows, self.env.spec)
        key = jax.random.key(check_seed(seed))
        stand_in = None if fallback is None else self.env.spec.action.check_action(fallback)
        self.warn_beyond(budgets=budgets)
        with self._alone():
            self._trial = _Trial(
                batched=batched,
                budget=usable_budget(jnp.asarray(budgets), self.env.spec),
                **_for_trial(agent),
                memory=_remember(agent, rows, self.env.spec.trial_steps),
                key=key,
                fallback=stand_in,
            )

    def change(
        self,
        *,
        budget: float | Sequence[float] | Sequence[Sequence[float]] | None = None,
        risk: float | None = None,
    ) -> None:
        """Change the budget or the guard's risk in mid-trial; what was learned stays.

        A new budget holds from the next episode on, in a batch from the next episode of each row; before the first
        action it holds at once. The episode under way keeps the budget it began with. A new risk holds from the
        next action on.
        """
        with self._alone():
            trial = self._running("change")
            made = {}
            if risk is not None:
                made = _for_trial(with_options(self.env, self.agent, risk=risk)[0])
            if budget is not None:
                budgets = _budget_per_row(check_budget(budget), len(trial.budget), self.env.spec)
                self.warn_beyond(budgets=budgets)
                trial.budget = usable_budget(jnp.asarray(budgets), self.env.spec)
            vars(trial).update(made)

    def act(
        self,
        observation: Any,
        reward: Any = None,
        cost: Any = None,
        terminated: Any = False,
        truncated: Any = False,
    ) -> Any:
        """The next action: an int or a vector. In a batch: an array [row] or [row, action].

        `reward`, `cost` and the end flags are those of the last step. The first call after `start` leaves them out.
        Several costs are a vector, in the order of `policy.env.spec.costs`.
        After an episode has ended, `observation` is the first one of the next episode.
        """
        with self._alone():
            trial = self._running("act")
            token = self._token(trial, observation, reward, cost, terminated, truncated)
            trial.memory, trial.key, chosen, said = _act((trial.ready, token, trial.key), trial.memory)
            trial.token, trial.guard = token, _reported(trial.guard, said)
            trial.action = np.asarray(chosen)
            if trial.fallback is not None:
                self._stop(trial, trial.fallback)
            if not trial.warned:
                # in a batch, all rows: one that has finished may be waiting for the others
                beyond = np.asarray(token.time).min() >= self.trained.max_steps
                second = self.episodes == 1 and np.asarray(token.episode).min() >= 1
                if beyond or second:
                    trial.warned = True
                    self.warn_beyond(episodes=1 + second, steps=self.trained.max_steps + beyond)
            action = trial.action.copy()  # callers may write into it
        if trial.batched:
            return action
        return action[0] if self.env.spec.action.shape else int(action[0])

    def _running(self, call: str) -> _Trial:
        if self._trial is None:
            raise UserError(f"{call} was called before start: begin with policy.start(budget=...)")
        return self._trial

    def _stop(self, trial: _Trial, fallback: np.ndarray) -> None:
        """Replace the actions of the rows that have nothing left to spend, and count them."""
        assert trial.token is not None
        assert trial.action is not None
        left, start = np.asarray(trial.token.ctg), np.asarray(trial.token.start)
        # less than one unit is nothing, up to rounding; of real-valued costs, exactly nothing
        unit = self.env.spec.cost_unit
        spent = left < (1 - ROUNDING) * unit if unit else left <= 0
        if self.env.spec.several:  # any cost
            spent = np.asarray(spent.any(-1))
        where = spent.reshape((-1,) + (1,) * (trial.action.ndim - 1))
        trial.action = np.where(where, fallback, trial.action)
        zero = np.zeros(len(spent), int)
        before = trial.stop or StopReport(stopped=zero.astype(bool), steps=zero, fallbacks=zero, episodes=zero)
        trial.stop = StopReport(
            stopped=spent,
            steps=before.steps + 1,
            fallbacks=before.fallbacks + spent,
            episodes=before.episodes + (spent & (start | ~before.stopped)),
        )

    def save_context(self, path: str | Path) -> Path:
        """Write the trial under way, to go on with it after a restart; returns the file's path.

        The file holds what the policy remembers, not the policy: `load_context` takes it into the same policy.
        """
        with self._alone():
            trial = self._running("save_context")
            risk = getattr(trial.agent, "risk", None)
            meta = {
                "batched": trial.batched,
                "risk": None if risk is None else float(risk),
                "warned": trial.warned,
                "has": [name for name in OPTIONAL if getattr(trial, name) is not None],
            }
            return contexts.save(Path(path), _arrays(trial), meta=meta, policy=self._identity())

    def load_context(self, path: str | Path) -> None:
        """Go on with the trial that `save_context` wrote: the same actions as without the interruption.

        A file from a stranger is safe to load: it holds numbers only, all are checked, and nothing in it is run.
        A file that is damaged, or that was written by another policy or for another environment, is refused.
        """

        def like(rows: int, has: list[str]) -> dict[str, Any]:
            trial = eqx.filter_eval_shape(_blank, self.env, self.agent, rows)
            return {name: value for name, value in trial.items() if name not in OPTIONAL or name in has}

        arrays, meta = contexts.load(
            Path(path), like, optional=OPTIONAL, policy=self._identity(), spec=self.env.spec
        )
        risk, guarded = meta["risk"], getattr(self.agent, "risk", None) is not None
        options = {"risk": risk} if risk is not None else {"guard": False} if guarded else {}
        agent, _ = with_options(self.env, self.agent, **options)
        with self._alone():
            self._trial = _Trial(
                batched=meta["batched"],
                **_for_trial(agent),
                warned=meta["warned"],
                **_restored(arrays),
            )

    def _identity(self) -> str:
        return contexts.identity(self.agent, {"env": self.card.get("env"), "kind": self.card.get("kind")})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread instead of letting it wait: the steps of two worlds would make one mixed trial."""
        if not self._acting.acquire(blocking=False):
            raise UserError("the policy is acting in another thread: give each thread its own, copy.copy(policy)")
        try:
            yield
        finally:
            self._acting.release()

    @property
    def guard(self) -> GuardReport | None:
        """What the guard predicted and did in this trial; None without one, or before the first action."""
        trial = self._trial
        if trial is None or trial.guard is None or trial.batched:
            return None if trial is None else trial.guard
        return _single(trial.guard)

    @property
    def stop(self) -> StopReport | None:
        """How often the fallback took over in this trial; None without one, or before the first action."""
        trial = self._trial
        if trial is None or trial.stop is None or trial.batched:
            return None if trial is None else trial.stop
        return _single(trial.stop)

    @property
    def context(self) -> int | None:
        """How many of the newest steps it remembers; older ones are forgotten one by one. None: no such limit."""
        net = getattr(getattr(self.agent, "net", None), "trunk", None)
        return None if net is None else min(net.config.context, self.env.spec.trial_steps)

    @property
    def episodes(self) -> int:
        """K of the trials it was trained on."""
        return trained_episodes(self.card, self.trained)

    def warn_beyond(self, *, budgets: Any = (), episodes: int = 0, steps: int = 0) -> None:
        """Warn about budgets, episodes of a trial and steps of an episode that it was never trained on.

        More than K episodes are no reason to warn: agents keep going (`InContextAgent.read`, and Safe AD's window
        slides as in training). A second episode is one, if training had single episodes only.
        """
        spec = self.trained
        usable = lambda values: np.asarray(usable_budget(jnp.asarray(values, jnp.float32), spec))  # noqa: E731
        known = getattr(self.agent, "known_budgets", None)  # Safe AD knows those of its data
        messages = []
        ranges = spec.ranges("train") if known is None else [known]
        each = spec.each_cost(np.reshape(budgets, (-1, *spec.cost_shape)))
        for name, own, values in zip(spec.costs, ranges, each, strict=True):
            (low, high), asked = usable(own), np.ravel(usable(values))
            outside = asked[(asked < low) | (asked > high)]
            of = f" of {name}" if spec.several else ""
            messages += [f"budgets{of} from {low:g} to {high:g}, not {outside[0]:g}"] if len(outside) else []
        if episodes > self.episodes == 1:
            messages.append("single episodes: it does not learn from earlier ones")
        if steps > spec.max_steps:
            messages.append(f"episodes of at most {spec.max_steps} steps, not {steps}")
        for message in messages:
            warnings.warn(f"this policy was trained on {message}", BeyondTraining, stacklevel=3)

    def _token(
        self, trial: _Trial, observation: Any, reward: Any, cost: Any, terminated: Any, truncated: Any
    ) -> Token:
        """What `act` was told as the next token of the trial, or an error that says what is wrong with it."""
        rows = len(trial.budget)
        seen = self._observation(observation, trial.batched, rows)
        if trial.token is None:
            for name, value in (("reward", reward), ("cost", cost)):
                if value is not None and np.any(np.asarray(value)):
                    raise UserError(f"the first call after start has no last step: {name} must be left out")
            return _first(self.env, jnp.asarray(seen), trial.budget)
        reward = _numbers("reward", reward, trial.batched, rows)
        cost = _numbers("cost", cost, trial.batched, rows, self.env.spec)
        ended = _flags("terminated", terminated, trial.batched, rows) | _flags(
            "truncated", truncated, trial.batched, rows
        )
        return _next(trial.token, seen, trial.action, reward, cost, ended, trial.budget)

    def _observation(self, observation: Any, batched: bool, rows: int) -> np.ndarray:
        """The observation as [row, obs], or an error that says what an observation is."""
        space = self.env.spec.observation
        shape = (rows, *space.shape) if batched else space.shape
        values = _array("observation", observation)
        if values.shape != shape:
            raise UserError(f"observation must have shape {shape}, got {values.shape}")
        return space.check_observation(check_sound("observation", values)).reshape(rows, *space.shape)


ROUNDING = 1e-4  # of a sum of costs, in units
OPTIONAL = ("token", "action", "fallback", "stop", "guard")  # fields of a trial that may be None
ON_HOST = ("action", "fallback", "stop", "guard")  # those that are NumPy arrays
REPORTS: dict[str, Any] = {"stop": StopReport, "guard": GuardReport}


def _arrays(trial: _Trial) -> dict[str, Any]:
    """The fields of a trial that hold its arrays, without those that are None."""
    fields = {name: getattr(trial, name) for name in ("budget", "memory", "key", *OPTIONAL)}
    present = {name: value for name, value in fields.items() if name not in OPTIONAL or value is not None}
    return {
        name: {part: _stored(numbers) for part, numbers in vars(value).items()} if name in REPORTS else value
        for name, value in present.items()
    }


def _stored(numbers: np.ndarray) -> np.ndarray:
    """In a type that JAX has without 64 bits."""
    return numbers.astype(np.int32) if numbers.dtype.kind == "i" else numbers


def _restored(arrays: dict[str, Any]) -> dict[str, Any]:
    """The fields of a trial from what `_arrays` gave of it."""
    on_host = lambda value: jax.tree.map(np.array, value)  # noqa: E731
    fields = {name: on_host(value) if name in ON_HOST else value for name, value in arrays.items()}
    return fields | {name: REPORTS[name](**fields[name]) for name in REPORTS if name in fields}


def _blank(env: Env, agent: Agent, rows: int) -> dict[str, Any]:
    """What `_arrays` gives of a trial with everything in it; only its shapes are of interest."""
    numbers, flags = jnp.zeros(rows, int), jnp.zeros(rows, bool)
    action = env.spec.action.zeros((rows,))
    budget = jnp.zeros((rows, *env.spec.cost_shape))
    return {
        "budget": budget,
        "memory": _remember(agent, rows, env.spec.trial_steps),
        "key": jax.random.key(0),
        "token": _first(env, env.spec.observation.zeros((rows,)), budget),
        "action": action,
        "fallback": action[0],
        "stop": {"stopped": flags, "steps": numbers, "fallbacks": numbers, "episodes": numbers},
        "guard": {"risk": jnp.zeros(rows), "stepped_in": flags, "steps": numbers, "interventions": numbers},
    }


def _budget_per_row(budgets: np.ndarray, rows: int, spec: EnvSpec) -> np.ndarray:
    """One budget for each row, [row]; with several costs [row, cost]."""
    each = spec.cost_shape
    if spec.several and (budgets.ndim not in (1, 2) or budgets.shape[-1:] != each):
        words = f"{len(spec.costs)} numbers ({', '.join(spec.costs)}) or a list of such budgets"
        raise UserError(f"budget must be {words}, got shape {budgets.shape}")
    if budgets.ndim > 1 + len(each):
        raise UserError(f"budget must be a number or a list of numbers, got shape {budgets.shape}")
    if budgets.ndim == 1 + len(each) and len(budgets) != rows:
        raise UserError(f"{len(budgets)} budgets were given for a batch of {rows}")
    return np.broadcast_to(budgets, (rows, *each))


Report = TypeVar("Report", GuardReport, StopReport)


def _single(report: Report) -> Report:
    """The report of the only row, in plain numbers."""
    return type(report)(**{name: value[0].item() for name, value in vars(report).items()})


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "iufb":
            raise ValueError
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused as such
            return array.astype(np.float32)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be made of numbers, got {value!r}") from None


def _numbers(name: str, value: Any, batched: bool, rows: int, spec: EnvSpec | None = None) -> np.ndarray:
    """A number per row, [row]; of several costs, which `spec` names, [row, cost]."""
    if value is None:
        raise UserError(f"act needs the last step's {name}: only the first call after start leaves it out")
    array = _array(name, value)
    each = () if spec is None else spec.cost_shape
    if array.shape != ((rows, *each) if batched else each):
        many = f"{len(spec.costs)} numbers ({', '.join(spec.costs)})" if spec is not None and each else "one number"
        expected = f"{many} for each of {rows} rows" if batched else many
        raise UserError(f"{name} must be {expected}, got shape {array.shape}")
    return check_sound(name, array).reshape(rows, *each)


def _flags(name: str, value: Any, batched: bool, rows: int) -> np.ndarray:
    """A flag per row, [row] bool; a single one holds for all rows."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):  # a ragged list
        array = np.array(None)
    if array.dtype.kind not in "biu" or array.shape not in ((), (rows,) if batched else ()):
        raise UserError(
            f"{name} must be true or false" + (f", or {rows} of them" if batched else "") + f", got {value!r}"
        )
    return np.broadcast_to(array.astype(bool), (rows,))


@eqx.filter_jit
def _first(env: Env, observation: jax.Array, budget: jax.Array) -> Token:
    return jax.vmap(first_token, (None, 0, 0))(env.spec, observation, budget)


_next = jax.jit(next_token)


@eqx.filter_jit
def _remember(agent: Agent, rows: int, steps: int) -> PyTree:
    """Memory for a whole trial. Jitted: no two of its arrays then share a buffer, so `_act` can donate them."""
    return agent.extend(agent.init(None, rows), steps)


class _Ready(NamedTuple):
    """An agent taken apart once, at the start of a trial: `eqx.filter_jit` would do it at every step, for longer
    than the step itself takes."""

    arrays: list[jax.Array]
    program: Callable[[list[jax.Array], Token, Key, PyTree], tuple]


def _act(ready_token_key: tuple[_Ready, Token, Key], memory: PyTree) -> tuple[PyTree, Key, jax.Array, PyTree]:
    """One step of the agent, whose memory (a KV cache) is updated in place; last, what its guard said, if any."""
    ready, token, key = ready_token_key
    return ready.program(ready.arrays, token, key, memory)


@functools.lru_cache(maxsize=64)
def _program(structure: Any, others: tuple, form: Any) -> Callable:
    """The compiled step of all agents that differ in their arrays only."""

    @functools.partial(jax.jit, donate_argnums=3)
    def act(arrays: list[jax.Array], token: Token, key: Key, memory: PyTree) -> tuple:
        agent = eqx.combine(jax.tree.unflatten(structure, arrays), jax.tree.unflatten(form, others))
        next_key, key = jax.random.split(key)
        memory, action, extras = agent.act(memory, token, key)
        said = {
            name: extras[name] for name in ("risk", "stepped_in") if isinstance(extras, dict) and name in extras
        }
        return memory, next_key, action, said

    return act


def _for_trial(agent: Agent) -> dict[str, Any]:
    """The fields `agent` and `ready` of a trial.

    The risk is an array, an argument of the compiled step and not a constant in it: another risk compiles nothing.
    """
    risk = getattr(agent, "risk", None)
    if risk is not None:
        agent = dataclasses.replace(agent, risk=jnp.float32(risk))  # type: ignore[type-var]
    arrays, static = eqx.partition(agent, eqx.is_array)
    (leaves, structure), (others, form) = jax.tree.flatten(arrays), jax.tree.flatten(static)
    return {"agent": agent, "ready": _Ready(arrays=leaves, program=_program(structure, tuple(others), form))}


def _reported(before: GuardReport | None, said: dict[str, jax.Array]) -> GuardReport | None:
    """The report after one more action."""
    if not said:
        return None
    risk, stepped_in = np.asarray(said["risk"]), np.asarray(said["stepped_in"])
    steps, interventions = (0, 0) if before is None else (before.steps, before.interventions)
    return GuardReport(
        risk=risk,
        stepped_in=stepped_in,
        steps=steps + np.ones_like(stepped_in, int),
        interventions=interventions + stepped_in.astype(int),
    )

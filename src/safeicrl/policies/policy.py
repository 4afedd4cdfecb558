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
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent, has_guard, lasting, with_options
from safeicrl.budgets import Reserve, is_spent
from safeicrl.envs.api import Env
from safeicrl.errors import (
    MOST_ROWS,
    BeyondTraining,
    UserError,
    check_flag,
    check_integer,
    check_seed,
    check_sound,
)
from safeicrl.policies import contexts
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import find_policy, load_agent, trained_env, trained_episodes
from safeicrl.policies.given import as_budgets, as_floats, budget_per_row, flag_per_row, number_per_row
from safeicrl.policies.running import (
    OPTIONAL,
    GuardReport,
    RunningTrial,
    StopReport,
    arrays_of,
    blank,
    first_tokens,
    for_trial,
    next_tokens,
    remember,
    reported,
    restored,
    single,
    take_step,
)
from safeicrl.tokens import Token, usable_budget


def load_policy(
    name_or_path: str | Path,
    *,
    temperature: float | None = None,
    greedy: bool = False,
    risk: float | None = None,
    guard: bool = True,
    reserve: Reserve | None = None,
    brake: float | None = None,
    settle: bool = True,
    settle_after: int | None = None,
) -> "Policy":
    """A released policy, by its name or the path of its files. For a run folder: the best one of its lowest seed.

    Actions are sampled at the `temperature` given here or in its card; `greedy` takes the most probable ones.
    A guard works at the `risk` given here or in its card; `guard=False` switches it off.
    Once an episode has cost something, the network is told that less is left of its budget than there is, by the
    `reserve` given here or in the card. With a reserve of (1, 2) it is told so from the first step on: 1 less of
    budgets below 2. A third number is the reserve of other budgets, once they have cost something. The budget
    itself, the guard and the hard stop do not change.
    Right after a costly step that leaves nothing of the budget, it acts `brake` times as hard, as given here or in
    the card.
    After the K episodes of its training its memory settles (docs/deploy.md), or after `settle_after` episodes as
    given here or in the card. With `settle=False` it goes on, for a world that changes while it plays.
    """
    if not check_flag("settle", settle) and settle_after is not None:
        raise UserError(f"settle=False contradicts settle_after {settle_after}; give one of them")
    path = find_policy(name_or_path)
    card = read_card(path)
    env, agent = load_agent(path, card)
    if temperature is None and not greedy:
        temperature = card.get("temperature")
    agent, how = with_options(
        env, agent, temperature=temperature, greedy=greedy, risk=risk, guard=guard, reserve=reserve,
        brake=brake, settle_after=settle_after,
    )  # fmt: skip
    for option in ("reserve", "brake", "settle_after"):  # `how` has those that it acts by
        card.pop(option, None)
    if not settle:
        how.pop("settle_after", None)
    return Policy(env=env, agent=agent, card={**card, **how}, settle=settle)


class Policy:
    """A frozen agent that learns each new task from its own history, under a budget."""

    def __init__(self, *, env: Env, agent: Agent, card: dict[str, Any], settle: bool = True) -> None:
        self.env, self.agent, self.card = env, lasting(agent, settle), card
        self.trained = trained_env(card, env).spec
        self._be_idle()

    def _be_idle(self) -> None:
        self._trial: RunningTrial | None = None
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
        guard: bool | None = None,
        fallback: Any = None,
    ) -> None:
        """Begin a trial on a new task (or on `batch` of them): forget everything, take the cost budget(s).

        `budget` is the limit on the cost of each episode. A list of budgets, or `batch`, makes it a batch: then
        every argument and result of `act` has a leading axis of that length. In an environment with several costs
        a budget is one number for each of them, as in `budget=(3, 5)`, and a batch is a list of such budgets.

        With a guard, `risk` is the chance of breaking the budget that is tolerable at a step; left out, it is the
        one the policy was loaded with. `guard=False` switches the guard off for this trial. `guard=True`
        is an error where it is missing or off.

        `fallback` is a hard stop: this action is taken in place of the policy's own whenever nothing is left of an
        episode's budget. It needs no learning and works for any policy; `policy.stop` counts it.

        The same seed, budgets and calls give the same actions on the same machine.
        """
        agent, _ = with_options(self.env, self.agent, risk=risk, guard=True if guard is None else guard)
        if guard and getattr(agent, "risk", None) is None:
            off = "the guard of this policy is off: load the policy with it, or give a risk"
            raise UserError(f"guard=True, but {off if has_guard(agent) else 'this policy has no guard'}")
        budgets = as_budgets(budget, self.env.spec)
        batched = batch is not None or budgets.ndim > len(self.env.spec.cost_shape)
        count = len(budgets) if batched and batch is None else 1
        rows = check_integer("batch", count if batch is None else batch, 1, MOST_ROWS)
        budgets = budget_per_row(budgets, rows, self.env.spec)
        key = jax.random.key(check_seed(seed))
        stand_in = None if fallback is None else self._check_fallback(fallback)
        self.warn_beyond(budgets=budgets)
        with self._alone():
            self._trial = RunningTrial(
                batched=batched,
                budget=usable_budget(jnp.asarray(budgets), self.env.spec),
                **for_trial(agent),
                memory=remember(agent, rows, self.env.spec.trial_steps),
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
            if budget is None and risk is None:
                raise UserError("change needs a budget or a risk")
            made = {}
            if risk is not None and has_guard(self.agent) and trial.agent.risk is None:  # type: ignore[attr-defined]
                raise UserError(f"the guard is off in this trial: leave out risk {risk}")
            if risk is not None:
                made = for_trial(with_options(self.env, self.agent, risk=risk)[0])
            if budget is not None:
                budgets = budget_per_row(as_budgets(budget, self.env.spec), len(trial.budget), self.env.spec)
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
            trial.memory, trial.key, trial.action, said = take_step((trial.ready, token, trial.key), trial.memory)
            trial.token, trial.guard = token, reported(trial.guard, said)
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

    def _running(self, call: str) -> RunningTrial:
        if self._trial is None:
            raise UserError(f"{call} was called before start: begin with policy.start(budget=...)")
        return self._trial

    def _check_fallback(self, action: Any) -> np.ndarray:
        try:
            return self.env.spec.action.check_action(action)
        except UserError as error:
            raise UserError(f"fallback: {error}") from None

    def _stop(self, trial: RunningTrial, fallback: np.ndarray) -> None:
        """Replace the actions of the rows that have nothing left to spend, and count them."""
        assert trial.token is not None
        assert trial.action is not None
        left, start = np.asarray(trial.token.ctg), np.asarray(trial.token.start)
        spent = np.asarray(is_spent(left, self.env.spec.cost_unit, self.env.spec.several))
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
            return contexts.save(Path(path), arrays_of(trial), meta=meta, policy=self._identity())

    def load_context(self, path: str | Path) -> None:
        """Go on with the trial that `save_context` wrote: the same actions as without the interruption.

        A file from a stranger is safe to load: it holds numbers only, all are checked, and nothing in it is run.
        A file that is damaged, or that was written by another policy or for another environment, is refused.
        """

        def like(rows: int, has: list[str]) -> dict[str, Any]:
            trial = eqx.filter_eval_shape(blank, self.env, self.agent, rows)
            return {name: value for name, value in trial.items() if name not in OPTIONAL or name in has}

        arrays, meta = contexts.load(
            Path(path), like, optional=OPTIONAL, policy=self._identity(), spec=self.env.spec
        )
        risk, guarded = meta["risk"], getattr(self.agent, "risk", None) is not None
        options = {"risk": risk} if risk is not None else {"guard": False} if guarded else {}
        agent, _ = with_options(self.env, self.agent, **options)
        with self._alone():
            self._trial = RunningTrial(
                batched=meta["batched"],
                **for_trial(agent),
                warned=meta["warned"],
                **restored(arrays),
            )

    def _identity(self) -> str:
        described = {"env": self.card.get("env"), "kind": self.card.get("kind")}
        # what gives its memory another form
        if getattr(self.agent, "settles", None) is False:
            described["settles"] = False
        elif (after := getattr(self.agent, "settle_after", None)) is not None:
            described["settle_after"] = after
        if reserve := getattr(self.agent, "reserve", 0.0):
            described["reserve"] = reserve
        return contexts.identity(self.agent, described)

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
        return single(trial.guard)

    @property
    def stop(self) -> StopReport | None:
        """How often the fallback took over in this trial; None without one, or before the first action."""
        trial = self._trial
        if trial is None or trial.stop is None or trial.batched:
            return None if trial is None else trial.stop
        return single(trial.stop)

    @property
    def context(self) -> int | None:
        """How many steps it can remember; None: no such limit."""
        net = getattr(getattr(self.agent, "net", None), "trunk", None)
        most = None if net is None else min(net.config.context, self.env.spec.trial_steps)
        return most if most is None else most + getattr(self.agent, "spare", 0)

    @property
    def episodes(self) -> int:
        """K of the trials it was trained on."""
        return trained_episodes(self.card, self.trained)

    def warn_beyond(self, *, budgets: Any = (), episodes: int = 0, steps: int = 0) -> None:
        """Warn about budgets, episodes of a trial and steps of an episode that it was never trained on.

        More than K episodes are no reason to warn: a memory settles (agents/settled.py), and Safe AD's window
        slides as in training. A second episode is one, if training had single episodes only.
        """
        spec = self.trained
        usable = lambda values: usable_budget(np.asarray(values, np.float32), spec)  # noqa: E731
        known = getattr(self.agent, "known_budgets", None)  # Safe AD knows those of its data
        messages = []
        ranges = spec.ranges("train") if known is None else [known]
        each = spec.each_cost(np.reshape(budgets, (-1, *spec.cost_shape)))
        for name, own, values in zip(spec.costs, ranges, each, strict=True):
            (low, high), asked = usable(own), np.ravel(usable(values))
            outside = np.ravel(values)[(asked < low) | (asked > high)]
            of = f" of {name}" if spec.several else ""
            messages += [f"budgets{of} from {low:g} to {high:g}, not {outside[0]:g}"] if len(outside) else []
        if episodes > self.episodes == 1:
            messages.append("single episodes: it does not learn from earlier ones")
        if steps > spec.max_steps:
            messages.append(f"episodes of at most {spec.max_steps} steps, not {steps}")
        for message in messages:
            warnings.warn(f"this policy was trained on {message}", BeyondTraining, stacklevel=3)

    def _token(
        self, trial: RunningTrial, observation: Any, reward: Any, cost: Any, terminated: Any, truncated: Any
    ) -> Token:
        """What `act` was told as the next token of the trial, or an error that says what is wrong with it."""
        rows = len(trial.budget)
        seen = self._observation(observation, trial.batched, rows)
        ended = flag_per_row("terminated", terminated, trial.batched, rows)
        ended = ended | flag_per_row("truncated", truncated, trial.batched, rows)
        if trial.token is None:
            for name, value in (("reward", reward), ("cost", cost)):
                if value is not None and np.any(np.asarray(value)):
                    raise UserError(f"the first call after start has no last step: {name} must be left out")
            return first_tokens(self.env, jnp.asarray(seen), trial.budget)
        reward = number_per_row("reward", reward, trial.batched, rows)
        cost = number_per_row("cost", cost, trial.batched, rows, self.env.spec)
        return next_tokens(trial.token, seen, trial.action, reward, cost, ended, trial.budget)

    def _observation(self, observation: Any, batched: bool, rows: int) -> np.ndarray:
        """The observation as [row, obs], or an error that says what an observation is."""
        space = self.env.spec.observation
        shape = (rows, *space.shape) if batched else space.shape
        values = as_floats("observation", observation)
        if values.shape != shape:
            raise UserError(f"observation must have shape {shape}, got {values.shape}")
        return space.check_observation(check_sound("observation", values)).reshape(rows, *space.shape)

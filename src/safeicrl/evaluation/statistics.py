"""The numbers drawn from results: totals, shares over budget, budget bins, scores between baselines. No jax."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safeicrl.budgets import bin_of, budget_edges
from safeicrl.errors import UserError
from safeicrl.evaluation.results import Results

# "the last …": the word for each number of episodes
NUMBERS = ("none", "episode", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The numbers one reads first."""

    total_return: float  # summed over the trial's episodes, mean over trials
    total_return_error: float  # standard error over tasks
    last_return: float  # mean return of the `last` episodes
    over_budget: float  # share of all episodes
    over_budget_last: float  # share of the `last` episodes
    cost: float  # mean episode cost
    by_budget: dict[str, float]  # bin → total return; nan for an empty bin
    over_by_budget: dict[str, float]  # bin → share of episodes over budget
    episodes: int
    tasks: int
    last: int = 10  # the number of "last" episodes: ten, or fewer in a short trial
    trials_over: float = float("nan")  # share of trials with any episode over budget
    budgets_per_task: int = 1  # trials of each task
    rise_by_budget: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # see `rises`

    @property
    def last_name(self) -> str:
        """As in "return, last ten"."""
        return f"last {NUMBERS[self.last] if self.last < len(NUMBERS) else self.last}"


def summarise(results: Results, last: int | None = None) -> Summary:
    """Total return, return of the `last` episodes, shares over budget, and both by budget bin.

    `last` is ten by default, and a third of a trial of fewer than thirty episodes.
    """
    totals = results.returns.sum(axis=1)
    trials, episodes = results.returns.shape
    last = last or min(10, max(episodes // 3, 1))
    by_budget, over_by_budget = {}, {}
    for name, rows in budget_bins(results).items():
        by_budget[name] = float(totals[rows].mean()) if rows.any() else float("nan")
        over_by_budget[name] = float(results.over[rows].mean()) if rows.any() else float("nan")
    return Summary(
        total_return=float(totals.mean()),
        total_return_error=float(standard_error(totals, results.task)),
        last_return=float(results.returns[:, -last:].mean()),
        over_budget=float(results.over.mean()),
        over_budget_last=float(results.over[:, -last:].mean()),
        cost=float(results.costs.mean()),
        by_budget=by_budget,
        over_by_budget=over_by_budget,
        episodes=episodes,
        tasks=trials // results.budgets_per_task,
        last=last,
        trials_over=float(results.over.any(axis=1).mean()),
        budgets_per_task=results.budgets_per_task,
        rise_by_budget=rises(results),
    )


@dataclass(frozen=True, kw_only=True)
class Relative:
    """Where an agent stands between two baselines on the same tasks: 0 is the lower one, 1 the upper one."""

    score: float
    error: float  # standard error over tasks
    last_return: float  # mean return of the last episodes
    over_budget_last: float  # share of them over budget


def relative(results: Results, *, upper: Results, lower: Results, last: int = 5) -> Relative:
    """The return of the `last` episodes relative to an upper baseline (1) and a lower one (0).

    All three met the same tasks with the same budgets, so differences are taken task by task: that a task is easy
    or hard for everybody does not count as error.
    """
    if last < 1:
        raise UserError(f"last must be at least 1 episode, got {last}")
    for baseline in (upper, lower):
        _check_comparable(results, baseline)
    mine, above, below = (r.returns[:, -last:].mean(axis=1) for r in (results, upper, lower))  # [trial]
    gained, range_ = mine - below, above - below
    if not range_.mean() > 0:
        raise UserError(f"the upper baseline {upper.label!r} must return more than the lower one, {lower.label!r}")
    score = gained.mean() / range_.mean()
    # The standard error of a ratio of means, to first order.
    error = standard_error(gained - score * range_, results.task) / range_.mean()
    return Relative(
        score=float(score),
        error=float(error),
        last_return=float(mine.mean()),
        over_budget_last=float(results.over[:, -last:].mean()),
    )


def _check_comparable(one: Results, other: Results) -> None:
    """Raise unless both are of the same tasks, budgets and trials."""

    def world(results: Results) -> Any:
        """The environment's name; for a `Revealed` one, the name of the environment inside."""
        env = results.meta.get("env") or {}
        return env["parameters"]["name"] if env.get("name") == "revealed" else env.get("name")

    facts = {
        "environment": world,
        "physics": lambda r: r.meta.get("approximation", "the real one"),
        "split": lambda r: r.meta.get("split"),
        "seed": lambda r: r.meta.get("seed"),
        "budgets per task": lambda r: r.budgets_per_task,
        "trials": lambda r: "{} of {} episodes".format(*r.returns.shape),
        "budget range": lambda r: r.budget_range,
    }
    for name, of in facts.items():
        if of(one) != of(other):
            raise UserError(
                f"only results on the same tasks can be compared: {one.label!r} and {other.label!r} differ in "
                f"their {name}, {of(one)} and {of(other)}"
            )
    if not np.array_equal(one.budgets, other.budgets):
        raise UserError(f"only results with the same budgets can be compared: {one.label!r}, {other.label!r}")


def budget_bins(results: Results) -> dict[str, np.ndarray]:
    """Bin name → which trials it holds, [trial] bool."""
    edges = budget_edges(*results.budget_range)
    if edges[0] == edges[-1]:
        return {f"{edges[0]:g}": np.ones(len(results.budgets), bool)}
    index = bin_of(results.budgets, edges)
    names = [f"{a:.3g}–{b:.3g}" for a, b in itertools.pairwise(edges)]
    return {name: index == i for i, name in enumerate(names)}


def rises(results: Results) -> dict[str, list[float]]:
    """Bin name → [mean, standard error] over tasks of the rise in total return from the bin before.

    Only where nearly all tasks are in both bins, as with nine budgets per task; never with one budget per task.
    """
    totals, count = results.returns.sum(axis=1), int(results.task.max()) + 1
    means: dict[str, np.ndarray] = {}  # [task], nan for a task that is not in the bin
    for name, rows in budget_bins(results).items():
        sums, trials = (np.bincount(results.task[rows], w, count) for w in (totals[rows], None))
        means[name] = np.divide(sums, trials, out=np.full(count, np.nan), where=trials > 0)
    found = {}
    for before, name in itertools.pairwise(means):
        more = means[name] - means[before]
        more = more[np.isfinite(more)]
        if len(more) > max(1, 0.9 * count):
            found[name] = [float(more.mean()), float(standard_error(more))]
    return found


def standard_error(values: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Standard error of the mean along the first axis; zero for a single value.

    `groups`, [value], says which values may resemble each other, as trials of one task do: a group counts once.
    """
    off = values - values.mean(axis=0)
    if groups is not None:
        names, index = np.unique(groups, return_inverse=True)
        sums = np.zeros((len(names), *values.shape[1:]))
        np.add.at(sums, index, off)
        off = sums
    count = len(off)
    return np.sqrt((off**2).sum(axis=0) * count / max(count - 1, 1)) / len(values)


# Student's t at 97.5% for 1, 2, 3, … degrees of freedom; beyond the last, the normal distribution's
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
NORMAL = 1.96


# What runs are compared by: name → number per trial, [trial], and whether it is a share.
MEASURES: dict[str, tuple[Callable[[Results], np.ndarray], bool]] = {
    "total return": (lambda r: r.returns.sum(axis=1), False),
    "episode cost": (lambda r: r.costs.mean(axis=1), False),
    "over budget": (lambda r: r.over.mean(axis=1), True),
}


def interval(seeds: Sequence[Results], measure: Callable[[Results], np.ndarray]) -> tuple[float, float]:
    """Mean and half-width of a 95% interval of a number per trial: over seeds, or over tasks if there is one seed.

    `measure` gives [trial]. Few seeds make a wide interval (Student's t). Over tasks it is the sampling error of
    the tasks alone: another training run may differ by more.
    """
    values = [measure(result) for result in seeds]
    if len(seeds) == 1:
        return float(values[0].mean()), NORMAL * float(standard_error(values[0], seeds[0].task))
    means = np.array([value.mean() for value in values])
    freedom = len(means) - 1
    factor = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    return float(means.mean()), factor * float(standard_error(means))


def rank(summary: Summary, tolerance: float) -> tuple[bool, float]:
    """How policies are ranked; the greatest is the best.

    Policies whose share of episodes over budget is within the tolerance come first, by total return. The others
    follow, by their share, the smallest first. A summary with nan cannot be ranked.
    """
    if not np.isfinite([summary.over_budget, summary.total_return]).all():
        raise UserError(
            f"a policy over budget in a share of {summary.over_budget} of its episodes, with a total return of "
            f"{summary.total_return}, cannot be ranked: both must be finite"
        )
    safe = summary.over_budget <= tolerance
    return safe, summary.total_return if safe else -summary.over_budget

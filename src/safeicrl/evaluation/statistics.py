"""The numbers drawn from results: totals, budget bins, scores between baselines, intervals, safety. No jax."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from safeicrl.budgets import bin_of, budget_edges
from safeicrl.errors import Unlike, UserError
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
    cost: float  # mean episode cost; with several costs, of their sum
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
        cost=float(results.total_costs.mean()),
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


def summaries(results: Results) -> dict[str, Any]:
    """What files and cards say about results: their summary and, with several costs, that of each cost."""
    found: dict[str, Any] = {"summary": dataclasses.asdict(summarise(results))}
    if results.several:
        found["by_cost"] = {name: dataclasses.asdict(summarise(own)) for name, own in results.by_cost().items()}
    return found


def relative(results: Results, *, upper: Results, lower: Results, last: int = 5) -> Relative:
    """The return of the `last` episodes relative to an upper baseline (1) and a lower one (0).

    All three met the same tasks with the same budgets, so differences are taken task by task: that a task is easy
    or hard for everybody does not count as error.
    """
    if last < 1:
        raise UserError(f"last must be at least 1 episode, got {last}")
    for baseline in (upper, lower):
        check_comparable(results, baseline)
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


def _world(results: Results) -> Any:
    """The environment's name; for a `Revealed` one, the name of the environment inside."""
    env = results.meta.get("env") or {}
    return env["parameters"]["name"] if env.get("name") == "revealed" else env.get("name")


# What results must share to be of one world, and to be of the same tasks.
WORLD: dict[str, Callable[[Results], Any]] = {
    "environment": _world,
    "physics": lambda r: r.meta.get("approximation", "the real one"),
}
TASKS: dict[str, Callable[[Results], Any]] = {
    "split": lambda r: r.meta.get("split"),
    "seed": lambda r: r.meta.get("seed"),
    "task list": lambda r: (r.meta.get("task_list") or {}).get("sha256"),
    "budgets per task": lambda r: r.budgets_per_task,
    "trials": lambda r: "{} of {} episodes".format(*r.returns.shape),
    "budget range": lambda r: r.budget_range,
}


def check_one_world(results: Sequence[Results]) -> None:
    """Refuse results of several worlds; warn of results of one world on other tasks, in one line."""
    first, *others = results
    for other in others:
        for name, of in WORLD.items():
            one, two = of(first), of(other)
            if one != two and None not in (one, two):  # None: it does not say
                raise UserError(
                    f"only results of one world can be compared: {first.label!r} and {other.label!r} differ in "
                    f"their {name}, {one} and {two}"
                )
    differ = {}
    for name, of in TASKS.items():
        if len(found := dict.fromkeys(f"{of(result)!s:.24}" for result in results)) > 1:
            differ[name] = " and ".join(found)
    if differ:
        listed = ", ".join(f"{name} ({values})" for name, values in differ.items())
        warnings.warn(f"these results are not of the same tasks: they differ in {listed}", Unlike, stacklevel=2)


def check_comparable(one: Results, other: Results) -> None:
    """Raise unless both are of the same tasks, budgets and trials."""
    for name, of in {**WORLD, **TASKS}.items():
        if of(one) != of(other):
            raise UserError(
                f"only results on the same tasks can be compared: {one.label!r} and {other.label!r} differ in "
                f"their {name}, {of(one)} and {of(other)}"
            )
    if not np.array_equal(one.budgets, other.budgets):
        raise UserError(f"only results with the same budgets can be compared: {one.label!r}, {other.label!r}")


def budget_bins(results: Results) -> dict[str, np.ndarray]:
    """Bin name → which trials it holds, [trial] bool.

    With several costs there are bins of each cost's budget, such as "heat 0–1": a trial is in one bin of each cost.
    """
    if results.several:
        parts = ((name, budget_bins(own)) for name, own in results.by_cost().items())
        return {f"{name} {span}": rows for name, bins in parts for span, rows in bins.items()}
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
    if results.several:  # from bin to bin of the same cost
        parts = ((name, rises(own)) for name, own in results.by_cost().items())
        return {f"{name} {span}": rise for name, found in parts for span, rise in found.items()}
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
    "episode cost": (lambda r: r.total_costs.mean(axis=1), False),
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


# -- statistics that few outliers and few seeds do not fool ------------------------------------------------------


def interquartile_mean(values: np.ndarray) -> float:
    """The mean of the middle half: without the lowest and the highest quarter, rounded down to whole values."""
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def performance_profile(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The share of the values above each level, [level]."""
    return (np.asarray(values)[None] > np.asarray(levels)[:, None]).mean(axis=1)


def resampled_trials(results: Results, random: np.random.Generator) -> np.ndarray:
    """[trial] the trials of one bootstrap sample: as many tasks, drawn again, each with all its trials.

    Where a task has one budget, it is drawn among those of its budget bin: the strata, which keep the budgets' mix.
    With several costs, the strata are the bins of the first one.
    """
    often = results.budgets_per_task
    tasks = len(results.budgets) // often
    strata = budget_bins(next(iter(results.by_cost().values()))).values()
    bins = [np.arange(tasks)] if often > 1 else [np.flatnonzero(rows) for rows in strata]
    chosen = np.concatenate([random.choice(stratum, len(stratum)) for stratum in bins if len(stratum)])
    return (chosen + tasks * np.arange(often)[:, None]).ravel()


def bootstrap(
    seeds: Sequence[Results],
    measure: Callable[[Results], np.ndarray],
    statistic: Callable[[np.ndarray], Any] = interquartile_mean,
    *,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    """A statistic of a number per trial, pooled over seeds, with the ends of its 95% bootstrap interval.

    `measure` gives [trial], `statistic` turns the pooled numbers into a number or an array. Each sample draws seeds
    with replacement, and tasks by `resampled_trials`. A seed is drawn whole, because one training run plays all
    tasks. Drawn apart for each task, the differences between seeds would average out over the tasks. With few seeds
    the interval is still too narrow; `interval` has Student's t for them.
    """
    if samples < 1:
        raise UserError(f"a bootstrap needs at least 1 sample, got {samples}")
    random = np.random.default_rng(seed)
    values = [np.asarray(measure(result)) for result in seeds]  # [seed][trial]
    alike = len({len(value) for value in values}) == 1  # then all seeds met the same tasks
    found = []
    for _ in range(samples):
        shared = resampled_trials(seeds[0], random)
        drawn = random.integers(len(seeds), size=len(seeds)) if len(seeds) > 1 else [0]
        parts = [values[i][shared if alike else resampled_trials(seeds[i], random)] for i in drawn]
        found.append(statistic(np.concatenate(parts)))
    low, high = np.quantile(np.asarray(found), (0.025, 0.975), axis=0)
    return statistic(np.concatenate(values)), low, high


# -- safety ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Safety:
    """How often, when and by how much budgets are broken. nan where nothing was broken, or nothing is known."""

    over_budget: float  # share of episodes
    trials_over: float  # share of trials with any episode over budget
    excess_mean: float  # cost beyond the budget, mean over the episodes that broke it
    excess_95: float  # its 95th percentile over these episodes
    excess_worst: float  # the largest
    first_break: float  # median index, from 1, of the first episode over budget, over the trials that have one
    over_beyond: float  # share of the episodes past the K of training
    by_episode: list[float]  # [episode] share of trials over budget in this episode
    by_budget: dict[str, float]  # bin → share of episodes over budget
    trials_by_budget: dict[str, float]  # bin → share of trials with any
    stepped_in: float  # share of the steps at which a guard stepped in; nan without a guard
    deciles: list[float]  # [11] edges of ten equal bins of the budget; empty with several costs
    largest: list[float]  # [10] largest episode cost of a trial, mean over the bin's trials; nan for an empty bin


def safety(seeds: Sequence[Results]) -> Safety:
    """The safety figures of one agent, pooled over its seeds."""
    over = np.concatenate([result.over for result in seeds])  # [trial, episode]
    excess = np.concatenate([result.excess for result in seeds])[over]
    first = over.argmax(axis=1)[over.any(axis=1)] + 1
    known = trained_episodes(seeds[0])
    inside: dict[str, list[np.ndarray]] = {name: [] for name in budget_bins(seeds[0])}
    for result in seeds:
        for name, rows in budget_bins(result).items():
            inside[name].append(result.over[rows])
    bins = {name: np.concatenate(parts) for name, parts in inside.items()}
    mean = lambda values: float(values.mean()) if values.size else float("nan")  # noqa: E731
    return Safety(
        over_budget=mean(over),
        trials_over=mean(over.any(axis=1)),
        excess_mean=mean(excess),
        excess_95=float(np.quantile(excess, 0.95)) if excess.size else float("nan"),
        excess_worst=float(excess.max()) if excess.size else float("nan"),
        first_break=float(np.median(first)) if first.size else float("nan"),
        over_beyond=float("nan") if known is None else mean(over[:, known:]),
        by_episode=over.mean(axis=0).tolist(),
        by_budget={name: mean(part) for name, part in bins.items()},
        trials_by_budget={name: mean(part.any(axis=1)) for name, part in bins.items()},
        stepped_in=mean(np.array([r.meta["guard_stepped_in"] for r in seeds if "guard_stepped_in" in r.meta])),
        **_largest_costs(seeds),
    )


def _largest_costs(seeds: Sequence[Results]) -> dict[str, list[float]]:
    """`Safety.deciles` and `Safety.largest`."""
    if seeds[0].several:
        return {"deciles": [], "largest": []}
    low, high = seeds[0].budget_range
    edges = np.linspace(low, high, 11)
    budgets = np.concatenate([result.budgets for result in seeds])
    worst = np.concatenate([result.costs.max(axis=1) for result in seeds])
    inside = bin_of(budgets, edges)
    parts = [worst[inside == index] for index in range(10)]
    return {
        "deciles": edges.round(3).tolist(),
        "largest": [float(part.mean()) if part.size else float("nan") for part in parts],
    }


def trained_episodes(results: Results) -> int | None:
    """The K of the trials in training, from the results' environment; None where it is not written down."""
    parameters = (results.meta.get("env") or {}).get("parameters") or {}
    known = parameters.get("episodes")
    return int(known) if known else None


def worst_excess(results: Results) -> np.ndarray:
    """[trial] the cost beyond the budget of the trial's worst episode; negative if all kept it."""
    return results.excess.max(axis=1)


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

"""Results of an evaluation, in memory and on disk (npz + JSON), and the numbers drawn from them. No jax."""

import dataclasses
import io
import itertools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.errors import UserError
from safeicrl.files import atomic_write, read_json, write_json

ARRAYS = ("returns", "costs", "lengths", "budgets")
NUMBERS = ("none", "episode", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")  # the last …


@dataclass(frozen=True, kw_only=True)
class Results:
    """One agent in many trials, each of one task under one budget."""

    returns: np.ndarray  # [trial, episode] undiscounted
    costs: np.ndarray  # [trial, episode]
    lengths: np.ndarray  # [trial, episode] steps
    budgets: np.ndarray  # [trial] δ
    meta: dict[str, Any]  # label, env, agent, action selection, seed, version, device, wall time, command

    @property
    def label(self) -> str:
        """The agent's name in tables and figures."""
        return str(self.meta.get("label", "agent"))

    @property
    def budgets_per_task(self) -> int:
        """How many trials each task has, from a small budget to a large one."""
        return int(self.meta.get("budgets_per_task", 1))

    @property
    def task(self) -> np.ndarray:
        """[trial] which task it is of. All tasks under a first budget, then all under a second, ..."""
        trials = len(self.budgets)
        return np.arange(trials) % (trials // self.budgets_per_task)

    @property
    def over(self) -> np.ndarray:
        """[trial, episode] bool: the episode cost more than its budget."""
        # the slack is for real-valued costs summed in float32
        return self.costs > self.budgets[:, None] * (1 + 1e-6) + 1e-6

    @property
    def budget_range(self) -> tuple[float, float]:
        """The range the budgets were drawn from."""
        low, high = self.meta.get("budget_range") or (self.budgets.min(), self.budgets.max())
        return float(low), float(high)


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
    last: int = 10  # how many episodes "last" are: ten, fewer in a short trial
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
    """Where an agent stands between two reference lines on the same tasks: 0 is the lower one, 1 the upper one."""

    score: float
    error: float  # standard error over tasks
    last_return: float  # mean return of the last episodes
    over_budget_last: float  # share of them over budget


def relative(results: Results, *, upper: Results, lower: Results, last: int = 5) -> Relative:
    """The return of the `last` episodes relative to an upper line (1) and a lower one (0).

    All three met the same tasks with the same budgets, so differences are taken task by task and what a task makes
    easy or hard for everybody does not count as error.
    """
    if last < 1:
        raise UserError(f"last must be at least 1 episode, got {last}")
    for line in (upper, lower):
        _check_comparable(results, line)
    mine, above, below = (r.returns[:, -last:].mean(axis=1) for r in (results, upper, lower))  # [trial]
    gained, range_ = mine - below, above - below
    if not range_.mean() > 0:
        raise UserError(f"the upper line, {upper.label!r}, is not above the lower one, {lower.label!r}: no scale")
    score = gained.mean() / range_.mean()
    # of a ratio of means, to first order
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
        """The environment's name; of one that only tells its task, that of the environment it is made of."""
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
                f"results can be compared on the same tasks only: {one.label!r} and {other.label!r} differ in "
                f"their {name}, {of(one)} and {of(other)}"
            )
    if not np.array_equal(one.budgets, other.budgets):
        raise UserError(f"results can be compared with the same budgets only: {one.label!r}, {other.label!r}")


def budget_edges(low: float, high: float) -> np.ndarray:
    """Edges of five budget bins; the first is half as wide, since little budget is the hardest case.

    For the paper's range 1–10: 1, 2, 4, 6, 8, 10.
    """
    return low + (high - low) * np.array([0, 1, 3, 5, 7, 9]) / 9


def budget_bins(results: Results) -> dict[str, np.ndarray]:
    """Bin name → which trials it holds, [trial] bool. Lower edges belong to their bin, the last edge too."""
    edges = budget_edges(*results.budget_range)
    if edges[0] == edges[-1]:
        return {f"{edges[0]:g}": np.ones(len(results.budgets), bool)}
    index = np.clip(np.searchsorted(edges, results.budgets, side="right") - 1, 0, len(edges) - 2)
    names = [f"{a:.3g}–{b:.3g}" for a, b in itertools.pairwise(edges)]
    return {name: index == i for i, name in enumerate(names)}


def rises(results: Results) -> dict[str, list[float]]:
    """Bin name → how much more a task's total return is there than in the bin before: mean over tasks, and error.

    Only where nearly all tasks are in both bins, as with nine budgets a task; never where each has one budget.
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

    Values of one of the `groups`, [value], may resemble each other, as trials of one task do: a group counts once.
    """
    off = values - values.mean(axis=0)
    if groups is not None:
        names, index = np.unique(groups, return_inverse=True)
        sums = np.zeros((len(names), *values.shape[1:]))
        np.add.at(sums, index, off)
        off = sums
    count = len(off)
    return np.sqrt((off**2).sum(axis=0) * count / max(count - 1, 1)) / len(values)


def save_results(results: Results, path: str | Path) -> tuple[Path, Path]:
    """Write `<path>.npz` and `<path>.json` (provenance and summary); returns both paths."""
    stem = _stem(path)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: getattr(results, name) for name in ARRAYS})
    arrays, card = Path(f"{stem}.npz"), Path(f"{stem}.json")
    atomic_write(arrays, [buffer.getbuffer()])
    write_json(card, {"meta": results.meta, "summary": dataclasses.asdict(summarise(results))})
    return arrays, card


def load_results(path: str | Path) -> Results:
    """Read what `save_results` wrote; `path` with or without its extension."""
    stem = _stem(path)
    arrays, card = Path(f"{stem}.npz"), Path(f"{stem}.json")
    missing = [file.name for file in (arrays, card) if not file.exists()]
    if len(missing) == 1 and Path(path).name not in missing:
        raise UserError(f"{path} is half a results file: {missing[0]} is missing beside it")
    if missing:
        raise UserError(f"no results file at {path}")
    saved = read_json(card, "results file")
    if not isinstance(saved, dict) or not isinstance(saved.get("meta"), dict):
        raise UserError(f"{card} is no results file: it has no group 'meta'")
    try:
        with np.load(arrays, allow_pickle=False) as file:
            values = {name: file[name] for name in ARRAYS}
        shape = values["returns"].shape
        right = values["costs"].shape == values["lengths"].shape == shape == (len(values["budgets"]), shape[1])
        results = Results(meta=saved["meta"], **values)
        if not right:
            raise ValueError("its arrays do not fit together")
        if results.budgets_per_task < 1 or shape[0] % results.budgets_per_task:
            raise ValueError(f"{shape[0]} trials are not of tasks with {results.budgets_per_task} budgets each")
        return results
    except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{arrays} is no results file: {str(error).partition(chr(10))[0]}") from None


def results_equal(a: Results, b: Results) -> bool:
    """The same numbers, whatever the provenance says about time and place."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


def _stem(path: str | Path) -> str:
    text = str(path)
    return text[: -len(Path(text).suffix)] if Path(text).suffix in (".npz", ".json") else text

"""A grid of trainings: which settings differ, what each run is called, and the index of its folder, sweep.json.

A run is a command line of `safeicrl train`. Its folder is named after the settings that differ from run to run, so
`sweeps/x/step=0.01,size=5` says what is in it.
"""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safeicrl import plugins
from safeicrl.errors import UserError
from safeicrl.evaluation.sweeps import SweptRun, is_sweep, read_sweep
from safeicrl.files import SWEEP, write_json

if TYPE_CHECKING:  # its modules import JAX, which a worker does only once its devices are chosen
    from safeicrl.recipes.recipe import Recipe

LONGEST = 200  # bytes of a folder's name; file systems take 255
TOGETHER = ("distributed", "coordinator", "processes", "process", "join-timeout")  # options of several processes
KEY = re.compile(r"[A-Za-z][\w.-]*")
Grid = dict[str, tuple[str, ...]]  # setting → its values, as on the command line of `safeicrl train`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a sweep will do."""

    name: str  # of the first run's recipe
    settings: tuple[str, ...]  # options of `safeicrl train` that all runs share
    grid: Grid
    evaluate: int | None  # unseen tasks of an evaluation after training; None: no such evaluation
    runs: tuple["Run", ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a sweep."""

    name: str  # of its folder
    label: str  # the same without the seed
    words: tuple[str, ...]  # options of `safeicrl train`, without its folder
    iterations: int | None  # of all stages; None where only time limits them

    def command(self, folder: Path) -> str:
        """The command that trains it alone."""
        imports = [word for name in plugins.imported for word in ("--import", name)]
        return shlex.join(["safeicrl", "train", *self.words, "--out", str(folder / self.name), *imports])


# -- from the command line ----------------------------------------------------------------------------------


def parse_grid(texts: Sequence[str]) -> Grid:
    """The settings of `--grid SETTING=VALUE,VALUE`; the words of one value are separated by spaces."""
    if not texts:
        raise UserError(
            "a sweep needs --grid SETTING=VALUE,VALUE; for several seeds of one run: safeicrl train --seeds 3"
        )
    grid: Grid = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        key = name.strip().lstrip("-").replace("_", "-")
        if not equals or not KEY.fullmatch(key):
            raise UserError(f"--grid takes SETTING=VALUE,VALUE, got {text!r:.80}")
        if key in ("out", "resume"):
            raise UserError(f"--grid {key}: a sweep chooses the folders of its runs, and resumes them by itself")
        if key in grid:
            raise UserError(f"--grid {key} is given twice: join its values, {key}=VALUE,VALUE")
        values = [" ".join(value.split()) for value in rest.split(",")]
        if "" in values:
            raise UserError(f"--grid {key} has an empty value: {text!r:.80}")
        if len(set(values)) < len(values):
            raise UserError(f"--grid {key} has the same value twice: {text!r:.80}")
        grid[key] = tuple(values)
    return grid


def option(key: str, value: str) -> tuple[str, ...]:
    """A setting as words of the command line; true and false are switches there."""
    if value.lower() in ("true", "false"):
        group, dot, name = key.rpartition(".")
        return (f"--{group}{dot}{'' if value.lower() == 'true' else 'no-'}{name}",)
    words = value.split()
    return (f"--{key}={value}",) if len(words) == 1 else (f"--{key}", *words)


def make_plan(
    texts: Sequence[str],
    settings: Sequence[str],
    *,
    evaluate: int | None,
    resolve: Callable[[list[str]], "Recipe"],
) -> Plan:
    """All runs of the grid; `resolve` turns options of `safeicrl train` into a recipe, or refuses them."""
    grid = parse_grid(texts)
    given = [word.split("=")[0].removeprefix("--").replace("_", "-") for word in settings if word.startswith("--")]
    if "resume" in given:
        raise UserError("a sweep resumes its runs by itself: repeat its command, with the same --out")
    for name in (*given, *grid):
        if name in TOGETHER:
            raise UserError(f"a run of a sweep is one process: leave out {name}")
    short = _short_keys(list(grid))
    runs: list[Run] = []
    names: list[str] = []  # of recipes
    trained: dict[tuple[str, int], str] = {}  # label and seed → run
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        name = _name({short[key]: value for key, value in chosen.items()})
        if any(run.name == name for run in runs):
            raise UserError(f"two runs would have the folder {name}: their values differ only in punctuation")
        words = (*settings, *(word for key, value in chosen.items() for word in option(key, value)))
        recipe = _resolved(resolve, words, chosen)
        label = _name({short[key]: value for key, value in chosen.items() if key != "seed"}) or recipe.name
        run = Run(name=name, label=label, words=words, iterations=_iterations(recipe))
        train = recipe.stages[0].experiment.train
        for seed in range(train.seed, train.seed + train.seeds):
            if (other := trained.setdefault((label, seed), name)) != name:
                raise UserError(f"{other} and {name} would both train seed {seed}: --seeds counts on from --seed")
        runs.append(run)
        names.append(recipe.name)
    return Plan(name=names[0], settings=tuple(settings), grid=grid, evaluate=evaluate, runs=tuple(runs))


def _resolved(resolve: Callable[[list[str]], "Recipe"], words: Sequence[str], chosen: dict[str, str]) -> "Recipe":
    """The recipe of a run; an error about a setting of the grid says that it comes from there."""
    try:
        return resolve(list(words))
    except UserError as error:
        for key, value in chosen.items():
            if re.search(rf"--{re.escape(key)}(?![\w.-])", str(error)):
                raise UserError(f"--grid {key}={value}: {error}") from None
        raise


def _short_keys(keys: list[str]) -> dict[str, str]:
    """Setting → the end of its name that no other one has: algo.penalty.step → step."""

    def ending(key: str, parts: int) -> str:
        return ".".join(key.split(".")[-parts:])

    found = {}
    for key in keys:
        lengths = range(1, key.count(".") + 2)
        alone = lambda parts, key=key: all(ending(k, parts) != ending(key, parts) for k in keys if k != key)  # noqa: E731
        found[key] = ending(key, next(filter(alone, lengths), len(lengths)))
    return found


def _name(values: dict[str, str]) -> str:
    """A folder's name: step=0.01,size=5."""
    name = ",".join(f"{key}={re.sub(r'[^A-Za-z0-9.+-]+', '-', value)}" for key, value in values.items())
    if len(name) > LONGEST:
        raise UserError(f"a run's folder is named after its settings, and {name:.40}… is longer than {LONGEST}")
    return name


def _iterations(recipe: "Recipe") -> int | None:
    """How many iterations a recipe plans for, in all stages."""
    total = 0
    for stage in recipe.stages:
        limit = stage.experiment.train.iterations
        planned = getattr(stage.experiment.algo, "iterations", None) if limit is None else limit
        if planned is None:
            return None
        total += planned
    return total


# -- the index ----------------------------------------------------------------------------------------------


def open_index(folder: Path, plan: Plan) -> dict[str, Any]:
    """The index of the sweep in `folder`: a new one, or the one that is there with the plan's new runs added.

    More values may join the grid of a sweep; any other difference makes it another sweep.
    """
    own = {"settings": list(plan.settings), "evaluate": plan.evaluate}
    planned = [
        SweptRun(name=run.name, label=run.label, command=run.command(folder), folder=folder / run.name)
        for run in plan.runs
    ]
    if not is_sweep(folder):
        if any(path for path in folder.glob("*") if not path.name.startswith(".")):
            raise UserError(f"{folder} has files but no {SWEEP}: choose another --out")
        from safeicrl.provenance import surroundings

        # each run's config.json says its device
        return {**own, "grid": plan.grid, "runs": planned, **surroundings(device=False)}
    index = read_sweep(folder)
    if any(index.get(name) != value for name, value in own.items()) or list(index["grid"]) != list(plan.grid):
        began = f" ({index['command']})" if index.get("command") else ""
        raise UserError(f"{folder} holds another sweep{began}: choose another --out, or repeat that command")
    there = {run.name for run in index["runs"]}
    grid = {key: list(dict.fromkeys([*index["grid"][key], *values])) for key, values in plan.grid.items()}
    return {**index, "grid": grid, "runs": [*index["runs"], *(run for run in planned if run.name not in there)]}


def save_index(folder: Path, index: dict[str, Any]) -> None:
    """Write sweep.json."""
    runs = [{k: v for k, v in dataclasses.asdict(run).items() if k != "folder"} for run in index["runs"]]
    write_json(folder / SWEEP, {**index, "runs": runs})

"""What a training is made of: experiments in a row, each of which starts with the networks of the one before."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safeicrl.algos.api import Algorithm
from safeicrl.algos.registry import algo_name, find_algo
from safeicrl.config import from_plain
from safeicrl.envs.registry import env_from_plain, parse_parameters
from safeicrl.errors import UserError, check_integer
from safeicrl.files import RECIPE, read_json, stage_folder, write_json
from safeicrl.provenance import surroundings
from safeicrl.training.settings import TrainConfig, describe

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a stage: it is the end of a folder's name


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run of the trainer."""

    env: Any  # an Env
    algo: Any  # the config of an algorithm
    train: TrainConfig

    def build(self) -> Algorithm:
        """The algorithm on its environment, ready for `train`."""
        algorithm, _ = find_algo(algo_name(self.algo))
        return algorithm(self.env, self.algo)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One experiment of a recipe."""

    name: str  # what the stage is for
    experiment: Experiment

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(f"a stage's name must be letters, digits, dots and dashes, got {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The way to one policy."""

    name: str
    stages: tuple[Stage, ...]  # one after another
    average_last: int = 1  # stages, counted from the last, whose policies are averaged for the exported one
    env_args: tuple[str, ...] = ()  # parameters of the environment the policy is exported for, e.g. engine=auto

    def __post_init__(self) -> None:
        if not self.stages:
            raise UserError(f"the recipe {self.name!r} has no stages")
        if check_integer("average_last", self.average_last, 1) > len(self.stages):
            raise UserError(f"average_last must be at most the number of stages, {len(self.stages)}")
        parse_parameters(self.env_args, "env_args")  # refuses what is not name=value

    @classmethod
    def single(cls, name: str, experiment: Experiment) -> "Recipe":
        """A recipe of one experiment."""
        return cls(name=name, stages=(Stage(name="train", experiment=experiment),))

    @property
    def folders(self) -> list[str]:
        """The stages' folders within the run's folder."""
        return [stage_folder(number, stage.name) for number, stage in enumerate(self.stages, 1)]


# -- on disk ------------------------------------------------------------------------------------------------


def save_recipe(folder: Path, recipe: Recipe, done: list[dict[str, Any]], *, exported: bool = False) -> None:
    """Write recipe.json: the whole recipe, and which of its stages are done.

    `done` has an entry for each finished stage; `exported` says that the policy has been written, too.
    """
    path, where = folder / RECIPE, surroundings()
    if path.exists():  # the run comes from where it began, also when it is resumed elsewhere
        where |= {name: value for name, value in read_json(path, "recipe").items() if name in where}
    stages = [{"name": stage.name, **describe(**vars(stage.experiment))} for stage in recipe.stages]
    saved = {
        "name": recipe.name,
        "stages": stages,
        "average_last": recipe.average_last,
        "env_args": recipe.env_args,
        "done": done,
        "exported": exported,
        **where,
    }
    write_json(path, saved)


def load_progress(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """What `save_recipe` was told about a run in `folder`: the finished stages, and whether the policy is there."""
    path = folder / RECIPE
    saved = read_json(path, "training run")
    try:
        done, exported = saved.get("done", []), bool(saved.get("exported", False))
        for entry in done:
            check_integer("iterations of a stage", entry["iterations"], 0)
        return list(done), exported
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a recipe: {error!r}") from None


def load_experiment(folder: Path) -> Experiment:
    """The experiment of a folder with one run of the trainer, from its config.json."""
    path = folder / "config.json"
    return _experiment(read_json(path, "training run"), path)


def load_recipe(path: Path) -> Recipe:
    """The recipe of a stored run: of its folder, or of the recipe.json or config.json in it."""
    file = path
    if not path.is_file():
        file = path / RECIPE if (path / RECIPE).exists() else path / "config.json"
    saved, name = read_json(file, "training run"), file.resolve().parent.name
    if not isinstance(saved, dict) or "stages" not in saved:
        return Recipe.single(name, _experiment(saved, file))
    try:
        return Recipe(
            name=saved["name"],
            stages=tuple(Stage(name=x["name"], experiment=_experiment(x, file)) for x in saved["stages"]),
            average_last=saved["average_last"],
            env_args=tuple(saved["env_args"]),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is not a recipe: {error!r}") from None


def _experiment(saved: Any, path: Path) -> Experiment:
    try:
        return Experiment(
            env=env_from_plain(saved["env"]["name"], saved["env"]["parameters"]),
            algo=from_plain(find_algo(saved["algo"]["name"])[1], saved["algo"]["config"], "algo"),
            train=from_plain(TrainConfig, saved["train"], "train"),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a training run: {error!r}") from None

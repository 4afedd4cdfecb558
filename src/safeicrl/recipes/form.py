"""The options of `safeicrl train`: a form for each stage of a recipe, filled in from one command line."""

import dataclasses
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import tyro

from safeicrl.errors import UserError
from safeicrl.recipes.presets import Line
from safeicrl.recipes.recipe import Recipe, Stage
from safeicrl.training.settings import TrainConfig

# What to train, and where: name → type, help.
CHOICES: dict[str, tuple[Any, str]] = {
    "preset": (str, "name of a recipe, see safeicrl list; darkroom-small by default"),
    "line": (
        Line,
        "train a baseline of the preset instead: privileged is told the hidden task, memoryless forgets "
        "everything after each episode; for point, car, half-cheetah and ant",
    ),
    "like": (Path, "repeat a stored run in a new folder: its folder, or its config.json or recipe.json"),
    "resume": (Path, "folder of a run to continue where it was stopped or killed"),
    "out": (Path, "folder of the new run; runs/NAME-DATE by default"),
}


# On which devices, and in which of several processes: name → type, default, help. Not part of the experiment.
PLACES: dict[str, tuple[Any, Any, str]] = {
    "devices": (
        int | None,
        None,
        "devices of this process to train on; by default all among which the rows can be divided",
    ),
    "distributed": (bool, False, "train in several processes, on one host or on many; start this command in each"),
    "coordinator": (
        str | None,
        None,
        "HOST:PORT where process 0 waits for the others; by default what the launcher says",
    ),
    "processes": (int | None, None, "how many processes there are"),
    "process": (int | None, None, "which one this is, from 0"),
    "join_timeout": (float, 300.0, "seconds to wait for the other processes"),
}


def train_form(recipe: Recipe, index: int, about: str) -> type:
    """The options, with the settings of the recipe's stage at `index` as defaults; `about` begins the help."""
    default = recipe.stages[index].experiment
    form = dataclasses.make_dataclass(
        "Train",
        [
            *(
                (name, Annotated[kind | None, tyro.conf.arg(help=text)], field(default=None))
                for name, (kind, text) in CHOICES.items()
            ),
            *(
                (name, Annotated[kind, tyro.conf.arg(help=text)], field(default=default_value))
                for name, (kind, default_value, text) in PLACES.items()
            ),
            # without a prefix: --minutes, --seeds; the other two are --env.size, --algo.net.width
            ("train", Annotated[TrainConfig, tyro.conf.arg(name="")], field(default=default.train)),
            ("env", type(default.env), field(default=default.env)),
            ("algo", type(default.algo), field(default=default.algo)),
        ],
        frozen=True,
    )
    form.__doc__ = about
    if len(recipe.stages) > 1:
        names = [stage.name for stage in recipe.stages]
        form.__doc__ += (
            f"\n\n{recipe.name} has {len(names)} stages: {', '.join(names)}. Each begins with the networks of the "
            "one before (--start is for the first). Any other option holds for every stage, --minutes and "
            f"--iterations too. The defaults below are those of {names[index]}."
        )
    return form


def with_options(recipe: Recipe, forms: Sequence[Any]) -> Recipe:
    """The recipe with the settings that were asked for: a filled-in form for each stage."""
    stages: list[Stage] = []
    for stage, form in zip(recipe.stages, forms, strict=True):
        default, train = stage.experiment, form.train
        if stages:  # which begins with the networks of the stage before
            train = dataclasses.replace(train, start=None)
        before, now = (getattr(algo, "iterations", None) for algo in (default.algo, form.algo))
        if before != now and train.iterations == default.train.iterations:
            # another plan, so the number of iterations that went with the old one no longer holds
            train = dataclasses.replace(train, iterations=None)
        experiment = dataclasses.replace(default, env=form.env, algo=form.algo, train=train)
        stages.append(dataclasses.replace(stage, experiment=experiment))
    return dataclasses.replace(recipe, stages=tuple(stages))


def check_resumable(saved: Recipe, asked: Recipe) -> None:
    """A resumed run may have other limits, but its experiments are the same."""
    for one, other in zip(saved.stages, asked.stages, strict=True):
        before, now = one.experiment, other.experiment
        fixed = {"env": (before.env, now.env), "algo": (before.algo, now.algo)}
        fixed |= {name: (getattr(before.train, name), getattr(now.train, name)) for name in ("seed", "seeds")}
        for name, (old, new) in fixed.items():
            if old != new:
                raise UserError(f"--resume continues the run as it was: {name} cannot change")

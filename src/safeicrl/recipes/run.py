"""Running a recipe: its stages one after another, then the export of its policy.

A recipe of one stage makes an ordinary run folder (train.py). A recipe of several stages makes recipe.json and an
ordinary run folder for each stage: RUN/1-learn-to-drive, RUN/2-whole-trials, ... Its last step is the policy,
RUN/policy.safetensors + .json, with its evaluation, RUN/policy-evaluation.npz + .json. With several seeds there are
RUN/policy-seed0.safetensors, ..., and RUN/policy.safetensors is the best of them.
"""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from safeicrl.envs.registry import env_to_plain, parse_parameters
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import summaries
from safeicrl.files import CHECKPOINT, RECIPE, owned
from safeicrl.log import Terminal
from safeicrl.machine import hosts
from safeicrl.machine.signals import StopRequest
from safeicrl.policies.cards import read_card, save_policy
from safeicrl.policies.catalogue import changed_env, load_agent, run_policies
from safeicrl.policies.contenders import released
from safeicrl.policies.export import best_seed, export_policy
from safeicrl.recipes.recipe import Recipe, load_progress, load_recipe, save_recipe
from safeicrl.train import train
from safeicrl.training.settings import EvalConfig
from safeicrl.training.start import check_start
from safeicrl.training.status import Status


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What `run_recipe` returns."""

    folder: Path
    finished: bool  # False when it was stopped on request
    policies: list[Path]  # [seed]; empty when it was stopped before there was one
    iterations: int  # in all stages


def run_recipe(
    recipe: Recipe,
    *,
    out: str | Path,
    resume: bool = False,
    console: Console | None = None,
    stop: StopRequest | None = None,
    devices: int | None = None,
) -> Ran:
    """Train in the folder `out`; `resume` continues the run that is there; a signal to `stop` ends it early.

    `devices` is that of `train`. Of several processes, only the first one touches the folder.
    """
    folder = Path(out)
    taken = lambda: any((folder / name).exists() for name in (RECIPE, CHECKPOINT))  # noqa: E731
    if not resume and hosts.by_first(taken):
        raise UserError(f"{folder} holds a run already: resume it or choose another folder")
    if len(recipe.stages) > 1:
        first = hosts.is_first()
        with owned(folder) if first else contextlib.nullcontext():
            terminal = Terminal(console if first else Console(quiet=True))
            return _run_stages(recipe, folder, resume, terminal, stop or StopRequest(), devices)
    experiment = recipe.stages[0].experiment
    trained = train(
        experiment.build(), experiment.train, out=folder, resume=resume, console=console, stop=stop, devices=devices
    )
    return Ran(
        folder=folder,
        finished=trained.finished,
        policies=trained.policies,
        iterations=trained.status.iteration,
    )


def _run_stages(
    recipe: Recipe, folder: Path, resume: bool, terminal: Terminal, stop: StopRequest, devices: int | None
) -> Ran:
    done, exported = hosts.by_first(lambda: load_progress(folder)) if resume else ([], False)
    # finished stages are stored as they ran, whatever options the run is resumed with
    before = load_recipe(folder).stages[: len(done)] if resume else ()
    recipe = dataclasses.replace(recipe, stages=(*before, *recipe.stages[len(done) :]))
    _check(recipe, new=not resume)
    _save(folder, recipe, done, exported=exported)
    for index in range(len(done), len(recipe.stages)):
        name = recipe.stages[index].name
        terminal.say(f"stage {index + 1} of {len(recipe.stages)}: {name}")
        status, finished = _train_stage(recipe, folder, index, terminal.console, stop, devices)
        minutes = math.ceil(status.seconds / 6) / 10
        entry = {"stage": name, "iterations": status.iteration, "env_steps": status.env_steps, "minutes": minutes}
        if not finished:
            return Ran(folder=folder, finished=False, policies=[], iterations=_iterations([*done, entry]))
        done = [*done, entry]
        _save(folder, recipe, done)
    if not exported:
        hosts.by_first(lambda: _export(recipe, folder, done))
        _save(folder, recipe, done, exported=True)
    terminal.say(f"all {len(done)} stages are done; the policy is {folder / 'policy.safetensors'}")
    policies = [
        Path(path) for path in hosts.by_first(lambda: [str(path) for path in run_policies(folder).values()])
    ]
    return Ran(folder=folder, finished=True, policies=policies, iterations=_iterations(done))


def _save(folder: Path, recipe: Recipe, done: list[dict[str, Any]], *, exported: bool = False) -> None:
    if hosts.is_first():
        save_recipe(folder, recipe, done, exported=exported)


def _check(recipe: Recipe, *, new: bool) -> None:
    """Refuse what would fail in a later stage or in the export, before hours of training."""
    algorithms = [stage.experiment.build() for stage in recipe.stages]
    start = recipe.stages[0].experiment.train.start
    if new and start is not None:
        hosts.by_first(lambda: check_start(algorithms[0], start))
    changed_env({"env": env_to_plain(algorithms[-1].env)}, parse_parameters(recipe.env_args, "env_args"))
    if recipe.average_last > 1:
        first, *others = ((each.env, each.card()) for each in algorithms[-recipe.average_last :])
        if first[1]["kind"] != "net" or any(other != first for other in others):
            raise UserError(
                f"average_last {recipe.average_last} needs stages with the same environment and network, and "
                "policies of kind 'net'"
            )


def _iterations(entries: list[dict[str, Any]]) -> int:
    return sum(entry["iterations"] for entry in entries)


def _train_stage(
    recipe: Recipe, folder: Path, index: int, console: Console, stop: StopRequest, devices: int | None
) -> tuple[Status, bool]:
    """Begin one stage or continue it; returns its status, and whether it is finished.

    Its train state is not returned, so that its memory is free for the next stage.
    """
    experiment, here = recipe.stages[index].experiment, folder / recipe.folders[index]
    settings = experiment.train
    if index > 0:
        settings = dataclasses.replace(settings, start=str(folder / recipe.folders[index - 1]))
    begun = hosts.by_first(lambda: (here / CHECKPOINT).exists())
    trained = train(
        experiment.build(), settings, out=here, resume=begun, console=console, stop=stop, devices=devices
    )
    return trained.status, trained.finished


# -- the policy at the end ----------------------------------------------------------------------------------


def _export(recipe: Recipe, folder: Path, done: list[dict[str, Any]]) -> None:
    """Write the policy of each seed, and the best of several as `policy`."""
    settings = recipe.stages[-1].experiment.train
    if settings.seeds == 1:
        _export_seed(recipe, folder, done, settings.seed, folder / "policy")
        return
    for seed in range(settings.seed, settings.seed + settings.seeds):
        _export_seed(recipe, folder, done, seed, folder / f"policy-seed{seed}")
    export_policy(folder / f"policy-seed{best_seed(folder)}", folder / "policy", overwrite=True)


def _export_seed(recipe: Recipe, folder: Path, done: list[dict[str, Any]], seed: int, out: Path) -> None:
    last = recipe.folders[-recipe.average_last :]
    *others, own = (folder / name / f"best-seed{seed}.safetensors" for name in last)
    env_args = parse_parameters(recipe.env_args, "env_args")
    path = export_policy(own, out, average=others, env_args=env_args, overwrite=True)
    card = read_card(path)
    if "evaluation" in card:
        found = load_results(own.with_name(f"{own.stem}-evaluation"))
    else:  # the mean of several policies, or a policy for another environment than it was trained in
        found = _evaluate(path, recipe.stages[-1].experiment.train.evaluation)
        card["evaluation"] = {**found.meta, **summaries(found)}
    _, agent = load_agent(path, card)
    save_policy(path, agent, {**card, "stages": done}, found)


def _evaluate(path: Path, options: EvalConfig) -> Results:
    """An exported policy on the tasks that its stages were evaluated on."""
    found = released(str(path), wipe=options.wipe).evaluate(
        tasks=options.tasks, episodes=options.episodes, seed=options.seed, rows=options.rows,
        segments=options.segments,
    )  # fmt: skip
    return dataclasses.replace(found, meta={key: value for key, value in found.meta.items() if key != "card"})

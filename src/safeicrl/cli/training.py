"""The commands that make something to learn with, or learn: train, sweep, collect."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from safeicrl.cli.options import option, parse, parse_known
from safeicrl.errors import UserError, unknown_name
from safeicrl.machine import hosts
from safeicrl.machine.signals import StopRequest
from safeicrl.plugins import import_options

# -- train ------------------------------------------------------------------------------------------------


def train(args: list[str]) -> int:
    """Train a policy: --preset NAME, or --algo NAME --env NAME, or as a stored run: --like RUN; or --resume RUN."""
    from safeicrl.recipes.form import check_resumable
    from safeicrl.recipes.run import run_recipe

    settings, recipe, resume = asked_recipe(args)
    changed, asked = _with_settings("train", recipe, settings)
    if resume is not None:
        check_resumable(recipe, changed)
    out = resume or asked.out or Path("runs") / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    stop = StopRequest()
    _join(asked)
    ran = run_recipe(changed, out=out, resume=resume is not None, stop=stop, devices=asked.devices)
    if not hosts.is_first():
        return stop.exit_status
    if ran.policies:
        print(f"evaluate it:  safeicrl evaluate {out}{import_options()}")
    else:
        writer = "the first evaluation" if len(recipe.stages) == 1 else "the end of the last stage"
        print(f"no policy yet, {writer} writes one; go on:  safeicrl train --resume {out}{import_options()}")
    if ran.iterations:
        print(f"its curves:   safeicrl plot {out}")
    return stop.exit_status


def _with_settings(command: str, recipe: Any, settings: list[str]) -> tuple[Any, Any]:
    """The recipe with what the command line changes in it, and the form of its first stage: folder, devices."""
    from safeicrl.recipes.form import train_form, with_options

    forms: list[Any] = [
        parse(command, train_form(recipe, index, train.__doc__ or ""), settings)
        for index in range(len(recipe.stages))
    ]
    return with_options(recipe, forms), forms[0]


def _join(asked: Any) -> None:
    """Meet the other processes, where several train together."""
    cluster = hosts.Cluster(coordinator=asked.coordinator, processes=asked.processes, process=asked.process)
    if asked.distributed:
        hosts.join(cluster, asked.join_timeout)
    elif asked.coordinator is not None:
        raise UserError("--coordinator, --processes and --process are for several processes: add --distributed")


def asked_recipe(args: list[str]) -> tuple[list[str], Any, Path | None]:
    """The arguments without --algo NAME and --env NAME, the recipe that is asked for, and the folder to resume."""
    from safeicrl.recipes.presets import PRESETS, experiment, preset
    from safeicrl.recipes.recipe import Recipe, load_recipe

    if args and args[0] in PRESETS:
        raise UserError(f"a preset is named by its option: --preset {args[0]}")
    chosen, line, like, resume, out = (option(args, f"--{x}") for x in ("preset", "line", "like", "resume", "out"))
    settings, named = _named(args)
    if named:
        if chosen is not None or line or like or resume:
            raise UserError("--algo and --env say what to train: leave out --preset, --line, --like and --resume")
        return settings, Recipe.single("-".join(named), experiment(*named)), None
    if resume:
        if chosen is not None or line or like or out:
            raise UserError("--resume continues a run in its folder: leave out --preset, --line, --like and --out")
        return settings, load_recipe(Path(resume)), Path(resume)
    if like:
        if chosen is not None or line:
            raise UserError("--like repeats a stored run: leave out --preset and --line")
        return settings, load_recipe(Path(like)), None
    return settings, preset("darkroom-small" if chosen is None else chosen, line), None


def _named(args: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments without --algo NAME and --env NAME, and these names; none if neither is given."""
    algo, env = (option(args, name) for name in ("--algo", "--env"))
    if algo is None and env is None:
        return args, ()
    left, skip = [], False
    for argument in args:
        if not skip and argument.split("=")[0] not in ("--algo", "--env"):
            left.append(argument)
        skip = not skip and argument in ("--algo", "--env")
    return left, (algo or "scared", env or "safe-dark-room")


# -- sweep ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Train a grid of runs, side by side with Ray; the same command goes on after an interrupt.

    Every other option is one of safeicrl train and holds for all runs: --preset, --algo, --env, --seeds, --minutes,
    --algo.rows and so on. The seeds of --seeds train side by side within each run.
    """

    # a setting that differs from run to run, with its values: algo.penalty.step=0.01,0.02 or preset=car,point or
    # seed=0,1,2; may be repeated. The words of one value are separated by spaces.
    grid: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="SETTING=VALUE,VALUE")
    ] = ()  # fmt: skip
    out: Path | None = None  # folder of the sweep; sweeps/NAME-DATE by default
    evaluate: int | None = None  # evaluate each trained run on this many unseen tasks
    ray: bool = True  # --no-ray: one run after another in this process
    ray_address: str | None = None  # of an existing Ray cluster, or auto; by default Ray starts on this machine
    cpus: float = 1.0  # that Ray counts for each run
    gpus: float | None = None  # likewise, e.g. 0.25: four runs share one; 1 where there are GPUs by default
    retries: int = 3  # of a run whose process dies; each goes on from its checkpoint
    dry_run: bool = False  # list the runs and their commands, and do nothing


def sweep(args: list[str], *, command: Callable[[list[str]], int]) -> int:
    """Train a grid of runs, side by side with Ray; the same command goes on after an interrupt."""
    asked, settings = parse_known("sweep", Sweep, args)

    from safeicrl.errors import check_integer
    from safeicrl.recipes.grid import make_plan
    from safeicrl.recipes.sweep import Resources, run_sweep

    if asked.evaluate is not None:
        check_integer("--evaluate", asked.evaluate, 1)
    resources = Resources(
        ray=asked.ray, address=asked.ray_address, cpus=asked.cpus, gpus=asked.gpus, retries=asked.retries
    )

    def resolve(words: list[str]) -> Any:
        rest, recipe, _ = asked_recipe(words)
        return _with_settings("sweep", recipe, rest)[0]

    plan = make_plan(asked.grid, settings, evaluate=asked.evaluate, resolve=resolve)
    out = asked.out or Path("sweeps") / f"{plan.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if asked.dry_run:
        for run in plan.runs:
            print(f"{run.name}:  {run.command(out)}")
        return 0
    return run_sweep(plan, out=out, resources=resources, command=command)


# -- collect ----------------------------------------------------------------------------------------------


def collect(args: list[str]) -> int:
    """Collect learning histories for Safe AD, or demonstrations; the same command continues after an interrupt."""
    from safeicrl.envs.registry import env_from_plain, make_env, parse_parameters
    from safeicrl.histories.collect import collect as learn
    from safeicrl.histories.collect import default_config, progress_table
    from safeicrl.histories.demonstrations import EpsConfig, collect_demonstrations
    from safeicrl.histories.minari import export_minari

    name, who = option(args, "--env") or "safe-dark-room", option(args, "--by") or "ppo-lag"
    if who not in ("ppo-lag", "eps"):
        raise unknown_name("maker of histories", who, ("ppo-lag", "eps"))
    helped = lambda kind, text: Annotated[kind, tyro.conf.arg(help=text)]  # noqa: E731
    run: Callable[..., Any] = collect_demonstrations if who == "eps" else learn
    default: Any = EpsConfig() if who == "eps" else default_config(make_env(name))
    folder = Path("histories") / (f"{name}-eps" if who == "eps" else name)
    by = helped(Literal["ppo-lag", "eps"], "who plays: PPO-Lagrangian, or a planner whose noise fades (eps)")
    form = dataclasses.make_dataclass(
        "Collect",
        [
            ("env", helped(str, "name of the environment, see safeicrl list"), field(default=name)),
            ("env_args", helped(tuple[str, ...], "its parameters, e.g. size=5 obstacles=6"), field(default=())),
            ("by", by, field(default=who)),
            ("out", helped(Path, "folder of the histories"), field(default=folder)),
            ("minari", helped(str | None, "name of a Minari dataset to write as well"), field(default=None)),
            ("minari_every", helped(int, "the dataset gets one of this many episodes"), field(default=1)),
            # without a prefix: --tasks, --limits; the learner's settings are --learner.learning-rate
            ("what", Annotated[type(default), tyro.conf.arg(name="")], field(default=default)),
        ],
        frozen=True,
    )
    form.__doc__ = collect.__doc__
    asked: Any = parse("collect", form, args)
    env = env_from_plain(asked.env, parse_parameters(asked.env_args, "--env-args"))
    stop = StopRequest()
    histories = run(env, asked.what, out=asked.out, stop=stop)
    if histories is None:
        return stop.exit_status
    Console().print(progress_table(histories))
    if asked.minari is not None:
        dataset = export_minari(histories, asked.minari, every=asked.minari_every)
        print(f"wrote {dataset.spec.dataset_id}, {dataset.total_episodes} episodes, for Minari")
    return 0

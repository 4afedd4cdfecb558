"""The command line: safeicrl train | sweep | collect | evaluate | export | compare | plot | reproduce | demo | ...

A user's mistake gets one line on stderr and exit code 2; a traceback is always a bug. A run that a signal stopped
has saved its work, and ends with exit code 128 + signal: 130 after Ctrl-C.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from safeicrl.config import DROPPED, dropped_option
from safeicrl.errors import Approximation, BeyondTraining, Damaged, Incomplete, UserError, printable, unknown_name
from safeicrl.files import check_output, make_folder
from safeicrl.machine import hosts
from safeicrl.machine.compiled import keep_compiled
from safeicrl.machine.signals import StopRequest
from safeicrl.plugins import import_module, load_entry_points
from safeicrl.version import VERSION

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    return hosts.work(lambda: _main(argv)) if hosts.is_worker() else _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name may have bytes that are no text
            stream.reconfigure(errors="backslashreplace")
    try:
        with _plain_warnings():
            return _run(args) or 0
    except UserError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has stopped reading (safeicrl list | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
            raise
        return _complain("out of memory: fewer --tasks and --rows need less, in training --algo.rows")
    except OSError as error:  # of a file whose name came from the user
        name = "" if error.filename is None else f": {error.filename}"
        return _complain(f"{error.strerror or error}{name}")


def _complain(error: object) -> int:
    """Print one line about a mistake; returns the exit code."""
    print(f"safeicrl: {printable(str(error))}", file=sys.stderr)
    return 2


def _run(args: list[str]) -> int | None:
    if "train" in args and "--distributed" in args and not hosts.is_worker():
        return hosts.supervise(args)
    if "--no-compile-cache" in args:
        args.remove("--no-compile-cache")
    else:
        keep_compiled()  # first: a module of the user's may import JAX
    args = _import_asked(args)
    if not args or args[0] in ("-h", "--help", "help"):
        _usage()
    elif args[0] == "--version":
        print(f"safeicrl {VERSION}")
    elif args[0] not in COMMANDS:
        raise unknown_name("command", args[0], COMMANDS)
    else:
        return COMMANDS[args[0]](args[1:])
    return 0


def _import_asked(args: list[str]) -> list[str]:
    """The arguments without --import MODULE, which any command takes, once the modules are imported."""
    left, words = [], iter(args)
    for word in words:
        if word != "--import" and not word.startswith("--import="):
            left.append(word)
            continue
        name = word.partition("=")[2] or next(words, "")
        if not name:
            raise UserError("--import takes the name of a module, or the path of its file")
        import_module(name)
    return left


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print our own warnings as one line; those of other libraries still say where they come from."""
    with warnings.catch_warnings():
        of_others = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            if issubclass(category, (Approximation, BeyondTraining, Damaged, Incomplete)):
                print(f"safeicrl: {printable(str(message))}", file=sys.stderr)
            else:
                of_others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _usage() -> None:
    """Safe in-context reinforcement learning: agents that learn new tasks under a cost budget."""
    print(f"usage: safeicrl COMMAND [options]\n\n{_usage.__doc__}\n")
    for name, command in COMMANDS.items():
        print(f"  {name:10} {_first_line(command)}")
    print("\nsafeicrl COMMAND --help lists a command's options.")
    print("Every command takes --import MODULE, which registers environments and algorithms of your own,")
    print("and --no-compile-cache, which compiles everything anew.")


def _first_line(thing: Any) -> str:
    """The first line of something's docstring."""
    return (thing.__doc__ or "").partition("\n")[0]


# -- train --------------------------------------------------------------------------------------------------


def train(args: list[str]) -> int:
    """Train a policy: --preset NAME, or --algo NAME --env NAME, or as a stored run: --like RUN; or --resume RUN."""
    from safeicrl.recipes.form import check_resumable
    from safeicrl.recipes.run import run_recipe

    settings, recipe, resume = _asked_recipe(args)
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
        print(f"evaluate it:  safeicrl evaluate {out}")
    else:
        writer = "the first evaluation" if len(recipe.stages) == 1 else "the end of the last stage"
        print(f"no policy yet, {writer} writes one; go on:  safeicrl train --resume {out}")
    if ran.iterations:
        print(f"its curves:   safeicrl plot {out}")
    return stop.exit_status


def _with_settings(command: str, recipe: Any, settings: list[str]) -> tuple[Any, Any]:
    """The recipe with what the command line changes in it, and the form of its first stage: folder, devices."""
    from safeicrl.recipes.form import train_form, with_options

    forms: list[Any] = [
        _parse(command, train_form(recipe, index, train.__doc__ or ""), settings)
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


def _asked_recipe(args: list[str]) -> tuple[list[str], Any, Path | None]:
    """The arguments without --algo NAME and --env NAME, the recipe that is asked for, and the folder to resume."""
    from safeicrl.recipes.presets import PRESETS, experiment, preset
    from safeicrl.recipes.recipe import Recipe, load_recipe

    if args and args[0] in PRESETS:
        raise UserError(f"a preset is named by its option: --preset {args[0]}")
    chosen, line, like, resume, out = (_option(args, f"--{x}") for x in ("preset", "line", "like", "resume", "out"))
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
    algo, env = (_option(args, name) for name in ("--algo", "--env"))
    if algo is None and env is None:
        return args, ()
    left, skip = [], False
    for argument in args:
        if not skip and argument.split("=")[0] not in ("--algo", "--env"):
            left.append(argument)
        skip = not skip and argument in ("--algo", "--env")
    return left, (algo or "scared", env or "safe-dark-room")


# -- sweep --------------------------------------------------------------------------------------------------


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


def sweep(args: list[str]) -> int:
    """Train a grid of runs, side by side with Ray; the same command goes on after an interrupt."""
    asked, settings = _parse_known("sweep", Sweep, args)

    from safeicrl.errors import check_integer
    from safeicrl.recipes.grid import make_plan
    from safeicrl.recipes.sweep import Resources, run_sweep

    if asked.evaluate is not None:
        check_integer("--evaluate", asked.evaluate, 1)
    resources = Resources(
        ray=asked.ray, address=asked.ray_address, cpus=asked.cpus, gpus=asked.gpus, retries=asked.retries
    )

    def resolve(words: list[str]) -> Any:
        rest, recipe, _ = _asked_recipe(words)
        return _with_settings("sweep", recipe, rest)[0]

    plan = make_plan(asked.grid, settings, evaluate=asked.evaluate, resolve=resolve)
    out = asked.out or Path("sweeps") / f"{plan.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if asked.dry_run:
        for run in plan.runs:
            print(f"{run.name}:  {run.command(out)}")
        return 0
    return run_sweep(plan, out=out, resources=resources, command=main)


# -- collect ------------------------------------------------------------------------------------------------


def collect(args: list[str]) -> int:
    """Collect learning histories for Safe AD, or demonstrations; the same command continues after an interrupt."""
    from safeicrl.envs.registry import env_from_plain, make_env, parse_parameters
    from safeicrl.histories.collect import collect as learn
    from safeicrl.histories.collect import default_config, progress_table
    from safeicrl.histories.demonstrations import EpsConfig, collect_demonstrations
    from safeicrl.histories.minari import export_minari

    name, who = _option(args, "--env") or "safe-dark-room", _option(args, "--by") or "ppo-lag"
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
    asked: Any = _parse("collect", form, args)
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


# -- evaluate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a frozen agent on unseen tasks: the paper's protocol."""

    # name or path of a policy, or folder of a run: all its seeds (RUN/best-seed2: that one)
    policy: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[POLICY]")] = None
    agent: Literal["random", "explorer", "planner"] | None = None  # a reference agent instead of a policy
    env: str | None = None  # environment of the reference agent; safe-dark-room by default
    env_args: tuple[str, ...] = ()  # parameters of the environment, e.g. size=5 obstacles=6
    tasks: int = 1000  # number of unseen tasks
    # range; the environment's test range by default. Several costs: once for all, or once for each
    budgets: Annotated[tuple[tuple[float, float], ...], tyro.conf.UseAppendAction] = ()
    budget_count: int = 100  # distinct budgets, uniform in the range
    budgets_per_task: int = 1  # trials of each task, from a small to a large budget; with 9, all bins share tasks
    episodes: int | None = None  # episodes in a trial; the environment's K by default
    temperature: float | None = None  # of sampled actions; what the policy's card says by default
    greedy: bool = False  # take the most probable action instead of a sampled one
    risk: float | None = None  # chance of breaking the budget that the policy's guard tolerates; see its card
    guard: bool = True  # whether the policy's guard is on, if it has one
    wipe: bool = False  # forget at every episode: shows what in-context learning is worth
    fresh_episodes: int | None = None  # for an agent that adapts: played for each update; 0: those that count
    updates: int | None = None  # for an agent that adapts: the most updates in a trial
    # a frozen list of tasks instead of those of --split and --seed; wide: tracks only, limits between training's
    list: Literal["train", "validation", "test", "wide"] | None = None
    split: Literal["test", "train"] = "test"  # which distribution the tasks are drawn from
    seed: int = 0  # of tasks and actions; agents evaluated with the same seed meet the same tasks
    rows: int | None = None  # trials at a time; 256 by default, 32 on a CPU
    devices: int | None = None  # that share them; all local ones by default
    label: str | None = None  # name in tables and figures; results with the same label are seeds of one agent
    out: Path | None = None  # file to write: OUT.npz and OUT.json; for several seeds OUT-seed0.npz, ...


def evaluate(args: list[str]) -> None:
    """Evaluate a frozen agent on unseen tasks: the paper's protocol."""
    from safeicrl.evaluation.archive import save_results
    from safeicrl.evaluation.tables import limits_table, seeds_table, summary_table

    asked = _parse("evaluate", Evaluate, args)
    contenders, results = _contenders(asked), {}
    outs = _outputs(asked.out, list(contenders))
    unsaved: UserError | None = None
    budgets: Any = asked.budgets[0] if len(asked.budgets) == 1 else asked.budgets or None
    for name, who in contenders.items():
        result = who.adapting(fresh_episodes=asked.fresh_episodes, updates=asked.updates).evaluate(
            split=asked.split, task_list=asked.list, tasks=asked.tasks, budgets=budgets,
            budget_count=asked.budget_count, budgets_per_task=asked.budgets_per_task,
            episodes=asked.episodes, seed=asked.seed, rows=asked.rows, devices=asked.devices,
            label=asked.label or who.label,
        )  # fmt: skip
        results[name], meta = result, result.meta
        print(f"{name}: actions {meta['actions']}, context {meta['context']}, {meta['seconds']:.1f} s")
        if "adaptation" in meta:
            print(_spending(meta["adaptation"]))
        if name in outs:  # after each seed, so that an interrupt costs one seed only
            try:
                print("wrote " + " and ".join(str(path) for path in save_results(result, outs[name])))
            except UserError as error:  # the table below is then all that is left of the work
                unsaved = error
    Console().print(summary_table([result]) if len(contenders) == 1 else seeds_table(results))
    if "limits" in result.meta and len(contenders) == 1:
        Console().print(limits_table(result))
    if unsaved is not None:
        raise unsaved


def _spending(took: dict[str, Any]) -> str:
    """What the updates of a trial took, in words."""
    text = f"  {took['updates']:g} updates per trial"
    if not took["fresh_episodes"]:
        return f"{text}, from the episodes that count"
    return (
        f"{text}, {took['fresh_episodes_per_update']} fresh episodes for each: {took['fresh_episodes']:,.0f} "
        f"episodes, {took['fresh_steps']:,.0f} steps, {took['fresh_episodes_over_budget']:.1%} of these over budget"
    )


def _outputs(out: Path | None, names: list[str]) -> dict[str, Path]:
    """The file of each agent's results, without extension: results/mine; for several seeds results/mine-seed0, ...

    What cannot be written is refused.
    """
    if out is None:
        return {}
    if out.name in ("", ".."):
        raise UserError(f"--out must name the file to write, without extension, got {str(out)!r}")
    stem = out.with_suffix("") if out.suffix in (".npz", ".json") else out
    found = {names[0]: stem}
    if len(names) > 1:
        found = {name: stem.with_name(f"{stem.name}-{name.replace(' ', '')}") for name in names}
    for path in found.values():
        check_output(path.with_name(f"{path.name}.json"))
    return found


def _contenders(asked: Evaluate) -> dict[str, Any]:
    """The agents that were asked for, by name: one agent, or the seeds of a run."""
    from safeicrl.envs.registry import env_from_plain, parse_parameters
    from safeicrl.policies.contenders import reference, released_seeds

    if (asked.policy is None) == (asked.agent is None):
        raise UserError("evaluate needs either a policy (name, path or run folder) or --agent, not both")
    parameters = parse_parameters(asked.env_args, "--env-args")
    if asked.policy is not None:
        if asked.env is not None:
            raise UserError("a policy brings its own environment: leave out --env (--env-args may change it)")
        return released_seeds(
            asked.policy, env_args=parameters,
            temperature=asked.temperature, greedy=asked.greedy, wipe=asked.wipe, risk=asked.risk, guard=asked.guard,
        )  # fmt: skip
    if asked.risk is not None or not asked.guard:
        raise UserError(f"the {asked.agent} agent has no guard: leave out --risk and --no-guard")
    if asked.greedy or asked.temperature is not None:
        raise UserError(f"the {asked.agent} agent has no temperature: leave out --greedy and --temperature")
    name, env = str(asked.agent), env_from_plain(asked.env or "safe-dark-room", parameters)
    return {name: reference(name, env, wipe=asked.wipe)}


# -- export -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write one policy and its card, to take elsewhere or to ship."""

    # name or path of a policy, or folder of a run
    policy: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="POLICY")] = None
    out: Path | None = None  # file to write: OUT.safetensors, and its card OUT.json
    # folder to write instead, as model hubs lay it out: weights, model card, configuration, evaluation, film
    hub: Path | None = None
    onnx: Path | None = None  # file to write instead: one step of the policy as an ONNX graph, to act without JAX
    film: bool = True  # whether --hub films one unseen task
    seed: int | None = None  # seed of the run; by default the one with the best evaluation
    # a related policy or run, one trained further from the other: exports their mean weights; may be repeated
    average: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    name: str | None = None  # the policy's name in tables and figures
    description: str | None = None  # a sentence about the policy, for the card
    temperature: float | None = None  # of its actions; what its card says by default
    env_args: tuple[str, ...] = ()  # parameters of its environment to change, e.g. engine=auto
    # a limit of the policy, to add to those on its card; may be repeated
    limit: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    evaluation: Path | None = None  # results of safeicrl evaluate for the card, instead of those of training
    overwrite: bool = False  # replace an existing file


def export(args: list[str]) -> None:
    """Write one policy and its card, to take elsewhere or to ship."""
    from safeicrl.envs.registry import parse_parameters
    from safeicrl.policies.export import export_policy
    from safeicrl.policies.policy import load_policy

    asked = _parse("export", Export, args)
    targets = [target for target in (asked.out, asked.hub, asked.onnx) if target is not None]
    if asked.policy is None or len(targets) != 1:
        raise UserError(
            "export needs a policy (name, path or run folder) and a file, as in export RUN --out FILE; "
            "or, in place of --out, --hub FOLDER or --onnx FILE"
        )
    options: dict[str, Any] = {
        "seed": asked.seed, "average": asked.average, "name": asked.name, "description": asked.description,
        "temperature": asked.temperature, "env_args": parse_parameters(asked.env_args, "--env-args"),
        "limits": asked.limit, "evaluation": asked.evaluation, "overwrite": asked.overwrite,
    }  # fmt: skip
    if asked.hub is not None:
        return _export_hub(asked.policy, asked.hub, options, film=asked.film)
    if asked.onnx is not None:
        return _export_onnx(asked.policy, asked.onnx, options)
    path = export_policy(asked.policy, targets[0], **options)
    card = load_policy(path).card
    origin = card["exported"]["from"]
    if asked.average:
        origin = f"the mean of {', '.join([origin, *(part['from'] for part in card['averaged_with'])])}"
    print(f"wrote {path} and {path.with_suffix('.json')}: {origin}, actions {card['actions']}")
    evaluated = card.get("evaluation", {}).get("actions", card["actions"])
    if evaluated != card["actions"]:
        print(f"but its card's evaluation is of actions {evaluated}: --temperature or --evaluation make them agree")
    print(f"load it:  policy = safeicrl.load_policy({str(path)!r})")


def _export_hub(policy: str, folder: Path, options: dict[str, Any], *, film: bool) -> None:
    from safeicrl.policies.contenders import released
    from safeicrl.policies.hub import FILM, export_hub, write_card
    from safeicrl.show.demo import film as shoot

    export_hub(policy, folder, **options)
    star = released(str(folder))
    if film and shoot(star, folder / FILM):
        write_card(folder, star.meta["card"])
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"load it:  policy = safeicrl.load_policy({str(folder)!r})")


def _export_onnx(policy: str, out: Path, options: dict[str, Any]) -> None:
    """By way of an ordinary export in a temporary folder, so that all its options hold here too."""
    from safeicrl.policies.export import export_policy
    from safeicrl.policies.onnx import export_onnx
    from safeicrl.policies.policy import load_policy

    target = out.with_suffix(".onnx")
    if target.exists() and not options["overwrite"]:
        raise UserError(f"{target} exists: choose another --onnx, or --overwrite")
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(load_policy(export_policy(policy, Path(folder) / "policy", **options)), out)
    print(f"wrote {path}; examples/onnx_runner.py acts with it, without JAX")


# -- fit-guard ----------------------------------------------------------------------------------------------


def fit_guard(args: list[str]) -> None:
    """Fit a guard to a frozen policy that has none, from what it plays: fit-guard POLICY --out FILE."""
    from safeicrl.optimisers.guard_fit import GuardFitConfig, GuardRound
    from safeicrl.policies.add_guard import add_guard

    helped = lambda kind, text: Annotated[kind, tyro.conf.arg(help=text)]  # noqa: E731
    form = dataclasses.make_dataclass(
        "FitGuard",
        [
            ("policy", Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="name or path of the policy")]),
            ("out", helped(Path, "file to write: OUT.safetensors, and its card OUT.json")),
            ("overwrite", helped(bool, "replace an existing file"), field(default=False)),
            ("what", Annotated[GuardFitConfig, tyro.conf.arg(name="")], field(default=GuardFitConfig())),
        ],
        frozen=True,
    )
    form.__doc__ = fit_guard.__doc__
    asked: Any = _parse("fit-guard", form, args)

    def say(now: GuardRound) -> None:
        if now.round == 1 or now.round % 5 == 0:
            print(
                f"round {now.round} of {asked.what.rounds}: a step costs with a chance of {now.predicted:.3f} "
                f"(observed {now.observed:.3f}), cross-entropy {now.loss:.4f}, {now.steps:,} steps"
            )

    path = add_guard(asked.policy, asked.out, asked.what, overwrite=asked.overwrite, report=say)
    print(f"wrote {path} and {path.with_suffix('.json')}, risk {asked.what.risk:g}")
    print(f"evaluate it:  safeicrl evaluate {path}")


# -- compare, plot, reproduce, demo, play, list -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare runs with intervals; or score agents between two reference agents that met the same tasks."""

    # results, or folders of runs: then the evaluations that chose their best policies
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")]
    upper: Path | None = None  # results of the reference agent that counts as 1, e.g. one that is told the task
    lower: Path | None = None  # results of the reference agent that counts as 0, e.g. one that forgets everything
    last: int = 5  # with --upper and --lower: the return of this many last episodes is compared
    safety: bool = False  # print how often, when and by how much budgets are broken, instead of the returns
    out: Path | None = None  # figure to write, e.g. sweep.png; without --upper and --lower


def compare(args: list[str]) -> None:
    """Compare runs with intervals; or score agents between two reference agents that met the same tasks."""
    from safeicrl.evaluation.archive import load_results
    from safeicrl.evaluation.tables import group, relative_table, run_results, safety_table, sweep_table

    asked = _parse("compare", Compare, args)
    if not asked.files:
        raise UserError("compare needs results files or run folders, as in compare runs/one runs/two")
    if (asked.upper is None) != (asked.lower is None):
        raise UserError("compare needs both --upper and --lower, or neither")
    if asked.upper is not None and asked.lower is not None:
        if asked.out is not None:
            raise UserError("--out draws runs with intervals: leave out --upper and --lower")
        if asked.safety:
            raise UserError("--safety compares agents with each other: leave out --upper and --lower")
        upper, lower = (load_results(path) for path in (asked.upper, asked.lower))
        results = [result for path in asked.files for result in run_results(path)]
        Console().print(relative_table(results, upper=upper, lower=lower, last=asked.last))
        return
    groups = group([result for path in asked.files for result in run_results(path)])
    Console().print(safety_table(groups) if asked.safety else sweep_table(groups))
    if asked.out is not None:
        from safeicrl.evaluation import plots

        make_folder(asked.out.parent)
        print(plots.save(plots.sweep(groups), asked.out if asked.out.suffix else asked.out.with_suffix(".png")))


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw the paper's figures from results files, and training curves from run folders."""

    # results (.npz or .json), run folders, metrics.jsonl
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")]
    out: Path = Path("figures")  # folder for the figures
    format: Literal["png", "pdf", "svg"] = "png"  # of the figures


def plot(args: list[str]) -> None:
    """Draw the paper's figures from results files, and training curves from run folders."""
    from safeicrl.evaluation.tables import draw_all

    asked = _parse("plot", Plot, args)
    if not asked.files:
        raise UserError("plot needs results files or run folders, e.g. safeicrl plot results.npz runs/my-run")
    make_folder(asked.out)
    for path in draw_all(asked.files, asked.out, asked.format):
        print(path)


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """The paper's figures and tables as one page: report/index.html."""

    # episodes, budgets, proposition, safe-ad-eps, scared-ablations, safe-ad-ablations, hyperparameters, training,
    # guard or beyond; all of them by default
    figure: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FIGURE]")] = None
    # paper draws the stored results; smoke and laptop train and evaluate everything anew, at a small size
    scale: Literal["smoke", "laptop", "paper"] = "paper"
    out: Path = Path("report")  # folder of the page, its figures and, at the small scales, its runs
    results: Path = Path("results")  # folder of the stored results, or of a sweep: then its runs are drawn


def reproduce(args: list[str]) -> None:
    """The paper's figures and tables as one page: report/index.html."""
    from safeicrl.show.report.reproduce import reproduce as report

    asked = _parse("reproduce", Reproduce, args)
    page, missing = report(asked.figure, scale=asked.scale, out=asked.out, results=asked.results)
    print(f"wrote {page}")
    if missing:
        print(f"missing, with the commands on the page: {', '.join(missing)}")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Agents on unseen tasks: a table, the figures, an animation of one task being learned."""

    # room (the default), point, car, half-cheetah or ant; or the environment's name
    world: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[WORLD]")] = "room"
    policy: str | None = None  # name or path of a policy to show instead of the one that ships for the world
    out: Path = Path("demo-output")  # folder for figures, results and the animation
    tasks: int = 50  # number of unseen tasks
    seed: int = 0  # of the tasks and the actions


def demo(args: list[str]) -> None:
    """Agents on unseen tasks: a table, the figures, an animation of one task being learned."""
    from safeicrl.show.demo import run, world_name

    asked = _parse("demo", Demo, args)
    world_name(asked.world)  # refuses an unknown name before anything is written
    make_folder(asked.out)
    run(asked.out, world=asked.world, policy=asked.policy, tasks=asked.tasks, seed=asked.seed)


@dataclass(frozen=True, kw_only=True)
class Play:
    """A local web page: draw a room, set a budget, watch a frozen agent learn it."""

    # a policy of your own (name, path or run folder), besides those that ship; may be repeated
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 lets other machines in, without a password
    port: int = 8642  # 0 takes any free one
    # a host name under which the page may be asked for, besides localhost and numeric addresses; may be repeated
    name: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    visitors: int = 64  # at a time
    open: bool = False  # open the page in a browser


def play(args: list[str]) -> None:
    """A local web page: draw a room, set a budget, watch a frozen agent learn it."""
    asked = _parse("play", Play, args)

    from safeicrl.show.play import server
    from safeicrl.show.play.worlds import worlds

    settings = server.Settings(host=asked.host, port=asked.port, names=asked.name, visitors=asked.visitors)
    found, missing = worlds(asked.policy)
    for why in missing:
        print(f"not on the page: {why}")
    server.run(found, settings, open_page=asked.open)


@dataclass(frozen=True, kw_only=True)
class List:
    """Environments, policies, agents, algorithms and presets by name."""


def list_names(args: list[str]) -> None:
    """Environments, policies, agents, algorithms and presets by name."""
    from safeicrl.algos.registry import ALGOS
    from safeicrl.envs.registry import WORLDS
    from safeicrl.policies.catalogue import policy_names
    from safeicrl.policies.contenders import DESCRIPTIONS
    from safeicrl.recipes.presets import PRESETS

    _parse("list", List, args)
    load_entry_points()
    for kind, named in {
        "environments": {name: world.summary or _first_line(world.load()) for name, world in WORLDS.items()},
        "policies": {name: "pretrained, ships with the library" for name in policy_names()},
        "agents": DESCRIPTIONS,
        "algorithms": {name: entry.summary for name, entry in ALGOS.items()},
        "presets (safeicrl train --preset NAME)": {name: found.summary for name, found in PRESETS.items()},
    }.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None)
        for name, text in named.items():
            table.add_row(name, text)
        Console().print(table)


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train,
    "sweep": sweep,
    "collect": collect,
    "evaluate": evaluate,
    "export": export,
    "fit-guard": fit_guard,
    "compare": compare,
    "plot": plot,
    "reproduce": reproduce,
    "demo": demo,
    "play": play,
    "list": list_names,
}


# -- parsing ------------------------------------------------------------------------------------------------


def _parse(command: str, form: type[T], args: list[str]) -> T:
    """The command's options as a dataclass; any others are refused."""
    asked, unknown = _parse_known(command, form, args)
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("-"):
            raise UserError(f"unexpected argument {name!r}; see safeicrl {command} --help")
        _refuse_dropped(unknown)
        options = [f"--{flag}" for flag in _flags(form)]
        if name in options:  # a positional argument
            raise UserError(f"leave out {name}, its value alone will do; see safeicrl {command} --help")
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else f"see safeicrl {command} --help"
        raise UserError(f"unknown option {name}; {hint}")
    return asked


def _parse_known(command: str, form: type[T], args: list[str]) -> tuple[T, list[str]]:
    """The command's options, and the words it does not know; tyro's errors, boxes of text, become one line."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(form, prog=f"safeicrl {command}", args=args, return_unknown_args=True)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(_one_line(messages.getvalue())) from None


def _refuse_dropped(unknown: list[str]) -> None:
    """Say so when the first of the unknown arguments is an option of an older version."""
    flag, _, value = unknown[0].partition("=")
    option = flag.removeprefix("--").replace("-", "_")
    if (positive := option.replace(".no_", ".")) in DROPPED:
        following = next((word for word in unknown[1:] if not word.startswith("--")), "True")
        raise dropped_option(positive, "False" if positive != option else value or following)


# How tyro says that a value does not fit an option.
MISFITS = (
    r"Error parsing (?P<name>\S+): no type matching (\{None\}\|)?\{?(?P<type>[A-Z ]+)\}? .*?\[(?P<got>.*?)\].*",
    r"Error parsing (?P<name>\S+): invalid literal for (?P<type>int)\(\) with base 10: (?P<got>.*)",
    r"Error parsing (?P<name>\S+): could not convert string to (?P<type>float): (?P<got>.*)",
    r"Error parsing (?P<name>\S+): Could not parse arguments \[(?P<got>.*?)\] into tuple type .*\[(?P<type>.*)\]",
)
NUMBERS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}


def _one_line(text: str) -> str:
    """The text of a boxed message: between its first two rules, below the title and above the advice."""
    lines = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if re.match(r"╭|╰|─{3}|-{3}", line)]  # without UTF-8: no box, dashes
    first, last = [*rules, len(lines)][:2] if rules else (-1, len(lines))
    line = " ".join(line for line in lines[first + 1 : last] if line)
    if found := re.fullmatch(r"Missing value for argument '(\S+)'\. Expected 2 values\.", line):
        return f"{found[1]} takes two numbers, got fewer"
    for pattern in MISFITS:
        if found := re.fullmatch(pattern, line):
            kind = found["type"].upper().replace(",", "")
            return f"{found['name']} takes {NUMBERS.get(kind, kind)}, got {found['got']}"
    return line.removeprefix("Error parsing ") or "these options cannot be understood"


def _flags(form: Any, prefix: str = "") -> list[str]:
    """Every option of a form by its name on the command line."""
    names = []
    for entry in dataclasses.fields(form):
        value = entry.default if entry.default is not dataclasses.MISSING else None
        if entry.default_factory is not dataclasses.MISSING:
            value = entry.default_factory()
        if dataclasses.is_dataclass(value):
            bare = prefix == "" and entry.name in ("train", "what")
            names += _flags(value, prefix if bare else f"{prefix}{entry.name}.")
        else:
            names.append(f"{prefix}{entry.name}".replace("_", "-"))
    return names


def _option(args: list[str], name: str) -> str | None:
    """The value of one option, looked up before the other options are parsed, because it decides what they are."""
    for index, argument in enumerate(args):
        if argument == name and index + 1 < len(args):
            return args[index + 1]
        if argument.startswith(f"{name}="):
            return argument.split("=", 1)[1]
    return None

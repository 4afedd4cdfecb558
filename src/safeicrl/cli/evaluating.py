"""The commands about results: evaluate, compare, plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from safeicrl.cli.options import parse
from safeicrl.errors import UserError
from safeicrl.files import check_output, make_folder

# -- evaluate ---------------------------------------------------------------------------------------------


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
    # how much less than is left of its budget the policy is told of, once an episode has cost something; with BELOW
    # from the first step on, in episodes whose budget is below that, and in others OTHERS once they have cost
    # something; what its card says by default
    reserve: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="AMOUNT [BELOW [OTHERS]]")] = None
    # how many times as hard it acts right after a costly step that leaves nothing; what its card says by default
    brake: float | None = None
    # episodes after which its memory settles; those of training, or what its card says by default
    settle_after: int | None = None
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
    from safeicrl.evaluation.results import in_words
    from safeicrl.evaluation.tables import limits_table, seeds_table, summary_table

    asked = parse("evaluate", Evaluate, args)
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
        how = ", ".join([*in_words(meta), f"context {meta['context']}"])
        print(f"{name}: {how}, {meta['seconds']:.1f} s")
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

    if asked.policy is None and asked.agent is None:
        raise UserError("evaluate needs a policy (name, path or run folder), or a reference agent: --agent NAME")
    if asked.policy is not None and asked.agent is not None:
        raise UserError(f"evaluate takes one agent: leave out {asked.policy!r} or --agent {asked.agent}")
    parameters = parse_parameters(asked.env_args, "--env-args")
    if asked.policy is not None:
        if asked.env is not None:
            raise UserError("a policy brings its own environment: leave out --env (--env-args may change it)")
        return released_seeds(
            asked.policy, env_args=parameters,
            temperature=asked.temperature, greedy=asked.greedy, wipe=asked.wipe, risk=asked.risk, guard=asked.guard,
            reserve=asked.reserve, brake=asked.brake, settle_after=asked.settle_after,
        )  # fmt: skip
    if asked.risk is not None or not asked.guard:
        raise UserError(f"the {asked.agent} agent has no guard: leave out --risk and --no-guard")
    if asked.reserve is not None:
        raise UserError(f"the {asked.agent} agent keeps no reserve: leave out --reserve")
    if asked.brake is not None:
        raise UserError(f"the {asked.agent} agent has no brake: leave out --brake")
    if asked.settle_after is not None:
        raise UserError(f"the memory of the {asked.agent} agent never settles: leave out --settle-after")
    if asked.greedy or asked.temperature is not None:
        raise UserError(f"the {asked.agent} agent has no temperature: leave out --greedy and --temperature")
    name, env = str(asked.agent), env_from_plain(asked.env or "safe-dark-room", parameters)
    return {name: reference(name, env, wipe=asked.wipe)}


# -- compare ----------------------------------------------------------------------------------------------


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
    from safeicrl.evaluation.statistics import check_one_world
    from safeicrl.evaluation.tables import group, relative_table, run_results, safety_table, sweep_table

    asked = parse("compare", Compare, args)
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
    results = [result for path in asked.files for result in run_results(path)]
    check_one_world(results)
    groups = group(results)
    Console().print(safety_table(groups) if asked.safety else sweep_table(groups))
    if asked.out is not None:
        from safeicrl.evaluation import plots

        make_folder(asked.out.parent)
        print(plots.save(plots.sweep(groups), asked.out if asked.out.suffix else asked.out.with_suffix(".png")))


# -- plot -------------------------------------------------------------------------------------------------


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

    asked = parse("plot", Plot, args)
    if not asked.files:
        raise UserError("plot needs results files or run folders, e.g. safeicrl plot results.npz runs/my-run")
    for path in draw_all(asked.files, asked.out, asked.format):
        print(path)

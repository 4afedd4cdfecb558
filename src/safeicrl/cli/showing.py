"""The commands that show something: reproduce, demo, play, list."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from safeicrl.cli.options import first_line, parse
from safeicrl.plugins import load_entry_points


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

    asked = parse("reproduce", Reproduce, args)
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
    tasks: int = 16  # number of unseen tasks
    seed: int = 0  # of the tasks and the actions


def demo(args: list[str]) -> None:
    """Agents on unseen tasks: a table, the figures, an animation of one task being learned."""
    asked = parse("demo", Demo, args)
    with _rare_collections():
        from safeicrl.show.demo import run

        run(asked.out, world=asked.world, policy=asked.policy, tasks=asked.tasks, seed=asked.seed)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage rarely: imports and traced programs leave hardly any, and make each search long."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
    asked = parse("play", Play, args)

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
    from safeicrl.policies.catalogue import penalty_names, policy_names, shipped_card
    from safeicrl.policies.contenders import DESCRIPTIONS
    from safeicrl.recipes.presets import PRESETS

    parse("list", List, args)
    load_entry_points()
    policies = dict.fromkeys(policy_names(), "trained with a guard")
    policies |= {
        name: f"by the penalty alone, as in the paper; also {alias}" for alias, name in penalty_names().items()
    }
    bases = {name: base for name in policies if (base := shipped_card(name).get("arrays"))}
    policies |= {name: f"acts with more care than {base}" for name, base in bases.items()}
    for kind, named in {
        "environments": {name: world.summary or first_line(world.load()) for name, world in WORLDS.items()},
        "pretrained policies": policies,
        "agents": DESCRIPTIONS,
        "algorithms": {name: entry.summary for name, entry in ALGOS.items()},
        "presets (safeicrl train --preset NAME)": {name: found.summary for name, found in PRESETS.items()},
    }.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None)
        for name, text in named.items():
            table.add_row(name, text)
        Console().print(table)

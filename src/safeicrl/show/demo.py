"""The demo: the pretrained agent, if there is one, beside the reference agents, on tasks nobody has seen."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from safeicrl.envs.api import Env
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import WORLDS, make_env, nicks
from safeicrl.errors import UserError, check_integer, check_seed, unknown_name
from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.tables import figure_groups, group, summary_table
from safeicrl.files import make_folder
from safeicrl.plugins import HINT, load_entry_points
from safeicrl.policies.contenders import Contender, reference, released
from safeicrl.show.films import save_film
from safeicrl.show.shoot import shoot_robot, shoot_room, unwrapped

SEGMENTS = 5  # of a trial: each takes longer to load than it saves if there are more
ROOM_BUDGET = 3.0  # in a room's film; a robot's film has the middle of its test range


def run(
    out: Path,
    *,
    world: str = "room",
    policy: str | None = None,
    tasks: int = 16,
    seed: int = 0,
    env: Env | None = None,
) -> list[Path]:
    """Evaluate, print the table, leave figures, results and a film in `out`; returns the files.

    The star is `policy` (a path or a name), or what ships for the world. `env` is the world with other parameters.
    """
    check_integer("tasks", tasks, 1)
    check_seed(seed)
    console = Console()
    field = contenders(env, world=world, policy=policy)
    make_folder(out)
    results: list[Results] = []
    name = "one-room.gif" if isinstance(unwrapped(field[0].env), SafeDarkRoom) else "one-task.gif"
    # Two at a time: on few tasks one agent does not fill the cores, and more of them would only wait for Python.
    with ThreadPoolExecutor(max_workers=2) as pool:
        start = lambda who: pool.submit(who.evaluate, tasks=tasks, seed=seed, segments=SEGMENTS)  # noqa: E731
        playing = [start(contender) for contender in field]  # the star takes longest: the others play beside it ...
        filming = pool.submit(film, field[0], out / name, seed=seed, console=console)  # ... then the film is made
        for contender, job in zip(field, playing, strict=True):
            results.append(found := job.result())
            steps = int(found.lengths.sum())
            words = f"{contender.label}: {steps:,} steps, done after {found.meta['seconds']:.1f} s"
            console.print(words, style="dim", highlight=False)
        spans = [f"{low:g}–{high:g}" for low, high in (own.budget_range for own in results[0].by_cost().values())]
        title = f"{tasks} tasks nobody has seen, budgets {', '.join(spans)}, parameters frozen"
        console.print(summary_table(results, title))

        files = [path for result in results for path in save_results(result, out / _slug(result.label))]
        for suffix, groups in figure_groups(group(results)).items():
            files += [
                plots.save(plots.by_episode(groups), out / f"episodes{suffix}.png"),
                plots.save(plots.by_budget(groups), out / f"budgets{suffix}.png"),
                plots.save(plots.over_budget(groups), out / f"over-budget{suffix}.png"),
            ]
    files += filming.result()
    _say_where(console, out, files)
    return files


def film(star: Contender, path: Path, *, seed: int = 0, console: Console | None = None) -> list[Path]:
    """Film one unseen task being learned; nothing for an environment of the user's own, which has no pictures."""
    world = unwrapped(star.env)
    if isinstance(world, SafeDarkRoom):
        return [save_film(shoot_room(star, ROOM_BUDGET, seed=seed), path)]
    if hasattr(world, "robot"):
        budget = float(np.mean(star.env.spec.test_budget))
        return [save_film(shoot_robot(star, budget, seed=seed, console=console), path)]
    return []


def world_name(world: str) -> str:
    """The name of an environment that is given by its short name (`point`) or its own."""
    known = nicks()
    load_entry_points()
    if world in WORLDS:
        return world
    if world not in known:
        raise UserError(f"{unknown_name('world', world, known)} {HINT}")
    return known[world]


def contenders(env: Env | None = None, *, world: str = "room", policy: str | None = None) -> list[Contender]:
    """Who plays. The star is first: the given policy, else the one that ships, else a reference agent."""
    name = world_name(world)
    own = env or make_env(name)
    names = ("explorer", "planner", "random") if isinstance(own, SafeDarkRoom) else ("random",)
    lines = [reference(line, own) for line in names]
    if policy is None and env is not None:
        return lines
    star = released(policy or name)
    assert star.policy is not None
    if star.policy.episodes == 1:  # it was trained on single episodes
        star = released(policy or name, wipe=True)
    described = star.meta["card"]["env"]
    if name not in (described["name"], described["parameters"].get("name")):
        raise UserError(f"the policy {policy} is for {described['name']}, not for {name}: safeicrl demo WORLD")
    if policy is not None:  # the reference agents play in the policy's own environment, on the same tasks
        lines = [reference(line, unwrapped(star.env)) for line in names]
    return [star, *lines]


def _slug(label: str) -> str:
    """A file's name for a label, which may come from a stranger's card."""
    return re.sub(r"[^\w.-]+", "-", label.replace(",", "")).lstrip(".")[:80] or "agent"


def _say_where(console: Console, out: Path, files: list[Path]) -> None:
    console.print(f"\nIn {out}:")
    for path in files:
        if path.suffix in (".png", ".gif"):
            console.print(f"  {path.name}", highlight=False)
    console.print(f"and the results (npz + JSON): safeicrl plot {out}/*.npz draws them again", soft_wrap=True)

"""The demo: the pretrained agent, where there is one, beside the reference lines, on tasks nobody has seen."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from safeicrl.envs.api import Env
from safeicrl.envs.dark_room import Room, SafeDarkRoom
from safeicrl.envs.registry import make_env, nicks
from safeicrl.envs.wrappers import Wrapped
from safeicrl.errors import UserError, check_integer, unknown_name
from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.tables import group, summary_table
from safeicrl.policies.contenders import Contender, reference, released
from safeicrl.show import robot_film as film
from safeicrl.show.room_film import Replay, animate
from safeicrl.show.shoot import shoot
from safeicrl.trial import run_trials

REPLAY_BUDGET = 3.0  # in the room; elsewhere the middle of the test range


def run(
    out: Path,
    *,
    world: str = "room",
    policy: str | None = None,
    tasks: int = 50,
    seed: int = 0,
    env: Env | None = None,
) -> list[Path]:
    """Evaluate, print the table, leave figures, results and an animation in `out`; returns the files.

    The star is `policy` (a path or a name), or what ships for the world. `env` is the world with other parameters.
    """
    check_integer("tasks", tasks, 1)
    console = Console()
    field = contenders(env, world=world, policy=policy)
    results: list[Results] = []
    for contender in field:
        found = contender.evaluate(tasks=tasks, seed=seed)
        results.append(found)
        steps = int(found.lengths.sum())
        seconds = found.meta["seconds"]
        console.print(f"{contender.label}: {steps:,} steps in {seconds:.1f} s", style="dim", highlight=False)
    low, high = results[0].budget_range
    title = f"{tasks} tasks nobody has seen, budgets {low:g}–{high:g}, parameters frozen"
    console.print(summary_table(results, title))

    files = [path for result in results for path in save_results(result, out / _slug(result.label))]
    groups = group(results)
    files += [
        plots.save(plots.by_episode(groups), out / "episodes.png"),
        plots.save(plots.by_budget(groups), out / "budgets.png"),
        plots.save(plots.over_budget(groups), out / "over-budget.png"),
    ]
    star = field[0]
    if isinstance(star.env, SafeDarkRoom):
        files.append(animate(replay(star, REPLAY_BUDGET, seed=seed), out / "one-room.gif"))
    else:
        shot = shoot(star, float(np.mean(star.env.spec.test_budget)), seed=seed, console=console)
        files.append(film.play(shot, out / "one-task.gif"))
    _say_where(console, out, files)
    return files


def world_name(world: str) -> str:
    """The environment meant by `point` or by its own name."""
    known = nicks()
    if world in known.values():
        return world
    if world not in known:
        raise unknown_name("world", world, known)
    return known[world]


def contenders(env: Env | None = None, *, world: str = "room", policy: str | None = None) -> list[Contender]:
    """The star first: the asked-for policy, or the one that ships where the world is its own, else a reference."""
    name = world_name(world)
    own = env or make_env(name)
    names = ("explorer", "planner", "random") if isinstance(own, SafeDarkRoom) else ("random",)
    lines = [reference(line, own) for line in names]
    if policy is None and env is not None:
        return lines
    star = released(policy or name)
    assert star.policy is not None
    if star.policy.episodes == 1:  # it knows no second episode
        star = released(policy or name, wipe=True)
    described = star.meta["card"]["env"]
    if name not in (described["name"], described["parameters"].get("name")):
        raise UserError(f"the policy {policy} is for {described['name']}, not for {name}: safeicrl demo WORLD")
    if policy is not None:  # the lines on the same tasks, those of the policy's own environment
        inner = star.env.inner if isinstance(star.env, Wrapped) else star.env
        lines = [reference(line, inner) for line in names]
    return [star, *lines]


def replay(contender: Contender, budget: float, *, seed: int = 0) -> Replay:
    """One trial in one unseen room, step by step."""
    env = contender.env
    if not isinstance(env, SafeDarkRoom):
        raise TypeError(f"a replay is drawn in SafeDarkRoom, not in {type(env).__name__}")
    task_key, key = jax.random.split(jax.random.key(seed))
    task: Room = env.sample_task(task_key, "test")
    trials = run_trials(
        env, contender.agent, jax.tree.map(lambda x: x[None, None], task), jnp.full((1, 1), budget), key,
        episodes=env.episodes, steps=env.spec.trial_steps,
    )  # fmt: skip
    trials = jax.tree.map(lambda x: np.asarray(x[0]), trials)  # [time, ...]
    paths, costs, reached = [], [], []
    for episode in range(env.episodes):
        here = trials.valid & (trials.token.episode == episode)
        cells = np.concatenate([trials.token.observation[here][:1], trials.final_observation[here]])
        paths.append([(int(row), int(column)) for row, column in cells])
        costs.append(trials.cost[here].tolist())
        reached.append(bool(trials.terminated[here].any()))
    cells = np.argwhere(np.asarray(task.obstacles).reshape(env.size, env.size))
    return Replay(
        label=contender.label,
        size=env.size,
        goal=divmod(int(task.goal), env.size),
        obstacles=[(int(row), int(column)) for row, column in cells],
        budget=budget,
        paths=paths,
        step_costs=costs,
        reached=reached,
    )


def _slug(label: str) -> str:
    return label.replace(",", "").replace(" ", "-")


def _say_where(console: Console, out: Path, files: list[Path]) -> None:
    console.print(f"\nIn {out}:")
    for path in files:
        if path.suffix in (".png", ".gif"):
            console.print(f"  {path.name}", highlight=False)
    console.print(f"and the results (npz + JSON): safeicrl plot {out}/*.npz draws them again", soft_wrap=True)

"""The demo: the pretrained agent, where there is one, beside the reference lines, in rooms nobody has seen."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from safeicrl import plots
from safeicrl.animation import Replay, animate
from safeicrl.contenders import Contender, reference, released
from safeicrl.envs.dark_room import Room, SafeDarkRoom
from safeicrl.errors import check_integer
from safeicrl.policy import policy_names
from safeicrl.report import group, summary_table
from safeicrl.results import Results, save_results
from safeicrl.trial import run_trials

STAR = "safe-dark-room"
REPLAY_BUDGET = 3.0


def run(out: Path, *, tasks: int = 50, seed: int = 0, env: SafeDarkRoom | None = None) -> list[Path]:
    """Evaluate, print the table, leave figures, results and an animation in `out`; returns the files."""
    check_integer("tasks", tasks, 1)
    console = Console()
    field = contenders(env)
    results: list[Results] = []
    for contender in field:
        found = contender.evaluate(tasks=tasks, seed=seed)
        results.append(found)
        steps = int(found.lengths.sum())
        seconds = found.meta["seconds"]
        console.print(f"{contender.label}: {steps:,} steps in {seconds:.1f} s", style="dim", highlight=False)
    low, high = results[0].budget_range
    title = f"{tasks} rooms nobody has seen, budgets {low:g}–{high:g}, parameters frozen"
    console.print(summary_table(results, title))

    files = [path for result in results for path in save_results(result, out / _slug(result.label))]
    groups = group(results)
    files += [
        plots.save(plots.by_episode(groups), out / "episodes.png"),
        plots.save(plots.by_budget(groups), out / "budgets.png"),
        plots.save(plots.over_budget(groups), out / "over-budget.png"),
    ]
    star = field[0]
    files.append(animate(replay(star, REPLAY_BUDGET, seed=seed), out / "one-room.gif"))
    _say_where(console, out, files)
    return files


def contenders(env: SafeDarkRoom | None = None) -> list[Contender]:
    """The star first: the pretrained policy where it ships and the room is its own, else the explorer."""
    lines = [reference(name, env or SafeDarkRoom()) for name in ("explorer", "planner", "random")]
    if env is None and STAR in policy_names():
        return [released(STAR), *lines]
    return lines


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

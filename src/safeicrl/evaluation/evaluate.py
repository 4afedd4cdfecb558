"""The paper's evaluation: a frozen agent, unseen tasks, a budget for each, K episodes with a growing context."""

import time
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from safeicrl.agents.api import Agent, adapts, lasting
from safeicrl.budgets import Ranges, ranges_of
from safeicrl.envs.api import Env, Key, PyTree, Split, check_split
from safeicrl.envs.faults import first_of, refuse_fault
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import (
    MOST_EPISODES,
    MOST_STEPS,
    UserError,
    check_budget,
    check_flag,
    check_integer,
    check_seed,
)
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.task_lists import TaskList, evaluation_keys, load_list, sample_tasks
from safeicrl.machine.callbacks import own_errors
from safeicrl.machine.devices import everywhere, make_mesh, over_rows, padded, spread, using
from safeicrl.provenance import surroundings
from safeicrl.trial import Episodes, episode_sums, first_fault, run_trials

if TYPE_CHECKING:  # it imports optax, which few agents need
    from safeicrl.optimisers.meta import Spent

SEGMENT = 32  # steps; a shorter segment of a trial saves less time than its compilation takes


@own_errors()
def evaluate(
    env: Env,
    agent: Agent,
    *,
    tasks: int = 1000,
    budgets: Ranges | None = None,
    budget_count: int = 100,
    budgets_per_task: int = 1,
    episodes: int | None = None,
    seed: int = 0,
    split: Split = "test",
    task_list: str | None = None,
    rows: int | None = None,
    segments: int = 8,
    devices: int | Mesh | None = None,
    settle: bool = True,
    label: str = "agent",
    meta: dict[str, Any] | None = None,
) -> Results:
    """Run a trial on each of `tasks` unseen tasks.

    There are `budget_count` distinct budgets, uniform in the range `budgets` (by default the environment's test
    range) and used equally often. With several `budgets_per_task`, each task has that number of trials, with
    budgets spread over the range. Small and large budgets are then compared on the same tasks; otherwise
    differences between tasks can hide what a budget is worth.

    With several costs, `budgets` is one range for all of them or one for each, in their order. The budgets of the
    second cost and of later ones are shuffled, so that small and large budgets of all costs meet.

    `task_list` takes the first `tasks` tasks of a frozen list of the world (train, validation, test; for the tracks
    also wide) in place of those of `split` and `seed`.

    `episodes` is the environment's K by default. Tasks and budgets depend on `seed` alone, so two agents meet the
    same tasks. At most `rows` trials run at a time (by default 256, on a CPU 32), which bounds the memory. All
    these chunks share one compilation, and each ends with its longest trial. `segments` is that of `run_trials`,
    for agents whose memory grows; a short trial has fewer.

    After K episodes, those of its training, or after its own `settle_after`, an agent's memory settles
    (agents/settled.py); `settle=False` lets it go on as in training, for comparison.

    The trials that run at a time are divided among `devices`: a number of local ones (all by default), or a mesh
    (devices.py). The results do not depend on it, but for rounding.
    """
    frozen = None if task_list is None else load_list(env, task_list)
    if frozen is not None:
        tasks, split = min(tasks, frozen.count), frozen.split
    episodes, rows = check_size(env, tasks=tasks, budgets_per_task=budgets_per_task, episodes=episodes, rows=rows)
    trials = tasks * budgets_per_task
    check_seed(seed)
    range_, budget = spread_budgets(env, budgets, budget_count, trials, seed)
    if budgets_per_task > budget_count:
        raise UserError(f"budgets_per_task must be at most budget_count, got {budgets_per_task} > {budget_count}")
    mesh = devices if isinstance(devices, Mesh) else make_mesh(devices, rows={}, env=env)
    begin = time.perf_counter()

    sampled = _draw_tasks(env, frozen, tasks, split, seed)
    # before it settles nothing is taken back, and a shared clock is faster
    known = getattr(agent, "settle_after", None) or getattr(agent, "trained_episodes", None)
    past = episodes > (known or episodes)
    agent = lasting(agent, check_flag("settle", settle) and past)
    whole, spent, stepped_in = _play_all(
        env, agent, sampled, budget, seed, tasks=tasks, episodes=episodes, rows=rows, segments=segments, mesh=mesh
    )
    provenance = {
        "label": label,
        **_protocol(env, split, seed, range_, budgets_per_task, frozen),
        **({"limits": _plain_limits(sampled)} if hasattr(sampled, "multiplier") else {}),
        **({"settles": settle} if past else {}),
        **({} if spent is None else {"adaptation": spending(spent)}),
        **({} if stepped_in is None else {"guard_stepped_in": float(stepped_in.sum() / whole.lengths.sum())}),
        **{name: value for name, value in (meta or {}).items() if name != "settle_after" or (past and settle)},
        **surroundings(),
        "seconds": time.perf_counter() - begin,
    }
    return Results(returns=whole.returns, costs=whole.costs, lengths=whole.lengths, budgets=budget, meta=provenance)


def _draw_tasks(env: Env, frozen: TaskList | None, tasks: int, split: Split, seed: int) -> PyTree:
    """The tasks [task], those of the frozen list if there is one, on the host."""
    if frozen is None:
        sampled = sample_tasks(env, check_split(split), jax.random.split(evaluation_keys(seed)[0], tasks))
    else:
        sampled = jax.tree.map(lambda x: x[:tasks], frozen.tasks)
    return jax.tree.map(_on_host, sampled)


def _play_all(
    env: Env, agent: Agent, sampled: PyTree, budgets: np.ndarray, seed: int, *, tasks: int, episodes: int,
    rows: int, segments: int, mesh: Mesh | None,
) -> "tuple[Any, Spent | None, np.ndarray | None]":  # fmt: skip
    """A trial for each budget, `rows` at a time: what `_play` returns, for all trials, in NumPy arrays."""
    trials, steps = len(budgets), episodes * env.spec.max_steps
    segments = min(segments, max(steps // SEGMENT, 1)) if _grows(agent, sampled, steps) else 1
    parts, name = [], env_to_plain(env)["name"]
    agent, run_key = spread(agent, mesh), evaluation_keys(seed)[1]
    for chunk, first in enumerate(range(0, trials, rows)):
        # The last chunk is filled up with the first trials, so that all chunks have one shape. A few more rows,
        # so that all devices have equally many, change nothing: a row's play does not depend on how many there are.
        index = np.arange(first, first + padded(rows, mesh)) % trials
        queue = jax.tree.map(lambda x, i=index % tasks: x[i][:, None], sampled)  # [row, 1, ...]
        key = jax.random.fold_in(run_key, chunk)
        given = spread((queue, jnp.asarray(budgets[index][:, None]), key), mesh)
        with using(mesh):
            played, found = _play(env, agent, *given, episodes=episodes, segments=segments)
        fault = np.asarray(found)
        refuse_fault(fault, name, [f"task {index[int(fault[1])] % tasks}"], env.spec)
        parts.append(jax.tree.map(lambda x: np.asarray(x)[:rows], played))
    return jax.tree.map(lambda *x: np.concatenate(x)[:trials], *parts)


def _protocol(
    env: Env, split: Split, seed: int, range_: list[Any], budgets_per_task: int, frozen: TaskList | None
) -> dict[str, Any]:
    """What was asked of the agent, as the results keep it."""
    return {
        "env": env_to_plain(env),
        **({"approximation": what} if (what := getattr(env, "approximation", None)) else {}),
        "split": split,
        "seed": seed,
        **({"costs": list(env.spec.costs)} if env.spec.several else {}),
        "budget_range": range_,
        "budgets_per_task": budgets_per_task,
        **({} if frozen is None else {"task_list": frozen.described()}),
    }


def check_size(
    env: Env, *, tasks: int, budgets_per_task: int = 1, episodes: int | None, rows: int | None
) -> tuple[int, int]:
    """The episodes of a trial and the trials at a time of an evaluation; refused if there are too many of them."""
    trials = check_integer("tasks", tasks, 1) * check_integer("budgets_per_task", budgets_per_task, 1)
    episodes = check_integer("episodes", env.spec.episodes if episodes is None else episodes, 1)
    check_integer("tasks · budgets_per_task · episodes", trials * episodes, 1, MOST_EPISODES)
    default = 32 if jax.default_backend() == "cpu" else 256
    rows = min(check_integer("rows", default if rows is None else rows, 1), trials)
    check_integer("rows · episodes · steps of an episode", rows * episodes * env.spec.max_steps, 1, MOST_STEPS)
    return episodes, rows


def budget_grid(low: float, high: float, count: int = 100) -> np.ndarray:
    """`count` distinct budgets, uniform in [low, high]: the middles of `count` equal slices."""
    check_budget([low, high])
    check_integer("number of budgets", count, 1)
    if low > high:
        raise UserError(f"the budget range must rise, got {low} to {high}")
    return (low + (high - low) * (np.arange(count) + 0.5) / count).astype(np.float32)


def spread_budgets(
    env: Env, budgets: Ranges | None, count: int, trials: int, seed: int
) -> tuple[list[Any], np.ndarray]:
    """The range of budgets, and the budget of each trial: [trial], or with several costs [trial, cost].

    Every budget of the grid is used equally often.
    """
    spec = env.spec
    order = np.arange(trials) * count // trials
    if not spec.several:
        if budgets and isinstance(budgets[0], tuple | list):
            ranges_of(budgets, spec.costs, "budgets")  # says what is wrong with them
        low, high = budgets or spec.test_budget
        return [low, high], budget_grid(low, high, count)[order]  # type: ignore[arg-type]
    ranges = ranges_of(budgets or spec.test_budget, spec.costs, "budgets")
    shuffle = lambda index: np.random.default_rng([seed, index]).permutation(order) if index else order  # noqa: E731
    each = [budget_grid(low, high, count)[shuffle(index)] for index, (low, high) in enumerate(ranges)]
    return [list(own) for own in ranges], np.stack(each, -1)


def _grows(agent: Agent, tasks: PyTree, steps: int) -> bool:
    """Whether the agent's memory grows with a trial; only then are several segments worth their compilation."""
    queue = jax.tree.map(lambda x: x[:1, None], tasks)
    early, late = (eqx.filter_eval_shape(lambda n=n: agent.extend(agent.init(queue, 1), n)) for n in (1, steps))
    return jax.tree.leaves(early) != jax.tree.leaves(late)


def _on_host(x: jax.Array) -> np.ndarray | jax.Array:
    """For taking rows: on the device every shape would need a compiled program. Random keys stay there."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _plain_limits(tasks: PyTree) -> list[float]:
    """[task] the speed limits of a track's tasks, for reports by limit."""
    return [round(float(limit), 4) for limit in np.asarray(tasks.multiplier)]


@eqx.filter_jit
def _play(
    env: Env, agent: Agent, tasks: PyTree, budgets: jax.Array, key: Key, *, episodes: int, segments: int
) -> "tuple[tuple[Episodes, Spent | None, jax.Array | None], jax.Array]":
    """Sums per episode, and the first fault; inside one jit, so that the steps themselves are never kept.

    For an agent that updates its parameters: also what it played besides the episodes of the trial. For one with a
    guard: at how many steps of each trial it stepped in.
    """
    if adapts(agent):
        single, budget = over_rows((jax.tree.map(lambda x: x[:, 0], tasks), budgets[:, 0]))
        found, spent = agent.play_trials(env, single, budget, key, episodes=episodes)  # type: ignore[attr-defined]
        return everywhere(((found, spent, None), first_of(spent.fault)))
    steps = episodes * env.spec.max_steps
    trials = run_trials(env, agent, tasks, budgets, key, episodes=episodes, steps=steps, segments=segments)
    guarded = isinstance(trials.extras, dict) and "stepped_in" in trials.extras
    stepped_in = (trials.extras["stepped_in"] & trials.valid).sum(-1) if guarded else None
    return everywhere(((episode_sums(trials, episodes), None, stepped_in), first_fault(trials, env.spec)))


def spending(spent: "Spent") -> dict[str, Any]:
    """What the updates of a trial took besides the episodes that count, as means over trials, for the results."""
    episodes = float(spent.episodes.sum())
    each = lambda total: float(total.sum() / episodes) if episodes else None  # noqa: E731
    return {
        "updates": spent.updates.sum(1).mean(),
        "fresh_episodes_per_update": int(spent.episodes.max()),
        "fresh_episodes": spent.episodes.sum(1).mean(),
        "fresh_steps": spent.steps.sum(1).mean(),
        "cost_per_fresh_episode": each(spent.cost),
        "fresh_episodes_over_budget": each(spent.over),
    }

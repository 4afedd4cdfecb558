"""The paper's evaluation: a frozen agent, unseen tasks, a budget for each, K episodes with a growing context."""

import dataclasses
import platform
import shlex
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, Split, check_split, replace
from safeicrl.envs.registry import ENVS
from safeicrl.errors import UserError, check_budget, check_integer, check_number, check_seed
from safeicrl.evaluation.results import Results
from safeicrl.tokens import Token, first_token
from safeicrl.trial import Agent, Episodes, WrappedAgent, episode_sums, run_trials
from safeicrl.version import VERSION


def evaluate(
    env: Env,
    agent: Agent,
    *,
    tasks: int = 1000,
    budgets: tuple[float, float] | None = None,
    budget_count: int = 100,
    budgets_per_task: int = 1,
    episodes: int | None = None,
    seed: int = 0,
    split: Split = "test",
    rows: int | None = None,
    segments: int = 8,
    label: str = "agent",
    meta: dict[str, Any] | None = None,
) -> Results:
    """Run a trial on each of `tasks` unseen tasks.

    Their budgets are `budget_count` distinct ones, uniform in the range `budgets` (the environment's test range
    by default) and used equally often. With more `budgets_per_task` each task is met in as many trials, whose
    budgets are spread over that range, so that small and large budgets are compared on the same tasks: where
    tasks differ much, they hide what a budget is worth. `episodes` is the environment's K by default.
    Tasks and budgets depend on `seed` alone, so two agents meet the same rooms. At most `rows` trials run at a
    time (by default 256, on a CPU 32), which bounds the memory; all chunks share one compilation, and a chunk
    ends with its longest trial. `segments` is `run_trials`', for agents whose memory grows.
    """
    check_integer("tasks", tasks, 1)
    trials = tasks * check_integer("budgets_per_task", budgets_per_task, 1)
    default = 32 if jax.default_backend() == "cpu" else 256
    rows = check_integer("rows", default if rows is None else rows, 1)
    check_seed(seed)
    episodes = check_integer("episodes", env.spec.episodes if episodes is None else episodes, 1)
    low, high = budgets or env.spec.test_budget
    grid = budget_grid(low, high, budget_count)
    if budgets_per_task > budget_count:
        raise UserError(f"there are no {budgets_per_task} budgets per task among {budget_count}")
    begin = time.perf_counter()

    task_key, run_key = jax.random.split(jax.random.key(seed))
    sampled = _sample(env, check_split(split), jax.random.split(task_key, tasks))
    budget = grid[np.arange(trials) * len(grid) // trials]  # [trial]: every budget equally often
    rows = min(rows, trials)
    segments = segments if _grows(agent, sampled, episodes * env.spec.max_steps) else 1
    parts = []
    for chunk, first in enumerate(range(0, trials, rows)):
        # the last chunk is filled up from the start, so that every chunk has one shape
        index = np.arange(first, first + rows) % trials
        queue = jax.tree.map(lambda x, i=index % tasks: x[i][:, None], sampled)  # [row, 1, ...]
        key = jax.random.fold_in(run_key, chunk)
        played = _play(
            env, agent, queue, jnp.asarray(budget[index][:, None]), key, episodes=episodes, segments=segments
        )
        parts.append(jax.tree.map(np.asarray, played))
    whole = jax.tree.map(lambda *x: np.concatenate(x)[:trials], *parts)
    provenance = {
        "label": label,
        "env": describe_env(env),
        **({"approximation": what} if (what := getattr(env, "approximation", None)) else {}),
        "split": split,
        "seed": seed,
        "budget_range": [low, high],
        "budgets_per_task": budgets_per_task,
        **(meta or {}),
        **surroundings(),
        "seconds": time.perf_counter() - begin,
    }
    return Results(returns=whole.returns, costs=whole.costs, lengths=whole.lengths, budgets=budget, meta=provenance)


def budget_grid(low: float, high: float, count: int = 100) -> np.ndarray:
    """`count` distinct budgets, uniform in [low, high]: the middles of as many equal slices."""
    check_budget([low, high])
    check_integer("number of budgets", count, 1)
    if low > high:
        raise UserError(f"the budget range must rise, got {low} to {high}")
    return (low + (high - low) * (np.arange(count) + 0.5) / count).astype(np.float32)


def _grows(agent: Agent, tasks: PyTree, steps: int) -> bool:
    """Whether the agent's memory grows with a trial; only then are several segments worth their compilation."""
    queue = jax.tree.map(lambda x: x[:1, None], tasks)
    early, late = (eqx.filter_eval_shape(lambda n=n: agent.extend(agent.init(queue, 1), n)) for n in (1, steps))
    return jax.tree.leaves(early) != jax.tree.leaves(late)


@eqx.filter_jit
def _sample(env: Env, split: Split, keys: Key) -> PyTree:
    return jax.vmap(lambda key: env.sample_task(key, split))(keys)


@eqx.filter_jit
def _play(
    env: Env, agent: Agent, tasks: PyTree, budgets: jax.Array, key: Key, *, episodes: int, segments: int
) -> Episodes:
    """Sums per episode; inside one jit, so that the steps themselves are never kept."""
    steps = episodes * env.spec.max_steps
    trials = run_trials(env, agent, tasks, budgets, key, episodes=episodes, steps=steps, segments=segments)
    return episode_sums(trials, episodes)


class WipedAgent(WrappedAgent):
    """The same agent, made to forget at every episode: what in-context learning is worth is the difference."""

    spec: EnvSpec = eqx.field(static=True)

    def act(self, memory: PyTree, token: Token, key: Key) -> tuple[PyTree, jax.Array, PyTree]:
        """Every episode looks like the first one of a new trial."""
        fresh = jax.vmap(first_token, (None, 0, 0))(self.spec, token.observation, token.ctg)
        pick = lambda a, b: jnp.where(token.start.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)  # noqa: E731
        token = jax.tree.map(pick, fresh, replace(token, episode=jnp.zeros_like(token.episode)))
        return self.agent.act(memory, token, key)


def with_options(
    env: Env, agent: Agent, *, temperature: float | None = None, greedy: bool = False, wipe: bool = False
) -> tuple[Agent, dict[str, Any]]:
    """The agent with its actions sampled at a temperature or greedy, its context kept or wiped.

    Also returns how to label that: {"actions": ..., "context": ...}.
    """
    if greedy and temperature is not None:
        raise UserError(f"greedy contradicts temperature {temperature}; give one of them")
    has = dataclasses.is_dataclass(agent) and hasattr(agent, "temperature")
    if (greedy or temperature is not None) and not has:
        raise UserError(f"{type(agent).__name__} does not sample its actions: no temperature, no greedy")
    if greedy:
        temperature = 0.0
    if temperature is not None:
        temperature = check_number("temperature", temperature, 0.0)
        agent = dataclasses.replace(agent, temperature=temperature)  # type: ignore[type-var]
    actions = "as the agent decides"
    if has:
        used = float(agent.temperature)  # type: ignore[attr-defined]
        actions = "greedy" if used == 0 else f"sampled, temperature {used:g}"
    context = "wiped at every episode" if wipe else "kept"
    agent = WipedAgent(agent=agent, spec=env.spec) if wipe else agent
    return agent, {"actions": actions, "context": context}


def describe_env(env: Env) -> dict[str, Any]:
    """The environment's registered name and parameters: what `make_env` needs to build it again."""
    name = next((name for name, make in ENVS.items() if make is type(env)), type(env).__name__)
    return {"name": name, "parameters": dataclasses.asdict(env) if dataclasses.is_dataclass(env) else {}}  # type: ignore[arg-type]


def surroundings() -> dict[str, Any]:
    """Version, device and command: what a results file or a card says about where it came from."""
    device = jax.devices()[0]
    return {
        "safeicrl": VERSION,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})",
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _program() -> str:
    """The program's name as one would type it, without the folder it happens to lie in."""
    name = sys.argv[0].replace("\\", "/").rsplit("/", 1)[-1] if sys.argv else ""
    return "safeicrl" if name == "__main__.py" else name or "python"

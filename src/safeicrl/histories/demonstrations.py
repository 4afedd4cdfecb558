"""Learning histories without a learner, for Safe AD-EPS: a planner that sees the room, with less and less noise.

Each history is the exact planner (agents/reference.py) on one task under one cost limit. An action is uniform with
probability ε. It falls linearly from 1 at the first step to its floor after 90% of the history.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.reference import Plan, PlannerAgent
from safeicrl.envs.api import Env, Key, PyTree, record, replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError, check_budget, check_integer, check_number, check_seed
from safeicrl.files import owned
from safeicrl.histories.store import TRUNCATED, Histories, HistoryWriter, open_histories
from safeicrl.machine.signals import StopRequest
from safeicrl.provenance import surroundings
from safeicrl.tokens import Token
from safeicrl.trial import run_trials

MOST_STEPS = 2**28  # of a group, which is made in memory


@dataclass(frozen=True)
class EpsConfig:
    """How many demonstrations, and how noisy; by default as many steps as in the paper's data."""

    tasks: int = 27
    limits: tuple[float, ...] = (0.0, 2.5, 5.0)  # cost limits, each on every task
    steps: int = 50_000  # of a history
    floor: float = 0.0  # ε at the end
    decay: float = 0.9  # share of the history in which ε falls
    group: int = 27  # histories made at a time
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "steps", "group"):
            check_integer(name, getattr(self, name), 1)
        check_integer("steps of a group", self.group * self.steps, 0, MOST_STEPS)
        check_seed(self.seed)
        check_number("decay", self.decay, 0.0, strict=True)
        check_budget(list(self.limits))
        if not self.limits:
            raise UserError("limits must hold at least one cost limit")
        if not 0 <= check_number("floor", self.floor, 0.0) <= 1 or self.decay > 1:
            raise UserError(f"floor and decay must be at most 1, got {self.floor} and {self.decay}")


@record
class Noisy:
    """Memory of a `NoisyPlanner`."""

    plan: Plan
    step: jax.Array  # [] int32, of the history


class NoisyPlanner(eqx.Module):
    """The planner, or with probability ε a uniform action."""

    planner: PlannerAgent
    config: EpsConfig = eqx.field(static=True)

    def init(self, tasks: PyTree, rows: int) -> Noisy:
        """Solve the rooms."""
        return Noisy(plan=self.planner.init(tasks, rows), step=jnp.int32(0))

    def extend(self, memory: Noisy, steps: int) -> Noisy:
        """The memory has its full size from the start."""
        return memory

    def act(self, memory: Noisy, token: Token, key: Key) -> tuple[Noisy, jax.Array, PyTree]:
        """The planner's action, or a random one."""
        noise_key, action_key, plan_key = jax.random.split(key, 3)
        # Once noise has broken the budget, waiting is pointless: go to the goal by the cheapest route.
        asked = replace(token, ctg=jnp.where(token.ctg < 0, self.planner.env.max_steps, token.ctg))
        plan, action, _ = self.planner.act(memory.plan, asked, plan_key)
        noisy = jax.random.uniform(noise_key, action.shape) < self.epsilon(memory.step)
        uniform = jax.random.randint(action_key, action.shape, 0, self.planner.env.spec.action.n)  # type: ignore[union-attr]
        return Noisy(plan=plan, step=memory.step + 1), jnp.where(noisy, uniform, action), None

    def epsilon(self, step: jax.Array) -> jax.Array:
        """ε at a step of the history."""
        config = self.config
        fallen = jnp.minimum(step / (config.decay * config.steps), 1.0)
        return 1 + (config.floor - 1) * fallen


def collect_demonstrations(
    env: Env, config: EpsConfig, *, out: str | Path, stop: StopRequest | None = None
) -> Histories | None:
    """Write the demonstrations to `out` as learning histories; goes on where an interrupted call stopped.

    None when `stop` heard a signal before the end.
    """
    if not isinstance(env, SafeDarkRoom):
        raise UserError(f"the eps demonstrator plans in SafeDarkRoom only, not in {type(env).__name__}")
    if config.steps < env.max_steps:
        raise UserError(f"steps must hold an episode of {env.max_steps}, got {config.steps}")
    task = np.repeat(np.arange(config.tasks), len(config.limits))  # [history]
    limit = np.tile(np.asarray(config.limits, np.float32), config.tasks)
    request: dict[str, Any] = {
        "env": env_to_plain(env),
        "algo": {"name": "eps", "config": {"floor": config.floor, "decay": config.decay}},
        "collection": {name: value for name, value in asdict(config).items() if name not in ("floor", "decay")},
    }
    task_key, play_key = jax.random.split(jax.random.key(config.seed))
    with owned(Path(out)), stop or StopRequest() as stop:
        writer = HistoryWriter(out, env=env, request=request, steps=config.steps, limit=limit, task=task)
        sample = jax.jit(jax.vmap(lambda key: env.sample_task(key, "train")))
        rooms = sample(jax.random.split(task_key, config.tasks))
        while writer.complete < writer.total:
            begin, first = time.perf_counter(), writer.complete
            which = slice(first, min(first + config.group, writer.total))
            tasks = jax.tree.map(lambda x, i=task[which]: x[i][:, None], rooms)
            key = jax.random.fold_in(play_key, first)
            group = jax.tree.map(np.asarray, _play(env, config, tasks, jnp.asarray(limit[which])[:, None], key))
            group["final"] = _final(group, env.max_steps)
            writer.append(group, seconds=time.perf_counter() - begin, **surroundings())
            if stop.requested and writer.complete < writer.total:
                return None
    return open_histories(out, env=env)


@eqx.filter_jit
def _play(env: SafeDarkRoom, config: EpsConfig, tasks: PyTree, limits: jax.Array, key: Key) -> dict[str, jax.Array]:
    agent = NoisyPlanner(planner=PlannerAgent(env=env), config=config)
    trials = run_trials(env, agent, tasks, limits, key, episodes=config.steps + 1, steps=config.steps)
    return {
        "observation": trials.token.observation.astype(jnp.uint8),
        "action": trials.action.astype(jnp.uint8),
        "reward": trials.reward.astype(jnp.uint8),
        "cost": trials.cost.astype(jnp.uint8),
        "done": (trials.terminated + TRUNCATED * trials.truncated).astype(jnp.uint8),
        "ended": trials.final_observation.astype(jnp.uint8),
    }


def _final(group: dict[str, np.ndarray], max_steps: int) -> np.ndarray:
    """The last observation of the i-th truncated episode of each history, [history, steps // max_steps, obs]."""
    ended, done = group.pop("ended"), group["done"]
    final = np.zeros((len(done), done.shape[1] // max_steps, ended.shape[-1]), ended.dtype)
    for row in range(len(done)):
        cut = ended[row][done[row] == TRUNCATED]
        final[row, : len(cut)] = cut
    return final

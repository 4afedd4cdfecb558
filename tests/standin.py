"""A tiny algorithm for the tests of the host side: REINFORCE on a table of action preferences per cell."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.algos import registry
from safeicrl.envs.api import record, replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.policies.catalogue import KINDS
from safeicrl.trial import episode_sums, first_fault, run_trials

ROOM = SafeDarkRoom(size=3, obstacles=2, max_steps=5, episodes=4, train_budget=(1.0, 3.0), test_budget=(1.0, 3.0))


class TableAgent(eqx.Module):
    """Softmax over one row of preferences per cell; no memory at all."""

    table: jax.Array  # [cell, action]
    size: int = eqx.field(static=True)
    temperature: float = eqx.field(static=True, default=1.0)

    def init(self, tasks: Any, rows: int) -> None:
        return None

    def extend(self, memory: None, steps: int) -> None:
        return None

    def logits(self, observation: jax.Array) -> jax.Array:
        return self.table[observation[..., 0] * self.size + observation[..., 1]]

    def act(self, memory: None, token: Any, key: jax.Array) -> tuple[None, jax.Array, None]:
        logits = self.logits(token.observation)
        if self.temperature == 0:
            return None, jnp.argmax(logits, axis=-1), None
        return None, jax.random.categorical(key, logits / self.temperature), None


@record
class TableState:
    table: jax.Array
    multiplier: jax.Array
    key: jax.Array
    step: jax.Array
    bad_from: jax.Array  # in the state, so that all configs share one compiled update
    bad_share: jax.Array


@dataclass(frozen=True)
class TableConfig:
    lr: float = 0.5
    trials: int = 16
    bad_from: int = 10**6  # from this step on every update makes the table nan
    bad_share: float = 0.0  # share of updates that do, chosen by the key


@dataclass(frozen=True)
class TableAlgorithm:
    env: SafeDarkRoom
    config: TableConfig

    def init(self, key: jax.Array) -> TableState:
        table = 0.01 * jax.random.normal(key, (self.env.size**2, 5))
        return TableState(
            table=table,
            multiplier=jnp.array(0.5),
            key=key,
            step=jnp.int32(0),
            bad_from=jnp.int32(self.config.bad_from),
            bad_share=jnp.float32(self.config.bad_share),
        )

    def start_from(self, state: TableState, other: TableState) -> TableState:
        return replace(state, table=other.table)

    def agent(self, state: TableState) -> TableAgent:
        return TableAgent(table=state.table, size=self.env.size)

    @property
    def row_axes(self) -> dict[str, int]:
        return {"algo.trials": self.config.trials}

    def card(self) -> dict[str, Any]:
        return {"kind": "table"}

    def update(self, state: TableState) -> tuple[TableState, dict[str, jax.Array]]:
        key, run_key = jax.random.split(state.key)
        spec, trials = self.env.spec, self.config.trials
        room = self.env.make_task(goal=(0, 0), obstacles=[(0, 1), (2, 2)])  # one room: quick to compile
        tasks = jax.tree.map(lambda x: jnp.broadcast_to(x, (trials, 1, *x.shape)), room)
        budgets = jnp.linspace(*spec.train_budget, trials)[:, None]
        played = run_trials(
            self.env, self.agent(state), tasks, budgets, run_key,
            episodes=spec.episodes, steps=spec.trial_steps,
        )  # fmt: skip
        sums = episode_sums(played, spec.episodes)
        gain = played.reward - state.multiplier * played.cost

        def loss(table: jax.Array) -> jax.Array:
            logits = TableAgent(table=table, size=self.env.size).logits(played.token.observation)
            taken = jax.nn.one_hot(played.action, 5)
            return -((jax.nn.log_softmax(logits) * taken).sum(-1) * gain * played.valid).mean()

        value, gradient = jax.value_and_grad(loss)(state.table)
        over = (sums.costs > budgets).mean()
        bad = (state.step >= state.bad_from) | (jax.random.uniform(key) < state.bad_share)
        state = replace(
            state,
            table=jnp.where(bad, jnp.nan, state.table - self.config.lr * gradient),
            multiplier=jnp.maximum(0.0, state.multiplier + 0.1 * (over - 0.05)),
            key=key,
            step=state.step + 1,
        )
        return state, {
            "env_steps": played.valid.sum(),
            "return": sums.returns.mean(),
            "cost": sums.costs.mean(),
            "budget": budgets.mean(),
            "over_budget": over,
            "lambda": state.multiplier,
            "policy_loss": value,
            "fault": first_fault(played, spec),
            "over_budget_by_bin": jnp.array([over, jnp.nan]),
        }


if "table" not in registry.ALGOS:
    KINDS["table"] = lambda card, env: TableAgent(table=jnp.zeros((env.size**2, 5)), size=env.size)
    entry = registry.Entry(algorithm=f"{__name__}:TableAlgorithm", config=f"{__name__}:TableConfig")
    registry.register("table", entry)

"""A tiny algorithm for the tests of the host side: REINFORCE on a table of action preferences per cell."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.algos import registry
from safeicrl.envs.api import record
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.trial import episode_sums, run_trials, sample_queue

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


@dataclass(frozen=True)
class TableConfig:
    lr: float = 0.5
    trials: int = 16
    bad_from: int = 10**6  # iterations bad_from … bad_until−1 make the table nan
    bad_until: int = 10**6


@dataclass(frozen=True)
class TableAlgorithm:
    env: SafeDarkRoom
    config: TableConfig

    def init(self, key: jax.Array) -> TableState:
        table = 0.01 * jax.random.normal(key, (self.env.size**2, 5))
        return TableState(table=table, multiplier=jnp.array(0.5), key=key, step=jnp.int32(0))

    def agent(self, state: TableState) -> TableAgent:
        return TableAgent(table=state.table, size=self.env.size)

    def card(self) -> dict[str, Any]:
        return {"kind": "table"}

    def update(self, state: TableState) -> tuple[TableState, dict[str, jax.Array]]:
        key, queue_key, run_key = jax.random.split(state.key, 3)
        spec, trials = self.env.spec, self.config.trials
        tasks, budgets = sample_queue(self.env, "train", spec.train_budget, (trials, 1), queue_key)
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
        bad = (state.step >= self.config.bad_from) & (state.step < self.config.bad_until)
        state = TableState(
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
            "over_budget_by_bin": jnp.array([over, jnp.nan]),
        }


if "table" not in registry.ALGOS:
    entry = registry.Entry(module=__name__, algorithm="TableAlgorithm", config="TableConfig")
    registry.register("table", entry)

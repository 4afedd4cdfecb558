"""What an agent is, and ways to change one: wrap it, wipe its memory, sample its actions at a temperature."""

import dataclasses
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, replace
from safeicrl.errors import UserError, check_number
from safeicrl.tokens import Token, first_token


class Agent(Protocol):
    """Anything that acts in trials: a frozen policy, the policy in training, a planner. A pytree."""

    def init(self, tasks: PyTree, rows: int) -> PyTree:
        """Memory for `rows` rows. Only reference agents look at the tasks ([row, queue])."""
        ...

    def extend(self, memory: PyTree, steps: int) -> PyTree:
        """Make room for `steps` steps in total; called before each segment of the scan."""
        ...

    def act(self, memory: PyTree, token: Token, key: Key) -> tuple[PyTree, jax.Array, PyTree]:
        """New memory, actions [row] and whatever the learner wants recorded (log-probabilities, ...)."""
        ...


class WrappedAgent(eqx.Module):
    """An agent around another one, with the other's memory. Subclasses write `act`."""

    agent: Any  # an Agent

    def init(self, tasks: PyTree, rows: int) -> PyTree:
        """The inner agent's own memory."""
        return self.agent.init(tasks, rows)

    def extend(self, memory: PyTree, steps: int) -> PyTree:
        """The inner agent's own memory."""
        return self.agent.extend(memory, steps)


class WipedAgent(WrappedAgent):
    """The same agent, made to forget at every episode. The difference is what in-context learning is worth."""

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
    """The agent with actions sampled at a temperature or greedy, and its context kept or wiped.

    Also returns both in words, for labels: {"actions": ..., "context": ...}.
    """
    if greedy and temperature is not None:
        raise UserError(f"greedy contradicts temperature {temperature}; give one of them")
    has = dataclasses.is_dataclass(agent) and hasattr(agent, "temperature")
    if (greedy or temperature is not None) and not has:
        raise UserError(f"{type(agent).__name__} does not sample actions: leave out temperature and greedy")
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

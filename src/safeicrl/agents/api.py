"""What an agent is, and ways to change one: wrap it, wipe its memory, sample its actions at a temperature."""

import dataclasses
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.budgets import Reserve, check_reserve
from safeicrl.envs.api import Env, EnvSpec, Key, PyTree, replace
from safeicrl.envs.spaces import Box
from safeicrl.errors import UserError, check_flag, check_integer, check_number, check_risk
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


def adapts(agent: Agent) -> bool:
    """Whether the agent updates its parameters between a trial's episodes, by `play_trials` (optimisers/meta.py).

    Evaluation then lets it play its trials itself. Wiped, it forgets its updates: it is what it was at the start.
    """
    return hasattr(agent, "play_trials")


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


class TaughtAgent(eqx.Module):
    """An agent whose teacher watches it, and says at every step what it would do there itself ("advice").

    Both see the same tokens, so the teacher must be one that learns from tokens, whoever acted.
    """

    agent: Any  # an Agent; it acts
    teacher: Any  # an Agent

    def init(self, tasks: PyTree, rows: int) -> tuple[PyTree, PyTree]:
        """The memories of both."""
        return self.agent.init(tasks, rows), self.teacher.init(tasks, rows)

    def extend(self, memory: tuple[PyTree, PyTree], steps: int) -> tuple[PyTree, PyTree]:
        """The memories of both."""
        return self.agent.extend(memory[0], steps), self.teacher.extend(memory[1], steps)

    def act(self, memory: tuple[PyTree, PyTree], token: Token, key: Key) -> tuple[PyTree, jax.Array, PyTree]:
        """The agent's action; the teacher's is recorded beside what the agent records."""
        own, action, extras = self.agent.act(memory[0], token, key)
        watched, advice, _ = self.teacher.act(memory[1], token, jax.random.fold_in(key, 1))
        return (own, watched), action, {**(extras or {}), "advice": advice}


def with_options(
    env: Env,
    agent: Agent,
    *,
    temperature: float | None = None,
    greedy: bool = False,
    wipe: bool = False,
    risk: float | None = None,
    guard: bool = True,
    reserve: Reserve | None = None,
    brake: float | None = None,
    settle_after: int | None = None,
) -> tuple[Agent, dict[str, Any]]:
    """The agent with actions sampled at a temperature or greedy, its context kept or wiped, its guard set or off.

    `reserve` is how much of a budget its network is not told of (reserved.py), `brake` how many times as hard it
    acts after a costly step that leaves nothing (brake.py), `settle_after` the episodes after which its memory
    settles (settled.py).

    Also returns all of it for labels: {"actions": ..., "context": ...} in words, with "guard" if it has one,
    "reserve" if that is not 0, "brake" if it is not 1, and "settle_after" if it is not K.
    """
    greedy, wipe = check_flag("greedy", greedy), check_flag("wipe", wipe)
    agent, guarded = _with_guard(agent, risk, check_flag("guard", guard))
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
    if reserve is not None:
        if not hasattr(agent, "reserve"):
            raise UserError(f"{type(agent).__name__} keeps no reserve: leave out reserve {reserve}")
        agent = dataclasses.replace(agent, reserve=check_reserve("reserve", reserve))  # type: ignore[type-var]
    kept = getattr(agent, "reserve", 0.0)
    told: dict[str, Any] = {"reserve": list(kept) if isinstance(kept, tuple) else kept} if kept else {}
    if brake is not None:
        agent = _braking(agent, brake)
    if (hardness := getattr(agent, "brake", 1.0)) != 1:
        told["brake"] = hardness
    if settle_after is not None:
        if wipe:
            raise UserError(f"a wiped context never settles: leave out settle_after {settle_after}")
        agent = _settling(agent, settle_after)
    after, known = getattr(agent, "settle_after", None), getattr(agent, "trained_episodes", None)
    if not wipe and after is not None and after != known:
        told["settle_after"] = after
    actions = "as the agent decides"
    if has:
        used = float(agent.temperature)  # type: ignore[attr-defined]
        actions = "greedy" if used == 0 else f"sampled, temperature {used:g}"
    context = "wiped at every episode" if wipe else "none, parameters adapt" if adapts(agent) else "kept"
    agent = WipedAgent(agent=lasting(agent, False), spec=env.spec) if wipe else agent  # nothing to take back
    return agent, {"actions": actions, "context": context, **guarded, **told}


def lasting(agent: Agent, on: bool = True) -> Agent:
    """The agent with a memory that lasts past the K episodes of training (settled.py), or as in training.

    Agents of other kinds stay as they are.
    """
    settles = check_flag("settle", on)
    if getattr(agent, "trained_episodes", None) is None:
        return agent
    return dataclasses.replace(agent, settles=settles)  # type: ignore[type-var]


def _braking(agent: Agent, brake: float) -> Agent:
    """The agent that acts so much harder after a costly step that leaves nothing of the budget."""
    net = getattr(agent, "net", None)
    if not hasattr(agent, "brake") or not isinstance(net.trunk.spec.action, Box):  # type: ignore[union-attr]
        raise UserError(f"only a transformer's real-valued actions can brake: leave out brake {brake}")
    if net.trunk.config.levels:  # type: ignore[union-attr]
        raise UserError(f"a policy whose actions have levels cannot brake: leave out brake {brake}")
    return dataclasses.replace(agent, brake=check_number("brake", brake, 1.0))  # type: ignore[type-var]


def _settling(agent: Agent, after: int) -> Agent:
    """The agent with a memory that settles after so many episodes."""
    known = getattr(agent, "trained_episodes", None)
    if known is None:
        raise UserError(f"the memory of {type(agent).__name__} never settles: leave out settle_after {after}")
    after = check_integer("settle_after", after, 1, known)
    return dataclasses.replace(agent, settle_after=after)  # type: ignore[type-var]


def has_guard(agent: Agent) -> bool:
    """Whether the agent's network has a guard, on or off."""
    return getattr(getattr(agent, "net", None), "guard", None) is not None


def _with_guard(agent: Agent, risk: float | None, guard: bool) -> tuple[Agent, dict[str, Any]]:
    """The agent with its guard at `risk` (None: as it is) or off, and what to say of it."""
    if not has_guard(agent):
        if risk is not None or not guard:
            asked = f"risk {risk}" if risk is not None else "switching it off"
            raise UserError(f"this policy has no guard: leave out {asked} (`safeicrl fit-guard` adds one)")
        return agent, {}
    if not guard and risk is not None:
        raise UserError(f"a guard that is off has no risk: leave out risk {risk}")
    if not guard:
        agent = dataclasses.replace(agent, risk=None)  # type: ignore[type-var]
    elif risk is not None:
        agent = dataclasses.replace(agent, risk=check_risk(risk))  # type: ignore[type-var]
    used = agent.risk  # type: ignore[attr-defined]
    return agent, {"guard": "off" if used is None else f"risk {used:g}"}

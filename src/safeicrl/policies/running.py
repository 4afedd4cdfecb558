"""A trial under way: its record, the compiled step that moves it on, what it reports, what is saved of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent, has_guard
from safeicrl.envs.api import Env, Key, PyTree
from safeicrl.envs.spaces import Box, Discrete
from safeicrl.tokens import Token, first_token, next_token


@dataclasses.dataclass(kw_only=True)
class RunningTrial:
    """A trial under way, all rows."""

    batched: bool
    budget: jax.Array  # [row], with several costs [row, cost]
    agent: Agent  # with the risk of this trial
    ready: "Ready"  # the same, as its compiled program takes it
    memory: PyTree
    key: Key
    fallback: np.ndarray | None = None  # the action that takes over once a budget is used up
    stop: "StopReport | None" = None  # how often it did
    guard: "GuardReport | None" = None  # what the guard has done so far
    token: Token | None = None  # the last one, [row]; None before the first call of `act`
    action: np.ndarray | None = None  # [row]
    warned: bool = False  # about going beyond what the policy was trained on


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardReport:
    """What the guard did; in a batch every number is an array [row]."""

    risk: Any  # predicted chance that the last action breaks the budget within the guard's depth
    stepped_in: Any  # whether the guard replaced the policy's last action
    steps: Any  # actions of this trial so far
    interventions: Any  # how many of them the guard replaced


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopReport:
    """What the hard stop did; in a batch every number is an array [row]."""

    stopped: Any  # whether the last action was the fallback
    steps: Any  # actions of this trial so far
    fallbacks: Any  # how many of them were the fallback
    episodes: Any  # in how many episodes the budget was used up


# -- the compiled step --------------------------------------------------------------------------------------


@eqx.filter_jit
def first_tokens(env: Env, observation: jax.Array, budget: jax.Array) -> Token:
    """The token of each row at its first step."""
    return jax.vmap(first_token, (None, 0, 0))(env.spec, observation, budget)


next_tokens = jax.jit(next_token)


@eqx.filter_jit
def remember(agent: Agent, rows: int, steps: int) -> PyTree:
    """Memory for a whole trial.

    Jitted: no two of its arrays then share a buffer, so that `take_step` can donate them.
    """
    return agent.extend(agent.init(None, rows), steps)


class Ready(NamedTuple):
    """An agent taken apart once, at the start of a trial: `eqx.filter_jit` would do it at every step, for longer
    than the step itself takes."""

    arrays: list[jax.Array]
    program: Callable[[list[jax.Array], Token, Key, PyTree], tuple]
    guarded: Discrete | Box | None  # its actions, if a guard is on


def take_step(
    ready_token_key: tuple[Ready, Token, Key], memory: PyTree
) -> tuple[PyTree, Key, np.ndarray, np.ndarray | None]:
    """One step of the agent, whose memory (a KV cache) is updated in place.

    Last, what its guard said, if it has one: the risk and whether it stepped in, [row, 2].
    """
    ready, token, key = ready_token_key
    memory, key, told = ready.program(ready.arrays, token, key, memory)
    told = np.asarray(told)
    if ready.guarded is None:
        return memory, key, told, None
    action = told[:, :-2].reshape(len(told), *ready.guarded.shape)
    return memory, key, action.astype(ready.guarded.dtype), told[:, -2:]


@functools.lru_cache(maxsize=64)
def _program(structure: Any, others: tuple, form: Any, guarded: bool) -> Callable:
    """The compiled step of all agents that differ in their arrays only.

    If they are `guarded`, what the guard says stands beside the actions, [row, number]: every array that leaves the
    program takes time.
    """

    @functools.partial(jax.jit, donate_argnums=3)
    def act(arrays: list[jax.Array], token: Token, key: Key, memory: PyTree) -> tuple:
        agent = eqx.combine(jax.tree.unflatten(structure, arrays), jax.tree.unflatten(form, others))
        next_key, key = jax.random.split(key)
        memory, action, extras = agent.act(memory, token, key)
        if guarded:
            action = action.reshape(len(action), -1)
            said = jnp.stack([extras["risk"], extras["stepped_in"].astype(jnp.float32)], -1)
            action = jnp.concatenate([action.astype(jnp.float32), said], -1)
        return memory, next_key, action

    return act


def for_trial(agent: Agent) -> dict[str, Any]:
    """The fields `agent` and `ready` of a trial.

    The risk is an array, an argument of the compiled step and not a constant in it: another risk compiles nothing.
    """
    risk = getattr(agent, "risk", None)
    if risk is not None:
        agent = dataclasses.replace(agent, risk=jnp.float32(risk))  # type: ignore[type-var]
    arrays, static = eqx.partition(agent, eqx.is_array)
    (leaves, structure), (others, form) = jax.tree.flatten(arrays), jax.tree.flatten(static)
    guarded = agent.net.trunk.spec.action if risk is not None and has_guard(agent) else None  # type: ignore[attr-defined]
    program = _program(structure, tuple(others), form, guarded is not None)
    return {"agent": agent, "ready": Ready(arrays=leaves, program=program, guarded=guarded)}


def reported(before: GuardReport | None, said: np.ndarray | None) -> GuardReport | None:
    """The report after one more action."""
    if said is None:
        return None
    risk, replaced = said[:, 0], said[:, 1] > 0
    if before is None:
        return GuardReport(
            risk=risk, stepped_in=replaced, steps=np.ones(len(risk), int), interventions=replaced.astype(int)
        )
    return GuardReport(
        risk=risk, stepped_in=replaced, steps=before.steps + 1, interventions=before.interventions + replaced
    )


Report = TypeVar("Report", GuardReport, StopReport)


def single(report: Report) -> Report:
    """The report of the only row, in plain numbers."""
    return type(report)(**{name: value[0].item() for name, value in vars(report).items()})


# -- what is saved ------------------------------------------------------------------------------------------


OPTIONAL = ("token", "action", "fallback", "stop", "guard")  # fields of a trial that may be None
ON_HOST = ("action", "fallback", "stop", "guard")  # those that are NumPy arrays
REPORTS: dict[str, Any] = {"stop": StopReport, "guard": GuardReport}


def arrays_of(trial: RunningTrial) -> dict[str, Any]:
    """The fields of a trial that hold its arrays, without those that are None."""
    fields = {name: getattr(trial, name) for name in ("budget", "memory", "key", *OPTIONAL)}
    present = {name: value for name, value in fields.items() if name not in OPTIONAL or value is not None}
    return {
        name: {part: _stored(numbers) for part, numbers in vars(value).items()} if name in REPORTS else value
        for name, value in present.items()
    }


def _stored(numbers: np.ndarray) -> np.ndarray:
    """In a type that JAX has without 64 bits."""
    return numbers.astype(np.int32) if numbers.dtype.kind == "i" else numbers


def restored(arrays: dict[str, Any]) -> dict[str, Any]:
    """The fields of a trial from what `arrays_of` gave of it."""
    on_host = lambda value: jax.tree.map(np.array, value)  # noqa: E731
    fields = {name: on_host(value) if name in ON_HOST else value for name, value in arrays.items()}
    return fields | {name: REPORTS[name](**fields[name]) for name in REPORTS if name in fields}


def blank(env: Env, agent: Agent, rows: int) -> dict[str, Any]:
    """What `arrays_of` gives of a trial with everything in it; only its shapes are of interest."""
    numbers, flags = jnp.zeros(rows, int), jnp.zeros(rows, bool)
    action = env.spec.action.zeros((rows,))
    budget = jnp.zeros((rows, *env.spec.cost_shape))
    return {
        "budget": budget,
        "memory": remember(agent, rows, env.spec.trial_steps),
        "key": jax.random.key(0),
        "token": first_tokens(env, env.spec.observation.zeros((rows,)), budget),
        "action": action,
        "fallback": action[0],
        "stop": {"stopped": flags, "steps": numbers, "fallbacks": numbers, "episodes": numbers},
        "guard": {"risk": jnp.zeros(rows), "stepped_in": flags, "steps": numbers, "interventions": numbers},
    }

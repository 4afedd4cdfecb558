"""Who can be evaluated: released policies by name or path, and the reference lines by name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safeicrl.config import env_from_plain
from safeicrl.envs.api import Env
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import UserError, unknown_name
from safeicrl.evaluate import with_options
from safeicrl.policy import load_policy
from safeicrl.reference import ExplorerAgent, PlannerAgent, RandomAgent
from safeicrl.trial import Agent


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An agent on an environment, and how to label its results."""

    label: str
    env: Env
    agent: Agent
    meta: dict[str, Any]


def _in_room(make: Callable[..., Agent], env: Env) -> Agent:
    if not isinstance(env, SafeDarkRoom):
        raise UserError(f"{make.__name__} plans in SafeDarkRoom only, not in {type(env).__name__}")
    return make(env=env)


REFERENCES: dict[str, Callable[[Env], Agent]] = {
    "random": lambda env: RandomAgent(action=env.spec.action),
    "explorer": lambda env: _in_room(ExplorerAgent, env),
    "planner": lambda env: _in_room(PlannerAgent, env),
}

DESCRIPTIONS = {
    "random": "uniform random actions",
    "explorer": "knows the rules, not the room; never breaks its budget",
    "planner": "sees the room: the upper bound",
}


def reference(name: str, env: Env, *, wipe: bool = False) -> Contender:
    """A reference line on `env`."""
    if name not in REFERENCES:
        raise unknown_name("agent", name, REFERENCES)
    agent, how = with_options(env, REFERENCES[name](env), wipe=wipe)
    return Contender(label=_label(name, wipe), env=env, agent=agent, meta={"agent": name, **how})


def released(
    name_or_path: str,
    *,
    env_args: dict[str, Any] | None = None,
    temperature: float | None = None,
    greedy: bool = False,
    wipe: bool = False,
) -> Contender:
    """A released policy, on its own environment or on one with other parameters (`env_args`)."""
    policy = load_policy(name_or_path, temperature=temperature, greedy=greedy)
    described = policy.card["env"]
    env = env_from_plain(described["name"], {**described["parameters"], **(env_args or {})})
    for what in ("observation", "action"):
        theirs, ours = (getattr(e.spec, what) for e in (policy.env, env))
        if theirs != ours:
            raise UserError(f"the policy's {what} space is {theirs}, this environment's is {ours}")
    agent, how = with_options(env, policy.agent, wipe=wipe)
    label = str(policy.card.get("name") or Path(name_or_path).stem)
    meta = {"agent": str(name_or_path), "card": policy.card, **how}
    return Contender(label=_label(label, wipe), env=env, agent=agent, meta=meta)


def _label(name: str, wipe: bool) -> str:
    return f"{name}, context wiped" if wipe else name

"""Who can be evaluated: released policies by name or path, and reference agents by name."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safeicrl.agents.api import Agent, WipedAgent, adapts, with_options
from safeicrl.agents.reference import ExplorerAgent, PlannerAgent, RandomAgent
from safeicrl.budgets import Ranges, Reserve, ranges_of
from safeicrl.envs.api import Env
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.wrappers import Wrapped
from safeicrl.errors import Approximation, UserError, check_budget, check_integer, unknown_name
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.files import RECIPE
from safeicrl.policies.catalogue import HUB, SEED, changed_env, run_policies, shipped_name
from safeicrl.policies.policy import Policy, load_policy


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An agent on an environment, and how to label its results."""

    label: str
    env: Env
    agent: Agent
    meta: dict[str, Any]
    policy: Policy | None = None  # if it is a released one: knows what it was trained on

    def evaluate(self, *, budgets: Ranges | None = None, episodes: int | None = None, **settings: Any) -> Results:
        """`evaluate.evaluate` under its own label; warns about approximate physics and what is beyond training."""
        if what := getattr(self.env, "approximation", None):
            real = "'args=[]'" if isinstance(self.env, Wrapped) else "engine=auto"
            words = f"evaluated with {what}; --env-args {real} takes the real one"
            warnings.warn(words, Approximation, stacklevel=2)
        if self.policy is not None:
            spec = self.env.spec
            given = budgets or spec.test_budget
            # [bound]; with several costs [bound, cost]
            asked = check_budget(ranges_of(given, spec.costs, "budgets")).T if spec.several else check_budget(given)
            # with its context wiped, every episode is the first one of a trial
            count = 1 if isinstance(self.agent, WipedAgent) else episodes or spec.episodes
            self.policy.warn_beyond(budgets=asked, episodes=count, steps=spec.max_steps)
        settings = {"label": self.label, **settings}
        return evaluate(self.env, self.agent, budgets=budgets, episodes=episodes, meta=self.meta, **settings)

    def adapting(self, *, fresh_episodes: int | None = None, updates: int | None = None) -> "Contender":
        """The same one with another number of fresh episodes per update, or with at most this many updates."""
        given = {"fresh_episodes": fresh_episodes, "updates": updates}
        changes = {name: check_integer(name, value, 0) for name, value in given.items() if value is not None}
        if changes and not adapts(self.agent):
            what = ", ".join(f"{name} {value}" for name, value in changes.items())
            raise UserError(f"{self.label} does not update its parameters: leave out {what}")
        return replace(self, agent=replace(self.agent, **changes)) if changes else self  # type: ignore[type-var]


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
    """A reference agent on `env`."""
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
    risk: float | None = None,
    guard: bool = True,
    reserve: Reserve | None = None,
    brake: float | None = None,
    settle_after: int | None = None,
) -> Contender:
    """A released policy, on its own environment or on one with other parameters (`env_args`)."""
    policy = load_policy(
        name_or_path, temperature=temperature, greedy=greedy, risk=risk, guard=guard, reserve=reserve,
        brake=brake, settle_after=settle_after,
    )  # fmt: skip
    env = changed_env(policy.card, env_args or {})
    agent, how = with_options(env, policy.agent, wipe=wipe, settle_after=settle_after)
    label = _label(str(policy.card.get("name") or _name(Path(name_or_path))), wipe)
    meta = {"agent": str(name_or_path), "card": policy.card, **how}
    return Contender(label=label, env=env, agent=agent, meta=meta, policy=policy)


def released_seeds(name_or_path: str, **options: Any) -> dict[str, Contender]:
    """`released`, by name. For a run folder: the best policy of every seed, with one label for all."""
    path = Path(name_or_path)
    if shipped_name(name_or_path) is not None or not path.is_dir() or (path / HUB).exists():
        return {name_or_path: released(name_or_path, **options)}
    files = run_policies(path)
    return {f"seed {seed}": released(str(path), **options) for seed, path in files.items()}


def _name(path: Path) -> str:
    """The name of a policy whose card has none: its file's, or that of its run."""
    path = path.resolve()
    if SEED.fullmatch(path.stem) or (path.parent / RECIPE).exists() or path.name == HUB:
        path = path.parent
    return path.name if path.is_dir() else path.stem


def _label(name: str, wipe: bool) -> str:
    return f"{name}, context wiped" if wipe else name

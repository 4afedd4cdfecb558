"""Who can be watched: the worlds, and the agents that play each of them."""

import functools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from safeicrl.agents.api import Agent, has_guard, with_options
from safeicrl.envs.api import Env, PyTree, refuse_several
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import nicks
from safeicrl.errors import UserError
from safeicrl.policies.catalogue import policy_names
from safeicrl.policies.contenders import DESCRIPTIONS, reference
from safeicrl.policies.policy import Policy, load_policy
from safeicrl.show.play.messages import MAX_SIDE, Drawn
from safeicrl.show.play.scenes import Scene, scene_of
from safeicrl.show.play.stage import Stage
from safeicrl.show.shoot import unwrapped

SUMMARY = 240  # characters of an agent's description on the page


@dataclass(frozen=True, kw_only=True)
class Actor:
    """An agent on the list: what to say of it, and how to make it."""

    summary: str
    make: Callable[[], Agent]
    guard: bool = False  # whether a guard watches it


@dataclass(frozen=True, kw_only=True)
class World:
    """One environment and its agents."""

    title: str
    env: Env
    scene: Scene
    agents: dict[str, Actor] = field(default_factory=dict)

    @property
    def budgets(self) -> tuple[float, float]:
        """Those of training: the widest range that the policies know."""
        return self.env.spec.bounds("train")

    @property
    def first(self) -> str:
        """The agent that the page begins with: one with a guard, if there is one."""
        return next((name for name, actor in self.agents.items() if actor.guard), next(iter(self.agents)))

    def check_drawn(self, room: Drawn) -> None:
        """Raise `Refused` unless such a room can be played here."""
        self.scene.drawn_task(room)

    def task(self, wanted: Drawn | int) -> PyTree:
        """The task that was drawn, or the one of the test split that a seed stands for."""
        if isinstance(wanted, Drawn):
            return self.scene.drawn_task(wanted)
        return _sample(self.env)(jax.random.key(wanted))  # type: ignore[arg-type]

    def stage(self, agent: str) -> Stage:
        """The agent with its programs compiled; takes seconds."""
        stage = Stage(self.env, self.agents[agent].make(), self.scene)
        stage.warm(self.task(0))
        return stage

    def describe(self) -> dict[str, Any]:
        """What the page must know."""
        spec = self.env.spec
        return {
            "title": self.title,
            "scene": self.scene.describe(),
            "budgets": list(spec.train_budget),
            "unit": spec.cost_unit,
            "episodes": spec.episodes,
            "steps": spec.max_steps,
            "first": self.first,
            "agents": {
                name: {"summary": actor.summary, "guard": actor.guard} for name, actor in self.agents.items()
            },
        }


@functools.lru_cache(maxsize=16)
def _sample(env: Env) -> Callable[[jax.Array], PyTree]:
    return jax.jit(lambda key: env.sample_task(key, "test"))


def worlds(policies: Sequence[str] = (), *, shipped: bool = True) -> tuple[dict[str, World], list[str]]:
    """The worlds of the given policies (names or paths) and of those that ship, by name.

    Also returns why shipped policies are missing, where MuJoCo is not installed.
    """
    found: dict[str, World] = {}
    missing = []
    for name in [*policies, *(policy_names() if shipped else ())]:
        try:
            policy = load_policy(name)
        except UserError as error:
            if name in policies:
                raise
            missing.append(f"{name}: {error}")
            continue
        _check(name, policy.env)
        _add_policy(found, name if name in policy_names() else Path(name).stem, policy)
    for world in found.values():
        _add_references(world)
    return dict(sorted(found.items(), key=lambda item: item[1].scene.kind != "room")), missing


def _check(name: str, env: Env) -> None:
    """Refuse what the page cannot show."""
    refuse_several(env.spec, f"play, asked to show {name},")
    if hasattr(env, "restart"):  # it lives on the host, where it cannot be held while its neighbours move
        raise UserError(f"play cannot show {name}: its environment comes from Gymnasium and cannot be paused")
    if isinstance(unwrapped(env), SafeDarkRoom) and unwrapped(env).size > MAX_SIDE:
        raise UserError(f"play shows rooms of at most {MAX_SIDE} cells per side, {name} is for a larger one")


def _add_policy(found: dict[str, World], name: str, policy: Policy) -> None:
    """To the world that it was made for. Equal environments are one world."""
    known = next((world for world in found.values() if world.env == policy.env), None)
    if known is None:
        own = policy.card["env"]["name"]
        title = {full: nick for nick, full in nicks().items()}.get(own, own).replace("-", " ").capitalize()
        others = sum(other.title.startswith(title) for other in found.values())
        if others:
            own, title = f"{own}-{others + 1}", f"{title} {others + 1}"
        found[own] = known = World(title=title, env=policy.env, scene=scene_of(policy.env))
    text = textwrap.shorten(str(policy.card.get("description") or "a policy"), SUMMARY, placeholder=" …")
    guarded = has_guard(policy.agent)
    same = sum(other.split(" (")[0] == name for other in known.agents)
    name = f"{name} ({same + 1})" if same else name
    known.agents[name] = Actor(summary=text, make=lambda: policy.agent, guard=guarded)
    if guarded:
        without = functools.partial(_without_guard, policy)
        known.agents[f"{name}, guard off"] = Actor(summary=f"{text} Its guard is switched off.", make=without)


def _without_guard(policy: Policy) -> Agent:
    return with_options(policy.env, policy.agent, guard=False)[0]


def _add_references(world: World) -> None:
    """The reference agents that play such a world."""
    env = unwrapped(world.env)
    if env is not world.env:
        return
    for name in ("explorer", "planner", "random") if isinstance(env, SafeDarkRoom) else ("random",):
        world.agents[name] = Actor(summary=DESCRIPTIONS[name], make=functools.partial(_reference, name, env))


def _reference(name: str, env: Env) -> Agent:
    return reference(name, env).agent

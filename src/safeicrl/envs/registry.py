"""The worlds by name: how to make one, describe it, and make it again from its description.

One table holds all that the rest of the library knows about a world. Classes are named, not imported: a list of
the worlds needs neither JAX nor MuJoCo.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safeicrl.config import from_plain, load_object
from safeicrl.errors import UserError, unknown_name
from safeicrl.files import parse_json
from safeicrl.plugins import HINT, load_entry_points

if TYPE_CHECKING:
    from safeicrl.envs.api import Env

Maker = Callable[..., "Env"]


@dataclass(frozen=True, kw_only=True)
class World:
    """One environment of the library."""

    maker: str | Maker  # what makes it, or where that lives: "module:class"
    summary: str = ""  # one line for `safeicrl list`; the maker's docstring where empty
    nick: str | None = None  # short name on the command line: `safeicrl demo point`
    gym_id: str | None = None  # for `gymnasium.make`
    face: str = "Face"  # class in envs/gym.py: the world's tasks, frames and info behind Gymnasium's interface

    def load(self) -> Maker:
        """What makes the environment; imports it first where necessary."""
        return load_object(self.maker) if isinstance(self.maker, str) else self.maker


WORLDS: dict[str, World] = {
    "safe-dark-room": World(
        maker="safeicrl.envs.dark_room:SafeDarkRoom",
        summary="A dark grid with a hidden goal and hidden obstacles.",
        nick="room",
        gym_id="safeicrl/SafeDarkRoom-v0",
        face="DarkRoomFace",
    ),
    "safe-dark-point": World(
        maker="safeicrl.envs.dark_mujoco:SafeDarkPoint",
        summary="A point robot in an arena with a hidden goal and hidden hazards.",
        nick="point",
        gym_id="safeicrl/SafeDarkPoint-v0",
        face="DarkMujocoFace",
    ),
    "safe-dark-car": World(
        maker="safeicrl.envs.dark_mujoco:SafeDarkCar",
        summary="A car in an arena with a hidden goal and hidden hazards.",
        nick="car",
        gym_id="safeicrl/SafeDarkCar-v0",
        face="DarkMujocoFace",
    ),
    "safe-velocity-half-cheetah": World(
        maker="safeicrl.envs.safe_velocity:SafeVelocityHalfCheetah",
        summary="HalfCheetah on a track with a hidden speed limit.",
        nick="half-cheetah",
        gym_id="safeicrl/SafeVelocityHalfCheetah-v0",
        face="VelocityFace",
    ),
    "safe-velocity-ant": World(
        maker="safeicrl.envs.safe_velocity:SafeVelocityAnt",
        summary="Ant on a plane with a hidden speed limit.",
        nick="ant",
        gym_id="safeicrl/SafeVelocityAnt-v0",
        face="VelocityFace",
    ),
    "workshop": World(
        maker="safeicrl.envs.workshop:Workshop",
        summary="A tiny world with two costs, heat and noise, and a known optimum.",
    ),
    # Environments made from another one (wrappers.py).
    "fixed-task": World(
        maker="safeicrl.envs.wrappers:FixedTask", summary="One task of another environment, with one cost limit."
    ),
    "revealed": World(
        maker="safeicrl.envs.wrappers:Revealed", summary="Another environment that tells its hidden task."
    ),
}


def register(name: str, make: Maker) -> None:
    """Make `make(**parameters)` available as `make_env(name, **parameters)`."""
    if name in WORLDS:
        raise UserError(f"environment {name!r} is registered already")
    WORLDS[name] = World(maker=make)


def register_with_gymnasium() -> None:
    """Make the worlds known to `gymnasium.make`, when Gymnasium is installed. Called when safeicrl is imported."""
    try:
        import gymnasium
    except ImportError:  # the core works without it
        return
    for name, world in WORLDS.items():
        if world.gym_id is not None and world.gym_id not in gymnasium.registry:
            # No max_episode_steps: the environments truncate themselves, a TimeLimit on top would only hide it.
            gymnasium.register(
                id=world.gym_id,
                entry_point="safeicrl.envs.gym:GymEnv",
                vector_entry_point="safeicrl.envs.gym_vector:GymVectorEnv",
                kwargs={"env": name},
            )


def world_of(name: str) -> World:
    """The world called `name`."""
    if name not in WORLDS:
        load_entry_points()
    if name not in WORLDS:
        raise UserError(f"{unknown_name('environment', name, WORLDS)} {HINT}")
    return WORLDS[name]


def nicks() -> dict[str, str]:
    """Short name → environment, for the worlds that have one."""
    return {world.nick: name for name, world in WORLDS.items() if world.nick is not None}


def parameters_of(name: str) -> set[str] | None:
    """Names of the parameters an environment takes; None when its maker does not say."""
    make = world_of(name).load()
    return {field.name for field in dataclasses.fields(make)} if dataclasses.is_dataclass(make) else None


def make_env(name: str, /, **parameters: Any) -> "Env":
    """Build a registered environment; a parameter may be called `name` too."""
    known = parameters_of(name)
    for parameter in parameters:
        if known is not None and parameter not in known:
            raise unknown_name(f"parameter of {name}", parameter, known)
    return _checked(world_of(name).load()(**parameters), name)


def _checked(env: "Env", name: str) -> "Env":
    """Return what a maker made if it has a `spec`."""
    if "spec" not in dir(env):
        raise UserError(f"environment {name!r} must have a spec, an EnvSpec: {type(env).__name__} has none")
    return env


def parse_parameters(pairs: Iterable[str], what: str) -> dict[str, Any]:
    """`size=5 split=test` as parameters for `make_env`; lists become tuples, since environments must hash."""
    parameters = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{what} takes name=value pairs, got {text!r}")
        try:
            parsed = parse_json(value)
        except ValueError:
            parsed = value
        parameters[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return parameters


def env_to_plain(env: "Env") -> dict[str, Any]:
    """The environment's registered name and parameters: what `env_from_plain` needs to build it again."""
    name = name_of(env) or type(env).__name__
    return {"name": name, "parameters": dataclasses.asdict(env) if dataclasses.is_dataclass(env) else {}}  # type: ignore[arg-type]


def env_from_plain(name: str, parameters: dict[str, Any]) -> "Env":
    """The environment that `env_to_plain` described, from JSON values."""
    make = world_of(name).load()
    if isinstance(make, type) and dataclasses.is_dataclass(make):
        return _checked(from_plain(make, parameters, name), name)  # type: ignore[arg-type]
    return _checked(make(**parameters), name)


def name_of(env: "Env") -> str | None:
    """The name under which an environment's class is registered; None when it is not."""
    if (own := getattr(env, "registered", None)) in WORLDS:  # one of from_gymnasium, which are all of one class
        return own
    kind = type(env)
    where = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, world in WORLDS.items() if world.maker in (kind, where)), None)

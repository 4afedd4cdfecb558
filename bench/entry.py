"""What it costs a robot to drive into a hazard that it does not know.

python bench/entry.py          Point and Car (Car in the plane) → results/lab/point/entry.json

It comes from afar at a steady thrust and meets the hazard anywhere on its width. After the first step of cost it
drives on at full thrust or turns its thrust round, until it is outside. "The better" is the cheaper of the two
at each meeting, which a policy cannot know beforehand. Nobody steers.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import provenance
from rich.console import Console
from rich.table import Table

from safeicrl.envs.dark_mujoco import HAZARD_RADIUS, Arena, SafeDarkMujoco
from safeicrl.envs.registry import make_env
from safeicrl.files import write_json

# A thrust of Point and both wheels of Car; Point's is at its limit from 0.05 on.
WORLDS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "safe-dark-point": ({}, (0.005, 0.01, 0.02, 0.05)),
    "safe-dark-car": ({"engine": "planar"}, (0.002, 0.005, 0.01, 1.0)),
}
DISTANCES = (0.9, 1.2)  # metres to the hazard's centre
THRUST = {"point": jnp.array([1.0, 0.0]), "car": jnp.array([1.0, 1.0])}
AHEAD = {"point": jnp.array([[1.0, 0.0], [0.0, 1.0]]), "car": jnp.array([[0.0, -1.0], [1.0, 0.0]])}  # at yaw 0
FAR = 99.0  # where the goal is, and the other hazards
MEETINGS = 400
STEPS = 150  # more than an episode's: slow robots must get there


def drive(env: SafeDarkMujoco, thrust: float, place: jax.Array, reverses: bool) -> tuple[jax.Array, jax.Array]:
    """The cost of meeting a hazard at `place`, and the speed before, in metres per step."""
    wheels = THRUST[env.robot]
    hazards = jnp.full((env.hazards, 2), FAR).at[0].set(place @ AHEAD[env.robot])
    task = Arena(goal=jnp.full(2, FAR), hazards=hazards)
    state, seen = env.reset_to(*env._rest(0.0))

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        state, seen, total, speed, met, left = carry
        action = jnp.where(met, -1.0 if reverses else 1.0, thrust) * wheels
        state, after = env.step(jax.random.key(0), state, action, task)
        total = total + jnp.where(left, 0.0, after.cost)
        left = left | (met & (after.cost == 0))
        now = jnp.linalg.norm((after.observation - seen)[:2])
        speed = jnp.where(met | (after.cost > 0), speed, now)
        return (state, after.observation, total, speed, met | (after.cost > 0), left), None

    begin = (state, seen, jnp.float32(0), jnp.float32(0), jnp.array(False), jnp.array(False))
    (_, _, total, speed, _, _), _ = jax.lax.scan(step, begin, None, length=STEPS)
    return total, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/lab/point/entry.json"))
    args = parser.parse_args()
    about, rng, found = provenance(), np.random.default_rng(0), []
    offsets = rng.uniform(-HAZARD_RADIUS, HAZARD_RADIUS, MEETINGS)
    places = jnp.asarray(np.stack([rng.uniform(*DISTANCES, MEETINGS), offsets], -1), jnp.float32)
    table = Table(
        "robot", "metres per step", "drives on", "turns round", "the better", "better: above 10", "above 16"
    )
    for world, (parameters, thrusts) in WORLDS.items():
        env = make_env(world, **parameters)
        for thrust in thrusts:
            both = [
                jax.jit(jax.vmap(lambda place, env=env, t=thrust, r=reverses: drive(env, t, place, r)))(places)
                for reverses in (False, True)
            ]
            (on, speed), (back, _) = ((np.asarray(x) for x in each) for each in both)
            best = np.minimum(on, back)
            met = on > 0  # a corner may be cut between two simulation steps
            mean = {"speed": speed, "drives_on": on, "turns_round": back, "better": best}
            mean |= {"above_10": best > 10, "above_16": best > 16}
            line = {name: float(values[met].mean()) for name, values in mean.items()}
            found.append({"world": world, "thrust": thrust, "met": float(met.mean()), **line})
            styles = ("{:.3f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.0%}", "{:.0%}")
            table.add_row(world, *(style.format(x) for style, x in zip(styles, line.values(), strict=True)))
    Console().print(table)
    write_json(args.out, {**about, "meetings": MEETINGS, "distances": DISTANCES, "found": found})


if __name__ == "__main__":
    main()

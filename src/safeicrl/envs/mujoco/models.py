"""The MuJoCo models of the four robots: Point and Car built here, HalfCheetah and Ant from Gymnasium's assets.

A model knows nothing of tasks: goals, hazards and speed limits are data of the environments, so each model is
compiled once in a process. MuJoCo is an optional dependency, imported when the first model is asked for.
"""

import copy
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from safeicrl.errors import UserError, unknown_name

if TYPE_CHECKING:
    import mujoco

# With one, Ant moves differently (docs/environments.md); RK4 evaluates the forces four times.
EULER_STEPS = 2

# What every Safety-Gymnasium robot has in common: Euler and the Newton solver are MuJoCo's own defaults, the
# pyramidal cone, 100 iterations and a tolerance of 1e-8 too. Robots collide with the floor only: no two parts
# of one can touch, and leaving those pairs out spares MuJoCo the search.
_WORLD = """
<mujoco model="{name}">
  <compiler autolimits="true"/>
  <option timestep="{timestep}"/>
  <visual>
    <global offwidth="1280" offheight="1280"/>
    <headlight ambient=".4 .4 .4" diffuse=".6 .6 .6" specular="0 0 0"/>
  </visual>
  <asset>
    <texture name="floor" type="2d" builtin="checker" rgb1=".92 .92 .9" rgb2=".86 .86 .84" width="256"
      height="256"/>
    <material name="floor" texture="floor" texrepeat="6 6" texuniform="true"/>
  </asset>
  <default>
    <geom condim="6" density="{density}" contype="1" conaffinity="0" rgba=".34 .71 .91 1"/>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="3.5 3.5 .1" material="floor" contype="0" conaffinity="1" rgba="1 1 1 1"/>
    {body}
  </worldbody>
  <actuator>
    {actuator}
  </actuator>
</mujoco>
"""

# A sphere with a nose, sliding in the plane. The slides come before the hinge, so qpos = (x, y, yaw) in the
# world's frame; the original bakes the first yaw into the body and slides in that rotated frame. The damping
# is the same along both axes, so the motion in the world is the same.
_POINT_BODY = """
    <body name="robot" pos="0 0 .1">
      <joint name="x" type="slide" axis="1 0 0" damping=".01"/>
      <joint name="y" type="slide" axis="0 1 0" damping=".01"/>
      <joint name="yaw" type="hinge" axis="0 0 1" damping=".005"/>
      <geom name="body" type="sphere" size=".1" friction="1 .01 .01"/>
      <geom name="nose" type="box" pos=".1 0 0" size=".05 .05 .05" rgba=".1 .25 .4 1"/>
      <site name="thrust"/>
    </body>
"""
_POINT_ACTUATOR = """
    <motor name="thrust" site="thrust" gear=".3 0 0 0 0 0" ctrlrange="-1 1" forcerange="-.05 .05"/>
    <velocity name="turn" joint="yaw" gear=".3" kv="1" ctrlrange="-1 1" forcerange="-.05 .05"/>
"""

# Two driven wheels behind (+y) and a ball caster in front (−y). The wheels' axes point to −x: a car at rest is
# symmetric, so the order in which the solver meets the contacts decides where rounding first pushes it.
_CAR_BODY = """
    <body name="robot" pos="0 0 .1">
      <freejoint name="root"/>
      <geom name="hull" type="box" size=".1 .1 .05"/>
      <geom name="back" type="box" size=".1 .01 .05" pos="0 .15 0"/>
      <geom name="back_strut" type="box" size=".01 .025 .03" pos="0 .125 0"/>
      <geom name="front" type="box" size=".05 .01 .05" pos="0 -.165 0" rgba=".1 .25 .4 1"/>
      <geom name="front_strut" type="box" size=".05 .03 .01" pos="0 -.13 .04" rgba=".1 .25 .4 1"/>
      <body name="left" pos="-.1 .1 -.05">
        <joint name="left" type="hinge" axis="1 0 0" damping=".001"/>
        <geom name="left" type="cylinder" size=".05 .025" pos="-.03 0 0" zaxis="-1 0 0" rgba=".2 .2 .2 1"/>
      </body>
      <body name="right" pos=".1 .1 -.05">
        <joint name="right" type="hinge" axis="1 0 0" damping=".001"/>
        <geom name="right" type="cylinder" size=".05 .025" pos=".03 0 0" zaxis="-1 0 0" rgba=".2 .2 .2 1"/>
      </body>
      <body name="caster" pos="0 -.1 -.05">
        <joint name="caster" type="ball" damping=".001"/>
        <geom name="caster" type="sphere" size=".05" rgba=".2 .2 .2 1"/>
      </body>
    </body>
"""
_CAR_ACTUATOR = """
    <motor name="left" joint="left" ctrlrange="-1 1" forcerange="-.02 .02"/>
    <motor name="right" joint="right" ctrlrange="-1 1" forcerange="-.02 .02"/>
"""


@functools.cache
def load(robot: str) -> "mujoco.MjModel":
    """The compiled model of one of `ROBOTS`. Shared: nobody may write to it."""
    if robot not in ROBOTS:
        raise unknown_name("robot", robot, ROBOTS)
    try:
        import mujoco.batch
    except ImportError:
        raise UserError("this world needs MuJoCo 3.17 or later 3.x: pip install 'safeicrl[mujoco]'") from None

    model = ROBOTS[robot]()
    # A state that turns non-finite must stay so until the physics sees and reports it, not jump back to qpos0.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
    # One robot is one island of contacts: looking for more costs 6% of a Car's step.
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    return model


@functools.cache
def load_euler(robot: str) -> "mujoco.MjModel":
    """The model of `load` with Euler steps, `EULER_STEPS` of which are as long as one of its own."""
    import mujoco

    model = copy.copy(load(robot))
    model.opt.integrator = mujoco.mjtIntegrator.mjINT_EULER
    model.opt.timestep /= EULER_STEPS
    return model


def uses_rk4(model: "mujoco.MjModel") -> bool:
    """Whether MuJoCo integrates this model by RK4, which evaluates the forces four times per step."""
    import mujoco

    return model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4


def _point() -> "mujoco.MjModel":
    import mujoco

    return mujoco.MjModel.from_xml_string(
        _WORLD.format(name="point", timestep=0.002, density=1, body=_POINT_BODY, actuator=_POINT_ACTUATOR)
    )


def _car() -> "mujoco.MjModel":
    import mujoco

    model = mujoco.MjModel.from_xml_string(
        _WORLD.format(name="car", timestep=0.004, density=5, body=_CAR_BODY, actuator=_CAR_ACTUATOR)
    )
    # At the original's 1e-8 this MuJoCo's solver stops one iteration earlier than the recorded one in some
    # contacts (wheel angles off by 1e-6); from 1e-10 on, every recorded step agrees to 1e-14.
    model.opt.tolerance = 1e-10
    return model


def _half_cheetah() -> "mujoco.MjModel":
    import mujoco

    # The total mass is set as MuJoCo asks for: its deprecated attribute warns into a log file at every load.
    total_mass = 14
    xml = _gymnasium_asset("half_cheetah.xml").replace(f'settotalmass="{total_mass}"', "")
    model = mujoco.MjModel.from_xml_string(xml)
    mujoco.mj_setTotalmass(model, total_mass)
    mujoco.mj_setConst(model, mujoco.MjData(model))
    return model


def _ant() -> "mujoco.MjModel":
    import mujoco

    model = mujoco.MjModel.from_xml_string(_gymnasium_asset("ant.xml"))
    # Since MuJoCo 3.5 the margins of two geoms in contact add up; before, the larger one counted.
    model.geom("floor").margin[:] = 0.0
    return model


def _gymnasium_asset(name: str) -> str:
    package = importlib.util.find_spec("gymnasium")  # only its files are needed
    if package is None or package.origin is None:
        raise UserError("this robot is part of Gymnasium: pip install 'safeicrl[mujoco]'")
    return (Path(package.origin).parent / "envs" / "mujoco" / "assets" / name).read_text()


ROBOTS: dict[str, Callable[[], "mujoco.MjModel"]] = {
    "point": _point,
    "car": _car,
    "half_cheetah": _half_cheetah,
    "ant": _ant,
}

"""What tests/test_devices.py looks at: one process with eight virtual devices does it all, for imports are slow.

python tests/eight_devices.py FOLDER
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from standin import ROOM, TableAgent, TableAlgorithm, TableConfig

from safeicrl import devices
from safeicrl import train as trainer
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.mujoco import physics
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.files import write_json
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.train import EvalConfig, TrainConfig, train

EVALUATION = EvalConfig(every=0, tasks=13, rows=5)
NOTHING = np.ones((1, 4))
EMPTY = Results(returns=NOTHING, costs=NOTHING, lengths=NOTHING, budgets=np.ones(1), meta={"label": "none"})
TABLE = TableAlgorithm(env=ROOM, config=TableConfig())
SCARED = Scared(
    ROOM,
    ScaredConfig(
        rows=16, queue=1, segments=1, episodes=1, iterations=4,
        net=NetConfig(width=8, layers=1, heads=2, context=5), ppo=PPOConfig(epochs=1, minibatch=8),
    ),
)  # fmt: skip


def runs(folder: Path) -> None:
    """The same training on other numbers of devices, some of it interrupted."""

    def go(name: str, iterations: int, count: int, seeds: int = 1) -> None:
        config = TrainConfig(iterations=iterations, seeds=seeds, chunk=2, evaluation=EVALUATION)
        train(TABLE, config, out=folder / name, resume=(folder / name).exists(), devices=count)

    go("one", 4, 1)
    go("eight", 4, 8)
    trainer.evaluate = lambda *_, **__: EMPTY  # the others need not be evaluated for each number of devices
    go("four-one", 2, 4)
    go("four-one", 4, 1)
    go("one-four", 2, 1)
    go("one-four", 4, 4)
    go("two-seeds", 4, 4, seeds=2)


def scared() -> dict[str, float]:
    """One update of SCARED on one device and on eight: the largest difference, and the work of one device."""
    arrays, static = eqx.partition(SCARED.init(jax.random.key(0)), eqx.is_array)

    def update(arrays):
        state, metrics = SCARED.update(eqx.combine(arrays, static))
        return eqx.filter(state, eqx.is_array), metrics

    mesh = devices.make_mesh(8, rows=SCARED.row_axes)
    alone = jax.jit(update).lower(arrays).compile()
    with devices.using(mesh):
        place = devices.sharding(mesh)
        shared = jax.jit(update, in_shardings=place, out_shardings=place).lower(arrays).compile()
    floats = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]  # noqa: E731
    old, new = alone(arrays), shared(devices.spread(arrays, mesh))
    return {
        "difference": max(float(np.nanmax(np.abs(a - b))) for a, b in zip(floats(old), floats(new), strict=True)),
        "moved": max(float(np.abs(a - b).max()) for a, b in zip(floats(arrays), floats(old[0]), strict=True)),
        "share": shared.cost_analysis()["flops"] / alone.cost_analysis()["flops"],
    }


def evaluations() -> list[bool]:
    """Whether an evaluation has the same numbers on one device and on eight."""
    agent = TableAgent(table=jax.random.normal(jax.random.key(1), (9, 5)), size=3)
    one, eight = (evaluate(ROOM, agent, tasks=13, rows=5, devices=count) for count in (1, 8))
    return [bool((getattr(one, x) == getattr(eight, x)).all()) for x in ("returns", "costs", "lengths")]


def worlds() -> dict[str, list]:
    """MuJoCo through a callback on each of four devices; how many worlds each call had."""
    job, calls, host = physics.Job(robot="half_cheetah", substeps=1), [], physics._advance_host

    def counted(job, euler, packed):
        calls.append(len(packed))
        return host(job, euler, packed)

    physics._advance_host = counted
    angles = jnp.linspace(-0.1, 0.1, 8 * 9).reshape(8, 9)
    start = jax.vmap(lambda q: physics.RobotState.start(q, jnp.zeros(9)).physics)(angles)
    move = lambda state: jax.vmap(lambda s: physics.step(job, s, jnp.ones(6)))(state).states.qpos  # noqa: E731
    alone = jax.jit(move)(start)
    jax.block_until_ready(alone)
    with devices.using(devices.make_mesh(4, rows={})):
        shared = jax.jit(lambda state: move(devices.over_rows(state)))(start)
    jax.block_until_ready(shared)
    return {"alone": np.asarray(alone).tolist(), "shared": np.asarray(shared).tolist(), "calls": calls}


def main(folder: Path) -> None:
    runs(folder)
    write_json(folder / "found.json", {"scared": scared(), "evaluation": evaluations(), "worlds": worlds()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

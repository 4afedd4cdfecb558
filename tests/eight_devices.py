"""What tests/test_devices.py looks at: one process with eight virtual devices does it all, for imports are slow.

python tests/eight_devices.py FOLDER
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from standin import ROOM, TableAlgorithm, TableConfig

from safeicrl.envs.mujoco import physics
from safeicrl.evaluation.results import Results
from safeicrl.files import write_json
from safeicrl.machine import devices
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.training import best

EVALUATION = EvalConfig(every=0, tasks=13, rows=5)
NOTHING = np.ones((1, 4))
EMPTY = Results(returns=NOTHING, costs=NOTHING, lengths=NOTHING, budgets=np.ones(1), meta={"label": "none"})
TABLE = TableAlgorithm(env=ROOM, config=TableConfig())


def runs(folder: Path) -> None:
    """The same training on other numbers of devices, some of it interrupted."""

    def go(name: str, iterations: int, count: int, seeds: int = 1) -> None:
        config = TrainConfig(iterations=iterations, seeds=seeds, chunk=2, evaluation=EVALUATION)
        train(TABLE, config, out=folder / name, resume=(folder / name).exists(), devices=count)

    go("one", 6, 1)
    go("eight", 6, 8, seeds=2)  # two groups of four
    best.evaluate = lambda *_, **__: EMPTY  # the other need not be evaluated for each number of devices
    go("four-one-four", 2, 4)
    go("four-one-four", 4, 1)
    go("four-one-four", 6, 4)


def minibatch() -> dict[str, bool]:
    """What PPO does with its rows: a minibatch of rows of all devices, divided among them again."""
    rows, order = jnp.arange(16.0).reshape(16, 1), jnp.array([3, 15, 0, 9, 8, 1, 2, 12])

    def draw(rows, order):
        return devices.over_rows(devices.everywhere(devices.over_rows(rows) * 2)[order])

    mesh = devices.make_mesh(8, rows={"minibatch": 8})
    with devices.using(mesh):
        drawn = jax.jit(draw)(rows, order)
    same = bool((np.asarray(drawn) == np.asarray(draw(rows, order))).all())
    return {"same": same, "divided": [shard.data.shape for shard in drawn.addressable_shards] == [(1, 1)] * 8}


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
    write_json(folder / "found.json", {"minibatch": minibatch(), "worlds": worlds()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

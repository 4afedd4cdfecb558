"""Frozen task lists of each world: train, validation, test, and for the tracks a wide test list.

The tasks are stored as arrays, so that a list stays the same however a later version draws tasks. The SHA-256 of
its arrays is checked whenever a list is used, and is written into the results.
"""

import hashlib
import io
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.envs.api import Env, Key, PyTree, Split
from safeicrl.envs.registry import env_to_plain
from safeicrl.envs.safe_velocity import TRAIN_MULTIPLIERS
from safeicrl.envs.wrappers import Revealed
from safeicrl.errors import UserError, unknown_name
from safeicrl.files import atomic_write, read_json, write_json

FOLDER = Path(__file__).parent / "lists"
VERSION = 1  # of the lists; results of other versions are of other tasks
# name → split and seed. `evaluate` draws the tasks of seed 0 by default, and training evaluates on those of 1000.
LISTS: dict[str, tuple[Split, int]] = {"train": ("train", 2000), "validation": ("test", 1000), "test": ("test", 0)}
COUNTS = {"safe-dark-room": 1000, "safe-dark-point": 500}  # tasks in a list; 200 elsewhere
WIDE_PER_GAP = 6  # limits of the wide list between two neighbouring limits of training
# Parameters that do not decide what a task is.
OTHER = ("episodes", "max_steps", "macro_steps", "train_budget", "test_budget", "engine")


@dataclass(frozen=True, kw_only=True)
class TaskList:
    """A frozen list of tasks."""

    world: str
    name: str
    split: Split
    version: int
    sha256: str  # of the arrays
    tasks: PyTree  # [task, ...]

    @property
    def count(self) -> int:
        """The number of tasks."""
        return len(jax.tree.leaves(self.tasks)[0])

    def described(self) -> dict[str, Any]:
        """What results say about the list."""
        return {"world": self.world, "name": self.name, "version": self.version, "sha256": self.sha256}


def load_list(env: Env, name: str) -> TaskList:
    """The list `name` of the environment's world; refused if its arrays, or the environment, are not the list's."""
    inner = env.inner if isinstance(env, Revealed) else env
    plain = env_to_plain(inner)
    world = plain["name"]
    card = FOLDER / f"{world}.json"
    if not card.exists():
        raise UserError(f"{world} has no task lists: leave out --list, and choose tasks by --split and --seed")
    saved = read_json(card, "task list")
    if name not in saved["lists"]:
        raise unknown_name(f"task list of {world}", name, saved["lists"])
    mine = _shaping(plain["parameters"])
    for key, value in saved["parameters"].items():
        if mine[key] != value:
            raise UserError(f"the task lists of {world} are for {key}={value}, got {key}={mine[key]}")
    about = saved["lists"][name]
    with np.load(FOLDER / f"{world}.npz", allow_pickle=False) as file:
        leaves = [file[f"{name}.{index}"] for index in range(about["arrays"])]
    if digest(leaves) != about["sha256"]:
        raise UserError(f"the task list {name!r} of {world} was changed: its SHA-256 is not that of {card.name}")
    form = jax.eval_shape(lambda: inner.sample_task(jax.random.key(0), about["split"]))
    shapes, tree = jax.tree.flatten(form)
    arrays = [jnp.asarray(leaf, shape.dtype) for leaf, shape in zip(leaves, shapes, strict=True)]
    tasks = jax.tree.unflatten(tree, arrays)
    return TaskList(
        world=world, name=name, split=about["split"], version=saved["version"], sha256=about["sha256"], tasks=tasks
    )


def digest(leaves: list[np.ndarray]) -> str:
    """SHA-256 of arrays: their types, shapes and bytes."""
    found = hashlib.sha256()
    for leaf in leaves:
        found.update(f"{leaf.dtype.str}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


@eqx.filter_jit
def sample_tasks(env: Env, split: Split, keys: Key) -> PyTree:
    """One task for each key, [key, ...]."""
    return jax.vmap(partial(env.sample_task, split=split))(keys)


def evaluation_keys(seed: int) -> tuple[Key, Key]:
    """The key of an evaluation's tasks, and that of its trials."""
    task_key, run_key = jax.random.split(jax.random.key(seed))
    return task_key, run_key


def seeded_tasks(env: Env, split: Split, seed: int, count: int) -> PyTree:
    """The tasks of an evaluation with this seed, [count, ...]."""
    return sample_tasks(env, split, jax.random.split(evaluation_keys(seed)[0], count))


def write_lists(env: Env, folder: Path = FOLDER) -> Path:
    """Draw and write the lists of a world, once per version; see bench/task_lists.py."""
    plain = env_to_plain(env)
    count = COUNTS.get(plain["name"], 200)
    lists = {name: (split, seeded_tasks(env, split, seed, count)) for name, (split, seed) in LISTS.items()}
    if "multiplier" in plain["parameters"]:
        limits = wide_limits()
        lists["wide"] = ("test", jax.tree.map(lambda x: jnp.asarray(limits, x.dtype), lists["test"][1]))
    arrays: dict[str, Any] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, (split, tasks) in lists.items():
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tasks)]
        arrays |= {f"{name}.{index}": leaf for index, leaf in enumerate(leaves)}
        about[name] = {"split": split, "count": len(leaves[0]), "arrays": len(leaves), "sha256": digest(leaves)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    atomic_write(folder / f"{plain['name']}.npz", [buffer.getbuffer()])
    card = folder / f"{plain['name']}.json"
    write_json(card, {"version": VERSION, "parameters": _shaping(plain["parameters"]), "lists": about})
    return card


def wide_limits() -> np.ndarray:
    """Speed limits from the gaps between those of training, in the inner 80% of each gap."""
    random = np.random.default_rng(3000)
    gaps = pairwise(sorted(TRAIN_MULTIPLIERS))
    parts = [a + (b - a) * np.sort(random.uniform(0.1, 0.9, WIDE_PER_GAP)) for a, b in gaps]
    return np.round(np.concatenate(parts), 4)


def _shaping(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in OTHER}

"""Several accelerators for one run: JAX's own sharding, over one mesh with the axes `seeds` and `rows`.

Parameters, optimiser and replay are replicated; the rows of trials are divided among the devices (data parallel).
Where seeds train side by side, as many as possible get devices of their own, which need not talk to each other.
The functions inside compiled programs, `over_rows`, `everywhere` and `on_each`, do nothing without a mesh: on one
device a program is what it would be without this module. docs/devices.md has the reasons and the limits.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from safeicrl.errors import UserError, check_integer

T = TypeVar("T")

SEEDS, ROWS = "seeds", "rows"  # the mesh's axes


# -- which devices ------------------------------------------------------------------------------------------


def make_mesh(
    count: int | None = None,
    *,
    rows: Mapping[str, int] | None,
    seeds: int = 1,
    env: Any = None,
    processes: int = 1,
) -> Mesh | None:
    """A mesh of `count` devices of each of `processes` processes; None if that is one device.

    `rows` are the sizes of the axes that are divided, by the name of their option. None: the work can be divided by
    seeds only. Without `count`, it is the largest number of devices among which everything can be divided. An `env`
    that lives on the host (with `restart`, see trial.py) is stepped by one process, row by row: one device.
    """
    local = jax.local_devices()
    if hasattr(env, "restart"):
        if processes > 1 or (count or 1) > 1:
            raise UserError(f"{type(env).__name__} lives on one host and steps row by row: it takes --devices 1")
        return None
    if count is None:
        each = next(n for n in range(len(local), 0, -1) if n == 1 or not _misfit(n * processes, rows, seeds))
    else:
        each = check_integer("devices", count, 1)
        if each > len(local):
            raise UserError(f"--devices {each} is more than there are: {len(local)} ({local[0].device_kind})")
    if misfit := _misfit(each * processes, rows, seeds):
        raise UserError(misfit)
    if each * processes == 1:
        return None
    found = local[:each]
    if processes > 1:
        found = [device for index in range(processes) for device in jax.local_devices(index)[:each]]
    groups = math.gcd(seeds, len(found))
    shape = (groups, len(found) // groups)
    return Mesh(np.array(found).reshape(shape), (SEEDS, ROWS), axis_types=(AxisType.Auto, AxisType.Auto))


def _misfit(count: int, rows: Mapping[str, int] | None, seeds: int) -> str | None:
    """Why the work cannot be divided among `count` devices; None if it can."""
    share = count // math.gcd(seeds, count)  # devices of one seed
    if share > 1 and rows is None:
        only = "one device" if seeds == 1 else f"as many devices as divide its {seeds} seeds"
        return f"this runs on {only}, got {count}: it has no rows to divide (docs/devices.md)"
    for name, size in (rows or {}).items():
        if size % share:
            return f"{name} must be a multiple of the {share} devices that share it, got {size}"
    return None


def count(mesh: Mesh | None) -> int:
    """The number of devices."""
    return 1 if mesh is None else mesh.size


def using(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Programs that are traced inside this context are divided."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def padded(rows: int, mesh: Mesh | None) -> int:
    """The smallest number of rows, at least `rows`, that can be divided."""
    share = 1 if mesh is None else mesh.shape[ROWS]
    return -(-rows // share) * share


# -- inside compiled programs -------------------------------------------------------------------------------


def over_rows(tree: T) -> T:
    """`tree`, whose arrays are [row, ...], divided among the devices."""
    return _constrained(tree, P(ROWS))


def everywhere(tree: T) -> T:
    """`tree`, whole on every device of its seed."""
    return _constrained(tree, P())


def divided() -> bool:
    """Whether the program that is being traced runs on several devices."""
    return ROWS in jax.sharding.get_abstract_mesh().axis_names


def _constrained(tree: T, spec: P) -> T:
    if not divided():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec) if hasattr(x, "shape") else x, tree)


def on_each(function: Callable[[jax.Array], jax.Array], worlds: jax.Array) -> jax.Array:
    """`function` of [world, ...], called on each device for its own worlds: for a callback to the host.

    Otherwise JAX would send all worlds to the first device's host. The worlds are those of all seeds, seed by seed.
    A number of them that cannot be divided, such as the one that `custom_vmap` traces first, goes that way.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if ROWS not in mesh.axis_names or len(worlds) % mesh.size:
        return function(worlds)
    spec = P((SEEDS, ROWS))
    return jax.shard_map(function, in_specs=spec, out_specs=spec, check_vma=False)(worlds)


# -- between programs ---------------------------------------------------------------------------------------


def sharding(mesh: Mesh, seeds: int = 1) -> NamedSharding:
    """Of a state: the same on all devices, or [seed, ...] divided among them."""
    return NamedSharding(mesh, P() if seeds == 1 else P(SEEDS))


def spread(tree: T, mesh: Mesh | None, seeds: int = 1) -> T:
    """The arrays of `tree` on the devices of the mesh; every process has the same ones."""
    if mesh is None:
        return tree
    place = sharding(mesh, seeds)

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if place.is_fully_addressable:
            return jax.device_put(leaf, place)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, place, lambda part: whole[part])

    return jax.tree.map(put, tree)


def local(tree: T, mesh: Mesh | None) -> T:
    """The arrays of `tree`, which lie on the mesh, as arrays of this process alone. All processes must call it."""
    if mesh is None or sharding(mesh).is_fully_addressable:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    arrays = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    whole = jax.jit(_same, out_shardings=NamedSharding(mesh, P()))(arrays)
    mine = [whole[place].addressable_shards[0].data if place in whole else x for place, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, mine)


def _same(tree: T) -> T:
    return tree

"""Arrays on disk: the whole train state, or a released policy, in one safetensors file.

The header holds JSON metadata and a SHA-256 of everything else. A file that is not exactly as it was written is
refused with one line. Arrays are named by their path in the pytree; nothing is ever unpickled.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from safeicrl.envs.api import PyTree
from safeicrl.errors import UserError
from safeicrl.files import atomic_write, parse_json, plain
from safeicrl.version import VERSION

FORMAT = 1  # one more when older files can no longer be read
HEADER_BYTES = 2**27  # the longest header that safetensors allows, about

# safetensors' own NumPy functions do not know bfloat16
DTYPES = {
    "BOOL": np.bool_, "BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}  # fmt: skip


def save(path: Path, tree: PyTree, *, kind: str, meta: dict[str, Any]) -> None:
    """Write the array leaves of `tree` and `meta` to `path`; the old file stays until the new one is complete."""
    arrays = {name: _to_numpy(leaf) for name, leaf in named_arrays(tree).items()}
    text = json.dumps(plain({**meta, "safeicrl": VERSION}), sort_keys=True)
    header = {"format": str(FORMAT), "kind": kind, "meta": text, "sha256": _digest(arrays, text)}
    atomic_write(path, _serialise(arrays, header))


def load(path: Path, like: PyTree, *, kind: str, any_shape: bool = False) -> tuple[PyTree, dict[str, Any]]:
    """Read what `save` wrote into a tree like `like` (arrays or their shapes); its other leaves stay.

    With `any_shape` the arrays may have other shapes than those of `like`. Returns the tree and the metadata.
    """
    arrays, meta = read(path, kind=kind)
    leaves, structure = tree_flatten_with_path(like)
    wanted = named_arrays(like)
    _check_names(path, wanted, arrays)
    restored = [
        _from_numpy(path, name, arrays[name], leaf, any_shape) if (name := _name(where)) in wanted else leaf
        for where, leaf in leaves
    ]
    return tree_unflatten(structure, restored), meta


def read(path: Path, *, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The named arrays and the metadata of a file of this `kind`, checked."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no {kind} at {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    header = _header(path, data, kind)
    try:
        arrays = {name: _view(entry) for name, entry in safetensors.deserialize(data)}
    except Exception:  # safetensors raises its own and builtin errors alike on damaged bytes
        raise UserError(f"{path} is damaged and cannot be read as a {kind}") from None
    if _digest(arrays, header["meta"]) != header["sha256"]:
        raise UserError(f"{path} is damaged: its SHA-256 differs from the one written with it")
    try:
        return arrays, dict(parse_json(header["meta"]))
    except (ValueError, TypeError):
        raise UserError(f"{path} is not a {kind} of safeicrl: its metadata cannot be read") from None


def stored_digest(path: Path) -> str | None:
    """The SHA-256 that a file says it has, from its header alone; None if it says nothing."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return str(parse_json(file.read(min(length, HEADER_BYTES)))["__metadata__"]["sha256"])
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """The array leaves (or their shapes) of a pytree by path, e.g. `params.layers.0.weight`."""
    leaves, _ = tree_flatten_with_path(tree)
    named = [(_name(path), leaf) for path, leaf in leaves if hasattr(leaf, "shape")]
    if len({name for name, _ in named}) != len(named):
        raise ValueError("two arrays of this pytree have the same path")
    return dict(named)


def _name(path: tuple) -> str:
    return keystr(path, simple=True, separator=".") or "array"


def _header(path: Path, data: bytes, kind: str) -> dict[str, str]:
    """The metadata of a safetensors file, checked as far as that is possible without its arrays."""
    no = UserError(f"{path} is not a {kind} of safeicrl")
    if len(data) < 8:
        raise no
    (length,) = struct.unpack("<Q", data[:8])
    if not data[8:].startswith(b"{"):
        raise no
    try:
        entries = parse_json(data[8 : 8 + length])
        header = entries.pop("__metadata__")
        size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        form = header["format"]
    except (ValueError, KeyError, TypeError, AttributeError):
        if 8 + length > len(data) and b"safeicrl" in data:
            raise UserError(f"{path} is truncated") from None
        raise no from None
    if form != str(FORMAT):
        raise UserError(
            f"{path} has format {form}, this version of safeicrl ({VERSION}) reads format {FORMAT}; "
            f"use the version that wrote it"
        )
    if not all(isinstance(header.get(name), str) for name in ("kind", "meta", "sha256")):
        raise no
    if header["kind"] != kind:
        raise UserError(f"{path} is a {header['kind']}, not a {kind}")
    if len(data) < 8 + length + size:
        raise UserError(f"{path} is truncated: {len(data)} bytes of {8 + length + size}")
    return header


def _check_names(path: Path, wanted: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    for name in wanted:
        if name not in arrays:
            raise UserError(
                f"{path} has no array {name!r}: it was written by another model, configuration or version"
            )
    for name in arrays:
        if name not in wanted:
            raise UserError(f"{path} has an array {name!r} that this model or configuration does not have")


def _view(entry: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _serialise(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The safetensors format, array by array: no second copy in memory, and the same bytes for the same state."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from (_bytes(array) for array in arrays.values())


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _digest(arrays: dict[str, np.ndarray], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for chunk in _chunks(arrays):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(arrays: dict[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    for name, array in sorted(arrays.items()):
        yield f"{name} {array.dtype.name} {array.shape}".encode()
        yield _bytes(array)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_numpy(leaf: Any) -> np.ndarray:
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    return np.ascontiguousarray(np.asarray(data)).reshape(data.shape)  # ascontiguousarray makes [] into [1]


def _from_numpy(path: Path, name: str, array: np.ndarray, like: Any, any_shape: bool) -> jax.Array:
    expected = jax.eval_shape(jax.random.key_data, like) if _is_key(like) else like
    for what, found, wanted in (
        ("shape", array.shape, array.shape if any_shape else tuple(expected.shape)),
        ("type", array.dtype.name, np.dtype(expected.dtype).name),
    ):
        if found != wanted:
            raise UserError(f"{path}: array {name!r} has {what} {found}, expected {wanted}")
    # A copy: the trainer donates its state, which must not alias the file's bytes. (jnp.array would copy with a
    # program that is compiled for every shape.)
    values = jax.device_put(array.copy())
    return jax.random.wrap_key_data(values, impl=_key_impl(like)) if _is_key(like) else values


def _key_impl(like: Any) -> Any:
    """The random generator of a key array; `like` may be its shape only, so it is read from a traced stand-in."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]

"""A trial under way on disk: all that a policy remembers, to go on after a restart.

A context is one safetensors file with a SHA-256 (checkpoint.py). It is bound to the weights and the environment of
the policy that wrote it. What a file says is never trusted: its size is bounded before it is read, every array must
have the name, shape and type that the policy expects, and every number must be one that a trial can hold.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from safeicrl.envs.api import EnvSpec, PyTree
from safeicrl.errors import UserError, check_budget, check_integer, check_risk
from safeicrl.files import plain
from safeicrl.policies import checkpoint

MAX_ROWS = 4096  # of a batch: bounds the size of a file from a stranger
SPARE_BYTES = 2**20  # for a file's header
MOST = 2**30  # of any integer in a context; counters stay far below

Like = Callable[[int, list[str]], dict[str, Any]]  # the shapes of a context: rows and optional parts → pytree


def identity(agent: PyTree, described: dict[str, Any]) -> str:
    """A digest of a policy's weights and of what it was made for: whose context it is."""
    digest = hashlib.sha256(json.dumps(plain(described), sort_keys=True).encode())
    for name, leaf in sorted(checkpoint.named_arrays(agent).items()):
        array = np.ascontiguousarray(np.asarray(leaf))
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def save(path: Path, arrays: dict[str, Any], *, meta: dict[str, Any], policy: str) -> Path:
    """Write a context; `policy` is the identity of the policy that it belongs to."""
    rows = len(arrays["budget"])
    if rows > MAX_ROWS:
        raise UserError(f"a context has at most {MAX_ROWS} rows, this trial has {rows}")
    checkpoint.save(path, arrays, kind="context", meta={**meta, "policy": policy, "rows": rows})
    return path


def load(
    path: Path, like: Like, *, optional: tuple[str, ...], policy: str, spec: EnvSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `save` wrote for the same policy, checked: the arrays and the metadata."""
    most = MAX_ROWS * _size(like(1, list(optional))) + SPARE_BYTES
    try:
        size = path.stat().st_size
    except OSError:
        raise UserError(f"no context at {path}") from None
    if size > most:
        raise UserError(f"{path} has {size} bytes, more than any context of this policy")
    try:
        _, meta = checkpoint.read(path, kind="context")
        _check_meta(meta, optional)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):  # metadata that no `save` ever wrote
        raise UserError(f"{path} is damaged and cannot be read as a context") from None
    if meta["policy"] != policy:
        raise UserError(
            f"{path} was saved by another policy, for another environment, "
            "or with another `settle`, `settle_after` or `reserve`"
        )
    arrays, _ = checkpoint.load(path, like(meta["rows"], meta["has"]), kind="context")
    try:
        _check_values(arrays, spec)
    except UserError as error:
        raise UserError(f"{path} holds no trial: {error}") from None
    return arrays, meta


def _size(tree: PyTree) -> int:
    """Bytes of all arrays; a random key counts as one number, the header's share covers the rest."""
    return sum(int(np.prod(x.shape)) * getattr(x.dtype, "itemsize", 8) for x in jax.tree.leaves(tree))


def _check_meta(meta: Any, optional: tuple[str, ...]) -> None:
    if check_integer("rows", meta["rows"], 1) > MAX_ROWS:
        raise UserError(f"a context has at most {MAX_ROWS} rows, got {meta['rows']}")
    for name in ("batched", "warned"):
        if not isinstance(meta[name], bool):
            raise TypeError(name)
    if not (meta["batched"] or meta["rows"] == 1):
        raise ValueError("a single trial has one row")
    if meta["risk"] is not None:
        check_risk(meta["risk"])
    has = meta["has"]
    if not isinstance(has, list) or any(name not in optional for name in has):
        raise ValueError("unknown parts")
    if ("token" in has) != ("action" in has):
        raise ValueError("a token without its action")


def _check_values(arrays: dict[str, Any], spec: EnvSpec) -> None:
    """Refuse numbers that no trial can hold."""
    for name, leaf in checkpoint.named_arrays(arrays).items():
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        values = np.asarray(leaf).astype(np.float64)
        if not np.isfinite(values).all():
            raise UserError(f"{name} must be finite")
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) and (np.abs(values) > MOST).any():
            raise UserError(f"{name} must be at most {MOST}")
    check_budget(np.asarray(arrays["budget"]))
    if "fallback" in arrays:
        spec.action.check_action(np.asarray(arrays["fallback"]))
    if "token" in arrays:
        token = arrays["token"]
        for seen in (token.observation, token.previous):
            spec.observation.check_observation(np.asarray(seen).astype(np.float32))
        for action in np.asarray(arrays["action"]):
            spec.action.check_action(action)
        counts = {"time": token.time, "episode": token.episode, "cost": token.cost}
        for name, count in counts.items():
            if (np.asarray(count) < 0).any():
                raise UserError(f"{name} must be ≥ 0")

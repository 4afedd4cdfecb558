"""Learning histories on disk: what learners did while they learned, episode by episode.

A folder holds `histories.json` (what was collected, by which learner, how much of it is complete) and one `.npy`
per array. Arrays have their full size from the start and are memory-mapped when opened. Histories are added in
groups, stretch by stretch: the arrays first, `histories.json` when the group is complete. A kill at any moment
costs at most the present group, which is then collected again to the same bytes.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.envs.api import Env, EnvSpec
from safeicrl.envs.faults import broken_rule, keeps_promise
from safeicrl.envs.registry import env_from_plain, name_of
from safeicrl.errors import UserError, check_integer
from safeicrl.files import make_folder, plain, read_json, temporary, write_json

FORMAT = "safeicrl learning histories"
VERSION = 1  # one more when older folders can no longer be read
CARD = "histories.json"
STEPWISE = ("observation", "action", "reward", "cost", "done")  # [history, step, ...]
ARRAYS = (*STEPWISE, "final", "limit", "task")
CONTINUES, TERMINATED, TRUNCATED = range(3)  # what `done` says


@dataclass(frozen=True, kw_only=True)
class Histories:
    """Opened histories, read-only. A window along `step` never crosses two of them.

    A history is one learner on one task, from its first step to its last. Episodes that the learner ran side by
    side are stored one after another, each whole, in the order of their ends. Only the last episode of a history
    may be cut by the end of the recording (`done` is 0 there).
    """

    folder: Path
    meta: dict[str, Any]  # histories.json
    env: Env  # the environment whose tasks were learned
    observation: np.ndarray  # [history, step, obs] before the action: uint8 (Grid) or float32 (Box)
    action: np.ndarray  # [history, step] uint8, or [history, step, action] float32
    reward: np.ndarray  # [history, step] uint8 where all are small whole numbers, else float32
    cost: np.ndarray  # [history, step] likewise
    done: np.ndarray  # [history, step] uint8: 0 the episode goes on, 1 terminated, 2 truncated
    final: np.ndarray  # [history, steps // max_steps, obs] last observation of the i-th truncated episode, then 0
    limit: np.ndarray  # [history] float32, cost limit of the learner
    task: np.ndarray  # [history] int32, which of the tasks; histories of one task differ in limit

    def episodes(self, history: int) -> "EpisodeSums":
        """Sums of a history's whole episodes, in order."""
        ends = np.flatnonzero(self.done[history]) + 1
        starts = np.concatenate([[0], ends[:-1]]).astype(int)
        total = lambda values: np.add.reduceat(values[: ends[-1]].astype(np.float64), starts)  # noqa: E731
        if not len(ends):
            return EpisodeSums(starts=starts[:0], ends=ends, returns=np.zeros(0), costs=np.zeros(0))
        returns, costs = total(self.reward[history]), total(self.cost[history])
        return EpisodeSums(starts=starts, ends=ends, returns=returns, costs=costs)


@dataclass(frozen=True, kw_only=True)
class EpisodeSums:
    """Where the episodes of a history lie, and their undiscounted sums; all [episode]."""

    starts: np.ndarray  # first step
    ends: np.ndarray  # one past the last step
    returns: np.ndarray
    costs: np.ndarray


# -- reading ------------------------------------------------------------------------------------------------


def open_histories(
    folder: str | Path, *, env: Env | None = None, partial: bool = False, verify: bool = False
) -> Histories:
    """The histories in `folder`, mapped into memory.

    With `env`, histories of any other environment are refused. An unfinished collection is refused too; `partial`
    takes its complete histories. Sizes are always checked; `verify` reads everything and checks the checksums.
    """
    folder = Path(folder)
    meta = _read_card(folder)
    own = _env_of(folder, meta, env)
    count, complete = meta["histories"], meta["complete"]
    if complete == 0 or (complete < count and not partial):
        raise UserError(f"{folder} is unfinished, {complete} of {count} histories: run its collect command again")
    arrays = {name: _map(folder, name, meta)[:complete] for name in ARRAYS}
    if verify:
        _verify(folder, meta, arrays)
    return Histories(folder=folder, meta=meta, env=own, **arrays)


def _read_card(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"no learning histories at {folder}")
    meta = read_json(folder / CARD, "card of learning histories")
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(f"{folder / CARD} is not a card of learning histories")
    if meta.get("version") != VERSION:
        raise UserError(
            f"{folder} holds learning histories of version {meta.get('version')}, this library reads {VERSION}"
        )
    needed = ("env", "histories", "complete", "arrays", "groups")
    missing = [name for name in needed if name not in meta]
    if missing:
        raise UserError(f"{folder / CARD} is incomplete: {missing[0]!r} is missing")
    try:
        _check_card(meta)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / CARD} is not a card of learning histories: {error!r}") from None
    return meta


def _check_card(meta: dict[str, Any]) -> None:
    """Raise unless a card's numbers are of the right type and fit together."""
    count = check_integer("histories", meta["histories"], 1)
    check_integer("complete histories", meta["complete"], 0, count)
    str(meta["env"]["name"]), dict(meta["env"]["parameters"])
    for entry in meta["arrays"].values():
        check_integer("bytes of an array", entry["bytes"], 0, 2**60)
        list(entry["shape"]), str(entry["dtype"])
    for group in meta["groups"]:
        check_integer("first history of a group", group["first"], 0, count)
        check_integer("histories of a group", group["count"], 0, count)
        str(group["sha256"])


def _env_of(folder: Path, meta: dict[str, Any], env: Env | None) -> Env:
    """The environment of the histories: `env` if they are its own, which then need not be registered."""
    name, parameters = meta["env"]["name"], meta["env"]["parameters"]
    if env is None:
        return env_from_plain(name, parameters)
    known = name_of(env) or type(env).__name__
    if known != name:
        raise UserError(f"{folder} holds histories of {name}, not of {known}")
    given: dict[str, Any] = plain(asdict(env)) if is_dataclass(env) and not isinstance(env, type) else {}
    for key in given.keys() | parameters.keys():
        if given.get(key) != parameters.get(key):
            raise UserError(
                f"{folder} holds histories of {name} with {key} {parameters.get(key)}, not {given.get(key)}"
            )
    return env


def _map(folder: Path, name: str, meta: dict[str, Any]) -> np.ndarray:
    path = folder / f"{name}.npy"
    expected = meta["arrays"].get(name)
    if expected is None or not path.exists():
        raise UserError(f"{folder} has no {name}.npy: these histories are incomplete")
    size = path.stat().st_size
    if size < expected["bytes"]:
        raise UserError(f"{path} is cut short: {size} bytes of {expected['bytes']}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        raise UserError(f"{path} is damaged: it is not a NumPy array") from None
    if list(array.shape) != expected["shape"] or array.dtype.name != expected["dtype"]:
        found = f"{array.dtype.name} {list(array.shape)}"
        raise UserError(f"{path} is {found}, but its card says {expected['dtype']} {expected['shape']}")
    return array


def _verify(folder: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    for group in meta["groups"]:
        rows = slice(group["first"], group["first"] + group["count"])
        if _digest({name: arrays[name][rows] for name in (*STEPWISE, "final")}) != group["sha256"]:
            raise UserError(f"{folder} is damaged: histories {rows.start} to {rows.stop - 1} fail their checksum")


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for _, array in sorted(arrays.items()):
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# -- writing ------------------------------------------------------------------------------------------------


class HistoryWriter:
    """Adds groups of histories to a folder; goes on where an interrupted collection of the same request stopped."""

    def __init__(
        self,
        folder: str | Path,
        *,
        env: Env,
        request: dict[str, Any],
        steps: int,
        limit: np.ndarray,
        task: np.ndarray,
    ) -> None:
        """`request` is all that decides the bytes: the description of the environment, the algorithm, the seed, ...

        `limit` and `task` are [history].
        """
        self.folder, self.spec, self.steps = Path(folder), env.spec, steps
        self.whole = {"limit": np.asarray(limit, np.float32), "task": np.asarray(task, np.int32)}
        request = plain(request)
        if (self.folder / CARD).exists():
            self.meta = _read_card(self.folder)
            _check_same(self.folder, self.meta, request)
            for name in self.meta["arrays"]:
                _map(self.folder, name, self.meta)
            return
        self.meta = {
            "format": FORMAT, "version": VERSION, **request,
            "histories": len(self.whole["limit"]), "complete": 0, "seconds": 0.0, "arrays": {}, "groups": [],
        }  # fmt: skip

    @property
    def complete(self) -> int:
        """How many histories are on the disk."""
        return self.meta["complete"]

    @property
    def total(self) -> int:
        """How many there will be."""
        return self.meta["histories"]

    def append(self, group: dict[str, np.ndarray], **about: Any) -> None:
        """Add a whole group of histories: `STEPWISE` and "final" arrays, [history, ...]."""
        count, steps = group["reward"].shape
        if steps != self.steps or self.complete + count > self.total:
            raise ValueError(f"{count} histories of {steps} steps do not fit")
        for name in (*STEPWISE, "final"):
            for row in range(count):
                self.write(row, name, 0, group[name][row])
        self.commit(count, **about)

    def write(self, row: int, name: str, at: int, values: np.ndarray) -> None:
        """Write a stretch of an array of the group's `row`-th history, from step `at` on ("final": episode `at`).

        `values` are [step, ...]. Nothing counts before `commit`.
        """
        spec = self.spec if name == "cost" else None
        if name in ("observation", "reward", "cost") and not (sound := keeps_promise(name, values, spec)).all():
            step = int(np.argwhere(~sound)[0][0])
            value, place = float(values[~sound].flat[0]), f"history {self.complete + row}, step {at + step}"
            rule = broken_rule(name, value, spec)
            raise UserError(f"{self.meta['env']['name']} gave {name} {value:g} ({place}): {rule}")
        if name not in self.meta["arrays"]:
            length = self.steps if name in STEPWISE else max(self.steps // self.spec.max_steps, 1)
            shape = (self.total, length, *values.shape[1:])
            self._create(name, _type_of(name, values, self.spec), shape)
        values = self._fitting(name, values)
        entry = self.meta["arrays"][name]
        size = math.prod(entry["shape"][2:]) * values.itemsize  # of a step
        first = entry["bytes"] - math.prod(entry["shape"]) * values.itemsize  # after the file's header
        place = first + ((self.complete + row) * entry["shape"][1] + at) * size
        _write(self.folder / f"{name}.npy", values, place)

    def commit(self, count: int, **about: Any) -> None:
        """The next `count` histories are written: from now on they count. `about` joins the card (device, ...)."""
        first = self.complete
        for name, array in self.whole.items():
            if name not in self.meta["arrays"]:
                self._create(name, array.dtype, array.shape)
                _write(self.folder / f"{name}.npy", array, self.meta["arrays"][name]["bytes"] - array.nbytes)
        for name in self.meta["arrays"]:
            _sync(self.folder / f"{name}.npy")
        about["seconds"] = self.meta["seconds"] + about.get("seconds", 0.0)
        rows = {name: _map(self.folder, name, self.meta)[first : first + count] for name in (*STEPWISE, "final")}
        entry = {"first": first, "count": count, "sha256": _digest(rows)}
        card = {**self.meta, **about, "complete": first + count, "groups": [*self.meta["groups"], entry]}
        write_json(self.folder / CARD, card)
        self.meta = plain(card)

    def _create(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        make_folder(self.folder)
        self.meta["arrays"][name] = _create(self.folder / f"{name}.npy", dtype, shape)

    def _fitting(self, name: str, values: np.ndarray) -> np.ndarray:
        """`values` in the file's type. Within the first group the file may still change to a wider one."""
        dtype = np.dtype(self.meta["arrays"][name]["dtype"])
        if dtype == np.uint8 and values.dtype != np.uint8 and not _whole(values):
            if self.complete:
                bad = values[(values < 0) | (values > 255) | (values != np.floor(values))].flat[0]
                path = self.folder / f"{name}.npy"
                raise UserError(f"{path} holds whole numbers from 0 to 255, got {name} {bad}")
            self._widen(name)
            dtype = np.dtype(np.float32)
        return np.ascontiguousarray(values, dtype)

    def _widen(self, name: str) -> None:
        """Real numbers instead of bytes in the file of one array."""
        path = self.folder / f"{name}.npy"
        with temporary(path) as narrow:
            try:
                os.replace(path, narrow)
            except OSError as error:
                raise UserError(f"cannot write {path}: {error.strerror or error}") from None
            old = np.load(narrow, mmap_mode="r", allow_pickle=False)
            self._create(name, np.dtype(np.float32), old.shape)
            entry = self.meta["arrays"][name]
            first = entry["bytes"] - old.size * 4
            for row, values in enumerate(old):
                if values.any():  # what is zero was never written: the file stays sparse
                    _write(path, values.astype(np.float32), first + row * values.size * 4)


def _check_same(folder: Path, meta: dict[str, Any], request: dict[str, Any]) -> None:
    """Refuse to continue a collection with other settings."""

    def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict):
            yield name, value
            return
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else key)

    before = dict(flat({name: meta.get(name) for name in request}, ""))
    for name, now in flat(request, ""):
        if before.get(name) != now:
            raise UserError(
                f"{folder} holds other histories: {name} is {before.get(name)} there, {now} here; "
                f"choose another folder"
            )


def _type_of(name: str, values: np.ndarray, spec: EnvSpec) -> np.dtype:
    """One byte per value if nothing is lost."""
    if name in ("observation", "final"):
        small = spec.observation.fits_byte
    elif name == "action":
        small = spec.action.fits_byte
    else:
        small = name == "done" or _whole(values)
    whole = name in ("observation", "final", "action") and np.issubdtype(values.dtype, np.integer)
    return np.dtype(np.uint8 if small else np.int32 if whole else np.float32)


def _whole(values: np.ndarray) -> bool:
    return bool(((values >= 0) & (values <= 255) & (values == np.floor(values))).all())


def _create(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    """A file of zeros, sparse if the file system can; returns its entry in the card."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    needed, free = math.prod(shape) * dtype.itemsize, shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(f"{path} needs {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free")
    try:
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            size = file.tell() + needed
            file.truncate(size)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return {"shape": list(shape), "dtype": dtype.name, "bytes": size}


def _write(path: Path, array: np.ndarray, place: int) -> None:
    """Write bytes of the file `path`. Not through a memory map: a full disk would then kill the process."""
    try:
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _sync(path: Path) -> None:
    """Have a file on the disk before the card that counts on it."""
    try:
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None

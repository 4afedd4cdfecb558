"""Files: names in a run's folder, writing that a crash cannot break, reading that a damaged file cannot break.

A crash, a kill or a full disk leaves the old file whole (`atomic_write`). A folder that a process works in belongs
to that process (`owned`). What a file says is checked here, before anybody uses it (`read_json`, `read_npz`).
"""

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import re
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.errors import UserError

try:
    import fcntl
except ImportError:  # not a POSIX system: there only the owner's note in the lock counts
    fcntl = None  # type: ignore[assignment]

RECIPE = "recipe.json"  # what makes a folder a run of several stages
CHECKPOINT = "checkpoint.safetensors"  # of a run, or of one of its stages
SWEEP = "sweep.json"  # what makes a folder a sweep of runs
LOCK = ".lock"  # in a folder that a process works in
NPZ_BYTES = 2**30  # the most that an array of a results file may hold
HOST = re.sub(r"[^A-Za-z0-9_-]", "-", platform.node())[:20] or "host"
LEFT = re.compile(r"\..*\.([A-Za-z0-9_-]+)\.(\d+)\.\d+\.tmp")  # a temporary file: its host and process
ABANDONED = 3600.0  # seconds after which another host's temporary file counts as left behind

_count = itertools.count()
_in_use: set[Path] = set()  # temporary files of this process


def stage_folder(number: int, name: str) -> str:
    """The name of a stage's folder within its run; the first stage has number 1."""
    return f"{number}-{name}"


# -- writing ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` for a temporary file or folder, which is removed at the end if it is still there.

    The name says whose it is, so that `sweep` can remove it after its process was killed.
    """
    own = path.with_name(f".{path.name[:40]}.{HOST}.{os.getpid()}.{next(_count)}.tmp")
    _in_use.add(own)
    try:
        yield own
    finally:
        _remove(own)
        _in_use.discard(own)


def atomic_write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace `path` by the joined `chunks`, or leave it untouched.

    It writes a temporary file in the same folder, flushes it to the disk and renames it. A reader, or the next
    start after a kill, sees either the old file whole or the new one whole.
    """
    with temporary(path) as new:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(new, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            sync_folder(path.parent)
        except OSError as error:
            raise UserError(_why(path, error)) from None


def make_folder(path: Path) -> None:
    """Make the folder `path` and try to write in it. Done before the work: what cannot be written shows early."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        sweep(path)
        with temporary(path / "try") as file:
            file.write_bytes(b"")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot make the folder {path}, or cannot write in it: {reason}") from None


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    make_folder(path.parent)
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder: name the file to write")
    except OSError as error:  # such as a name that is too long
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def sweep(folder: Path) -> None:
    """Remove the temporary files that killed processes left in `folder`."""
    for path in folder.glob(".*.tmp"):
        found = LEFT.fullmatch(path.name)
        if found is None or path in _in_use:
            continue
        host, process = found[1], int(found[2])
        with contextlib.suppress(OSError):
            if host == HOST:
                left = process == os.getpid() or not _alive(process)
            else:  # nobody can tell from here whether its process lives
                left = time.time() - path.stat().st_mtime > ABANDONED
            if left:
                _remove(path)


def sync_folder(folder: Path) -> None:
    """Make a rename itself survive a power cut, on systems that can open a folder."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _why(path: Path, error: OSError) -> str:
    try:
        kept = "; the previous one is still there" if path.exists() else ""
    except OSError:  # a name that is too long for the file system
        kept = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {path}: the disk is full{kept}"
    return f"cannot write {path}: {error.strerror or error}{kept}"


def _alive(process: int) -> bool:
    """Whether a process of this host runs; true if that cannot be known."""
    if os.name != "posix":  # there, signal 0 would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


# -- who works in a folder ----------------------------------------------------------------------------------


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Work in `folder` alone: refused while another process does.

    The kernel lets go of the lock when its process ends, however it ends. The note in it says who that is. Locks of
    network file systems may not reach from host to host, so a note of another host counts until it is deleted.
    """
    new = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    make_folder(folder)
    path = folder / LOCK
    try:
        handle = _lock(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
            for each in new:  # these stay empty if the work was refused
                each.rmdir()
        except OSError:
            pass  # not empty; and the kernel's lock counts, not the file
        finally:
            os.close(handle)


def disown(folder: Path) -> None:
    """Forget that a process of another host works in `folder`: for a caller who knows that it has ended."""
    path = folder / LOCK
    try:
        note = _note(path.read_bytes())
    except OSError:  # nobody works there
        return
    if note and note["host"] != platform.node():
        _remove(path)


def _lock(path: Path) -> int:
    """The open lock file, with this process's note in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            free = _try_lock(handle)
            note = _note(os.pread(handle, 1000, 0) if hasattr(os, "pread") else path.read_bytes())
            elsewhere = bool(note) and note["host"] != platform.node()
            if free is False or elsewhere or (free is None and note and _alive(note["pid"])):
                raise UserError(_taken(path, note))
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                own = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                os.truncate(handle, 0)
                os.write(handle, json.dumps(own).encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the owner before us has deleted this file: try again with the new one


def _try_lock(handle: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _note(text: bytes) -> dict[str, Any]:
    """What a lock file says about its owner; nothing if a kill cut it short."""
    try:
        note = json.loads(text)
        return {"pid": int(note["pid"]), "host": str(note["host"]), "since": str(note["since"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _taken(path: Path, note: dict[str, Any]) -> str:
    who = "process {pid} on {host} since {since}".format(**note) if note else "another process"
    hint = f"; if that process has ended, delete {path}" if note and note["host"] != platform.node() else ""
    return f"{path.parent} is in use by {who}: wait for it, stop it or choose another folder{hint}"


# -- JSON and arrays ------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value in JSON's own types; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"
    # A file name that is not UTF-8 has surrogates in it; escaped with a backslash, they are JSON.
    atomic_write(path, [text.encode("utf-8", "backslashreplace")])


def read_json(path: Path, what: str) -> Any:
    """The JSON in `path`; `what` names the file's purpose in the error."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {what} at {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no {what}: {str(error).partition(chr(10))[0]}") from None


def parse_json(text: str | bytes) -> Any:
    """The JSON value of `text`, with numbers that fit 64 bits; anything else is a ValueError."""
    try:
        return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_real)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"the number {text:.30} has more than 64 bits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.30} is not finite")
    return value


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The named arrays of an npz file; a ValueError if one is not there, or larger than the file can hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                _check_member(archive, f"{name}.npy")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except (KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError, SyntaxError) as error:
        raise ValueError(str(error).partition("\n")[0] or "it is damaged") from None
    except (MemoryError, RecursionError, zipfile.LargeZipFile, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
        raise ValueError(f"it is damaged: {error}") from None


def _check_member(archive: zipfile.ZipFile, name: str) -> None:
    """Compare what an array's header asks for with what there is, before memory is taken for it."""
    there = archive.getinfo(name).file_size
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{name} has format {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        size = file.tell() + math.prod(shape) * dtype.itemsize
    if size != there or there > NPZ_BYTES:
        raise ValueError(f"{name} is {dtype} {shape}, but its file has {there} bytes")

"""Files: names in a run's folder, and writing so that a crash, a kill or a full disk leaves the old file whole."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.errors import UserError

RECIPE = "recipe.json"  # what makes a folder a run of several stages


def stage_folder(number: int, name: str) -> str:
    """The name of a stage's folder within its run; the first stage has number 1."""
    return f"{number}-{name}"


def atomic_write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace `path` by the joined `chunks`, or leave it untouched.

    It writes a temporary file in the same folder, flushes it to the disk and renames it. A reader, or the next
    start after a kill, sees either the old file whole or the new one whole.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(_why(path, error)) from None
    finally:
        with contextlib.suppress(OSError):  # after the rename there is nothing left to remove
            temporary.unlink()


def make_folder(path: Path) -> None:
    """Make the folder `path`. Done before the work, so that a folder that cannot be written to shows early."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror or error}") from None


def _why(path: Path, error: OSError) -> str:
    kept = "; the previous one is still there" if path.exists() else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {path}: the disk is full{kept}"
    return f"cannot write {path}: {error.strerror or error}{kept}"


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, on systems that can open a folder."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    atomic_write(path, [(json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n").encode()])


def read_json(path: Path, what: str) -> Any:
    """The JSON in `path`; `what` names the file's purpose in the error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {what} at {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no {what}: {str(error).partition(chr(10))[0]}") from None

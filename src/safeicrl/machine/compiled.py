"""Compiled programs, kept on disk, so that a command starts sooner the second time.

JAX writes and reads them; here is where they lie and how much room they may take. The commands of `safeicrl` keep
them in the user's cache folder. `--no-compile-cache` turns that off, and JAX's own settings come first. A program
that imports the library decides for itself.
"""

import hashlib
import os
import platform
import sys
from pathlib import Path

LIMIT = 2**30  # bytes that may stay, of all machines that share the folder
SHORTEST = "0.2"  # seconds of compiling that are worth a file


def keep_compiled() -> None:
    """Tell JAX to keep what this process compiles, unless it is running already or the user has told it where."""
    if "jax" in sys.modules or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = cache_folder()
    folder = base / f"{platform.machine()}-{_processor()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # programs are run as they are read
        trim(base, LIMIT)
    except OSError:
        return  # no home, or a full or read-only one: compile every time
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", SHORTEST)


def cache_folder() -> Path:
    """Where this system keeps what a program can make anew."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "safeicrl" / "compiled"


def _processor() -> str:
    """A short digest of the processor's features: a program for one processor may crash on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return hashlib.sha256(features.encode()).hexdigest()[:8]


def trim(folder: Path, limit: int) -> None:
    """Delete the oldest files under `folder` until it holds at most `limit` bytes."""
    files = []
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except OSError:  # another process was faster
            continue
        if path.is_file():
            files.append((found.st_mtime, found.st_size, path))
    excess = sum(size for _, size, _ in files) - limit
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size

"""All tests share compiled programs, with the processes they start and with later runs too.

Most of the tests' time is compilation. The programs are kept in an ignored folder of the repository, or where
JAX_COMPILATION_CACHE_DIR says; `make clean` removes them. Workers may write there at the same time: JAX compiles
anew whatever it cannot read.
"""

import functools
import gc
import importlib.metadata
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safeicrl.machine.compiled import trim  # does not import JAX

CACHE = Path(__file__).parents[1] / ".cache" / "jax"
CACHE_BYTES = 2**28  # several runs of everything; JAX has a limit of its own, which needs one more package

# Not optimised: nearly all programs here take longer to compile than to run. The others use probe.OPTIMISED.
FLAGS = ["--xla_backend_optimization_level=0"]
KNOWN = importlib.metadata.version("jaxlib").startswith("0.10.")
if KNOWN:  # XLA stops at a flag that it does not know
    # Fusion emitters double the time of compilation; splitting small programs among threads adds to it.
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]


def keep_to_own_cores() -> None:
    """Each worker on its share of the cores: XLA's threads of two workers on both cores are in each other's way.

    On two cores, training in a small room takes 26 s in place of 32 s.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if worker and len(cores) >= count:
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: count])


keep_to_own_cores()  # before JAX starts its threads
gc.disable()  # tracing makes many objects, of which few are garbage: see collect_garbage
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads where a test's program came from
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")  # writing takes time, too
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))


@pytest.fixture(scope="module", autouse=True)
def collect_garbage() -> Iterator[None]:
    """Collect once per file of tests, then leave what is still in use out of later collections."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def share_context() -> None:
    """Share one MLIR context: JAX makes one per program, a fifth of the time that a small program takes."""
    if KNOWN:
        from jax._src.interpreters import mlir

        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


@pytest.fixture(scope="session", autouse=True)
def remember_sources() -> None:
    """Keep the sources of classes. Options have their help from them, and Python parses a whole file for each."""
    plain, known = inspect.findsource, {}

    def find(thing: Any) -> tuple[list[str], int]:
        if not inspect.isclass(thing):
            return plain(thing)
        if thing not in known:
            known[thing] = plain(thing)
        return known[thing]

    inspect.findsource = find  # type: ignore[assignment]


# The slowest files, slowest first: no worker should be left with one of them at the end.
LONGEST = (
    "scared", "worlds", "safe_ad", "ppo_lag", "guard", "small_room", "safe_meta", "costs", "shipped", "recipes",
    "sweep", "devices", "cli", "maml", "reference", "transformer", "policy", "trial", "mujoco_physics", "fuzz",
    "mujoco_worlds", "heads", "train", "penalty", "deploy", "overlap", "disks", "mujoco_gym", "examples", "docs",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Once per run: xdist's workers have `workerinput`."""
    if not hasattr(config, "workerinput"):
        trim(CACHE, CACHE_BYTES)
    if hasattr(config.option, "loadscopereorder"):  # xdist would begin with the files of most tests
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first."""
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    """What was imported lives on."""
    gc.freeze()

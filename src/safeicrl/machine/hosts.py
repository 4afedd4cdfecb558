"""Several processes, on one host or on many, for one run: `jax.distributed`.

Every process runs the same program on its own devices. Only the first reads and writes the run's folder. What
depends on a clock, a signal or a file is decided by all together (`any_says`) or by the first alone (`by_first`):
no process may wait for a computation that another one never begins.

JAX ends a process from C++, with a page of text, when another one is lost. The command line therefore works in a
child process (`supervise`) and turns its end into one line.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn, TypeVar

import numpy as np

from safeicrl.errors import UserError, check_integer, check_number
from safeicrl.files import plain
from safeicrl.machine.signals import SIGNALS

T = TypeVar("T")

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost
WORKER = "SAFEICRL_WORKER"  # in the environment of a child of `supervise`
LOST = 75  # exit code of a child that lost another process
# Who starts the processes: variables for the coordinator's host and port, their number and this one's index.
# JAX itself knows Slurm, Open MPI, Cloud TPU and, with the package kubernetes, indexed jobs.
LAUNCHERS = {
    "JAX": ("JAX_COORDINATOR_ADDRESS", None, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "Kubeflow": ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"),
    "Ray Train or torchrun": ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
}
# How a collective says that another process is gone: on CPUs, on GPUs, and from the service that all report to.
GONE = re.compile("Gloo|NCCL|RCCL|coordination service|heartbeat|UNAVAILABLE|[Cc]onnection (reset|closed|refused)")
LOST_TEXT = (
    "another process of this run was lost, so the run ends here; its last checkpoint is whole: start all processes "
    "again with --resume"
)


# -- joining ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a process meets the others; None is left to JAX, which knows some launchers itself."""

    coordinator: str | None = None  # HOST:PORT of the first process
    processes: int | None = None
    process: int | None = None  # this one, from 0

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.coordinator, self.processes, self.process)]
        if any(given) and not all(given):
            raise UserError("--coordinator, --processes and --process belong together: give all three or none")
        if self.coordinator is None or self.processes is None or self.process is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UserError(f"--coordinator must be HOST:PORT, got {self.coordinator!r}")
        check_integer("--processes", self.processes, 1)
        check_integer("--process", self.process, 0)
        if self.process >= self.processes:
            raise UserError(f"--process must be below --processes, got {self.process} of {self.processes}")


def find_cluster(environment: Mapping[str, str]) -> Cluster:
    """What a launcher's variables say; all None if JAX has to find out."""
    for launcher, names in LAUNCHERS.items():
        host, port, count, index = (environment.get(name) if name else None for name in names)
        if host is None or count is None or index is None or (names[1] and port is None):
            continue
        try:
            return Cluster(coordinator=f"{host}:{port}" if port else host, processes=int(count), process=int(index))
        except ValueError as error:
            raise UserError(f"the variables of {launcher} ({', '.join(filter(None, names))}): {error}") from None
    return Cluster()


def join(cluster: Cluster, timeout: float) -> None:
    """Meet the other processes; before anything is computed. Refused if they are not there within `timeout` s."""
    import jax

    check_number("--join-timeout", timeout, 1.0)
    if cluster.coordinator is None:
        cluster = find_cluster(os.environ)
    if cluster.process:
        _await_coordinator(str(cluster.coordinator), timeout)
    known = cluster.coordinator is not None
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator, num_processes=cluster.processes, process_id=cluster.process,
            cluster_detection_method="deactivate" if known else None,
            initialization_timeout=int(timeout), heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )  # fmt: skip
    except (ValueError, RuntimeError, KeyError) as error:
        if known:
            raise UserError(f"cannot join the run at {cluster.coordinator}: {_first_line(error)}") from None
        raise UserError(
            "--distributed finds no launcher: give --coordinator HOST:PORT --processes COUNT --process INDEX "
            f"({_first_line(error)})"
        ) from None


def _await_coordinator(address: str, timeout: float) -> None:
    """Wait until somebody listens there: JAX would end this process with a page of text."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"no coordinator at {address} after {timeout:g} s: is process 0 running? ({error})"
                ) from None
            time.sleep(0.2)
        else:
            return


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# -- one run in several processes ---------------------------------------------------------------------------


def count() -> int:
    """The number of processes."""
    import jax

    return jax.process_count()


def is_first() -> bool:
    """Whether this process is the one that reads and writes the run's folder."""
    import jax

    return jax.process_index() == 0


def any_says(answer: bool) -> bool:
    """Whether any process says yes: the same answer for all."""
    if count() == 1:
        return answer
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.array(answer)).any())


def by_first(compute: Callable[[], T]) -> T:
    """What `compute` returns in the first process, a JSON value, or its `UserError`; the others do not call it."""
    if count() == 1:
        return compute()
    answer: dict[str, Any] = {}
    if is_first():
        try:
            answer = {"value": compute()}
        except UserError as error:
            answer = {"error": str(error)}
    said = json.loads(_told(json.dumps(plain(answer)).encode()))
    if "error" in said:
        raise UserError(said["error"])
    return said["value"]


def arrays_of_first(tree: T) -> T:
    """The arrays of the first process, in all of them; `tree` has arrays or, in the others, their shapes."""
    if count() == 1:
        return tree
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    def data(leaf: Any) -> np.ndarray:
        words = jax.random.key_data if is_key(leaf) else jnp.asarray
        if is_first():
            return np.asarray(words(leaf))
        like = jax.eval_shape(words, leaf)
        return np.zeros(like.shape, like.dtype)

    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    told = multihost_utils.broadcast_one_to_all(jax.tree.map(data, tree))
    whole = lambda leaf, own: jax.random.wrap_key_data(jnp.array(own)) if is_key(leaf) else jnp.array(own)  # noqa: E731
    return jax.tree.map(whole, tree, told)


def _told(text: bytes) -> bytes:
    """The first process's bytes."""
    from jax.experimental import multihost_utils

    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    mine = np.frombuffer(text.ljust(length)[:length], np.uint8)
    return multihost_utils.broadcast_one_to_all(mine).tobytes()


# -- the command line ---------------------------------------------------------------------------------------


def supervise(args: Sequence[str]) -> int:
    """Run `safeicrl ARGS` in a child process; returns its exit code, and says in one line why it was ended."""
    environment = {**os.environ, WORKER: "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    child = subprocess.Popen(
        [sys.executable, "-m", "safeicrl", *args], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="backslashreplace",
    )  # fmt: skip
    with _passing_on_signals(child):
        assert child.stderr is not None
        fatal = _copy(child.stderr, sys.stderr)
        code = child.wait()
    if "RegisterTask" in fatal:
        raise UserError("not all processes joined the run in time (--processes, --join-timeout)")
    if fatal or code == LOST:
        raise UserError(LOST_TEXT)
    if code < 0:
        raise UserError(
            f"this process of the run was ended by signal {-code}; --resume continues from a checkpoint"
        )
    return code


def _copy(source: IO[str], target: IO[str]) -> str:
    """Copy lines; returns those from JAX's last words on, which are not copied."""
    for line in source:
        if re.match(r"F\d{4} .*JAX distributed service", line):
            return line + source.read()
        target.write(line)
        target.flush()
    return ""


@contextlib.contextmanager
def _passing_on_signals(child: subprocess.Popen) -> Iterator[None]:
    """Signals to this process go to its child, which saves and ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_worker() -> bool:
    """Whether this process is a child of `supervise`."""
    return WORKER in os.environ


def work(run: Callable[[], int]) -> int:
    """What a child does: `run`, until its parent ends. Returns its exit code.

    After a failure it leaves at once: on the way out JAX would wait for the other processes, which cannot come.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):  # not `sys.stdin`, which Python locks when it ends
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        code = run()
    except Exception as error:
        if GONE.search(str(error)):
            _leave(LOST)
        traceback.print_exc()
        _leave(1)
    if 0 < code < 128:  # not if all were stopped together
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

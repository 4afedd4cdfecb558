"""What runs a command.

A user's mistake gets one line on stderr and exit code 2; a traceback is always a bug. A run that a signal stopped
has saved its work, and ends with exit code 128 + signal: 130 after Ctrl-C.
"""

import atexit
import contextlib
import functools
import gc
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from safeicrl.cli.evaluating import compare, evaluate, plot
from safeicrl.cli.exporting import export, fit_guard
from safeicrl.cli.options import first_line
from safeicrl.cli.showing import demo, list_names, play, reproduce
from safeicrl.cli.training import collect, sweep, train
from safeicrl.errors import (
    Approximation,
    BeyondTraining,
    Damaged,
    Incomplete,
    Unlike,
    UserError,
    printable,
    unknown_name,
)
from safeicrl.machine import hosts
from safeicrl.machine.callbacks import own_errors
from safeicrl.machine.compiled import keep_compiled
from safeicrl.plugins import import_module
from safeicrl.version import VERSION

# Before it ends, Python looks for garbage once more: half a second after JAX has traced a few programs. Frozen
# objects are left out; they go with the process.
atexit.register(gc.freeze)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    return hosts.work(lambda: _main(argv)) if hosts.is_worker() else _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file name may have bytes that are no text
            stream.reconfigure(errors="backslashreplace")
    try:
        with _plain_warnings(), own_errors():
            return _run(args) or 0
    except UserError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has stopped reading (safeicrl list | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("RESOURCE_EXHAUSTED|[Oo]ut of memory", str(error)):
            raise
        return _complain("out of memory: fewer --tasks and --rows need less, in training --algo.rows")
    except OSError as error:  # of a file whose name came from the user
        name = "" if error.filename is None else f": {error.filename}"
        return _complain(f"{error.strerror or error}{name}")


def _complain(error: object) -> int:
    """Print one line about a mistake; returns the exit code."""
    print(f"safeicrl: {printable(str(error))}", file=sys.stderr)
    return 2


def _run(args: list[str]) -> int | None:
    if "train" in args and "--distributed" in args and not hosts.is_worker():
        return hosts.supervise(args)
    if "--no-compile-cache" in args:
        args.remove("--no-compile-cache")
    else:
        keep_compiled()  # first: a module of the user's may import JAX
    args = _import_asked(args)
    if not args or args[0] in ("-h", "--help", "help"):
        _usage()
    elif args[0] == "--version":
        print(f"safeicrl {VERSION}")
    elif args[0] not in COMMANDS:
        raise unknown_name("command", args[0], COMMANDS)
    else:
        return COMMANDS[args[0]](args[1:])
    return 0


def _import_asked(args: list[str]) -> list[str]:
    """The arguments without --import MODULE, which any command takes, once the modules are imported."""
    left, words = [], iter(args)
    for word in words:
        if word != "--import" and not word.startswith("--import="):
            left.append(word)
            continue
        name = word.partition("=")[2] or next(words, "")
        if not name:
            raise UserError("--import takes the name of a module, or the path of its file")
        import_module(name)
    return left


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print our own warnings as one line; those of other libraries still say where they come from."""
    with warnings.catch_warnings():
        of_others = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int,
            file: TextIO | None = None, line: str | None = None,
        ) -> None:  # fmt: skip
            if issubclass(category, (Approximation, BeyondTraining, Damaged, Incomplete, Unlike)):
                print(f"safeicrl: {printable(str(message))}", file=sys.stderr)
            else:
                of_others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _usage() -> None:
    """Safe in-context reinforcement learning: agents that learn new tasks under a cost budget."""
    print(f"usage: safeicrl COMMAND [options]\n\n{_usage.__doc__}\n")
    for name, command in COMMANDS.items():
        print(f"  {name:10} {first_line(command)}")
    print("\nsafeicrl COMMAND --help lists a command's options.")
    print("Every command takes --import MODULE, which registers environments and algorithms of your own,")
    print("and --no-compile-cache, which compiles everything anew.")


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train,
    # its runs are commands, too
    "sweep": functools.update_wrapper(functools.partial(sweep, command=main), sweep),
    "collect": collect,
    "evaluate": evaluate,
    "export": export,
    "fit-guard": fit_guard,
    "compare": compare,
    "plot": plot,
    "reproduce": reproduce,
    "demo": demo,
    "play": play,
    "list": list_names,
}

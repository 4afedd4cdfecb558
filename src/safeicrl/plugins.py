"""Environments and algorithms of others: modules that register them when they are imported.

Installed packages name such modules as entry points of the group `safeicrl`. They are imported when a name is asked
for that the library does not know. `safeicrl --import MODULE` imports one for a single command. A file never
decides what is imported: a policy or a run of a stranger must not run code.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from pathlib import Path

from safeicrl.errors import UserError

GROUP = "safeicrl"  # of entry points
HINT = "If it is your own, import its module first: --import MODULE."  # after an unknown name

imported: list[str] = []  # what --import asked for, in order; goes into every run's config.json


@functools.cache
def load_entry_points() -> None:
    """Import the modules that installed packages name; a broken one is only warned of."""
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # anything can be wrong in code of others
            words = f"the entry point {point.name} = {point.value} cannot be loaded: {_first_line(error)}"
            warnings.warn(words, stacklevel=2)


def import_module(name: str) -> None:
    """Import a module by its name, also from the current folder, or by its path (`levers.py`)."""
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            importlib.import_module(name)
    except Exception as error:  # a syntax error, a missing package, whatever the module raises
        raise UserError(f"cannot import {name}: {_first_line(error)}") from None
    imported.append(name)


def import_options() -> str:
    """The --import options of this command, to print with a command that needs them again."""
    return "".join(f" --import {name}" for name in dict.fromkeys(imported))


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    module = path.stem
    if module in sys.modules:
        if getattr(sys.modules[module], "__file__", None) == str(path.resolve()):
            return
        raise ImportError(f"another module is called {module!r}: rename the file")
    spec = importlib.util.spec_from_file_location(module, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

"""What a command takes, as a dataclass; a mistake becomes one line."""

import contextlib
import dataclasses
import difflib
import io
import re
from typing import Any, TypeVar

import tyro

from safeicrl.config import DROPPED, dropped_option
from safeicrl.errors import UserError, unknown_name

T = TypeVar("T")


def parse(command: str, form: type[T], args: list[str]) -> T:
    """The command's options as a dataclass; any others are refused."""
    asked, unknown = parse_known(command, form, args)
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("-"):
            raise UserError(f"unexpected argument {name!r}; see safeicrl {command} --help")
        _refuse_dropped(unknown)
        options = [f"--{flag}" for flag in _flags(form)]
        if name in options:  # a positional argument
            raise UserError(f"leave out {name}, its value alone will do; see safeicrl {command} --help")
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else f"see safeicrl {command} --help"
        raise UserError(f"unknown option {name}; {hint}")
    return asked


def parse_known(command: str, form: type[T], args: list[str]) -> tuple[T, list[str]]:
    """The command's options, and the words it does not know; tyro's errors, boxes of text, become one line."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(form, prog=f"safeicrl {command}", args=args, return_unknown_args=True)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UserError(_one_line(messages.getvalue())) from None


def _refuse_dropped(unknown: list[str]) -> None:
    """Say so when the first of the unknown arguments is an option of an older version."""
    flag, _, value = unknown[0].partition("=")
    option = flag.removeprefix("--").replace("-", "_")
    if (positive := option.replace(".no_", ".")) in DROPPED:
        following = next((word for word in unknown[1:] if not word.startswith("--")), "True")
        raise dropped_option(positive, "False" if positive != option else value or following)


# How tyro says that a value does not fit an option.
MISFITS = (
    r"Error parsing (?P<name>\S+): no type matching (\{None\}\|)?\{?(?P<type>[A-Z ]+)\}? .*?\[(?P<got>.*?)\].*",
    r"Error parsing (?P<name>\S+): invalid literal for (?P<type>int)\(\) with base 10: (?P<got>.*)",
    r"Error parsing (?P<name>\S+): could not convert string to (?P<type>float): (?P<got>.*)",
    r"Error parsing (?P<name>\S+): Could not parse arguments \[(?P<got>.*?)\] into tuple type .*\[(?P<type>.*)\]",
)
CHOICE = r"invalid choice (?P<got>.*) for argument '(?P<name>\S+)'\. Expected one of \((?P<known>.*)\)\."
NUMBERS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}


def _one_line(text: str) -> str:
    """The text of a boxed message: between its first two rules, below the title and above the advice."""
    lines = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if re.match(r"╭|╰|─{3}|-{3}", line)]  # without UTF-8: no box, dashes
    first, last = [*rules, len(lines)][:2] if rules else (-1, len(lines))
    line = " ".join(line for line in lines[first + 1 : last] if line)
    if found := re.fullmatch(r"Missing value for argument '(\S+)'\. Expected 2 values\.", line):
        return f"{found[1]} takes two numbers, got fewer"
    if found := re.fullmatch(CHOICE, line):
        known = re.findall("'([^']*)'", found["known"])  # in another order each time; None: the option left out
        return str(unknown_name(f"value of {found['name']}", found["got"][1:-1], set(known) - {"None"}))
    for pattern in MISFITS:
        if found := re.fullmatch(pattern, line):
            kind = found["type"].upper().replace(",", "")
            return f"{found['name']} takes {NUMBERS.get(kind, kind)}, got {found['got']}"
    return line.removeprefix("Error parsing ") or "these options cannot be understood"


def _flags(form: Any, prefix: str = "") -> list[str]:
    """Every option of a form by its name on the command line."""
    names = []
    for entry in dataclasses.fields(form):
        value = entry.default if entry.default is not dataclasses.MISSING else None
        if entry.default_factory is not dataclasses.MISSING:
            value = entry.default_factory()
        if dataclasses.is_dataclass(value):
            bare = prefix == "" and entry.name in ("train", "what")
            names += _flags(value, prefix if bare else f"{prefix}{entry.name}.")
        else:
            names.append(f"{prefix}{entry.name}".replace("_", "-"))
    return names


def option(args: list[str], name: str) -> str | None:
    """The value of one option, looked up before the other options are parsed, because it decides what they are."""
    for index, argument in enumerate(args):
        if argument == name and index + 1 < len(args):
            return args[index + 1]
        if argument.startswith(f"{name}="):
            return argument.split("=", 1)[1]
    return None


def first_line(thing: Any) -> str:
    """The first line of something's docstring."""
    return (thing.__doc__ or "").partition("\n")[0]

"""Errors of callbacks to the host: raised as themselves, where the result of a compiled program is awaited.

A callback runs inside a compiled program, in a thread of JAX's. What it raises ends the program, but the caller
gets a RuntimeError of JAX's that has the traceback as its text. So `remembered` keeps a user's mistake, and
`own_errors` raises it in place of JAX's error. It stands around everything that plays environments: training,
evaluation, a guard's fit and the command line.
"""

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from safeicrl.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")

_raised: deque[UserError] = deque(maxlen=8)  # by callbacks, the last ones


def remembered(callback: Callable[P, T]) -> Callable[P, T]:
    """`callback`, whose user errors `own_errors` can raise."""

    @functools.wraps(callback)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return callback(*args, **kwargs)
        except UserError as error:
            _raised.append(error)
            raise

    return call


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Inside, a program that a callback ended with a user error raises that error; also a decorator."""
    try:
        yield
    except RuntimeError as error:
        # Found by its text, since another thread's program may have failed in between.
        found = next((each for each in _raised if str(each) in str(error)), None)
        if found is None:
            raise
        _raised.remove(found)
        raise found from found.__cause__


def _unexpected(record: logging.LogRecord) -> bool:
    """Whether a message of JAX's is not about a user error, which is raised anyway."""
    return not (record.exc_info and isinstance(record.exc_info[1], UserError))


# JAX also prints the traceback of whatever a callback raises.
logging.getLogger("jax._src.callback").addFilter(_unexpected)

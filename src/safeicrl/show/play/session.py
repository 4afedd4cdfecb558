"""One visitor: what was asked for so far, and whether the next message makes sense now.

A session is changed by whole messages only: `receive` replaces `visit`, a frozen record, or leaves it as it is.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from safeicrl.show.play.messages import Drawn, Message, Refused, Setup, parse

RATE = 30.0  # messages per second that a visitor may send on average: a slider that is dragged sends about 20 ...
BURST = 60.0  # ... and this many at once
DEFAULT_SPEED = 5.0  # steps per second


class WorldRules(Protocol):
    """What a session must know of a world to judge a message."""

    @property
    def agents(self) -> Mapping[str, Any]:
        """By name."""
        ...

    @property
    def budgets(self) -> tuple[float, float]:
        """The range that a visitor may choose from."""
        ...

    def check_drawn(self, room: Drawn) -> None:
        """Raise `Refused` unless such a room can be played here."""
        ...


@dataclass(frozen=True, kw_only=True)
class Visit:
    """All that a visitor has asked for."""

    n: int = -1  # number of the last message that was accepted
    setup: Setup | None = None
    trial: int = 0  # which trial of the visit this is; grows with every `start` and `reset`
    playing: bool = False
    finished: bool = False  # every panel's trial is over
    speed: float = DEFAULT_SPEED  # steps per second
    steps: int = 0  # single steps that were asked for in this trial


class Session:
    """Judges a visitor's messages."""

    def __init__(self, worlds: Mapping[str, WorldRules], clock: Callable[[], float] = time.monotonic) -> None:
        self.worlds, self.visit = worlds, Visit()
        self._clock, self._allowance, self._counted_at = clock, BURST, clock()
        self.refused_in_a_row = 0

    def receive(self, text: object) -> dict[str, Any] | None:
        """Take a message; None, or the error to send back. An error changes nothing."""
        try:
            self._count()
            message = parse(text)
            self.visit = self._after(message)
        except Refused as refusal:
            self.refused_in_a_row += 1
            return {"type": "error", "message": str(refusal)}
        self.refused_in_a_row = 0
        return None

    def finish(self) -> None:
        """Every panel's trial is over."""
        self.visit = dataclasses.replace(self.visit, finished=True, playing=False)

    def _count(self) -> None:
        """A bucket that refills at RATE; every message, good or bad, takes one from it."""
        now = self._clock()
        self._allowance = min(BURST, self._allowance + RATE * (now - self._counted_at))
        self._counted_at = now
        if self._allowance < 1:
            raise Refused(f"too many messages: at most {RATE:g} per second")
        self._allowance -= 1

    def _after(self, message: Message) -> Visit:
        """The visit after this message, or `Refused`."""
        visit = dataclasses.replace(self.visit, n=message.n)
        if message.n <= self.visit.n:
            raise Refused(f"message {message.n} came after message {self.visit.n}")
        if message.type == "start":
            assert message.setup is not None
            self._check_setup(message.setup)
            return _anew(dataclasses.replace(visit, setup=message.setup))
        if message.type == "speed":
            return dataclasses.replace(visit, speed=message.value)
        if visit.setup is None:
            raise Refused(f"{message.type} came before start")
        if message.type == "budget":
            return dataclasses.replace(visit, setup=self._with_budget(visit.setup, message))
        if message.type == "reset":
            return _anew(visit)
        if message.type == "pause":
            return dataclasses.replace(visit, playing=False)
        if visit.finished:
            raise Refused("the trial is over: reset the context or start another one")
        if message.type == "play":
            return dataclasses.replace(visit, playing=True)
        if visit.playing:
            raise Refused("pause before you go step by step")
        return dataclasses.replace(visit, steps=visit.steps + 1)

    def _check_setup(self, setup: Setup) -> None:
        if setup.world not in self.worlds:
            raise Refused(f"unknown world; known: {', '.join(self.worlds)}")
        world = self.worlds[setup.world]
        for panel in setup.panels:
            if panel.agent not in world.agents:
                raise Refused(f"unknown agent; known here: {', '.join(world.agents)}")
            _check_budget(world, panel.budget)
        if isinstance(setup.task, Drawn):
            world.check_drawn(setup.task)

    def _with_budget(self, setup: Setup, message: Message) -> Setup:
        if message.panel >= len(setup.panels):
            raise Refused(f"there is no panel {message.panel}")
        _check_budget(self.worlds[setup.world], message.value)
        panels = list(setup.panels)
        panels[message.panel] = dataclasses.replace(panels[message.panel], budget=message.value)
        return dataclasses.replace(setup, panels=tuple(panels))


def _anew(visit: Visit) -> Visit:
    return dataclasses.replace(visit, trial=visit.trial + 1, playing=False, finished=False, steps=0)


def _check_budget(world: WorldRules, budget: float) -> None:
    low, high = world.budgets
    if not low <= budget <= high:
        raise Refused(f"budget must be a number from {low:g} to {high:g}")

"""All visitors: seats them, advances their trials in time, and hands every frame to its visitor.

The event loop only talks. One thread computes turns, so a batch serves all visitors who are due; another one loads
and compiles agents, so nobody waits for an agent that somebody else has asked for.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from safeicrl.budgets import is_over
from safeicrl.show.play.messages import Setup
from safeicrl.show.play.session import Session
from safeicrl.show.play.stage import Seat, Stage, Turn
from safeicrl.show.play.worlds import World

FRAMES = 20.0  # per second, at most: faster trials show several steps in one frame
LONGEST = 0.1  # seconds of turns between two looks at who is due
WAITING = 8  # frames a visitor may be behind: the trial waits for a slow connection
OUTBOX = 64  # messages to a visitor that are kept before the connection is closed
log = logging.getLogger(__name__)


class Panel:
    """One agent at a visitor's task."""

    def __init__(self, stage: Stage, seat: Seat, world: World, setup_index: int) -> None:
        self.stage, self.seat, self.world, self.index = stage, seat, world, setup_index
        self.episode, self.time, self.steps = 0, 0, 0
        self.total_reward, self.total_cost = 0.0, 0.0
        self.budget: float | None = None  # of the present episode
        self.finished = False

    def tell(self, turn: Turn, asked: float) -> dict[str, Any]:
        """The turn in plain numbers for the page; `asked` is the budget of the next episode."""
        scene, spec = self.world.scene, self.world.env.spec
        if self.budget is None:  # the first turn decides, and moves nothing
            self.budget = self.stage.usable(asked)
            return {"first": True, "budget": self.budget, **self._ahead(turn), **scene.picture(turn.here)}
        self.time += 1
        self.steps += 1
        self.total_reward += float(turn.reward)
        self.total_cost += float(turn.cost)
        said: dict[str, Any] = {
            "episode": self.episode, "time": self.time, "reward": round(float(turn.reward), 4),
            "cost": round(float(turn.cost), 4), "return": round(self.total_reward, 4),
            "spent": round(self.total_cost, 4), "budget": self.budget, **scene.picture(turn.reached),
        }  # fmt: skip
        if not (turn.terminated or turn.truncated):
            return {**said, **self._ahead(turn)}
        said["end"] = {
            "return": said["return"], "cost": said["spent"], "steps": self.time, "budget": self.budget,
            "over": bool(is_over(self.total_cost, self.budget)), "terminated": bool(turn.terminated),
        }  # fmt: skip
        self.episode, self.time = self.episode + 1, 0
        self.total_reward = self.total_cost = 0.0
        self.budget = self.stage.usable(asked)
        self.finished = self.episode >= spec.episodes
        if not self.finished:
            said["next"] = {"budget": self.budget, **self._ahead(turn), **scene.picture(turn.here)}
        return said

    def _ahead(self, turn: Turn) -> dict[str, Any]:
        """What the agent will do next, and what its guard says of it."""
        said: dict[str, Any] = {}
        if np.ndim(turn.action) == 0:
            said["action"] = int(turn.action)
        if turn.allowed is not None and np.ndim(turn.allowed) == 1:
            said["forbids"] = np.flatnonzero(~turn.allowed).tolist()
        if turn.risk is not None:
            said["risk"] = round(float(turn.risk), 4)
            said["stepped_in"] = bool(turn.stepped_in)
        return said


class Player:
    """A visitor at play."""

    def __init__(self, session: Session, now: float) -> None:
        self.session, self.panels = session, list[Panel]()
        self.outbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(OUTBOX)
        self.dismissed = ""  # why the connection is to be closed
        self.trial = 0  # which of the session's trials is seated
        self.loading = False
        self.steps = 0  # single steps of this trial that were played
        self.owed, self.counted_at, self.framed_at = 0.0, now, 0.0
        self.heard_at = now

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. A visitor who does not read is sent away."""
        if self.outbox.full():
            self.dismiss("the connection is too slow")
        else:
            self.outbox.put_nowait(message)

    def dismiss(self, why: str) -> None:
        """Close the connection after what is queued."""
        if self.outbox.full():
            self.outbox.get_nowait()
        self.dismissed = why
        self.outbox.put_nowait(None)

    def idle(self, now: float) -> float:
        """Seconds in which this visitor neither played nor said anything."""
        return 0.0 if self.session.visit.playing else now - self.heard_at

    def due(self, now: float) -> int:
        """How many steps to play now."""
        visit, passed = self.session.visit, now - self.counted_at
        self.counted_at = now
        if self.trial != visit.trial or not self.panels or visit.finished or self.outbox.qsize() > WAITING:
            self.owed = 0.0
            return 0
        if not visit.playing:
            self.owed = 1.0  # the first step follows the button at once
            single = min(visit.steps - self.steps, 1)
            self.steps += single
            return single
        self.owed += passed * visit.speed
        if self.owed < 1 or now - self.framed_at < 1 / FRAMES:
            return 0
        most = max(1.0, 2 * visit.speed / FRAMES)  # what is later than that is not caught up with
        steps = int(min(self.owed, most))
        self.owed = min(self.owed - steps, 1.0)
        self.framed_at = now
        return steps


class Hall:
    """Everybody who is here."""

    def __init__(self, worlds: Mapping[str, World]) -> None:
        self.worlds, self.players = dict(worlds), set[Player]()
        self._stages: dict[tuple[str, str], asyncio.Future[Stage]] = {}
        self._turns, self._loads = ThreadPoolExecutor(1, "turns"), ThreadPoolExecutor(1, "loads")
        self._tasks: set[asyncio.Task] = set()
        self._news = asyncio.Event()

    # -- coming and going --

    def enter(self) -> Player:
        """A new visitor."""
        player = Player(Session(self.worlds), time.monotonic())
        self.players.add(player)
        return player

    async def leave(self, player: Player) -> None:
        """Free all that a visitor holds."""
        self.players.discard(player)
        await self._in_turn(_unseat, player)

    def hear(self, player: Player, text: object) -> None:
        """Take a visitor's message."""
        player.heard_at = time.monotonic()
        error = player.session.receive(text)
        if error is not None:
            player.send(error)
        elif player.session.visit.trial != player.trial and not player.loading:
            player.loading = True
            self._spawn(self._seat(player))
        self._news.set()

    # -- seating --

    def load(self, world: str, agent: str) -> None:
        """Load an agent before anybody asks for it."""
        self._spawn(self._stage(world, agent))

    def _spawn(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _seat(self, player: Player) -> None:
        """Seat a visitor for the trial that was asked for last; there may be a newer one when the agents are in."""
        try:
            while player in self.players and player.trial != player.session.visit.trial:
                visit = player.session.visit
                assert visit.setup is not None
                world = self.worlds[visit.setup.world]
                names = dict.fromkeys(panel.agent for panel in visit.setup.panels)
                if any((visit.setup.world, name) not in self._stages for name in names):
                    player.send({"type": "loading"})
                stages = {name: await self._stage(visit.setup.world, name) for name in names}
                if player.session.visit.trial != visit.trial or player not in self.players:
                    continue
                setup = player.session.visit.setup  # the budget may have changed since
                assert setup is not None
                started = await self._in_turn(_seat_panels, player, world, stages, setup)
                if player not in self.players:  # left while being seated
                    await self._in_turn(_unseat, player)
                    return
                player.trial, player.steps = visit.trial, 0
                player.send({"type": "started", "trial": visit.trial, **started})
        except Exception:
            log.exception("a trial could not be started")
            player.trial = player.session.visit.trial
            player.send(_failure("this trial could not be started"))
        finally:
            player.loading = False
            self._news.set()

    async def _stage(self, world: str, agent: str) -> Stage:
        """The agent's stage, loaded once for everybody."""
        key = (world, agent)
        if key not in self._stages:
            loop = asyncio.get_running_loop()
            self._stages[key] = loop.run_in_executor(self._loads, self.worlds[world].stage, agent)
        try:
            return await asyncio.shield(self._stages[key])
        except Exception:
            self._stages.pop(key, None)  # the next visitor may have more luck
            raise

    async def _in_turn(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """In the thread that owns the stages."""
        return await asyncio.get_running_loop().run_in_executor(self._turns, work, *arguments)

    # -- time --

    async def run(self) -> None:
        """Advance everybody's trials for ever."""
        while True:
            now = time.monotonic()
            due = {player: steps for player in self.players if (steps := player.due(now))}
            if due:
                frames = await self._in_turn(_advance, due)
                for player, frame in frames.items():
                    self._deliver(player, frame)
            else:
                await self._rest()

    def close(self) -> None:
        """End the threads."""
        for threads in (self._turns, self._loads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _rest(self) -> None:
        """Until somebody may be due: at once after a message, soon while somebody plays."""
        playing = any(player.session.visit.playing for player in self.players)
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), 0.2 / FRAMES if playing else None)

    def _deliver(self, player: Player, frame: dict[str, Any] | None) -> None:
        if player not in self.players:
            return
        if frame is None:
            player.send(_failure("this step failed"))
            player.session.finish()
            return
        player.send(frame)
        if all(panel.finished for panel in player.panels) and player.trial == player.session.visit.trial:
            player.session.finish()
            player.send({"type": "finished"})


def _failure(what: str) -> dict[str, Any]:
    """A fault of ours; the page must begin the trial anew."""
    return {"type": "error", "message": f"{what}; the server's log says why", "stopped": True}


# -- what runs in the thread that owns the stages -------------------------------------------------------------


def _unseat(player: Player) -> None:
    for panel in player.panels:
        panel.stage.leave(panel.seat)
    player.panels = []


def _seat_panels(player: Player, world: World, stages: dict[str, Stage], setup: Setup) -> dict[str, Any]:
    """Begin the trial; what to tell the page of it."""
    _unseat(player)
    task = world.task(setup.task)
    for index, wanted in enumerate(setup.panels):
        stage = stages[wanted.agent]
        player.panels.append(Panel(stage, stage.enter(task, wanted.budget, setup.seed), world, index))
    first = _play({player: 1})[player]
    return {"world": setup.world, "task": world.scene.plain_task(task), "panels": first}


def _advance(due: dict[Player, int]) -> dict[Player, dict[str, Any] | None]:
    """A frame for each visitor; None for all of them if a turn failed."""
    try:
        played = _play(due)
    except Exception:
        log.exception("a turn failed")
        return dict.fromkeys(due)
    return {player: {"type": "frame", "trial": player.trial, "panels": panels} for player, panels in played.items()}


def _play(due: dict[Player, int]) -> dict[Player, list[list[dict[str, Any]]]]:
    """Play the steps that are due, one step of everybody after the other; → the steps of each panel."""
    steps: dict[Player, list[list[dict[str, Any]]]] = {player: [[] for _ in player.panels] for player in due}
    begin = time.monotonic()
    for index in range(max(due.values())):
        if index and time.monotonic() - begin > LONGEST:
            break
        together: dict[Stage, dict[Seat, tuple[Player, Panel, float]]] = {}
        for player, wanted in due.items():
            setup = player.session.visit.setup
            for panel in player.panels if index < wanted else ():
                if not panel.finished and setup is not None and panel.index < len(setup.panels):
                    budget = setup.panels[panel.index].budget
                    together.setdefault(panel.stage, {})[panel.seat] = (player, panel, budget)
        for stage, seats in together.items():
            turns = stage.turn({seat: budget for seat, (_, _, budget) in seats.items()})
            for seat, (player, panel, budget) in seats.items():
                steps[player][panel.index].append(panel.tell(turns[seat], budget))
    return steps

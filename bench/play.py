"""Many visitors of `safeicrl play` at once, on loopback: how late frames are, memory, errors.

python bench/play.py           50 visitors for 20 s; a table, and results/bench_play.json

The server runs in a process of its own; the visitors run in this one and share its cores. Each plays rooms of its
own at `speed` steps per second and begins the next when one is over. The time of a frame is the time since the last
one; the ideal is 1/speed. The round trip is that of single steps: from the message to the frame. The visitors come
twice: what they leave behind is freed if the server's memory does not grow the second time.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
import websockets
from common import provenance
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect

from safeicrl.files import write_json

READY = 300.0  # seconds for the server to load and compile the agent


@dataclass(frozen=True)
class Args:
    visitors: int = 50
    seconds: float = 20.0  # of playing, in each of the two visits
    speed: float = 10.0  # steps per second of each visitor
    round_trips: int = 20  # single steps of each visitor, after the playing
    world: str = "safe-dark-room"
    agent: str = "safe-dark-room-guard"
    budget: float = 3.0
    out: Path = Path("results/bench_play.json")


@dataclass
class Found:
    """What the visitors saw."""

    frames: list[float] = field(default_factory=list)  # seconds since the frame before
    trips: list[float] = field(default_factory=list)  # seconds from a step's message to its frame
    errors: list[str] = field(default_factory=list)
    steps: int = 0


class Visitor:
    """One visitor and what it saw."""

    def __init__(self, socket: ClientConnection, args: Args, index: int, found: Found) -> None:
        self.socket, self.args, self.index, self.found = socket, args, index, found
        self.count = self.room = 0

    async def say(self, kind: str, **fields: Any) -> None:
        self.count += 1
        await self.socket.send(json.dumps({"type": kind, "n": self.count, **fields}))

    async def hear(self) -> dict[str, Any]:
        message = json.loads(await asyncio.wait_for(self.socket.recv(), READY))
        if message["type"] == "error":
            self.found.errors.append(message["message"])
        return message

    async def begin(self) -> None:
        """Another room."""
        self.room += 1
        seed = 1000 * self.index + self.room
        panel = {"agent": self.args.agent, "budget": self.args.budget}
        await self.say("start", world=self.args.world, task={"seed": seed}, seed=seed, panels=[panel])
        while (await self.hear())["type"] != "started":
            pass

    async def play(self, until: float) -> None:
        """Watch rooms until the time is over."""
        await self.say("speed", value=self.args.speed)
        await self.say("play")
        last = None
        while time.monotonic() < until:
            message = await self.hear()
            now = time.monotonic()
            if message["type"] == "frame":
                self.found.steps += sum(len(steps) for steps in message["panels"])
                self.found.frames += [] if last is None else [now - last]
                last = now
            elif message["type"] == "finished":
                await self.begin()
                await self.say("play")
                last = None

    async def step(self) -> None:
        """Single steps, one after another."""
        await self.begin()
        for _ in range(self.args.round_trips):
            begin = time.monotonic()
            await self.say("step")
            while (await self.hear())["type"] != "frame":
                pass
            self.found.trips.append(time.monotonic() - begin)
            await asyncio.sleep(0.1)


async def visit(port: int, args: Args, found: Found) -> float:
    """All visitors come, play and leave; → the seconds until the first could play."""
    begin = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        visitors = []
        for index in range(args.visitors):
            origin = f"http://127.0.0.1:{port}"
            joining = connect(f"ws://127.0.0.1:{port}/socket", origin=origin, compression=None)
            visitors.append(Visitor(await stack.enter_async_context(joining), args, index, found))
        await visitors[0].begin()
        ready = time.monotonic() - begin
        await asyncio.gather(*(visitor.begin() for visitor in visitors))
        until = time.monotonic() + args.seconds
        await asyncio.gather(*(visitor.play(until) for visitor in visitors))
        await asyncio.gather(*(visitor.say("pause") for visitor in visitors))
        await asyncio.gather(*(visitor.step() for visitor in visitors))
    return ready


def memory(pid: int, name: str) -> float:
    """Of a process, MiB: VmHWM is the peak, VmRSS what it has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def summary(values: list[float]) -> dict[str, float]:
    milliseconds = 1000 * np.asarray(values)
    return {
        "median_ms": round(float(np.median(milliseconds)), 1),
        "p99_ms": round(float(np.percentile(milliseconds, 99)), 1),
        "worst_ms": round(float(milliseconds.max()), 1),
        "count": len(values),
    }


def main(args: Args) -> None:
    about = provenance(websockets=websockets.__version__)
    command = [sys.executable, "-m", "safeicrl", "play", "--port", "0", "--visitors", str(args.visitors)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("play at"))
        port = int(line.split(":")[2].split("/")[0])
        found, mib = Found(), {"idle": memory(server.pid, "VmRSS")}
        ready = asyncio.run(visit(port, args, found))
        mib["peak_of_first_visit"] = memory(server.pid, "VmHWM")
        asyncio.run(visit(port, args, found))
        mib["peak_of_second_visit"] = memory(server.pid, "VmHWM")
    finally:
        server.terminate()
        server.wait()
    report(args, about, found, ready, mib)


def report(args: Args, about: dict[str, Any], found: Found, ready: float, mib: dict[str, float]) -> None:
    frames, trips = summary(found.frames), summary(found.trips)
    table = Table(title=f"{args.visitors} visitors, {args.agent}, {args.speed:g} steps/s each")
    for name in ("", "median, ms", "p99, ms", "worst, ms"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("between frames", *(f"{frames[name]:.0f}" for name in ("median_ms", "p99_ms", "worst_ms")))
    table.add_row("round trip of a step", *(f"{trips[name]:.0f}" for name in ("median_ms", "p99_ms", "worst_ms")))
    Console().print(table)
    rate = found.steps / args.seconds / 2
    print(f"{rate:.0f} steps/s of {args.visitors * args.speed:.0f} asked for; {len(found.errors)} errors")
    print("memory, MiB: " + ", ".join(f"{name} {value:.0f}" for name, value in mib.items()))
    write_json(
        args.out,
        {
            **about, "visitors": args.visitors, "seconds": args.seconds, "speed": args.speed, "agent": args.agent,
            "frame": frames, "round_trip": trips, "steps_per_s": round(rate, 1), "seconds_to_load": round(ready, 1),
            "memory_mib": {name: round(value) for name, value in mib.items()}, "errors": found.errors,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Args))

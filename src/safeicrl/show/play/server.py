"""The server: a few files over HTTP, and one WebSocket per visitor, on one port.

It answers only to its own name: a request for another host is refused, so that a page elsewhere cannot reach it
through a name that it controls; and a WebSocket must be opened by this page. Every file is read at the start, so no
path that a visitor sends is ever looked up on disk.
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from typing import Any

from safeicrl.errors import UserError, check_integer
from safeicrl.show.play.hall import Hall, Player
from safeicrl.show.play.messages import SPEEDS
from safeicrl.show.play.worlds import World

try:
    import websockets.asyncio.server as ws
    from websockets.datastructures import Headers
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request, Response
except ImportError:  # pragma: no cover
    raise UserError("safeicrl play needs the package websockets: pip install 'safeicrl[play]'") from None

PAGE = ("play.css", "play.js", "panel.js", "board.js", "charts.js", "link.js")
PATHS = {"/": "index.html", **{f"/{name}": name for name in PAGE}}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LARGEST = 2**16  # bytes of a message; a larger one ends the connection before it is read
REFUSALS = 200  # in a row, after which a visitor is sent away
IDLE = 900.0  # seconds without a word or a step, after which a visitor is sent away
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to serve."""

    host: str = "127.0.0.1"
    port: int = 8642  # 0: any free one
    names: tuple[str, ...] = ()  # host names of this server, besides localhost and any numeric address
    visitors: int = 64  # at a time

    def __post_init__(self) -> None:
        check_integer("visitors", self.visitors, 1)
        if check_integer("port", self.port, 0) > 65535:
            raise UserError(f"port must be at most 65535, got {self.port}")


class Server:
    """Answers requests; `serve` runs one."""

    def __init__(self, worlds: Mapping[str, World], settings: Settings) -> None:
        self.hall, self.settings = Hall(worlds), settings
        self.background: list[asyncio.Task[None]] = []
        self._files = _read_files()
        about = {name: world.describe() for name, world in worlds.items()}
        self._hello = json.dumps({"type": "hello", "worlds": about, "speeds": SPEEDS})

    # -- HTTP --

    def answer(self, connection: Any, request: Request) -> Response | None:
        """A file, an error, or None to go on with a WebSocket."""
        host = request.headers.get_all("Host")
        if len(host) != 1 or not self.is_ours(host[0]):
            return _response(HTTPStatus.MISDIRECTED_REQUEST, b"this server has another name; see --name\n")
        path = request.path.split("?")[0]
        if path == "/socket":
            origin = request.headers.get_all("Origin")
            if origin not in ([f"http://{host[0]}"], [f"https://{host[0]}"]):
                return _response(HTTPStatus.FORBIDDEN, b"open this from the server's own page\n")
            return None
        if path in self._files:
            kind, body = self._files[path]
            return _response(HTTPStatus.OK, body, kind)
        return _response(HTTPStatus.NOT_FOUND, b"there is nothing here\n")

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this server: localhost, a numeric address, or one of the names given to it.

        A numeric address cannot be made to point here by a stranger, a name can.
        """
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if name.lower() in ("localhost", *(own.lower() for own in self.settings.names)):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    # -- WebSocket --

    async def welcome(self, connection: ws.ServerConnection) -> None:
        """Serve one visitor from coming to going."""
        if len(self.hall.players) >= self.settings.visitors:
            await connection.send(json.dumps({"type": "error", "message": "all seats are taken; try again later"}))
            await connection.close(1013, "full")
            return
        player = self.hall.enter()
        sender = asyncio.create_task(self._send_all(connection, player))
        try:
            await connection.send(self._hello)
            async for text in connection:
                self.hall.hear(player, text)
                if player.session.refused_in_a_row >= REFUSALS:
                    await connection.close(1008, "too many refused messages")
        except ConnectionClosed:
            pass
        finally:
            sender.cancel()
            await self.hall.leave(player)

    async def _send_all(self, connection: ws.ServerConnection, player: Player) -> None:
        with contextlib.suppress(ConnectionClosed):
            while (message := await player.outbox.get()) is not None:
                await connection.send(json.dumps(message, separators=(",", ":")))
            await connection.close(1008, player.dismissed)

    async def dismiss_idle(self) -> None:
        """Send away whoever has been idle for long, for ever."""
        while True:
            await asyncio.sleep(IDLE / 30)
            for player in list(self.hall.players):
                if player.idle(time.monotonic()) > IDLE:
                    player.send({"type": "error", "message": "you were away for long: the connection is closed"})
                    player.dismiss("away for long")


@contextlib.asynccontextmanager
async def serving(worlds: Mapping[str, World], settings: Settings) -> AsyncIterator[tuple[Server, int]]:
    """A running server and its port."""
    server = Server(worlds, settings)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(server.hall.close)  # last: visitors who are sent away now still free their seats
        try:
            listening = await stack.enter_async_context(
                ws.serve(
                    server.welcome, settings.host, settings.port, process_request=server.answer, max_size=LARGEST,
                    max_queue=4, compression=None, server_header=None, open_timeout=10, ping_interval=20,
                    ping_timeout=20, write_limit=2**16, logger=_quiet(),
                )
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from None
        server.background = [asyncio.create_task(work) for work in (server.hall.run(), server.dismiss_idle())]
        try:
            yield server, next(iter(listening.sockets)).getsockname()[1]
        finally:
            for task in server.background:
                task.cancel()


def run(worlds: Mapping[str, World], settings: Settings, *, open_page: bool = False) -> None:
    """Serve until interrupted."""
    asyncio.run(_run(worlds, settings, open_page))


async def _run(worlds: Mapping[str, World], settings: Settings, open_page: bool) -> None:
    async with serving(worlds, settings) as (server, port):
        name, world = next(iter(worlds.items()))
        server.hall.load(name, world.first)
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"http://{shown}:{port}/"
        print(f"play at {address}  (Ctrl-C ends it)", flush=True)
        if not _loopback(settings.host):
            print("anybody who can reach this machine can play: there is no password", flush=True)
        if open_page:
            import webbrowser

            webbrowser.open(address)
        await asyncio.gather(*server.background)  # for ever, unless one of them fails


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_files() -> dict[str, tuple[str, bytes]]:
    folder = resources.files("safeicrl.show.play") / "page"
    return {path: (TYPES[name.rsplit(".", 1)[1]], (folder / name).read_bytes()) for path, name in PATHS.items()}


def _response(status: HTTPStatus, body: bytes, kind: str = "text/plain") -> Response:
    headers = Headers(SECURITY)
    headers["Content-Type"] = f"{kind}; charset=utf-8"
    headers["Content-Length"] = str(len(body))
    return Response(status.value, status.phrase, headers, body)


def _quiet() -> logging.Logger:
    """Strangers who speak no HTTP are no news."""
    quiet = logging.getLogger("safeicrl.play.connections")
    quiet.setLevel(logging.CRITICAL)
    return quiet

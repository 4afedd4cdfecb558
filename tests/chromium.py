"""Drives Debian's Chromium over the DevTools protocol: enough of it to open a page, click, type and read."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--mute-audio", "--remote-debugging-port=0",
)  # fmt: skip
KEYS = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, " ": 32, "Tab": 9, "g": 71, "o": 79}


class Browser:
    """One page of a browser with a fresh profile; a context manager."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 1000) -> None:
        assert PROGRAM is not None
        self.problems: list[str] = []  # what the page wrote to its console as an error
        self._process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port = self._port(profile / "DevToolsActivePort")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as reply:
            page = next(target for target in json.load(reply) if target["type"] == "page")
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(connect(page["webSocketDebuggerUrl"], max_size=2**26))
        self._count = 0
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _port(self, file: Path) -> int:
        for _ in range(300):
            if file.exists() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            assert self._process.poll() is None, "Chromium ended at once"
            time.sleep(0.1)
        raise AssertionError("Chromium did not open its port in 30 s")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])

    def open(self, address: str) -> None:
        """Go to an address, until the page is there."""
        for url, there in (("about:blank", "==="), (address, "!==")):  # else a new fragment would not load anew
            self.call("Page.navigate", url=url)
            self.wait(f"document.readyState === 'complete' && location.protocol {there} 'about:'")

    def js(self, expression: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < end, (expression, self.js("document.body.innerText"), self.problems)
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        place = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **button)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            code = {"windowsVirtualKeyCode": KEYS[key]}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **code, **typed)

    def focus(self, selector: str) -> None:
        """Move the focus to an element."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")

    def picture(self, path: Path, **options: Any) -> None:
        """Save what is on the screen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

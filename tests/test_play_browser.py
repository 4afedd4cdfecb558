"""The page of `safeicrl play` in a real browser: draw a room, move the slider, play to the end, read numbers."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from play_room import small_worlds

pytest.importorskip("websockets")
from chromium import PROGRAM, Browser

from safeicrl.envs.dark_room import ACTIONS
from safeicrl.show.play import server

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")
CELL = '.panel [data-row="{}"][data-column="{}"]'
ROWS = (
    "[...document.querySelectorAll('.panel:nth-child({}) tbody tr')].map(row => row.innerText.trim().split(/\\s+/))"
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server in a thread of its own."""
    ready, ports = threading.Event(), []
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with server.serving(small_worlds(), server.Settings(port=0)) as (_, port):
            ports.append(port)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{ports[0]}/"
    loop.call_soon_threadsafe(done.set)
    thread.join(30)
    loop.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.problems == []  # neither an exception nor something that the page's own rules forbid


def choose(browser: Browser, selector: str, value: object) -> None:
    browser.js(
        f"(() => {{ const e = document.querySelector('{selector}'); e.value = '{value}';"
        "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind)); })()"
    )


def open_ready(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelector('#status').innerText.includes('ready')", 60)


def draw_a_room(browser: Browser) -> None:
    """Obstacles around the start, two by mouse and two by keyboard, and the goal in the corner."""
    browser.click("#clear")
    browser.focus(CELL.format(4, 4))
    browser.press("g")  # the goal of a random room may be where an obstacle is to be
    browser.click(CELL.format(2, 1))
    browser.click(CELL.format(1, 2))
    browser.focus(CELL.format(2, 2))
    for key in ("ArrowDown", " ", "ArrowUp", "ArrowRight", "o"):
        browser.press(key)
    assert "4 obstacles" in browser.text("#status")
    for key in ("ArrowUp",) * 3 + ("ArrowLeft",) * 5 + ("g",):
        browser.press(key)
    assert browser.js("document.activeElement.getAttribute('aria-label')") == "row 1, column 1, goal"


def test_draw_a_room_move_the_slider_and_play_to_the_end(browser, address):
    open_ready(browser, address)
    choose(browser, ".agent", "planner")
    browser.wait("document.querySelector('#status').innerText.includes('ready')", 60)
    draw_a_room(browser)
    choose(browser, "#speed", 7)
    browser.focus(".budget")
    for key in ("ArrowLeft",) * 4 + ("ArrowRight",):
        browser.press(key)
    assert browser.text(".budget-text") == "1"
    browser.click("#play")
    browser.wait("document.querySelector('#status').innerText.includes('The trial is over')")
    # The goal is four steps away, and the first of them costs 1; the newest episode stands first.
    browser.js("document.querySelector('details').open = true")
    assert browser.js(ROWS.format(1)) == [[str(n), "1", "1", "1", "4"] for n in (3, 2, 1)]
    assert browser.text(".totals") == "3 episodes, total return 3, 0 over budget."
    assert browser.text(".spent") == "Cost 1 of 1."
    assert browser.js("document.querySelector('.bar').getAttribute('aria-valuetext')") == "1 of 1"
    label = "document.querySelector('.costs svg').getAttribute('aria-label')"
    assert browser.js(label) == "Cost per episode: 3 episodes, first 1, last 1, 0 over budget"
    assert browser.js("document.querySelectorAll('.costs .point').length") == 3
    assert browser.js("document.querySelectorAll('.cell.paid, .cell.avoided').length") >= 1

    # Step by step after a reset: the context is empty again.
    browser.click("#reset")
    browser.wait("document.querySelectorAll('tbody tr').length === 0")
    browser.click("#step")
    browser.wait("document.querySelector('.now').innerText.startsWith('Episode 1 of 3, step 1 of 6')")
    assert "1 of 1 spent" in browser.text("#status")


def test_a_link_brings_the_room_back_and_two_budgets_play_side_by_side(browser, address):
    """On from the test before."""
    link = browser.js("document.querySelector('#link').value")
    assert link.startswith(address)
    open_ready(browser, link)
    obstacles = "[...document.querySelectorAll('.cell.obstacle')].map(c => [+c.dataset.row, +c.dataset.column])"
    assert browser.js(obstacles) == [[1, 2], [2, 1], [2, 3], [3, 2]]
    assert browser.js("document.querySelector('.agent').value") == "planner"
    assert browser.text(".budget-text") == "1"
    browser.click("#compare")
    browser.wait("document.querySelectorAll('.panel').length === 2")
    choose(browser, ".panel:nth-child(2) .agent", "planner")
    choose(browser, ".panel:nth-child(2) .budget", 0)
    choose(browser, "#speed", 7)
    browser.click("#play")
    browser.wait("document.querySelector('#status').innerText.includes('The trial is over')")
    browser.js("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert browser.js(ROWS.format(1)) == [[str(n), "1", "1", "1", "4"] for n in (3, 2, 1)]
    assert browser.js(ROWS.format(2)) == [[str(n), "0", "0", "0", "6"] for n in (3, 2, 1)]  # it may not leave

    open_ready(browser, f"{address}#world=room&agents=nobody&budgets=1&seed=1&task=1")
    assert "not valid" in browser.text("#problem")


def test_what_the_guard_forbids_is_shown_and_said(browser, address):
    open_ready(browser, f"{address}#world=room&agents=net&budgets=0&seed=1&task=1")
    said = set()
    for _ in range(6):
        before = browser.text(".now")
        browser.click("#step")
        browser.wait(f"document.querySelector('.now').innerText !== {before!r}")
        moves = browser.text(".guard").split(".")[0].removeprefix("Guard: forbids ").split(", ")
        moves = [] if moves == ["nothing"] else moves
        assert browser.js("document.querySelectorAll('.board .forbidden').length") == len(moves)
        said.update(moves)
    assert said
    assert said <= set(ACTIONS)


def test_everything_has_a_name_and_fits_a_phone(browser, address):
    open_ready(browser, address)
    roles = {"button", "slider", "combobox", "checkbox", "radio", "textbox", "gridcell", "meter", "image", "grid"}
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node["name"]["value"])
        for node in nodes
        if node.get("role", {}).get("value") in roles
    ]
    assert {role for role, _ in named} >= roles - {"image"}
    assert [role for role, name in named if not name] == []
    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.js(background)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.js(background) != light
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
    assert browser.js("document.documentElement.scrollWidth") <= 360

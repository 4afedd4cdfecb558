"""The server of `safeicrl play`: messages, sessions, trials in batches, HTTP and WebSocket."""

import asyncio
import contextlib
import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from play_room import ROOM, small_worlds, tiny_net
from probe import Push

from safeicrl.agents.reference import RandomAgent
from safeicrl.cli import main
from safeicrl.envs.dark_mujoco import SafeDarkCar, SafeDarkPoint
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.safe_velocity import SafeVelocityHalfCheetah
from safeicrl.errors import UserError
from safeicrl.show.play.hall import WAITING, Panel, Player
from safeicrl.show.play.messages import MAX_CHARACTERS, Drawn, parse
from safeicrl.show.play.scenes import Scene, scene_of
from safeicrl.show.play.session import BURST, RATE, Session
from safeicrl.show.play.stage import Stage
from safeicrl.show.play.worlds import Actor, World, worlds
from safeicrl.trial import run_trials

websockets = pytest.importorskip("websockets")
from websockets.asyncio.client import connect  # noqa: E402

from safeicrl.show.play import server  # noqa: E402

WORLDS = small_worlds()
GOAL, OBSTACLES = [0, 0], [[2, 1], [1, 2], [3, 2], [2, 3]]  # all around the start: every first move costs 1
START = {
    "type": "start", "n": 1, "world": "room", "seed": 3, "task": {"goal": GOAL, "obstacles": OBSTACLES},
    "panels": [{"agent": "net", "budget": 2}],
}  # fmt: skip


class Clock:
    """Time that passes when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(clock=None) -> Session:
    session = Session(WORLDS, clock or Clock())
    assert session.receive(json.dumps(START)) is None
    return session


def say(session: Session, kind: str, **fields) -> str | None:
    reply = session.receive(json.dumps({"type": kind, "n": session.visit.n + 1, **fields}))
    return None if reply is None else reply["message"]


# -- sessions -----------------------------------------------------------------------------------------------


def test_a_visit_from_start_to_end():
    session = Session(WORLDS, Clock())
    assert "before start" in say(session, "play")
    assert say(session, "speed", value=20) is None
    assert session.receive(json.dumps(START)) is None
    assert (session.visit.trial, session.visit.playing, session.visit.speed) == (1, False, 20)
    assert say(session, "step") is None
    assert session.visit.steps == 1
    assert say(session, "play") is None
    assert "pause before" in say(session, "step")
    assert say(session, "budget", panel=0, value=4) is None
    assert session.visit.setup.panels[0].budget == 4
    session.finish()
    assert not session.visit.playing
    assert "over" in say(session, "play")
    assert say(session, "reset") is None
    assert (session.visit.trial, session.visit.finished, session.visit.steps) == (2, False, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": "elsewhere"}, "unknown world"),
        ({"panels": [{"agent": "../policy", "budget": 2}]}, "unknown agent"),
        ({"panels": [{"agent": "net", "budget": 5}]}, "budget must be a number from 0 to 4"),
        ({"task": {"goal": [2, 2], "obstacles": []}}, "start"),
        ({"task": {"goal": [0, 9], "obstacles": []}}, "outside"),
        ({"task": {"goal": [0, 0], "obstacles": [[0, 0]]}}, "goal"),
    ],
)
def test_what_makes_no_sense_here_is_refused(change, message):
    session = Session(WORLDS, Clock())
    assert message in session.receive(json.dumps({**START, **change}))["message"]
    assert session.visit.setup is None


def test_a_visitor_may_not_flood():
    clock = Clock()
    session = Session(WORLDS, clock)
    accepted = [say(session, "speed", value=5) for _ in range(int(BURST) + 10)]
    assert accepted.count(None) == BURST
    assert "too many messages" in accepted[-1]
    clock.now = 1.0
    again = [say(session, "speed", value=5) for _ in range(int(BURST))]
    assert again.count(None) == RATE


HOSTILE = [
    None, True, False, -1, 1.5, 2**53, 2**64, 1e308, -1e308, "", "x" * 101, "../../etc/passwd", "<script>",
    "\x00", "__proto__", [], [[]], {}, {"a": 1}, [1, 2, 3], "’; DROP TABLE", "NaN",
]  # fmt: skip
NOT_JSON = [
    "", " ", "{", "[" * 4000, '{"a":' * 600, "null", "1", '"start"', "[]", "NaN", '{"type":"play","n":NaN}',
    "\ud800", '{"type":"play","n":1e999}', '{"type":"play","type":"play","n":5}', "play", "\x00\x01",
    '{"type":["play"],"n":5}',
]  # fmt: skip


def broken_message(rng: random.Random, valid: list[dict], last: int) -> object:
    """A message that must be refused, whatever the session's state."""
    message = json.loads(json.dumps(rng.choice(valid)))
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice([*NOT_JSON, b"{}", None, 7, "x" * (MAX_CHARACTERS + rng.randrange(9999))])
    if kind == 1:  # text cut short, or with noise in it: no longer JSON
        text = json.dumps(message)
        cut = rng.randrange(len(text) - 1)
        return text[:cut] if rng.random() < 0.5 else f"{text[:cut]}\x07{text[cut:]}"
    if kind == 2:  # too late, or twice
        message["n"] = rng.choice([last, max(last - rng.randrange(1, 9), 0)])
    elif kind == 3:
        del message[rng.choice(list(message))]
    elif kind == 4:
        message[rng.choice(["path", "__class__", "policy", "", "N"])] = rng.choice(HOSTILE)
    elif kind == 5:
        message["type"] = rng.choice([value for value in HOSTILE if not isinstance(value, list | dict)])
    elif kind == 6:  # no number of a message is among the hostile values
        message["n"] = rng.choice([value for value in HOSTILE if value != 0])
    else:
        where = message = {**START, "n": last + 1, "task": {"goal": GOAL, "obstacles": OBSTACLES}}
        path = rng.choice([["world"], ["seed"], ["task"], ["panels"], ["task", "goal"], ["task", "obstacles"]])
        if len(path) == 2:
            where = message["task"] = dict(message["task"])
        harmless = {"seed": (), "obstacles": ([],)}.get(path[-1], ())
        where[path[-1]] = rng.choice([value for value in HOSTILE if value not in harmless])
    return json.dumps(message)


def test_ten_thousand_hostile_messages_change_nothing():
    """In every state of a session: before a start, started, playing, over."""
    rng, clock = random.Random(0), Clock()
    sessions = [Session(WORLDS, clock), *(started(clock) for _ in range(3))]
    say(sessions[0], "speed", value=5)
    say(sessions[2], "play")
    sessions[3].finish()
    errors = set()
    for index in range(10_000):
        clock.now += 1  # slowly enough that each message is judged by what it says
        session = sessions[index % 4]
        last = session.visit.n
        valid = [
            {**START, "n": last + 1}, {"type": "pause", "n": last + 1},
            {"type": "speed", "n": last + 1, "value": 9}, {"type": "budget", "n": last + 1, "panel": 0, "value": 3},
        ]  # fmt: skip
        before, message = session.visit, broken_message(rng, valid, last)
        reply = session.receive(message)
        assert reply is not None, message
        assert reply.keys() == {"type", "message"}, message
        assert session.visit is before, message
        errors.add(reply["message"])
    assert len(errors) > 20  # they were refused for many reasons
    assert say(sessions[1], "play") is None  # and the session still works


def test_the_largest_room_fits_into_a_message():
    cells = [[row, column] for row in range(20) for column in range(20)]
    text = json.dumps({**START, "task": {"goal": [0, 0], "obstacles": cells}}, separators=(",", ":"))
    assert len(parse(text).setup.task.obstacles) == 400


# -- trials in batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage(ROOM, tiny_net(), scene_of(ROOM))


def numbers(turn) -> tuple:
    return (*turn.reached.tolist(), int(turn.action), float(turn.reward), float(turn.cost), float(turn.left))


def test_a_trial_is_that_of_run_trials(stage):
    """The same cells, costs and rests of the budget, with a budget that changes between the episodes."""
    room = ROOM.make_task(GOAL, OBSTACLES)
    budgets = [2.0, 4.0, 0.0]
    tasks = jax.tree.map(lambda x: x[None, None], room)
    expected = run_trials(
        ROOM, tiny_net(), tasks, jnp.asarray(budgets)[None, None], jax.random.key(0), episodes=3, steps=18
    )
    valid = np.asarray(expected.valid[0])
    seat = stage.enter(room, budgets[0], 0)
    episode, played = 0, []
    first = stage.turn({seat: budgets[0]})[seat]
    while episode < 3:
        turn = stage.turn({seat: budgets[min(episode + 1, 2)]})[seat]
        played.append(turn)
        episode += bool(turn.terminated or turn.truncated)
    stage.leave(seat)
    assert len(played) == valid.sum()
    actions = [int(turn.action) for turn in [first, *played[:-1]]]
    assert actions == np.asarray(expected.action[0])[valid].tolist()
    assert len(set(actions)) > 1
    np.testing.assert_array_equal([turn.reached for turn in played], expected.final_observation[0][valid])
    np.testing.assert_array_equal([turn.cost for turn in played], expected.cost[0][valid])
    np.testing.assert_array_equal([turn.left for turn in [first, *played[:-1]]], expected.token.ctg[0][valid])
    forbidden = [turn.allowed.tolist() for turn in [first, *played[:-1]]]
    assert forbidden == np.asarray(expected.extras["allowed"][0])[valid].tolist()
    assert not np.all(forbidden)


def test_neighbours_change_nothing(stage):
    """A row is held while others move, begin and leave, also after its ring of keys and values has closed."""
    room, other = ROOM.make_task(GOAL, OBSTACLES), ROOM.make_task([4, 4], [[0, 1], [1, 1]])
    alone = stage.enter(room, 3, 5)
    expected = [numbers(stage.turn({alone: 3.0})[alone]) for _ in range(17)]
    stage.leave(alone)
    first, second = stage.enter(other, 1, 9), stage.enter(room, 3, 5)
    found = []
    for index in range(17):
        stage.turn({first: 1.0})
        if index == 9:
            stage.leave(first)
            first = stage.enter(other, 4, 2)
        found.append(numbers(stage.turn({second: 3.0} if index % 2 else {first: 1.0, second: 3.0})[second]))
    assert found == expected
    stage.leave(first)
    stage.leave(second)
    assert stage.seats == 0


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (Push, set()),  # a world of the user's own has no picture
        (SafeDarkPoint, {"place", "heading"}),
        (SafeVelocityHalfCheetah, {"body", "place", "speed"}),
    ],
)
def test_every_world_is_played(make, seen):
    if make is not Push:
        pytest.importorskip("mujoco")
    env = make(max_steps=2, episodes=2)
    agents = {"random": Actor(summary="", make=lambda: RandomAgent(action=env.spec.action))}
    world = World(title="World", env=env, scene=scene_of(env), agents=agents)
    stage, task = world.stage("random"), world.task(3)
    panel = Panel(stage, stage.enter(task, 1.0, 0), world, 0)
    told = []
    while not panel.finished:
        told.append(panel.tell(stage.turn({panel.seat: 1.0})[panel.seat], 1.0))
    json.dumps([world.describe(), world.scene.plain_task(task), told])
    assert [step.get("time", 0) for step in told] == [0, 1, 2, 1, 2]
    assert all(seen <= step.keys() for step in told)
    ends = [step["end"] for step in told if "end" in step]
    for end, steps in zip(ends, (told[1:3], told[3:5]), strict=True):
        for total, name in (("return", "reward"), ("cost", "cost")):
            assert end[total] == pytest.approx(sum(step[name] for step in steps), abs=1e-3)
    if make is SafeVelocityHalfCheetah:  # two steps of 0.05 s at the speeds that were told
        places = [told[0]["place"][0], told[2]["place"][0]]
        assert places[1] - places[0] == pytest.approx(0.05 * (told[1]["speed"] + told[2]["speed"]), abs=2e-3)


# -- time ---------------------------------------------------------------------------------------------------


async def _timing() -> None:
    clock = Clock()
    player = Player(started(clock), 0.0)
    player.trial, player.panels = 1, [None]
    assert player.due(1.0) == 0  # paused
    say(player.session, "step")
    assert [player.due(1.1), player.due(1.2)] == [1, 0]
    say(player.session, "speed", value=10)
    say(player.session, "play")
    steps = [player.due(2.0 + 0.01 * i) for i in range(100)]
    assert abs(sum(steps) - 10) <= 1
    say(player.session, "speed", value=200)
    steps = [player.due(3.0 + 0.01 * i) for i in range(100)]
    assert abs(sum(steps) - 200) <= 12
    assert sum(step > 0 for step in steps) <= 20  # frames
    assert player.due(60.0) <= 20  # what was missed is not caught up with
    for _ in range(WAITING + 1):
        player.send({})
    assert player.due(61.0) == 0  # a slow connection is waited for
    for _ in range(100):
        player.send({})
    assert player.dismissed


def test_trials_go_on_at_the_speed_that_was_asked_for():
    asyncio.run(_timing())


# -- the server ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def visitor(port: int, **options):
    async with connect(f"ws://127.0.0.1:{port}/socket", origin=f"http://127.0.0.1:{port}", **options) as socket:
        yield socket


async def hear(socket, kind: str) -> dict:
    """The next message of a kind."""
    async with asyncio.timeout(60):
        while True:
            message = json.loads(await socket.recv())
            if message["type"] == kind:
                return message


async def _play_to_the_end(port: int, serving: server.Server) -> None:
    """The planner's numbers are known: the goal is four steps away, and the first one costs 1."""
    async with visitor(port) as socket:
        hello = await hear(socket, "hello")
        assert hello["worlds"]["room"]["scene"]["size"] == 5
        await socket.send("no JSON")
        assert "JSON" in (await hear(socket, "error"))["message"]
        await socket.send(b"\x00" * 9)
        assert "text" in (await hear(socket, "error"))["message"]
        panels = [{"agent": "planner", "budget": 1}, {"agent": "planner", "budget": 0}]
        await socket.send(json.dumps({**START, "panels": panels}))
        began = await hear(socket, "started")
        assert began["task"] == {"goal": GOAL, "obstacles": sorted(OBSTACLES)}
        assert [panel[0]["cell"] for panel in began["panels"]] == [[2, 2], [2, 2]]
        await socket.send('{"type":"speed","n":2,"value":200}')
        await socket.send('{"type":"play","n":3}')
        steps: list[list[dict]] = [[], []]
        while True:
            message = json.loads(await socket.recv())
            if message["type"] == "finished":
                break
            for panel, more in zip(steps, message["panels"], strict=True):
                panel.extend(more)
        ends = [[step["end"] for step in panel if "end" in step] for panel in steps]
        assert [(end["return"], end["cost"], end["steps"], end["over"]) for end in ends[0]] == [
            (1, 1, 4, False)
        ] * 3
        assert [(end["return"], end["cost"], end["steps"]) for end in ends[1]] == [(0, 0, 6)] * 3
        assert sum(stage.result().seats for stage in serving.hall._stages.values()) == 2
        await socket.send('{"type":"step","n":4}')
        assert "over" in (await hear(socket, "error"))["message"]
    await until(lambda: not serving.hall.players)
    await until(lambda: sum(stage.result().seats for stage in serving.hall._stages.values()) == 0)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def _strangers(port: int) -> None:
    async def get(path: str, host: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        reply = (await reader.read()).decode()
        writer.close()
        return int(reply.split()[1]), reply

    own = f"127.0.0.1:{port}"
    status, page = await get("/", own)
    assert status == 200
    assert "script-src 'self'" in page
    for path in server.PATHS:
        assert (await get(path, f"localhost:{port}"))[0] == 200, path
    for path in ("/../server.py", "/page/index.html", "/%2e%2e/server.py", "//etc/passwd", "/play.js/", "/debug"):
        assert (await get(path, own))[0] == 404, path
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        assert (await get("/", host))[0] == 421, host
    for origin in (None, "http://evil.example", f"http://localhost:{port}", "null"):
        with pytest.raises(websockets.InvalidStatus, match="403"):
            await connect(f"ws://{own}/socket", origin=origin)


async def _crowd(port: int, serving: server.Server) -> None:
    async with visitor(port) as one, visitor(port) as two:
        await hear(one, "hello")
        await hear(two, "hello")
        async with visitor(port) as three:
            assert "taken" in (await hear(three, "error"))["message"]
        await two.send("x" * (server.LARGEST + 1))
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await hear(two, "error")
        assert closed.value.rcvd.code == 1009
        await until(lambda: len(serving.hall.players) == 1)
        await one.send(json.dumps(START))  # the other one still plays
        await hear(one, "started")


async def _nuisances(port: int, serving: server.Server) -> None:
    """Who only sends nonsense is sent away; so is who does nothing. An agent that cannot be loaded harms nobody."""
    async with visitor(port) as socket:
        for _ in range(server.REFUSALS):
            await socket.send("nonsense")
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await hear(socket, "nothing")
        assert closed.value.rcvd.code == 1008
    async with visitor(port) as socket:
        await socket.send(json.dumps({**START, "panels": [{"agent": "broken", "budget": 1}]}))
        failed = await hear(socket, "error")
        assert "could not be started" in failed["message"]
        assert failed["stopped"]
        await socket.send(json.dumps({**START, "n": 2}))
        await hear(socket, "started")
        server.IDLE = 0.3
        with pytest.raises(websockets.ConnectionClosedError):
            await hear(socket, "nothing")
    await until(lambda: not serving.hall.players)


def _broken():
    raise RuntimeError("this agent is broken, as the test wants it")


async def _serve() -> None:
    found = small_worlds()
    found["room"].agents["broken"] = Actor(summary="", make=_broken)
    async with server.serving(found, server.Settings(port=0, visitors=2)) as (serving, port):
        await _play_to_the_end(port, serving)
        await _strangers(port)
        await _crowd(port, serving)
        await _nuisances(port, serving)


def test_visitors_play_and_strangers_are_refused(monkeypatch):
    monkeypatch.setattr(server, "IDLE", 3.0)  # it is looked for in steps of IDLE / 30
    asyncio.run(_serve())


def test_a_server_answers_to_its_own_names_only():
    ours = server.Server(WORLDS, server.Settings(names=("play.example",))).is_ours
    for host in (
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1:8642",
        "[::1]:8642",
        "[::1]",
        "192.0.2.7",
        "play.example:80",
    ):
        assert ours(host), host
    for host in ("evil.example", "localhost.evil.example", "", ":80", "127.0.0.1@evil.example"):
        assert not ours(host), host


def test_mistakes_on_the_command_line_are_one_line(capsys):
    assert main(["play", "--port", "99999"]) == 2
    assert "65535" in capsys.readouterr().err
    assert main(["play", "--policy", "safe-dark-rom"]) == 2
    assert "safe-dark-room" in capsys.readouterr().err


# -- worlds and scenes --------------------------------------------------------------------------------------


def test_a_policy_with_a_guard_is_listed_with_and_without_it():
    found, missing = worlds(["safe-dark-room-guard"], shipped=False)
    assert not missing
    world = found["safe-dark-room"]
    assert list(world.agents) == [
        "safe-dark-room-guard",
        "safe-dark-room-guard, guard off",
        "explorer",
        "planner",
        "random",
    ]
    assert world.first == "safe-dark-room-guard"
    assert world.agents["safe-dark-room-guard, guard off"].make().risk is None
    json.dumps(world.describe())


def test_policies_of_one_name_are_told_apart_and_what_cannot_be_shown_is_refused(monkeypatch):
    found, _ = worlds(["safe-dark-room", "safe-dark-room"], shipped=False)
    assert list(found["safe-dark-room"].agents)[:2] == ["safe-dark-room", "safe-dark-room (2)"]
    monkeypatch.setattr(SafeDarkRoom, "restart", None, raising=False)  # as an environment on the host has
    with pytest.raises(UserError, match="Gymnasium"):
        worlds(["safe-dark-room"], shipped=False)
    monkeypatch.undo()
    monkeypatch.setattr("safeicrl.show.play.worlds.MAX_SIDE", 8)
    with pytest.raises(UserError, match="at most 8 cells"):
        worlds(["safe-dark-room"], shipped=False)


def test_rooms_go_to_the_page_and_back():
    scene = scene_of(ROOM)
    room = Drawn(goal=(0, 4), obstacles=((1, 1), (3, 4)))
    assert scene.plain_task(scene.drawn_task(room)) == {"goal": [0, 4], "obstacles": [[1, 1], [3, 4]]}
    assert Scene(None).describe() == {"kind": "plain"}


def test_robots_are_seen_from_above():
    pytest.importorskip("mujoco")
    point = scene_of(SafeDarkPoint()).picture(np.array([0.5, -1.0, 0.25]))
    assert point == {"place": [0.5, -1.0], "heading": 0.25}
    quarter = [math.cos(math.pi / 4), 0, 0, math.sin(math.pi / 4)]  # turned left by 90°: its front, −y, is now +x
    car = scene_of(SafeDarkCar()).picture(np.array([0.1, 0.2, 0.1, *quarter, 0, 0, 0, 0]))
    assert car["place"] == [0.1, 0.2]
    assert car["heading"] == pytest.approx(0, abs=1e-3)


def test_a_runner_is_seen_from_the_side_with_its_speed():
    pytest.importorskip("mujoco")
    env = SafeVelocityHalfCheetah()
    scene = scene_of(env)
    qpos, qvel = np.zeros(9), np.zeros(9)
    before, _ = env.reset_to(qpos, qvel)
    after, _ = env.reset_to(qpos + np.eye(9)[0] * 0.1, qvel)
    picture = scene.picture(np.asarray(scene.look(before, after)))
    assert picture["speed"] == pytest.approx(0.1 / 0.05, rel=1e-3)  # a step takes 5 · 0.01 s
    assert picture["place"] == [0.1, 0.0]
    torso = picture["body"][0]
    assert [torso[0] + torso[2], torso[1], torso[3]] == pytest.approx(
        [0.2, 0.7, 0.7], abs=1e-3
    )  # level, at its height
    assert scene.plain_task(env.make_task(0.5)) == {"limit": 1.605}

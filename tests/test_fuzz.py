"""Bad input made by a machine: whatever it is, it works or is one line; never a traceback, never a hang.

Hypothesis draws the same cases each time; `CASES` says how many there are of each kind. FUZZ=20 in the environment
draws twenty times as many, others each time.
"""

import contextlib
import copy
import dataclasses
import datetime
import io
import json
import os
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import random_weights
from rich.console import Console

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.mlp import MlpAgent
from safeicrl.algos.scared import ScaredConfig
from safeicrl.cli import COMMANDS, main
from safeicrl.config import from_plain
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.gym import GymEnv
from safeicrl.errors import UserError
from safeicrl.evaluation import tables
from safeicrl.evaluation.archive import load_results, save_results
from safeicrl.evaluation.results import Results
from safeicrl.files import plain
from safeicrl.histories.collect import CollectConfig
from safeicrl.histories.demonstrations import EpsConfig
from safeicrl.log import read_metrics
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.lagrangian import PPOLagConfig
from safeicrl.policies import cards
from safeicrl.policies.policy import Policy, load_policy
from safeicrl.recipes import recipe
from safeicrl.recipes.grid import Plan, open_index
from safeicrl.recipes.presets import preset
from safeicrl.show.report.sweep import sweep_panels
from safeicrl.training.settings import TrainConfig, describe

CASES = {
    "command lines": 80, "cards": 60, "configs": 120, "runs": 50, "results": 50, "logs": 40, "acting": 50,
    "resets": 25, "sweeps": 30,
}  # fmt: skip
FACTOR = int(os.environ.get("FUZZ", "1"))
ROOM = SafeDarkRoom(size=3, obstacles=2, max_steps=4, episodes=2)


def test_there_are_enough_cases():
    assert sum(CASES.values()) >= 500


def fuzzed(what: str, /, **strategies: Any):
    """A test of `CASES[what]` drawn cases, none of which may take long."""
    options = settings(
        max_examples=FACTOR * CASES[what], derandomize=FACTOR == 1, database=None,
        deadline=datetime.timedelta(seconds=30), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: options(given(**strategies)(test))


NAMES = st.one_of(
    st.sampled_from(["", ".", "..", "-", "--", "-1", "n" * 300, "\x1b[2J", "a\nb", "[red]", "[/]", "$x_{", "%s"]),
    st.sampled_from([os.fsdecode(b"caf\xe9"), "δ" * 90, "x=1", "size=3", "=", "{}", "none.npz", "a/b/c", "~"]),
    st.text(string.printable.replace("/", ""), max_size=8),
)
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**32, 2**63 - 1, 10**30, -(10**30)]),
    st.sampled_from([0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)


@st.composite
def edits(draw: Any, count: int = 2) -> list[tuple[list[int], str, Any]]:
    """Where to change a JSON value (places to go down, each taken modulo what is there), how, and by what."""
    one = st.tuples(st.lists(st.integers(0, 50), max_size=5), st.sampled_from(["set", "drop", "rename"]), JSON)
    return draw(st.lists(one, min_size=1, max_size=count))


def edited(value: Any, changes: list[tuple[list[int], str, Any]]) -> Any:
    """A changed copy of a JSON value."""
    whole = [copy.deepcopy(value)]
    for path, how, new in changes:
        holder, key = whole, 0
        for place in path:
            inner = holder[key]
            if not isinstance(inner, dict | list) or not inner:
                break
            holder, key = inner, (list(inner) if isinstance(inner, dict) else range(len(inner)))[place % len(inner)]
        if how == "set" or holder is whole:
            holder[key] = new
        elif how == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[str(new)] = holder.pop(key)
    return whole[0]


def one_line(error: BaseException) -> None:
    assert isinstance(error, UserError)
    assert "\n" not in str(error).replace("\\n", "")
    assert len(str(error)) < 2000


# -- command lines


class Reached(Exception):
    """The command line was understood: the work would begin."""


def work(*_: Any, **__: Any) -> None:
    raise Reached


OPTIONS = {
    "train": "preset line like resume out algo env minutes iterations seed seeds chunk start evaluation.every "
    "evaluation.tasks evaluation.seed env.size env.alpha env.test-budget algo.rows algo.net.width algo.net.layers "
    "algo.penalty.price algo.ppo.clip wandb devices distributed coordinator processes process join-timeout",
    "sweep": "grid out evaluate ray-address cpus gpus retries dry-run preset algo env seeds env.size algo.rows",
    "collect": "env env-args by out tasks limits steps seed group learner.hidden learner.envs minari minari-every",
    "evaluate": "agent env env-args tasks budgets budget-count budgets-per-task episodes temperature greedy risk "
    "seed rows devices label out wipe",
    "export": "out seed average name description temperature risk env-args limit evaluation overwrite",
    "fit-guard": "out overwrite depth clock risk rounds rows updates learning-rate seed",
    "compare": "upper lower last",
    "plot": "out format",
    "demo": "policy out tasks seed",
    "reproduce": "scale out results",
    "play": "policy host port name visitors",
    "list": "all",
}


@st.composite
def command_lines(draw: Any) -> list[str]:
    """A command, some of its options with values that may not fit, words that may not belong."""
    command = draw(st.sampled_from(sorted(OPTIONS)))
    known = st.sampled_from(["random", "safe-dark-room", "ppo-lag", "test", "planner"])
    words = st.one_of(NAMES, NUMBERS.map(str), known)
    option = st.tuples(st.sampled_from(OPTIONS[command].split()), st.lists(words, max_size=2), st.booleans())
    line = [command, *draw(st.lists(words, max_size=1))]
    for name, values, joined in draw(st.lists(option, max_size=3)):
        line += [f"--{name}={values[0]}", *values[1:]] if joined and values else [f"--{name}", *values]
    return line


def test_every_command_is_fuzzed():
    assert set(OPTIONS) == set(COMMANDS)


@pytest.fixture
def idle(monkeypatch, tmp_path):
    """Nothing is computed, and nothing is written but in an own folder."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "recipes.run.run_recipe", "recipes.sweep.run_sweep", "histories.collect.collect",
        "histories.demonstrations.collect_demonstrations",
        "policies.contenders.evaluate", "policies.add_guard.fit_guard", "show.demo.run",
        "policies.export.save_policy", "evaluation.plots.save",
        "show.play.server.run", "show.report.reproduce.reproduce", "machine.hosts.supervise",
    ):  # fmt: skip
        monkeypatch.setattr(f"safeicrl.{name}", work)
    monkeypatch.setattr("safeicrl.show.play.worlds.policy_names", list)  # all policies would be loaded each time


@pytest.mark.usefixtures("idle")
@fuzzed("command lines", line=command_lines())
def test_command_lines(capsys, line):
    code: Any = None
    with contextlib.suppress(Reached):
        try:
            code = main(line)
        except SystemExit as leaving:  # --help
            code = leaving.code or 0
    said = capsys.readouterr().err
    assert code in (None, 0, 2), line
    if code == 2:
        assert len(said.splitlines()) == 1, line
        assert said.startswith("safeicrl: "), line


# -- files


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def small_card(kind: str) -> dict[str, Any]:
    own = {"net": {"net": plain(vars(NetConfig(width=4, layers=1, heads=1)))}, "mlp": {"hidden": [4]}}[kind]
    room = {"name": "safe-dark-room", "parameters": {"size": 3, "obstacles": 2, "max_steps": 4}}
    training = {"seed": 0, "algo": {"config": {"episodes": 2}}}
    about = {"temperature": 0.5, "training": training, "limits": ["few"], "format": 1}
    return {"kind": kind, **own, "env": room, **about}


@pytest.fixture(scope="module")
def released(folder) -> dict[str, Path]:
    """Two small policies."""
    agents = {
        "net": InContextAgent(net=random_weights(PolicyNet, NetConfig(width=4, layers=1, heads=1), ROOM.spec)),
        "mlp": MlpAgent.build(ROOM.spec, (4,)),
    }
    for kind, agent in agents.items():
        cards.save_policy(folder / f"{kind}.safetensors", agent, small_card(kind))
        load_policy(folder / kind)
    return {kind: folder / f"{kind}.safetensors" for kind in agents}


@fuzzed("cards", kind=st.sampled_from(["net", "mlp", "mlp"]), changes=edits(), signed=st.booleans())
def test_cards(released, kind, changes, signed):
    path, card = released[kind], edited(small_card(kind), changes)
    if signed and isinstance(card, dict):  # a forged one: its digests fit
        cards.write_card(path, card)
    else:
        path.with_suffix(".json").write_text(json.dumps(card))
    try:
        load_policy(path)
    except UserError as error:
        one_line(error)


CONFIGS = (TrainConfig(), ScaredConfig(), CollectConfig(), EpsConfig(), PPOLagConfig(), ROOM)


@fuzzed("configs", config=st.sampled_from(CONFIGS), changes=edits())
def test_configs(config, changes):
    values = edited(plain(dataclasses.asdict(config)), changes)
    try:
        from_plain(type(config), values)
    except UserError as error:
        one_line(error)


@fuzzed("runs", changes=edits(), file=st.sampled_from(["config.json", "recipe.json"]))
def test_run_folders(folder, changes, file):
    stage = preset("darkroom-small", None).stages[0]
    described = {"name": "run", **describe(**vars(stage.experiment))}
    whole = {"name": "r", "stages": [described], "average_last": 1, "env_args": [], "done": []}
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for other in run.iterdir():
        other.unlink()
    content = edited(plain(whole if file == "recipe.json" else described), changes)
    (run / file).write_text(json.dumps(content))
    for read in (recipe.load_recipe, recipe.load_progress, tables.read_run):
        try:
            read(run)
        except UserError as error:
            one_line(error)


@fuzzed("sweeps", changes=edits())
def test_sweep_folders(folder, changes):
    known = {"name": "a=1", "label": "a=1", "command": "x", "status": "failed"}
    run = {**known, "error": "", "seconds": 1.0, "host": "h"}
    content = edited({"settings": ["--x"], "evaluate": None, "grid": {"a": ["1"]}, "runs": [run]}, changes)
    (folder / "sweep.json").write_text(json.dumps(content))
    plan = Plan(name="x", settings=("--x",), grid={"a": ("1", "2")}, evaluate=None, runs=())
    for read in (tables.run_results, sweep_panels, lambda path: open_index(path, plan)):
        try:
            read(folder)
        except UserError as error:
            one_line(error)


@fuzzed("results", changes=edits(), flips=st.lists(st.integers(0, 10**6), max_size=2), forged=st.booleans())
def test_results(folder, changes, flips, forged):
    returns = np.arange(6.0).reshape(2, 3)
    meta = {"label": "mine", "env": {"name": "e", "parameters": {}}, "budget_range": [1, 3], "budgets_per_task": 1}
    good = Results(returns=returns, costs=returns, lengths=returns + 1, budgets=np.ones(2), meta=meta)
    arrays, card = save_results(good, folder / "r")
    saved = json.loads(card.read_text())
    if forged:
        saved.pop("sha256")
    card.write_text(json.dumps(edited(saved, changes)))
    data = bytearray(arrays.read_bytes())
    for flip in flips:
        data[flip % len(data)] ^= 1 << flip % 8
    arrays.write_bytes(data)
    try:
        found = load_results(folder / "r")
        console = Console(file=io.StringIO())
        console.print(tables.summary_table([found]))
        console.print(tables.relative_table([found], upper=found, lower=found))
    except UserError as error:
        one_line(error)


@fuzzed("logs", lines=st.lists(JSON, max_size=3), raw=st.binary(max_size=20), cut=st.integers(0, 100))
@pytest.mark.filterwarnings("ignore::safeicrl.errors.Damaged")
def test_logs(folder, lines, raw, cut):
    path = folder / "metrics.jsonl"
    good = {"iteration": 1, "env_steps": 10, "seconds": 1.0, "return": 0.5}
    text = "".join(json.dumps(line) + "\n" for line in (good, *lines)).encode()
    path.write_bytes(text[:cut] + raw + text[cut:])
    try:
        for line in read_metrics(path):
            assert isinstance(line["iteration"], int)
    except UserError as error:
        one_line(error)


# -- acting


@pytest.fixture(scope="module")
def player() -> Policy:
    net = random_weights(PolicyNet, NetConfig(width=4, layers=1, heads=1), ROOM.spec)
    policy = Policy(env=ROOM, agent=InContextAgent(net=net), card=small_card("net"))
    policy.start(budget=2)
    return policy


ANYTHING = st.one_of(JSON, st.lists(NUMBERS, min_size=2, max_size=2), st.just((1, 1)), st.just(object()))


@fuzzed("acting", place=st.integers(0, 7), value=ANYTHING)
@pytest.mark.filterwarnings("ignore::safeicrl.errors.BeyondTraining")
def test_acting(player, place, value):
    names = ("observation", "reward", "cost", "terminated", "truncated")
    good = dict(zip(names, ((1, 1), 0.0, 0.0, False, False), strict=True))
    player.start(2)
    player.act((1, 1))
    try:
        if place < len(names):
            player.act(**{**good, names[place]: value})
        else:
            player.start(**{"budget": 2, ("budget", "seed", "batch")[place - len(names)]: value})
            player.start(2)
            player.act((1, 1))
    except UserError as error:
        one_line(error)
    assert player.act(**good) in range(5)  # whatever came before, it goes on


@fuzzed("resets", options=ANYTHING, seed=ANYTHING, action=ANYTHING)
def test_resets(options, seed, action):
    env = GymEnv(ROOM)
    for call in (lambda: env.reset(seed=seed, options=options), lambda: env.reset() and env.step(action)):
        try:
            call()
        except UserError as error:
            one_line(error)

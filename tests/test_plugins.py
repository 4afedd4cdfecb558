"""Environments and algorithms of others on the command line: entry points and --import."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import equinox as eqx
import jax
import pytest
from standin import ROOM

from safeicrl import cli, plugins, provenance
from safeicrl.algos import registry as algos
from safeicrl.algos.api import METRICS
from safeicrl.config import changed
from safeicrl.envs import registry
from safeicrl.policies.catalogue import KINDS

LEVERS = Path(__file__).parent.parent / "examples" / "custom_env.py"

MODULE = """
from safeicrl.algos import registry as algos
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import register

class {name}(SafeDarkRoom):
    "A room of one's own."

register("{world}", {name})
algos.register("{world}-algo", algos.Entry(algorithm="standin:TableAlgorithm", config="standin:TableConfig"))
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to work in; nothing that a test registers there stays."""
    monkeypatch.chdir(tmp_path)
    tables = [(table, dict(table)) for table in (registry.WORLDS, algos.ALGOS)]
    monkeypatch.setattr(plugins, "imported", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for table, before in tables:
        table.clear()
        table.update(before)
    for name in set(sys.modules) - modules:
        if name in ("my_room", "other_room", "my_levers", "my_algorithm"):
            del sys.modules[name]


def test_a_module_is_imported_by_name_or_by_file_for_one_command(elsewhere, capsys):
    (elsewhere / "my_room.py").write_text(MODULE.format(name="Own", world="own-room"))
    (elsewhere / "other_room.py").write_text(MODULE.format(name="Other", world="other-room"))
    for before in ("--import my_room list --import=other_room.py", "list --import other_room.py --import my_room"):
        assert cli.main(before.split()) == 0
        said = capsys.readouterr().out
        assert "own-room" in said
        assert "other-room-algo" in said
        assert "A room of one's own." in said
    assert plugins.imported == ["my_room", "other_room.py", "other_room.py", "my_room"]
    assert provenance.surroundings()["imports"] == plugins.imported


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("--import no_such_module list", "cannot import no_such_module: No module named 'no_such_module'"),
        ("--import nothing.py list", "cannot import nothing.py: there is no such file"),
        ("--import broken.py list", "cannot import broken.py: one line"),
        ("--import json.py list", "another module is called 'json'"),
        ("list --import", "--import takes the name of a module"),
        ("evaluate --agent random --env own-room", "unknown environment 'own-room'.*--import MODULE"),
        ("train --algo own --env safe-dark-room", "unknown algorithm 'own'.*--import MODULE"),
    ],
)
def test_what_cannot_be_imported_is_one_line(elsewhere, capsys, asked, words):
    (elsewhere / "broken.py").write_text("raise RuntimeError('one line\\nand another')")
    (elsewhere / "json.py").write_text("")
    assert cli.main(asked.split()) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert re.search(words, said)
    assert "broken" not in sys.modules
    assert plugins.imported == []


def test_an_entry_point_is_loaded_when_its_name_is_asked_for(elsewhere, monkeypatch):
    (elsewhere / "my_room.py").write_text(MODULE.format(name="Own", world="own-room"))
    sys.path.insert(0, str(elsewhere))
    points = [
        importlib.metadata.EntryPoint(name="own", value="my_room", group="safeicrl"),
        importlib.metadata.EntryPoint(name="bad", value="no_such_module", group="safeicrl"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "safeicrl" else [])
    plugins.load_entry_points.cache_clear()
    assert "my_room" not in sys.modules
    with pytest.warns(UserWarning, match="the entry point bad = no_such_module cannot be loaded"):
        env = registry.make_env("own-room", size=4, obstacles=3)
    assert env.size == 4
    plugins.load_entry_points.cache_clear()


def test_a_world_of_ones_own_is_evaluated_and_shown_from_the_command_line(elsewhere, capsys):
    (elsewhere / "my_levers.py").write_text(LEVERS.read_text())
    sizes = "--tasks 4 --budget-count 4 --episodes 2"
    assert cli.main(f"evaluate --import my_levers --agent random --env hot-levers {sizes} --out found".split()) == 0
    meta = json.loads((elsewhere / "found.json").read_text())["meta"]
    assert meta["imports"] == ["my_levers"]
    assert meta["env"]["name"] == "hot-levers"
    capsys.readouterr()
    assert cli.main(["demo", "hot-levers"]) == 2  # which is known now, but no policy ships for it
    assert "unknown policy 'hot-levers'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (("standin:Tabel", "standin:TableConfig"), "and the module has no 'Tabel'"),
        (("standin:TableAlgorithm", "no_such:Config"), "and there is no module 'no_such'"),
        (("standin:TableAlgorithm", "standin:jax"), "of algorithm 'own' must be a dataclass, got standin:jax"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_a_wrong_entry_is_one_line(entry, words, capsys):
    algos.register("own", algos.Entry(algorithm=entry[0], config=entry[1]))
    assert cli.main(["train", "--algo", "own"]) == 2
    assert words in capsys.readouterr().err


def test_an_algorithm_of_ones_own_takes_at_most_60_lines(elsewhere):
    """Traced, not compiled: its parts are tested where they live."""
    script = LEVERS.with_name("custom_algorithm.py")
    assert len(script.read_text().splitlines()) <= 60
    (elsewhere / "my_algorithm.py").write_text(script.read_text())
    plugins.import_module("my_algorithm.py")
    algorithm, config = algos.find_algo("plain-ppo")
    settings = changed(config(), {"rows": 8, "ppo.minibatch": 8, "net.width": 8, "net.layers": 1, "net.heads": 2})
    learner = algorithm(ROOM, settings)
    assert algos.algo_name(settings) == "plain-ppo"
    before = eqx.filter_eval_shape(learner.init, jax.random.key(0))
    after, metrics = eqx.filter_eval_shape(learner.update, before)
    shapes = [[x.shape for x in jax.tree.leaves(state) if hasattr(x, "shape")] for state in (before, after)]
    assert shapes[0] == shapes[1]
    assert {name for name in METRICS if metrics[name].shape != ()} == set()
    assert learner.agent(after).trained_episodes == ROOM.episodes
    assert KINDS[learner.card()["kind"]]

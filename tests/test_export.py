"""Policies to take elsewhere: the same actions, a card that says what is true, and one line for every mistake."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import numpy as np
import pytest
from standin import ROOM, TableAgent

import safeicrl
from safeicrl import load_policy
from safeicrl.agents.in_context import InContextAgent
from safeicrl.cli import main
from safeicrl.envs.registry import env_to_plain
from safeicrl.evaluation.archive import load_results, results_equal, save_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import Summary, summarise
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies import cards, catalogue
from safeicrl.policies.export import best_seed, export_policy

TOLERANCE = 0.03


def agent(seed: int) -> TableAgent:
    return TableAgent(table=jax.random.normal(jax.random.key(seed), (9, 5)), size=3)


def card(seed: int, total: float, over: float) -> dict:
    summary = Summary(
        total_return=total, total_return_error=0.0, last_return=0.0, over_budget=over, over_budget_last=0.0,
        cost=0.0, by_budget={}, over_by_budget={}, episodes=4, tasks=20,
    )  # fmt: skip
    return {
        "kind": "table",
        "env": env_to_plain(ROOM),
        "temperature": 0.5,
        "training": {"train": {"evaluation": {"tolerance": TOLERANCE}}, "command": "train", "seed": seed},
        "evaluation": {"actions": "sampled, temperature 0.5", "summary": dataclasses.asdict(summary)},
        "limits": ["a toy"],
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of three seeds: the most return at too many violations, the best, the safest."""
    monkeypatch.setitem(catalogue.KINDS, "table", lambda card, env: agent(0))
    folder = tmp_path / "run"
    for seed, (total, over) in {3: (9.0, 0.04), 10: (2.0, 0.03), 11: (1.0, 0.01)}.items():
        cards.save_policy(folder / f"best-seed{seed}.safetensors", agent(seed), card(seed, total, over))
    return folder


def actions(policy, seed: int) -> list[list[int]]:
    """Of a batch that walks over every cell; the more rows, the less two temperatures can agree by chance."""
    policy.start(budget=2, batch=64, seed=seed)
    cells = [np.tile((row, column), (64, 1)) for row in range(3) for column in range(3)]
    first = policy.act(cells[0])
    return [first.tolist(), *(policy.act(cell, np.zeros(64), np.zeros(64), True).tolist() for cell in cells[1:])]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.1}, {"temperature": 0.0}])
def test_an_exported_policy_acts_bit_for_bit_as_before(run, tmp_path, changes):
    path = export_policy(run, tmp_path / "new" / "mine.v2", **changes)
    assert path == tmp_path / "new" / "mine.v2.safetensors"
    assert path.read_bytes() == (run / "best-seed10.safetensors").read_bytes()
    exported, source = load_policy(path), load_policy(run / "best-seed10", **changes)
    assert exported.card["actions"] == source.card["actions"]
    assert actions(exported, 3) == actions(source, 3)
    own = load_policy(run / "best-seed10")
    assert (actions(exported, 3) == actions(own, 3)) == (not changes)
    again = load_policy(export_policy(path, tmp_path / "again"))
    assert actions(again, 3) == actions(exported, 3)


def test_the_card_says_what_it_is(run, tmp_path, capsys):
    out = tmp_path / "mine.json"
    command = ["export", str(run), "--seed", "11", "--out", str(out), "--name", "toy", "--description", "a table"]
    assert main([command[0], "--limit", "one room", *command[1:], "--limit", "δ ≥ 1"]) == 0
    found, before = cards.read_card(out), cards.read_card(run / "best-seed11.json")
    assert list(found)[:2] == ["name", "description"]
    assert {key: found.pop(key) for key in ("name", "description")} == {"name": "toy", "description": "a table"}
    assert found.pop("exported")["from"] == str(run / "best-seed11.safetensors")
    assert found.pop("limits") == ["a toy", "one room", "δ ≥ 1"]
    assert found == {key: value for key, value in before.items() if key != "limits"}
    wrote, line = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {out.with_suffix('.safetensors')} and {out}: ")
    assert wrote.endswith("best-seed11.safetensors, actions sampled, temperature 0.5")
    namespace = {"safeicrl": safeicrl}
    exec(line.removeprefix("load it:  "), namespace)
    assert namespace["policy"].card["name"] == "toy"
    # another temperature than that of its evaluation is said
    assert main(["export", str(out), "--out", str(out), "--overwrite", "--temperature", "2"]) == 0
    assert "evaluation is of actions sampled, temperature 0.5" in capsys.readouterr().out
    assert cards.read_card(out)["name"] == "toy"


def test_a_policy_for_other_parameters_of_its_environment(run, tmp_path, capsys):
    out = tmp_path / "mine"
    assert main(["export", str(run), "--out", str(out), "--env-args", "alpha=0.25", "episodes=7"]) == 0
    card = load_policy(out).card
    parameters = card["env"]["parameters"]
    assert "evaluation" not in card  # which was of another environment
    assert card["trained_in"]["parameters"]["episodes"] == ROOM.episodes
    assert card["limits"][0].endswith(f"alpha={ROOM.alpha}, here 0.25, episodes={ROOM.episodes}, here 7")
    assert (parameters["alpha"], parameters["episodes"], parameters["size"]) == (0.25, 7, ROOM.size)
    capsys.readouterr()
    line = refused(capsys, "export", str(run), "--out", str(tmp_path / "no"), "--env-args", f"size={ROOM.size + 1}")
    assert "the policy's observation space is" in line


def test_the_best_seed_is_the_trainers(run):
    assert best_seed(run) == 10
    for seed, over in ((10, 0.05), (11, 0.06)):  # none is safe: the fewest violations
        cards.save_policy(run / f"best-seed{seed}.safetensors", agent(seed), card(seed, 99.0, over))
    assert best_seed(run) == 3


def test_an_evaluation_takes_the_place_of_trainings(run, tmp_path, capsys):
    results = tmp_path / "results"
    assert main(["evaluate", str(run), "--tasks", "20", "--out", str(results)]) == 0
    found = load_results(f"{results}-seed10")
    path = export_policy(run, tmp_path / "mine", evaluation=f"{results}-seed10.json")
    evaluation = cards.read_card(path)["evaluation"]
    assert evaluation.pop("summary") == json.loads(json.dumps(dataclasses.asdict(summarise(found))))
    assert evaluation == {key: value for key, value in found.meta.items() if key != "card"}
    # and what was exported gives these results again
    assert main(["evaluate", str(path), "--tasks", "20", "--out", str(results)]) == 0
    assert results_equal(load_results(results), found)
    capsys.readouterr()
    reference = Results(**{**vars(found), "meta": {"label": "explorer", "agent": "explorer"}})
    save_results(reference, tmp_path / "explorer")
    for changes, words in (
        ({"evaluation": f"{results}-seed11"}, "results-seed11 is the evaluation of another policy"),
        ({"evaluation": results, "temperature": 0.4}, "actions sampled, temperature 0.5; the policy's: sampled"),
        (
            {"evaluation": tmp_path / "explorer.npz"},
            "result of safeicrl evaluate POLICY, got one of explorer",
        ),
        ({"evaluation": tmp_path / "none.json"}, "no results file at"),
        ({"evaluation": path.with_suffix(".json")}, r"mine\.json is half a results file"),
    ):
        options = [text for name, value in changes.items() for text in (f"--{name}", str(value))]
        assert re.search(words, refused(capsys, "export", str(run), "--out", str(tmp_path / "x"), *options))
    for name, value, words in (
        ("size", 4, "another environment than the policy's: size 4, not 3"),
        ("alpha", 0.25, "alpha 0.25, not 0.5"),
    ):
        env = {**found.meta["env"], "parameters": {**found.meta["env"]["parameters"], name: value}}
        save_results(Results(**{**vars(found), "meta": {**found.meta, "env": env}}), tmp_path / "other")
        options = ["--out", str(tmp_path / "x"), "--evaluation", str(tmp_path / "other.json")]
        assert words in refused(capsys, "export", str(run), *options)
    save_results(
        Results(**{**vars(found), "meta": {**found.meta, "context": "wiped at every episode"}}), tmp_path / "wiped"
    )
    wiped = ["--out", str(tmp_path / "x"), "--evaluation", str(tmp_path / "wiped")]
    assert "context wiped at every episode; the policy's: kept" in refused(capsys, "export", str(run), *wiped)
    without_card = {key: value for key, value in found.meta.items() if key != "card"}
    shorter = {name: getattr(found, name)[:, :3] for name in ("returns", "costs", "lengths")}
    unclear = "does not say what was evaluated on which environment: "
    for changes, words in (
        (shorter, "of trials of 3 episodes, the environment's have 4$"),
        ({"meta": {**without_card, "iteration": 7}}, "in training, which the card has already$"),
        ({"meta": {**found.meta, "env": {"parameters": {}}}}, f"{unclear}KeyError.'name'"),
        ({"meta": {**found.meta, "env": {"name": ["x"], "parameters": {}}}}, unclear),
        ({"meta": {**found.meta, "card": {"training": ["x"]}}}, unclear),
    ):
        save_results(Results(**{**vars(found), **changes}), tmp_path / "other")
        options = ["--out", str(tmp_path / "x"), "--evaluation", str(tmp_path / "other.npz")]
        assert re.search(f"other.npz .*{words}", refused(capsys, "export", str(run), *options))
    assert not list(tmp_path.glob("x*"))


def net_policy(path, seed: int, **changes) -> None:
    """A released policy of the library's own kind, never trained."""
    config = NetConfig(width=8, layers=1, heads=2, context=20)
    own = InContextAgent(net=PolicyNet(config, ROOM.spec, jax.random.key(seed)))
    content = {**card(seed, 1.0, 0.0), "kind": "net", "net": dataclasses.asdict(config), **changes}
    cards.save_policy(path, own, content)


def arrays(policy) -> list:
    return jax.tree.leaves(eqx.filter(policy.agent, eqx.is_array))


def test_the_mean_of_policies(tmp_path, capsys):
    runs = [tmp_path / name for name in "abc"]
    for number, folder in enumerate(runs):
        for seed in (0, 1):
            path, own = folder / f"best-seed{seed}.safetensors", 10 * seed + number
            training = {**card(own, 1.0, 0.0)["training"], "algo": {"config": {"episodes": number or None}}}
            net_policy(path, own, training=training)
    out = tmp_path / "mean"
    others = [option for folder in runs[1:] for option in ("--average", str(folder))]
    assert main(["export", str(runs[0] / "best-seed1"), *others, "--out", str(out)]) == 0
    parts = [f"{folder / 'best-seed1'}.safetensors" for folder in runs]  # of the same seed
    assert f": the mean of {', '.join(parts)}, actions" in capsys.readouterr().out
    found = load_policy(out)
    for mean, *single in zip(arrays(found), *(arrays(load_policy(part)) for part in parts), strict=True):
        np.testing.assert_allclose(mean, np.mean(single, axis=0), rtol=1e-5, atol=1e-7)
    assert not np.allclose(arrays(found)[0], arrays(load_policy(parts[0]))[0])
    assert "evaluation" not in found.card  # which was of the first
    assert found.card["training"]["seed"] == 10
    others = [(part["from"], part["training"]["seed"]) for part in found.card["averaged_with"]]
    assert others == [(parts[1], 11), (parts[2], 12)]
    # its own evaluation fits it, that of a part does not
    for name, policy in (("whole", str(out)), ("part", parts[0])):
        assert main(["evaluate", policy, "--tasks", "4", "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    again = ["export", str(out), "--out", str(tmp_path / "again"), "--evaluation", str(tmp_path / "whole")]
    assert main(again) == 0
    assert "mean of" not in capsys.readouterr().out
    assert cards.read_card(tmp_path / "again.json")["averaged_with"] == found.card["averaged_with"]
    other = ["--out", str(tmp_path / "x"), "--evaluation", str(tmp_path / "part")]
    assert "the evaluation of another policy" in refused(capsys, "export", str(out), *other)


def test_what_cannot_be_averaged(run, tmp_path, capsys):
    first, there = tmp_path / "one" / "best-seed3.safetensors", tmp_path / "there.safetensors"
    net_policy(first, 3)
    net_policy(there, 4)
    env = env_to_plain(dataclasses.replace(ROOM, alpha=0.25))
    net_policy(tmp_path / "env.safetensors", 5, env=env)
    wider = {**cards.read_card(first)["net"], "context": 40}
    net_policy(tmp_path / "net.safetensors", 5, net=wider)
    net_policy(tmp_path / "mean.safetensors", 5, averaged_with=[])
    net_policy(tmp_path / "run" / "best-seed7.safetensors", 5)
    for other, words in (
        (first, "each policy counts once in an average"),
        (tmp_path / "mean", "mean.safetensors is an average already: give its parts instead"),
        (tmp_path / "env", "their env differs: alpha 0.25, not 0.5"),
        (tmp_path / "net", "their net differs: context 40, not 20"),
        (run / "best-seed3", "is of kind 'table': only policies of kind 'net'"),
        (run, "best-seed3.safetensors is of kind 'table'"),
        (tmp_path / "none", "no policy and no run folder at"),
    ):
        options = ["--average", str(there), "--average", str(other), "--out", str(tmp_path / "x")]
        assert words in refused(capsys, "export", str(first), *options)
    line = refused(
        capsys, "export", str(run), "--seed", "11", "--average", str(first.parent), "--out", str(tmp_path / "x")
    )
    assert "has no policy of seed 11; it has seeds 3" in line
    incomplete = tmp_path / "incomplete.safetensors"
    net_policy(incomplete, 4)
    content = {key: value for key, value in cards.read_card(incomplete).items() if key != "net"} | {"format": 1}
    incomplete.with_suffix(".json").write_text(json.dumps(content))
    line = refused(capsys, "export", str(first), "--average", str(incomplete), "--out", str(tmp_path / "x"))
    assert "incomplete.json is an incomplete policy card: KeyError('net')" in line
    for damaged in (None, "x", ["a"], 3):
        net_policy(there, 4, averaged_with=damaged)
        line = refused(capsys, "export", str(there), "--out", str(tmp_path / "x"))
        assert "'averaged_with' must be a list of objects" in line
    assert not list(tmp_path.glob("x*"))


def refused(capsys, *args: str) -> str:
    """The one line a mistake gets."""
    assert main(list(args)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_a_guard_keeps_the_risk_that_it_was_exported_with(tmp_path, capsys):
    command = ["export", "safe-dark-room-guard", "--out", str(tmp_path / "bold"), "--risk", "0.25"]
    assert main([*command, "--reserve", "1"]) == 0
    said, actions = capsys.readouterr().out, "actions sampled, temperature 0.5"
    assert f"{actions}, guard risk 0.25, reserve 1\n" in said
    assert f"its card's evaluation is of {actions}, guard risk 0.03: --evaluation makes them agree" in said
    assert load_policy(tmp_path / "bold.safetensors").agent.risk == 0.25


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "export needs a policy .* and a file"),
        ("RUN", "export needs a policy .* and a file"),
        ("--out new", "export needs a policy .* and a file"),
        ("nowhere/at/all --out new", "no policy and no run folder at nowhere/at/all$"),
        ("safe-dark-rom --out new", "Did you mean 'safe-dark-room'"),
        ("RUN --out new --seed 4", "has no policy of seed 4; it has seeds 3, 10, 11$"),
        ("RUN/best-seed3 --out new --seed 3", "is a single policy: leave out --seed 3"),
        ("RUN --out RUN", "--out must name the file to write, got the folder"),
        ("RUN --out RUN/best-seed3", r"best-seed3\.safetensors exists: choose another --out, or --overwrite$"),
        ("RUN --out taken --overwrite", r"^safeicrl: taken\.json is a folder: choose another --out$"),
        ("RUN --out full --overwrite", r"^safeicrl: full\.safetensors is a folder"),
        ("RUN --out RUN/config.json/new", "cannot make the folder"),
        ("RUN --out new --temperature -1", "temperature must be a finite number ≥ 0"),
        ("RUN --out new --temperature warm", "--temperature takes a number"),
        ("RUN --out new --risk 0.1", r"this policy has no guard: leave out risk 0\.1"),
        ("safe-dark-room-guard --out new --risk 1", "risk must be a number between 0 and 1, both excluded, got 1"),
        ("RUN --out new --name=", "the name of a policy must be words"),
        ("RUN --out new --limit", "Missing value for argument '--limit'"),
        ("RUN --limit --out new", "Missing value for argument '--limit'"),
        ("RUN --out new --limit=", "the limit of a policy must be words"),
        ("RUN --out new --limit few words", "unexpected argument 'words'"),
        ("RUN --out new --limits few", "unknown option --limits; did you mean --limit"),
        ("RUN --out new --greedy", "unknown option --greedy"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, capsys, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (run / "config.json").write_text("{}")
    for folder in ("taken.json", "full.safetensors"):
        (tmp_path / folder).mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert re.search(words, refused(capsys, "export", *args.replace("RUN", str(run)).split()))
    assert sorted(tmp_path.rglob("*")) == before


def test_cards_that_say_nothing_of_how_good_they_are(run, tmp_path, capsys):
    bare = {key: value for key, value in card(3, 0.0, 0.0).items() if key in ("kind", "env")}
    cards.save_policy(run / "best-seed3.safetensors", agent(3), bare)
    command = ["export", str(run), "--out", str(tmp_path / "new")]
    assert "best-seed3.json has no evaluation to choose a seed by" in refused(capsys, *command)
    assert main([*command, "--seed", "3"]) == 0
    assert cards.read_card(tmp_path / "new.json")["limits"] == []


@pytest.mark.parametrize(("field", "value"), [("evaluation", None), ("limits", None), ("limits", "abc")])
def test_a_card_that_was_edited_by_hand(run, tmp_path, capsys, field, value):
    edited = run / "best-seed10.json"
    edited.write_text(json.dumps({**json.loads(edited.read_text()), field: value}))
    for source in (run, edited):
        line = refused(capsys, "export", str(source), "--out", str(tmp_path / "new"))
        assert f"{edited} is damaged or was edited" in line
    assert not list(tmp_path.glob("new*"))

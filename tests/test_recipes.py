"""Recipes of several stages: what is handed over, being killed, the policy at the end, repeating a run."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from standin import ROOM, TableAgent, TableConfig
from test_train import arrays, same_arrays, timeless

from safeicrl.agents.in_context import InContextAgent
from safeicrl.algos import registry
from safeicrl.cli import main
from safeicrl.config import changed
from safeicrl.envs.api import record, replace
from safeicrl.envs.faults import NO_FAULT
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results, results_equal
from safeicrl.log import JsonLines, read_metrics, read_run
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies import catalogue
from safeicrl.policies.cards import read_card
from safeicrl.policies.policy import load_policy
from safeicrl.recipes.presets import PRESETS, Preset
from safeicrl.recipes.recipe import Experiment, Recipe, Stage, load_experiment, load_recipe
from safeicrl.recipes.run import run_recipe
from safeicrl.show import demo
from safeicrl.train import EvalConfig, TrainConfig, train

NET = NetConfig(width=8, layers=1, heads=2, context=20, dtype="float32")
EVALUATION = EvalConfig(every=0, tasks=6, rows=6, temperature=0.5, segments=1)
FOLDERS = ["1-walk", "2-run"]


@record
class DriftState:
    net: PolicyNet
    memory: jax.Array  # [length] what must not be handed over
    key: jax.Array


@dataclass(frozen=True)
class DriftConfig:
    iterations: int = 2
    size: float = 0.1  # share by which every weight grows
    length: int = 3  # of `memory`
    net: NetConfig = NET


@dataclass(frozen=True)
class Drift:
    """Policies of the library's own kind, which can be averaged; quick to compile, and blind to what they play."""

    env: Any
    config: DriftConfig

    def init(self, key):
        net, factor = random_weights(PolicyNet, self.config.net, self.env.spec), jax.random.uniform(key)
        net = jax.tree.map(lambda x: x * factor if eqx.is_inexact_array(x) else x, net)
        return DriftState(net=net, memory=jnp.zeros(self.config.length), key=key)

    def start_from(self, state, other):
        return replace(state, net=other.net)

    def agent(self, state):
        return InContextAgent(net=state.net)

    def card(self):
        return {"kind": "net", "net": dataclasses.asdict(self.config.net)}

    def update(self, state):
        factor = 1 + self.config.size / (1 + state.memory[0])
        net = jax.tree.map(lambda x: x * factor if eqx.is_inexact_array(x) else x, state.net)
        metrics = dict.fromkeys(("return", "cost", "budget", "over_budget", "lambda"), jnp.float32(0.0))
        state = replace(state, net=net, memory=state.memory + 1)
        return state, {**metrics, "env_steps": jnp.int32(10), "fault": NO_FAULT}


if "drift" not in registry.ALGOS:
    registry.register("drift", registry.Entry(algorithm=f"{__name__}:Drift", config=f"{__name__}:DriftConfig"))


def stage(name: str, algo: Any, **settings: Any) -> Stage:
    settings = TrainConfig(**{"checkpoint_minutes": 0.0, "evaluation": EVALUATION, **settings})
    return Stage(name=name, experiment=Experiment(env=ROOM, algo=algo, train=settings))


def drift(**changes: Any) -> Recipe:
    """Two stages, the second of which forgets a memory of another size."""
    stages = (stage("walk", DriftConfig()), stage("run", DriftConfig(iterations=3, length=5)))
    return Recipe(**{"name": "drift", "stages": stages, **changes})


def table() -> Recipe:
    """Two stages of the table, which does learn."""
    stages = (
        stage("walk", TableConfig(), iterations=2),
        stage("run", TableConfig(lr=0.25), iterations=4, evaluation=dataclasses.replace(EVALUATION, every=2)),
    )
    return Recipe(name="table", stages=stages)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    make = lambda card, env: TableAgent(table=jnp.zeros((env.size**2, 5)), size=env.size)  # noqa: E731
    monkeypatch.setitem(catalogue.KINDS, "table", make)
    line = lambda line: stage(line, DriftConfig(length=len(line))).experiment  # noqa: E731
    monkeypatch.setitem(PRESETS, "drift", Preset(summary="Drift.", make=drift, line=line))
    monkeypatch.setitem(PRESETS, "table", Preset(summary="A table.", make=table))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The table's recipe without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalogue.KINDS, "table", lambda card, env: TableAgent(table=jnp.zeros((9, 5)), size=3))
        return run_recipe(table(), out=tmp_path_factory.mktemp("runs") / "whole").folder


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    """Drift's recipe, averaged, for rooms with one more episode."""
    recipe = drift(average_last=2, env_args=("episodes=5",))
    return run_recipe(recipe, out=tmp_path_factory.mktemp("runs") / "averaged").folder


def test_a_stage_begins_with_the_networks_of_the_one_before(tmp_path):
    """With steps of size 0 the second stage keeps them; its memory is of its own size and starts anew."""
    still = stage("run", DriftConfig(size=0.0, length=5))
    folder = run_recipe(drift(stages=(stage("walk", DriftConfig()), still)), out=tmp_path / "run").folder
    first, second = (arrays(folder / name) for name in FOLDERS)
    nets = [name for name in first if name.startswith("net.")]
    assert len(nets) > 10
    for name in nets:
        np.testing.assert_array_equal(first[name], second[name])
    assert (first["memory"].tolist(), second["memory"].tolist()) == ([2.0] * 3, [2.0] * 5)
    assert load_experiment(folder / "2-run").train.start == str(folder / "1-walk")
    alone = train(still.experiment.build(), still.experiment.train, out=tmp_path / "alone").folder
    assert any((arrays(alone)[name] != second[name]).any() for name in nets)


def test_only_the_networks_of_a_start_must_fit(tmp_path):
    lost = stage("walk", DriftConfig(), start=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no policy and no run folder at"):
        run_recipe(drift(stages=(lost, stage("run", DriftConfig()))), out=tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    wide = DriftConfig(net=dataclasses.replace(NET, width=16))
    with pytest.raises(UserError, match=r"1-walk has width 8, this run has 16: use --algo\.net\.width 8"):
        run_recipe(drift(stages=(stage("walk", DriftConfig()), stage("run", wide))), out=tmp_path / "run")
    room = dataclasses.replace(ROOM, size=4)
    other = Experiment(env=room, algo=DriftConfig(), train=TrainConfig(start=str(tmp_path / "run" / "1-walk")))
    with pytest.raises(UserError, match=r"1-walk/checkpoint.safetensors: array 'net\..* has shape .*, expected"):
        train(other.build(), other.train, out=tmp_path / "other")


@pytest.mark.parametrize("at", [1, 3])  # iterations of the second stage
def test_killed_in_the_second_stage_and_resumed_is_as_if_nothing_had_happened(whole, tmp_path, monkeypatch, at):
    run, write = tmp_path / "whole", JsonLines.write

    def killed(self, step, values):
        if self.path.parent.name == "2-run" and values["iteration"] == at:
            raise KeyboardInterrupt
        write(self, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", killed)
        assert main(["train", "--preset", "table", "--out", str(run)]) == 130
    assert not (run / "policy.safetensors").exists()
    assert main(["train", "--resume", str(run)]) == 0
    for name in FOLDERS:
        same_arrays(whole / name, run / name)
        assert timeless(whole / name) == timeless(run / name)
    for name in ("policy", "2-run/best-seed0"):
        assert (whole / f"{name}.safetensors").read_bytes() == (run / f"{name}.safetensors").read_bytes()
    names = lambda folder: sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))  # noqa: E731
    assert names(whole) == names(run)


def test_a_stopped_recipe_goes_on_with_other_limits(tmp_path, capsys, monkeypatch):
    run, write = tmp_path / "run", JsonLines.write

    def stopped(self, step, values):
        if values["iteration"] == 1 and self.path.parent.name == "2-run":
            raise KeyboardInterrupt
        write(self, step, values)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", stopped)
        assert main(["train", "--preset", "drift", "--seed", "7", "--out", str(run)]) == 130
    for command in ("evaluate", "export"):
        assert main([command, str(run), *(["--out", str(tmp_path / "x")] if command == "export" else [])]) == 2
        assert f"safeicrl train --resume {run}" in capsys.readouterr().err
    for options, words in (
        (["--seed", "8"], "seed cannot change"),
        (["--algo.size", "1"], "algo cannot change"),
        (["--out", "x"], "leave out --preset, --line, --like and --out"),
    ):
        assert main(["train", "--resume", str(run), *options]) == 2
        assert words in capsys.readouterr().err
    before = (run / "1-walk" / "checkpoint.safetensors").read_bytes()
    monkeypatch.setattr("sys.argv", ["safeicrl", "train", "--resume", "run"])
    began = json.loads((run / "recipe.json").read_text())["command"]
    assert main(["train", "--resume", str(run), "--iterations", "1"]) == 0
    assert "stage 2 of 2: run" in capsys.readouterr().out
    assert (run / "1-walk" / "checkpoint.safetensors").read_bytes() == before
    limits = [each.experiment.train.iterations for each in load_recipe(run).stages]
    assert limits == [None, 1]  # the first stage is stored as it ran
    assert [entry["iterations"] for entry in load_policy(run).card["stages"]] == [2, 1]
    assert json.loads((run / "recipe.json").read_text())["command"] == began != "safeicrl train --resume run"
    # resumed once more there is nothing left to do
    assert main(["train", "--resume", str(run)]) == 0
    assert "compiling" not in capsys.readouterr().out


def test_the_policy_at_the_end_is_the_mean_and_for_the_other_environment(averaged):
    policy, parts = load_policy(averaged), [load_policy(averaged / name) for name in FOLDERS]
    weights = [jax.tree.leaves(eqx.filter(each.agent, eqx.is_inexact_array)) for each in (policy, *parts)]
    for mean, one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(mean, (np.asarray(one) + np.asarray(other)) / 2, rtol=1e-5, atol=1e-7)
    assert policy.env == dataclasses.replace(ROOM, episodes=5)
    assert policy.card["trained_in"]["parameters"]["episodes"] == ROOM.episodes
    # it has an evaluation of its own, in its own environment
    kept = load_results(averaged / "policy-evaluation")
    assert kept.returns.shape == (EVALUATION.tasks, 5)
    assert policy.card["evaluation"]["summary"]["total_return"] == pytest.approx(kept.returns.sum(1).mean())
    assert policy.card["actions"] == policy.card["evaluation"]["actions"] == "sampled, temperature 0.5"
    assert "card" not in policy.card["evaluation"]


def test_the_card_lists_the_stages(whole, averaged):
    for folder, iterations in ((whole, (2, 4)), (averaged, (2, 3))):
        stages = read_card(folder / "policy.safetensors")["stages"]
        assert [(entry["stage"], entry["iterations"]) for entry in stages] == list(
            zip(("walk", "run"), iterations, strict=True)
        )
        for entry, name in zip(stages, FOLDERS, strict=True):
            last = read_metrics(folder / name / "metrics.jsonl")[-1]
            assert entry["env_steps"] == last["env_steps"] > 0
            assert 60 * entry["minutes"] >= last["seconds"] > 60 * (entry["minutes"] - 0.2)
    # without an average it is the best policy of the last stage, with the evaluation that chose it
    card, best = (read_card(whole / name) for name in ("policy.safetensors", "2-run/best-seed0.safetensors"))
    assert card["evaluation"] == best["evaluation"]
    assert (whole / "policy.safetensors").read_bytes() == (whole / "2-run" / "best-seed0.safetensors").read_bytes()
    assert (whole / "policy-evaluation.npz").exists()


def test_every_command_takes_the_folder_of_several_stages(whole, tmp_path, capsys):
    assert main(["evaluate", str(whole), "--tasks", "6", "--seed", "1000", "--out", str(tmp_path / "results")]) == 0
    found = load_results(tmp_path / "results")
    assert found.label == "whole"
    assert results_equal(found, load_results(whole / "policy-evaluation"))
    assert main(["export", str(whole), "--out", str(tmp_path / "mine")]) == 0
    assert load_policy(tmp_path / "mine").card["stages"] == load_policy(whole).card["stages"]
    assert main(["plot", str(whole), "--out", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "training.png").stat().st_size > 5000
    star, *others = demo.contenders(policy=str(whole))
    assert (star.label, star.env) == ("whole", ROOM)
    assert [other.label for other in others] == ["explorer", "planner", "random"]
    capsys.readouterr()
    assert main(["train", "--preset", "table", "--out", str(whole)]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_the_curve_of_several_stages_is_one(averaged):
    lines = [line for line in read_run(averaged) if "return" in line]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["env_steps"] for line in lines] == [10, 20, 30, 40, 50]
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_several_seeds_have_a_policy_each(tmp_path, capsys):
    run = tmp_path / "both"
    assert main(["train", "--preset", "table", "--seed", "2", "--seeds", "2", "--out", str(run)]) == 0
    assert sorted(path.name for path in run.glob("*.safetensors")) == [
        "policy-seed2.safetensors", "policy-seed3.safetensors", "policy.safetensors",
    ]  # fmt: skip
    chosen = load_policy(run).card
    totals = {seed: load_results(run / f"policy-seed{seed}-evaluation").returns.sum(1).mean() for seed in (2, 3)}
    shares = {seed: load_results(run / f"policy-seed{seed}-evaluation").over.mean() for seed in (2, 3)}
    within = [seed for seed in totals if shares[seed] <= EVALUATION.tolerance]
    best = max(within, key=totals.__getitem__) if within else min(shares, key=shares.__getitem__)
    assert chosen["training"]["seed"] == best
    capsys.readouterr()
    assert main(["evaluate", str(run), "--tasks", "6"]) == 0
    shown = capsys.readouterr().out
    assert "seed 2" in shown
    assert "mean ± s.e." in shown


def test_options_hold_for_every_stage(tmp_path):
    run = tmp_path / "run"
    options = ["--algo.size", "0.5", "--minutes", "3", "--iterations", "1", "--evaluation.tolerance", "0.2"]
    assert main(["train", "--preset", "drift", *options, "--out", str(run)]) == 0
    for index, name in enumerate(FOLDERS):
        found = load_experiment(run / name)
        assert found == dataclasses.replace(load_recipe(run).stages[index].experiment, train=found.train)
        assert (found.algo.size, found.algo.length) == (0.5, (3, 5)[index])
        assert (found.train.minutes, found.train.iterations, found.train.evaluation.tolerance) == (3.0, 1, 0.2)
        assert read_metrics(run / name / "metrics.jsonl")[-1]["iteration"] == 1


def test_another_plan_takes_the_place_of_a_stages_iterations(tmp_path, monkeypatch):
    """A stage that stops after 2 of 5 planned iterations runs all of another plan, unless told otherwise."""
    stages = (stage("walk", DriftConfig(iterations=5), iterations=2), stage("run", DriftConfig()))
    monkeypatch.setitem(PRESETS, "drift", Preset(summary="Drift.", make=lambda: drift(stages=stages)))
    for options, expected in (
        ("", (2, 2)),
        ("--algo.iterations 3", (3, 3)),
        ("--algo.iterations 3 --iterations 1", (1, 1)),
    ):
        run = tmp_path / f"run{options.replace(' ', '')}"
        assert main(["train", "--preset", "drift", *options.split(), "--out", str(run)]) == 0
        assert tuple(entry["iterations"] for entry in load_policy(run).card["stages"]) == expected


def test_a_start_is_for_the_first_stage(averaged, tmp_path):
    run = tmp_path / "run"
    start = ["--start", str(averaged / "2-run"), "--algo.size", "0", "--iterations", "1"]
    assert main(["train", "--preset", "drift", *start, "--algo.length", "4", "--out", str(run)]) == 0
    before, after = arrays(averaged / "2-run"), arrays(run / "2-run")
    for name in before:
        if name.startswith("net."):
            np.testing.assert_array_equal(before[name], after[name])
    assert load_experiment(run / "2-run").train.start == str(run / "1-walk")


@pytest.mark.parametrize("like", ["", "recipe.json", "2-run", "2-run/config.json"])
def test_a_stored_run_is_repeated(averaged, tmp_path, like):
    again = tmp_path / "again"
    assert main(["train", "--like", str(averaged / like), "--out", str(again)]) == 0
    stages = FOLDERS if "2-run" not in like else ["2-run"]
    for name in stages:
        same_arrays(averaged / name, again / name if len(stages) > 1 else again)
    if len(stages) > 1:
        assert (averaged / "policy.safetensors").read_bytes() == (again / "policy.safetensors").read_bytes()


def test_a_stored_run_is_repeated_with_a_change(averaged, tmp_path, capsys):
    again = tmp_path / "again"
    assert main(["train", "--like", str(averaged), "--seed", "5", "--iterations", "1", "--out", str(again)]) == 0
    assert [each.experiment.train.seed for each in load_recipe(again).stages] == [5, 5]
    assert load_recipe(again).average_last == 2
    capsys.readouterr()
    for text, words in (
        ('{"stages": []}', "is not a recipe: KeyError"),
        ('{"name": "x", "stages": [], "average_last": 1, "env_args": []}', "the recipe 'x' has no stages"),
        ("[1]", "is not a training run"),
    ):
        (tmp_path / "other.json").write_text(text)
        assert main(["train", "--like", str(tmp_path / "other.json")]) == 2
        assert words in capsys.readouterr().err
    stored = json.loads((averaged / "recipe.json").read_text())
    stored["stages"][1]["name"] = "../../away"
    (tmp_path / "other.json").write_text(json.dumps(stored))
    assert main(["train", "--like", str(tmp_path / "other.json")]) == 2
    assert "a stage's name must be letters, digits, dots and dashes, got '../../away'" in capsys.readouterr().err


def test_what_does_not_fit_a_later_stage_shows_before_the_first(tmp_path):
    @dataclass(frozen=True)
    class Picky(DriftConfig):
        pass

    bad = stage("run", Picky())  # an algorithm that nobody registered
    wider = stage("walk", DriftConfig(net=dataclasses.replace(NET, width=16)))
    with pytest.raises(UserError, match="unknown algorithm 'Picky'"):
        run_recipe(drift(stages=(stage("walk", DriftConfig()), bad)), out=tmp_path / "run")
    for changes, words in (
        ({"env_args": ("epsodes=5",)}, "Did you mean 'episodes'"),
        ({"env_args": ("size=5",)}, "the policy's observation space is"),
        ({"average_last": 2, "stages": table().stages}, "policies of kind 'net'"),
        ({"average_last": 2, "stages": (wider, stage("run", DriftConfig()))}, "the same environment and network"),
    ):
        with pytest.raises(UserError, match=words):
            run_recipe(drift(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="average_last must be at most the number of stages, 2"):
        drift(average_last=3)
    with pytest.raises(UserError, match="env_args takes name=value pairs"):
        drift(env_args=("engine",))


def test_a_reference_agent_is_an_ordinary_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--preset", "drift", "--line", "memoryless", "--iterations", "1"]) == 0
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("drift-memoryless-2")
    assert load_experiment(run).algo.length == len("memoryless")
    assert load_policy(run).card["training"]["iteration"] == 1
    assert not (run / "recipe.json").exists()


def test_the_help_names_the_stages(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--preset", "drift", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "drift has 2 stages: walk, run." in shown
    assert "Any other option holds for every stage" in shown


def test_changes_by_their_names():
    config = DriftConfig()
    found = changed(config, {"size": 2.0, "net.width": 16, "net.heads": 4})
    assert found == dataclasses.replace(config, size=2.0, net=dataclasses.replace(NET, width=16, heads=4))
    with pytest.raises(TypeError, match="widht"):
        changed(config, {"net.widht": 16})

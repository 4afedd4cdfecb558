"""The command line: what it prints and writes, and that no mistake ever shows a traceback."""

import contextlib
import functools
import gc
import io
import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image
from standin import ROOM, TableConfig

from safeicrl import cli
from safeicrl.algos.scared import ScaredConfig
from safeicrl.cli import main
from safeicrl.config import from_plain
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results, results_equal
from safeicrl.evaluation.statistics import summarise
from safeicrl.evaluation.tables import group
from safeicrl.log import read_metrics
from safeicrl.machine.signals import StopRequest
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.policies import catalogue
from safeicrl.policies.policy import load_policy
from safeicrl.recipes.presets import PRESETS, Preset
from safeicrl.recipes.recipe import Experiment, Recipe, load_experiment
from safeicrl.show.demo import contenders, run
from safeicrl.show.shoot import shoot_room
from safeicrl.train import EvalConfig, TrainConfig
from safeicrl.version import VERSION


@pytest.fixture(autouse=True)
def table_preset(monkeypatch):
    train = TrainConfig(iterations=2, checkpoint_minutes=0.0, evaluation=EvalConfig(every=0, tasks=20, rows=20))
    experiment = Experiment(env=ROOM, algo=TableConfig(), train=train)
    recipe = Recipe.single("table", experiment)
    monkeypatch.setitem(PRESETS, "table", Preset(summary="A table.", make=lambda: recipe))


def refused(capsys, *args) -> str:
    """The one line a mistake gets."""
    assert main(list(args)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("safeicrl: ")
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("trian", "unknown command 'trian'.*Did you mean 'train'"),
        ("train --preset tabel", "unknown preset 'tabel'.*Did you mean 'table'"),
        ("train --preset table --minuts 3", "unknown option --minuts; did you mean --minutes"),
        ("train --preset table --algo.trails 3", "did you mean --algo.trials"),
        ("train --preset table --env.sise 3", "did you mean --env.size"),
        ("train --preset table --evaluation.evry 3", "did you mean --evaluation.every"),
        ("train --preset table --env.size 2 --env.obstacles 3", "obstacles must be at most 2"),
        ("train --preset table --iterations x", "iterations"),
        ("train --preset table --iterations 0", "iterations must be an integer"),
        ("train --preset table --iterations 3 --chunk 2", "multiple of chunk"),
        ("train --preset table word", "unexpected argument 'word'"),
        ("train table", "--preset table$"),
        ("train --preset=", "unknown preset ''"),
        ("train --preset table --device gpu", "unknown option --device; did you mean --devices"),
        ("train --preset table --minutes x", "--minutes takes a number, got 'x'$"),
        ("train --preset table --seed 1.5", "--seed takes a whole number, got '1.5'$"),
        ("train --preset table --env.alpha x", "--env.alpha takes a number, got 'x'$"),
        ("train --preset table --env.test-budget a b", "--env.test-budget takes two numbers, got 'a', 'b'$"),
        ("train --preset table --env.test-budget 5 1", "env: test_budget must rise, got 5 to 1$"),
        ("train --preset table --env.train-budget nan 1", "env: train_budget must be a finite number"),
        ("train --algo.ppo.episode-discount 0.95", "algo.ppo.episode_discount 0.95 is not .* version 0.2 dropped"),
        ("train --algo.ddpg.critic-weight=2", "algo.ddpg.critic_weight 2 is not supported: version 0.2 dropped"),
        ("train --algo.ddpg.pessimism", "algo.ddpg.pessimism True is not supported"),
        ("train --algo.ddpg.no-pessimism --minutes 3", "algo.ddpg.pessimism False is not supported"),
        ("train --resume nowhere", "no training run at"),
        ("train --resume nowhere --preset table", "leave out --preset"),
        ("train --like nowhere", "no training run at nowhere/config.json$"),
        ("train --like nowhere --preset table", "--like repeats a stored run: leave out --preset and --line$"),
        (
            "train --preset table --line privileged",
            "--line privileged is for the presets point, .*not for table",
        ),
        ("train --preset point --line told", "unknown line 'told'; known: memoryless, privileged"),
        ("train --algo scared --line privileged", "--algo and --env say what to train: leave out"),
        ("evaluate", r"evaluate needs a policy \(name, path or run folder\), or a reference agent: --agent NAME$"),
        ("evaluate safe-dark-rom", "unknown policy 'safe-dark-rom'"),
        ("evaluate runs/nothing", "no policy and no run folder at runs/nothing$"),
        ("evaluate --policy x", "leave out --policy, its value alone"),
        ("evaluate --agent random --out .", "--out must name the file"),
        ("evaluate --agent random --seed 99999999999999999999", "seed must be an integer ≥ 0 and below 2³²"),
        ("evaluate --agent random --budgets 3", "--budgets takes two numbers, got fewer$"),
        ("evaluate x --agent random", "evaluate takes one agent: leave out 'x' or --agent random$"),
        (
            "evaluate --agent randon",
            r"unknown value of --agent 'randon'; known: explorer, planner, random\. Did you mean 'random'\?$",
        ),
        ("evaluate --agent random --env safe-dark-rom", "Did you mean 'safe-dark-room'"),
        ("evaluate --agent random --env-args sise=3", "Did you mean 'size'"),
        ("evaluate --agent random --env-args size", "name=value"),
        ("evaluate --agent random --env-args size=big", "safe-dark-room.size must be of type int"),
        ("evaluate --agent random --greedy", "no temperature"),
        ("evaluate --agent random --budgets 5 1", "must rise"),
        ("evaluate --agent random --budgets -1 1", "budget"),
        ("evaluate --agent random --tasks 0", "tasks must be"),
        ("plot", "needs results files"),
        ("plot nothing.npz --out left/figures", r"no results file at nothing\.npz$"),
        ("reproduce --results nowhere --out left/report", "no results folder at nowhere"),
        (f"compare {__file__}", r"test_cli\.py is not a results file: that is a \.npz with a \.json"),
        ("compare --upper a --lower b", "compare needs results files"),
        ("compare x.npz --upper a --lower b", "no results file at a$"),
        ("demo --tasks 0", "tasks must be"),
        ("demo pint", "unknown world 'pint'.*Did you mean 'point'"),
        ("demo room --policy nowhere/at/all --out left/demo", "no policy and no run folder at nowhere/at/all$"),
        ("demo --seed -1", "seed must be"),
        ("list --all", "unknown option --all"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    assert re.search(words, refused(capsys, *args.split()))
    assert not list(tmp_path.iterdir())


def test_help_and_version(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert main(["help"]) == 0
    assert capsys.readouterr().out == shown
    for name in ("train", "evaluate", "export", "compare", "plot", "demo", "list"):
        assert f"  {name} " in shown
    assert main(["--version"]) == 0
    assert VERSION in capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--preset", "table", "--help"])
    assert not leaving.value.code
    shown = capsys.readouterr().out
    for option in ("--minutes", "--seeds", "--env.size", "--algo.lr", "--evaluation.every"):
        assert option in shown
    for option in ("--preset", "--line", "--like", "--resume", "--out"):
        assert option in shown


# an option and what it takes, then no words before its default
NO_HELP = re.compile(r"(--[\w.-]+)(?:, --[\w.-]+)?(?: (?:\{[^}]*\}(?:\|\S+)*|[A-Z.\[\]]+))* \(default")


def check_help(capsys, *args):
    with pytest.raises(SystemExit):
        main([*args, "--help"])
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert re.search(r"--out (\{None\}\|)?PATH \w", text)
    assert NO_HELP.findall(text) == []


@pytest.mark.parametrize("command", ["evaluate", "export", "collect", "plot", "demo"])
def test_every_option_has_a_line_of_help(capsys, command):
    check_help(capsys, command)


def test_every_option_of_training_has_a_line_of_help(capsys):
    """Options are the fields of an environment and an algorithm: one preset for each pair of them."""
    kinds = {}
    for name in PRESETS.keys() - {"table"}:  # which is of these tests
        whole = PRESETS[name].make().stages[0].experiment
        kinds.setdefault((type(whole.env), type(whole.algo)), name)
    assert len(kinds) > 5
    for name in kinds.values():
        check_help(capsys, "train", "--preset", name)


def test_the_version_is_the_packages():
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == VERSION


def test_names_are_listed(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in ("safe-dark-room", "explorer", "scared"):
        assert name in shown
    assert len(PRESETS) <= 15  # the table of these tests is one
    for name, found in PRESETS.items():  # each on one line, with its machine and its time
        assert re.search(rf"^ *{name} +{re.escape(found.summary)} *$", shown, re.MULTILINE)


def test_train_resume_and_plot(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--preset", "table", "--algo.lr", "0.25", "--seed", "3", "--out", str(out)]) == 0
    assert load_experiment(out).algo == TableConfig(lr=0.25)
    assert (out / "best-seed3.safetensors").exists()
    assert main(["train", "--resume", str(out), "--iterations", "4"]) == 0
    assert [line["iteration"] for line in read_metrics(out / "metrics.jsonl") if "return" in line] == [1, 2, 3, 4]
    capsys.readouterr()
    assert "algo cannot change" in refused(capsys, "train", "--resume", str(out), "--algo.lr", "0.5")
    assert "seed cannot change" in refused(capsys, "train", "--resume", str(out), "--seed", "4")
    assert main(["plot", str(out), "--out", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "training.png").stat().st_size > 5000
    capsys.readouterr()
    (out / "config.json").write_text("{}")
    assert "is not a training run" in refused(capsys, "train", "--resume", str(out))


def test_evaluate_writes_results(tmp_path, capsys):
    args = "evaluate --agent random --env-args size=3 obstacles=2 episodes=2 max_steps=4 --tasks 10 --budgets 1 3"
    assert main([*args.split(), "--out", str(tmp_path / "random")]) == 0
    assert "total return of 2" in capsys.readouterr().out
    found = load_results(tmp_path / "random")
    assert found.returns.shape == (10, 2)
    assert found.budget_range == (1.0, 3.0)
    assert found.meta["agent"] == "random"
    assert json.loads((tmp_path / "random.json").read_text())["meta"]["env"]["parameters"]["size"] == 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@functools.cache
def trained(run: Path, *options: str) -> str:
    """What training the table into a folder says; once for all tests that only read the run."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["train", "--preset", "table", *options, "--out", str(run)]) == 0
    return said.getvalue()


def two_seeds(runs: Path) -> tuple[Path, str]:
    run = runs / "mine"
    return run, trained(run, "--seed", "9", "--seeds", "2")


def one_seed(runs: Path) -> Path:
    """At a temperature of 1 the actions would be nearly uniform: the table's preferences are near 0."""
    trained(runs / "cold", "--evaluation.temperature", "0.01")
    return runs / "cold"


def test_every_seed_of_a_run_is_evaluated(runs, tmp_path, capsys):
    run, said = two_seeds(runs)
    assert f"safeicrl evaluate {run}" in said
    out = tmp_path / "results" / "both.npz"
    assert main(["evaluate", str(run), "--tasks", "20", "--greedy", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    found = {seed: load_results(out.parent / f"both-seed{seed}") for seed in (9, 10)}
    for seed, result in found.items():
        assert result.label == "mine"
        assert result.meta["card"]["training"]["seed"] == seed
        assert re.search(rf"seed {seed} +{result.returns.sum(1).mean():.2f} ", shown)
    assert "mean ± s.e." in shown
    assert not results_equal(*found.values())
    assert len(group(list(found.values()))) == 1  # for `plot`: one agent
    # one of them, by its path: one file, one column, the same numbers under the same name
    one = tmp_path / "one"
    assert main(["evaluate", str(run / "best-seed10"), "--tasks", "20", "--greedy", "--out", str(one)]) == 0
    assert results_equal(load_results(one), found[10])
    assert load_results(one).label == "mine"


def test_a_policy_acts_as_in_the_evaluation_that_chose_it(runs, tmp_path, capsys):
    run, results = one_seed(runs), tmp_path / "results"
    kept = load_results(run / "best-seed0-evaluation")
    for options, actions in (
        ("", "sampled, temperature 0.01"),
        ("--temperature 1", "sampled, temperature 1"),
        ("--greedy", "greedy"),
    ):
        capsys.readouterr()
        command = f"evaluate {run} --tasks 20 --rows 20 --seed 1000 --out {results} {options}"
        assert main(command.split()) == 0
        found = load_results(results)
        assert f"seed 0: actions {actions}, context kept" in capsys.readouterr().out
        assert found.meta["actions"] == found.meta["card"]["actions"] == actions
        assert results_equal(found, kept) == (options == "")
    assert kept.meta["actions"] == "sampled, temperature 0.01"
    assert load_policy(run).card["actions"] == "sampled, temperature 0.01"


def test_what_chose_a_runs_best_policies_is_drawn_and_compared_like_any_results(runs, tmp_path, capsys):
    (run, _), figures = two_seeds(runs), tmp_path / "figures"
    kept = [str(run / f"best-seed{seed}-evaluation.npz") for seed in (9, 10)]
    assert sorted(str(path) for path in run.glob("*.npz")) == sorted(kept)
    assert len(group([load_results(path) for path in kept])) == 1  # seeds of one agent
    assert main(["plot", *kept, "--out", str(figures)]) == 0
    assert (figures / "episodes.png").stat().st_size > 5000
    assert list(catalogue.run_policies(run)) == [9, 10]
    lines = {}
    for name in ("planner", "random"):
        lines[name] = str(tmp_path / name)
        room = "--env-args size=3 obstacles=2 max_steps=5 episodes=4 --budgets 1 3 --tasks 20 --rows 20 --seed 1000"
        assert main(["evaluate", "--agent", name, *room.split(), "--out", lines[name]]) == 0
    capsys.readouterr()
    assert main(["compare", *kept, "--upper", lines["planner"], "--lower", lines["random"]]) == 0
    assert capsys.readouterr().out.count("mine, in training") == 2


def test_beyond_its_training_a_policy_is_evaluated_with_a_warning(runs, capsys):
    run = one_seed(runs)
    for options, warned in (
        ("", ()),
        (
            "--budgets 1 8 --env-args max_steps=6",
            ("budgets from 1 to 3, not 8", "episodes of at most 5 steps, not 6"),
        ),
    ):
        capsys.readouterr()
        assert main(["evaluate", str(run), "--tasks", "4", *options.split()]) == 0
        said = capsys.readouterr().err
        assert said == "".join(f"safeicrl: this policy was trained on {words}\n" for words in warned)


def test_a_run_without_a_policy_yet_is_not_sent_to_evaluation(tmp_path, capsys, monkeypatch):
    def stopped(self):  # as by Ctrl-C before the first iteration
        self.number = signal.SIGINT
        return self

    monkeypatch.setattr(StopRequest, "__enter__", stopped)
    run = tmp_path / "run"
    assert main(["train", "--preset", "table", "--out", str(run)]) == 130
    shown = capsys.readouterr().out
    assert f"safeicrl train --resume {run}" in shown
    assert "safeicrl evaluate" not in shown
    assert "safeicrl plot" not in shown  # no iteration, no curves


def test_a_place_that_cannot_be_written_shows_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for command in ("evaluate --agent random --out {}/file/x", "demo --out {}/file/x"):
        assert "cannot make the folder" in refused(capsys, *command.format(tmp_path).split())


def test_out_of_memory_is_no_traceback(capsys, monkeypatch):
    def too_much(args):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setitem(cli.COMMANDS, "list", too_much)
    assert "out of memory: fewer" in refused(capsys, "list")


def test_the_module_is_the_program():
    command = [sys.executable, "-m", "safeicrl", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Did you mean 'train'" in done.stderr


def test_a_command_ends_without_a_last_search_for_garbage():
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count())); import safeicrl.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 10_000


def test_the_library_runs_without_the_command_lines_packages():
    code = (
        "import sys; sys.modules |= {'tyro': None, 'gymnasium': None};"
        "import safeicrl.policies.policy, safeicrl.show.demo; assert 'optax' not in sys.modules;"  # takes time
        "import safeicrl.train, safeicrl.recipes"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_demo_leaves_its_files(tmp_path, capsys):
    env = SafeDarkRoom(size=4, obstacles=4, max_steps=6, episodes=3)
    files = run(tmp_path, tasks=10, env=env)
    names = {file.name for file in files}
    assert {
        "episodes.png",
        "budgets.png",
        "over-budget.png",
        "one-room.gif",
        "planner.npz",
        "planner.json",
    } <= names
    shown = capsys.readouterr().out
    assert str(tmp_path) in shown
    # the table shows what the files hold; the explorer keeps every budget, the planner finds every goal it may
    found = {name: load_results(tmp_path / name) for name in ("explorer", "planner", "random")}
    totals = [summarise(each).total_return for each in found.values()]
    row = next(line for line in shown.splitlines() if "total return of 3" in line)
    assert [float(number) for number in re.findall(r"(\d+\.\d+) ±", row)] == pytest.approx(totals, abs=0.006)
    assert totals[1] > totals[0] > totals[2]
    assert [bool(each.over.any()) for each in found.values()] == [False, False, True]
    for name in ("episodes", "budgets", "over-budget"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(2**24)) > 100  # something is drawn in it
    with Image.open(tmp_path / "one-room.gif") as film:
        assert film.n_frames > 3


def test_the_demo_searches_for_garbage_rarely(tmp_path, monkeypatch):
    before, seen = gc.get_threshold(), []
    monkeypatch.setattr("safeicrl.show.demo.run", lambda *_, **__: seen.append(gc.get_threshold()[0]))
    assert main(["demo", "--out", str(tmp_path)]) == 0
    assert seen[0] > 10 * before[0]
    assert gc.get_threshold() == before


def test_a_rooms_film_tells_what_happened():
    env = SafeDarkRoom(size=4, obstacles=4, max_steps=6, episodes=3)
    explorer = contenders(env)[0]
    shown = shoot_room(explorer, budget=2.0)
    assert len(shown.paths) == 3
    assert len(shown.obstacles) == 4
    for path, costs, reached in zip(shown.paths, shown.step_costs, shown.reached, strict=True):
        assert path[0] == (2, 2)
        assert len(path) == len(costs) + 1
        assert reached == (path[-1] == shown.goal)
        assert costs == [float(cell in shown.obstacles) for cell in path[1:]]
        assert sum(costs) <= 2


def test_configs_from_json():
    saved = {"iterations": 3, "minutes": 2, "evaluation": {"every": 0, "temperature": None}}
    assert from_plain(TrainConfig, saved) == TrainConfig(iterations=3, minutes=2.0, evaluation=EvalConfig(every=0))
    for values, words in (
        ({"iterations": "3"}, "iterations must be of type int"),
        ({"evaluation": {"evry": 3}}, "unknown setting of evaluation 'evry'.*Did you mean 'every'"),
        ({"evaluation": 3}, "evaluation must be a group of settings"),
        ({"tensorboard": 1}, "tensorboard must be of type bool"),
    ):
        with pytest.raises(UserError, match=words):
            from_plain(TrainConfig, values)
    with pytest.raises(UserError, match="train_budget must be a list"):
        from_plain(SafeDarkRoom, {"train_budget": 3})
    assert from_plain(SafeDarkRoom, {"train_budget": [1, 3]}).train_budget == (1.0, 3.0)


def test_options_of_older_versions():
    old = {"ppo": {"episode_discount": 1, "epochs": 5}, "ddpg": {"pessimism": False, "critic_weight": 1.0}}
    assert from_plain(ScaredConfig, old, "algo") == ScaredConfig(ppo=PPOConfig(epochs=5))
    for owner, option, value in (
        ("ppo", "episode_discount", 0.95),
        ("ddpg", "episode_discount", 0.9),
        ("ddpg", "pessimism", True),
        ("ddpg", "critic_weight", 2.0),
    ):
        words = f"^algo.{owner}.{option} {value} is not supported: version 0.2 dropped this option$"
        with pytest.raises(UserError, match=words):
            from_plain(ScaredConfig, {owner: {option: value}}, "algo")
    with pytest.raises(UserError, match="unknown setting of train 'episode_discount'"):
        from_plain(TrainConfig, {"episode_discount": 1.0}, "train")  # the same name in another group

"""The report: it shows what is stored, says what is missing, and needs nothing but itself."""

import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from safeicrl.cli import main
from safeicrl.cli.evaluating import Evaluate
from safeicrl.cli.options import parse
from safeicrl.cli.training import asked_recipe
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.files import read_json, write_json
from safeicrl.log import read_metrics
from safeicrl.recipes.form import train_form
from safeicrl.show.report import draw, jobs, meta, panels, safe_ad, settings, training
from safeicrl.show.report.content import Found, Grid, find
from safeicrl.show.report.reproduce import build
from safeicrl.show.report.steps import trained_on

ROOT = Path(__file__).parents[1]
STORED = ROOT / "results"


class Page(HTMLParser):
    """What the tests ask of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found["src"]] if "src" in found else []


def part_of(name):
    return next(part for panel in panels.PANELS for part in panel.parts if part.name == name)


def stored(folder, stem, *, costs, returns, **more):
    """An evaluation of four rooms with budgets of 1, 2, 8 and 9."""
    meta = {"label": "x", "seed": 7, "budget_range": [1.0, 10.0], "command": "safeicrl evaluate <x> & y"}
    meta |= {"env": {"name": "safe-dark-room", "parameters": {"episodes": 2}}, **more}
    costs, returns = np.asarray(costs, float), np.asarray(returns, float)
    budgets = np.array([1.0, 2.0, 8.0, 9.0])
    results = Results(returns=returns, costs=costs, lengths=np.ones_like(costs), budgets=budgets, meta=meta)
    (folder / stem).parent.mkdir(parents=True, exist_ok=True)
    save_results(results, folder / stem)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A results folder with two seeds of SCARED, and the page made of it."""
    root, out = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("report")
    for seed, total in ((0, 2.0), (1, 3.0)):
        returns = np.full((4, 3), total / 3)
        costs = [[2, 1, 0], [2, 1, 0], [4, 1, 0], [4, 3, 2]]
        stored(root, f"safe-dark-room/three-seeds/policy-seed{seed}", costs=costs, returns=returns)
    page, missing = build("episodes", root=root, about=["a <test>"], out=out)
    return root, page.read_text(), missing


def test_the_page_needs_nothing_else(room):
    _, text, _ = room
    page = Page(text)
    assert page.sources
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "a &lt;test&gt;" in text
    assert "safeicrl evaluate &lt;x&gt; &amp; y" in text  # a recorded command is text, never markup


def test_the_numbers_of_the_page_are_those_of_the_files(room):
    """By hand: totals 2 and 3; episode 1 costs (2+2+4+4)/4 = 3, the last one (0+0+0+2)/4 = 0.5.

    Over budget: of budget 1 the first episode alone (2 > 1; 1 is not over), of budget 2 none, of 8 and 9 none.
    """
    root, _, _ = room
    _, table = part_of("episodes-dark-room").show(find(part_of("episodes-dark-room"), root))
    assert isinstance(table, Grid)
    (row,) = table.rows
    assert row[:3] == ["SCARED", "4", "2"]
    assert row[3] == "2.5 ± 0.5"
    assert row[4] == "2.5 [2, 3]"  # the middle half of four 2s and four 3s; a sample may hold one seed only
    assert row[6] == "3 → 0.5"
    assert row[7:] == ["8.3% / 0.0%", "25%", "–"]  # no card says what these were trained on


def test_episodes_that_were_played_only_to_learn_are_said(tmp_path):
    """By hand: 6 and 8 episodes, 50 and 70 steps, 10 and 30% over budget; without fresh episodes, nothing."""
    about = {"updates": 2, "fresh_episodes_per_update": 3, "cost_per_fresh_episode": 1.0}
    for seed, (episodes, steps, over) in enumerate(((6, 50, 0.1), (8, 70, 0.3))):
        adapted = {**about, "fresh_episodes": episodes, "fresh_steps": steps, "fresh_episodes_over_budget": over}
        numbers = {"costs": np.zeros((4, 3)), "returns": np.zeros((4, 3))}
        stored(tmp_path, f"safe-meta/dark-room-seed{seed}", **numbers, adaptation=adapted)
    own = {**about, "fresh_episodes": 0.0, "fresh_steps": 0.0, "fresh_episodes_over_budget": None}
    stored(tmp_path, "maml/dark-room", **numbers, adaptation=own)
    groups = find(part_of("episodes-dark-room"), tmp_path).groups()
    assert set(groups) == {"SafeMeta", "MAML with penalty"}
    (said,) = draw._fresh(groups)
    assert said.endswith(": SafeMeta 7 (60 steps; 20.0% of the episodes over budget).")


def test_budgets_are_told_apart_and_the_largest_cost_is_of_a_trial(room):
    root, _, _ = room
    part = part_of("budgets-dark-room")
    *_, largest = part.show(find(part, root))
    assert largest.rows == [["SCARED", "2", "2", "–", "–", "4"]]  # bins 1–2, 2–4, 4–6, 6–8 and 8–10


def test_what_is_missing_is_said_and_never_drawn(room, tmp_path):
    _, text, missing = room
    assert "Missing: Safe AD." in text
    assert "safeicrl train --algo safe-meta --env safe-dark-room --seeds 3" in text
    assert "episodes-dark-room" in missing
    empty, names = build("guard", root=tmp_path, about=[], out=tmp_path / "report")
    page = Page(empty.read_text())
    assert page.sources == []
    worlds = ("point", "car", "half-cheetah", "ant")
    parts = [["guard-room", *(f"guard-{w}" for w in worlds)]]
    parts += [["guard-calibration", *(f"guard-calibration-{w}" for w in worlds)]]
    assert names == [*parts[0], *parts[1]]
    assert empty.read_text().count('class="missing"') == 6 + 4 * 3 + 5  # room, robots, calibrations


def test_the_guards_comparison_says_how_often_it_stepped_in(tmp_path):
    """One of eight episodes is over budget, by 2; the guard acted at every tenth step."""
    costs = [[1, 1], [1, 1], [1, 1], [11, 0]]
    stored(tmp_path, "safe-dark-room-guard/policy", costs=costs, returns=np.ones((4, 2)), guard_stepped_in=0.1)
    part = part_of("guard-room")
    *_, brief, largest = part.show(find(part, tmp_path))
    assert brief.rows == [["guard", "4", "2", "12.50% / 0.00%", "25.00%", "2 / 2", "10.00%"]]
    assert largest.rows == [["guard", "1", "1", "–", "–", "–", "–", "–", "1", "11", "–"]]  # bins of 0.9, from 1


def test_mistakes_are_one_line(capsys, tmp_path):
    assert main(["reproduce", "epsiodes", "--out", str(tmp_path)]) == 2
    assert "unknown figure 'epsiodes'" in capsys.readouterr().err
    assert main(["reproduce", "--out", str(tmp_path), "--results", str(tmp_path / "no")]) == 2
    assert "no results folder at" in capsys.readouterr().err


@pytest.mark.parametrize("table", settings.TABLES, ids=lambda table: table.name)
def test_every_difference_from_the_paper_has_a_reason(table):
    found = Found(root=STORED)
    for row in table.rows:
        every = [settings._settings(column, found)[1] for column in table.columns]
        ours = [settings.fill(row.ours, values) for values in every]
        assert "–" not in ours, f"{row.name}: no such setting"
        assert bool(row.why) == any(text != row.paper for text in ours), row.name


def test_settings_are_looked_up_by_name():
    values = {"a": {"b": [1, 2.50]}}
    assert settings.fill("{a.b.0} → {a.b.1}, {a.c}, {a.c|0}", values) == "1 → 2.5, –, 0"


def test_training_budgets_are_those_of_the_logs():
    """The room: 330 iterations of 2 epochs of 512 / 32 minibatches; HalfCheetah: 600 and 240 of its two stages."""
    (table, _) = part_of("training-runs").show(find(part_of("training-runs"), STORED))
    rows = {row[0]: row[1:] for row in table.rows}
    room = rows["safe-dark-room"]
    assert room[:4] == ["219,717", "239.64 million", "330", f"{330 * 2 * 16:,}"]
    assert room[-2:] == ["3", "NVIDIA H200"]
    short, whole = 600 * 4 * 64 // 16, 240 * 3 * 48 // 12
    assert rows["safe-velocity-half-cheetah: all stages"][2:4] == ["840", f"{short + whole:,}"]


def test_every_result_states_the_steps_it_was_trained_on():
    """A card has the steps of its last stage, but Point has four, in their logs. The room: to each checkpoint."""
    point, room = (find(part_of(f"episodes-{world}"), STORED) for world in ("point", "dark-room"))
    steps = {label: trained_on(STORED, files) for label, files in point.files.items()}
    logs = (STORED / "safe-dark-point" / "training").glob("[0-9]-*/metrics.jsonl")
    total = sum(read_metrics(log)[-1]["env_steps"] for log in logs)
    assert steps["SCARED"] == f"{total / 1e6:.3g} million"
    assert steps["privileged"] == "18.8 million"
    assert steps["random"] == "–"
    assert trained_on(STORED, room.files["SCARED"]) == "210 million"  # of 240, 173 and 217


def test_logs_of_seeds_are_drawn_as_one_run():
    one = [{"env_steps": 10, "q": 1.0, "by_bin": [1, 2]}, {"env_steps": 20, "eval/cost": 4.0}]
    two = [{"env_steps": 14, "q": 2.0, "by_bin": [1, 2]}, {"env_steps": 24, "eval/cost": 5.0}, {"env_steps": 30}]
    first, second = training.joined([one, two])
    assert first == {"env_steps": 12.0, "q": 1.5, "env_steps/seeds": [10, 14], "q/seeds": [1.0, 2.0]}
    assert second["eval/cost/seeds"] == [4.0, 5.0]
    assert training.joined([one]) is one


def test_safe_ads_budget_is_that_of_its_log_and_its_data(tmp_path):
    """By hand: 40 iterations of 50 updates; 3 histories of 2000 steps; 90 seconds."""
    run, data = tmp_path / "safe-ad" / "training" / "point", tmp_path / "safe-ad" / "histories"
    run.mkdir(parents=True)
    data.mkdir()
    net = {"width": 256, "layers": 8, "context": 200}
    algo = {"histories": "histories/point", "updates": 50, "batch": 128, "net": net}
    write_json(run / "config.json", {"algo": {"config": algo}, "train": {"seed": 0}, "device": "a machine"})
    (run / "metrics.jsonl").write_text('{"iteration": 40, "env_steps": 51200000, "seconds": 90, "loss": 0.5}\n')
    write_json(data / "point.json", {"arrays": {"reward": {"shape": [3, 2000]}}})
    part = part_of("training-safe-ad")
    found = find(part, tmp_path)
    (table, _) = part.show(found)
    network = "width 256, 8 layers, 200 steps"
    numbers = ["0.01 million", "2,000", "128", "51 million", "1.5", "a machine"]
    assert table.rows == [["Safe AD, point", network, *numbers]]
    assert {need.label for need in found.missing} >= {"Safe AD, sampled, point", "Safe AD, car", "Safe AD, ant"}


def test_gradient_updates_of_an_iteration():
    """Safe AD says how many; the `updates` of a meta-learner are those of a test, and may be None."""
    assert training._updates({"updates": 10, "histories": "h"}) == 10
    assert training._updates({"updates": None, "tasks": 20}) == 1
    assert training._updates({"optimiser": "ddpg", "ddpg": {"updates": 4}}) == 4
    assert training._updates({"optimiser": "ppo", "rows": 64, "ppo": {"epochs": 3, "minibatch": 16}}) == 12


def test_evaluations_of_stages_follow_one_another():
    """HalfCheetah: one evaluation at the end of the first stage, four in the second, by the logs themselves."""
    part = part_of("training-steps-robots")
    found = find(part, STORED)
    folder = STORED / "safe-velocity-half-cheetah" / "training"
    first, second = (read_metrics(path / "metrics.jsonl") for path in sorted(folder.glob("[0-9]-*")))
    judged = [line for line in second if "eval/over_budget" in line]
    steps, over = training._evaluations(found, "eval/over_budget")["safe-velocity-half-cheetah"]
    assert steps == [first[-1]["env_steps"], *(first[-1]["env_steps"] + line["env_steps"] for line in judged)]
    assert over[1:] == [line["eval/over_budget"] for line in judged]
    drawing, _ = part.show(found)
    goals, returns, shares = drawing.figure.axes
    assert [len(axis.lines) - len(training.MARKS) for axis in (goals, returns, shares)] == [2, 2, 4]


def test_every_stored_file_that_a_panel_names_is_found():
    """What is missing today, and nothing else. When a result lands, it leaves this list."""
    parts = [part for panel in panels.PANELS for part in panel.parts]
    missing = {f"{part.name}: {need.label}" for part in parts for need in find(part, STORED).missing}
    assert missing == {"eps-curves: Safe AD-EPS"}


def test_past_k_is_shown_by_blocks_of_k(tmp_path):
    """K = 2. An evaluation of four episodes beside a file of bench/beyond.py: both as two blocks."""
    costs = [[2, 1, 0, 0], [2, 1, 0, 0], [4, 1, 0, 0], [4, 3, 2, 0]]
    stored(tmp_path, "beyond/safe-dark-room-random", costs=costs, returns=np.tile([0.0, 1.0, 1.0, 1.0], (4, 1)))
    episodes = {"returns": [0.0, 0.5, 1.0, 0.0], "costs": [4.0, 2.0, 1.0, 1.0], "over": [1.0, 0.0, 0.0, 0.0]}
    played = {
        "tasks": 5,
        "trained_episodes": 2,
        "episodes": episodes,
        "context_full": {"share": 0.5, "median": 3.0},
    }
    write_json(tmp_path / "beyond/safe-dark-room.json", played)
    part = part_of("beyond-dark-room")
    drawing, table, _ = part.show(find(part, tmp_path))
    assert table.rows == [
        ["SCARED", "5", "2", "0.25 → 0.5", "3.00 → 1.00", "50.00% → 0.00%"],
        ["random", "4", "2", "0.5 → 1", "2.25 → 0.25", "12.50% → 0.00%"],
    ]
    thin, thick, full, *other, k = drawing.figure.axes[0].lines  # two agents, one context that fills up
    assert (len(thin.get_xdata()), full.get_xdata()[0], len(other), k.get_xdata()[0]) == (4, 3.0, 2, 2)
    assert list(thick.get_ydata()) == list(thin.get_ydata())  # the mean of one episode
    assert list(draw._running_mean(np.array([0.0, 2.0, 4.0, 6.0]), 3)) == [1.0, 2.0, 4.0, 5.0]
    # At the small scales the policy is evaluated, too; its card is where the file was.
    stored(tmp_path, "beyond/safe-dark-room", costs=costs, returns=np.ones((4, 4)))
    _, table, _ = part.show(find(part, tmp_path))
    assert table.rows[0] == ["SCARED", "4", "2", "1 → 1", "2.25 → 0.25", "12.50% → 0.00%"]


def test_one_rule_chooses_the_temperature(tmp_path):
    """The greatest return of those within 3% over budget, though a riskier one earns more."""
    for name, total, cost in (("0.1", 1.0, 0.0), ("0.5", 2.0, 0.0), ("1", 3.0, 5.0)):
        folder = "safe-dark-room/validation"
        stored(tmp_path, f"{folder}/{name}", costs=np.full((4, 3), cost), returns=np.full((4, 3), total))
    part = part_of("temperatures")
    table, _ = part.show(find(part, tmp_path))
    assert [row[1:] for row in table.rows] == [
        ["0.1", "4", "3", "0.00%", ""],
        ["0.5", "4", "6", "0.00%", "chosen"],
        ["1", "4", "9", "50.00%", ""],
    ]


def test_every_claim_has_a_verdict_and_a_panel():
    text = (ROOT / "docs" / "results.md").read_text()
    claims = [line.strip("| ").split(" | ") for line in text.splitlines() if re.search(r"\| `[a-z-]+` \|$", line)]
    assert len(claims) > 20
    names = {panel.name for panel in panels.PANELS}
    for claim in claims:
        assert len(claim) == 4, claim
        assert claim[2].startswith(("agrees", "partly", "differs", "not tested")), claim
        assert claim[3].strip("`") in names, claim


# -- the small scales ---------------------------------------------------------------------------------------


@pytest.fixture
def commands(monkeypatch):
    """The commands that would have run; `fail` names those that fail."""
    ran: list[tuple[str, ...]] = []
    fail: list[str] = []

    def stand_in(step, log, compiler):
        ran.append(step)
        log.write_text("safeicrl: no such thing\n")
        failed = " ".join(step[:2]) in fail
        if step[0] == "train" and not failed and "interrupt" not in fail:
            out = Path(step[-1])  # of --out and --resume
            out.mkdir(parents=True, exist_ok=True)
            (out / "best-seed0.safetensors").touch()
        return 2 if failed else 0

    monkeypatch.setattr(jobs, "_safeicrl", stand_in)
    return ran, fail


def run(asked, folder):
    jobs.run_jobs(asked, folder, lambda text: None)


def test_finished_commands_are_skipped_and_the_failed_one_is_run_again(commands, tmp_path):
    ran, fail = commands
    collect, first, second = (
        (*words, "--out", "o") for words in (("collect",), ("evaluate", "y"), ("evaluate", "z"))
    )
    job = jobs.Job(name="x", panels=(), steps=(collect, first, second))
    fail.append("evaluate y")
    with pytest.raises(UserError, match=r"safeicrl evaluate failed: safeicrl: no such thing \(all of it: .*x\.log"):
        run([job], tmp_path)
    assert ran == [collect, first]
    fail.clear()
    ran.clear()
    run([job], tmp_path)
    assert ran == [first, second]
    ran.clear()
    run([job], tmp_path)
    assert ran == []


def test_an_interrupted_training_is_resumed_or_begun_anew(commands, tmp_path):
    ran, fail = commands
    out = tmp_path / "run"
    out.mkdir()
    train = ("train", "--preset", "p", "--out", str(out))
    resume = ("train", "--resume", str(out))
    run([jobs.Job(name="x", panels=(), steps=(train,))], tmp_path / "one")
    assert ran == [resume]
    ran.clear()
    fail.append("train --resume")
    run([jobs.Job(name="x", panels=(), steps=(train,))], tmp_path / "two")
    assert ran == [resume, train]
    fail.append("interrupt")
    new = ("train", "--preset", "p", "--out", str(tmp_path / "new"))
    with pytest.raises(UserError, match="was interrupted; the same command goes on with it"):
        run([jobs.Job(name="x", panels=(), steps=(new,))], tmp_path / "three")
    assert not (tmp_path / "three" / jobs.DONE).exists()


def test_every_command_of_a_small_scale_can_be_parsed_and_writes_what_a_panel_needs(tmp_path):
    """A renamed option or a moved file would show here, without training anything."""
    found = jobs.jobs("smoke", tmp_path)
    parts = [part for panel in panels.PANELS for part in panel.parts]
    wanted = [pattern for part in parts for need in part.needs for pattern in need.files]
    for job in found:
        assert set(job.panels) <= {panel.name for panel in panels.PANELS}
        written = [Path(step[step.index("--out") + 1]) for step in job.steps]
        endings = (".npz", "-seed0.npz", "/metrics.jsonl")
        files = [Path(f"{path}{ending}") for path in written for ending in endings]
        used = [f for f in files if any(f.relative_to(tmp_path).match(pattern) for pattern in wanted)]
        assert used, job.name
        for step in job.steps:
            check(step)


def test_every_command_of_safe_ad_can_be_parsed():
    pytest.importorskip("mujoco")
    for world in safe_ad.DATA:
        *_, need = safe_ad.needs(world, 200)  # the other ones have fewer options
        collect, train, evaluate = (shlex.split(line)[1:] for line in need.command.splitlines())
        check(train)
        check(evaluate)
        histories, run = (words[words.index("--out") + 1] for words in (collect, train))
        assert [histories, run] == [train[train.index("--algo.histories") + 1], evaluate[1]]


def test_every_command_of_a_meta_learner_can_be_parsed():
    pytest.importorskip("mujoco")
    for world in ("dark-room", "ant"):
        env, tasks = panels.WORLDS[world][1:3]
        trained, variants, past_k = meta.needs(world, env, tasks), meta.variants(world, env, tasks), meta.past_k
        lines = [line for need in trained for line in need.command.splitlines()]
        lines += [need.command.splitlines()[-1] for need in (*variants, *past_k(world, env, 60))]
        for line in lines:
            check(shlex.split(line)[1:])


@pytest.mark.parametrize("world", list(panels.WORLDS)[1:])
def test_commands_of_the_meta_learners_are_those_that_were_run(world):
    """With every robot. A training may have had more: how often it was saved."""
    words = lambda line: set(shlex.split(line))  # noqa: E731
    env, tasks = panels.WORLDS[world][1:3]
    for need in (*meta.needs(world, env, tasks), *meta.variants(world, env, tasks)):
        train, evaluate = need.command.splitlines()
        stem = need.files[0].removesuffix(".npz")
        folder = STORED / stem.partition("/")[0] / "training" / world
        assert words(train) <= words(read_json(folder / "config.json", "settings")["command"])
        assert words(evaluate) == words(read_json(STORED / f"{stem}.json", "results")["meta"]["command"])


@pytest.mark.parametrize("world", panels.WORLDS)
def test_commands_past_k_are_those_that_were_run(world):
    """But for the folder of a run, and a file's name where it is the default."""
    for need in panels._beyond(world):
        path = STORED / need.files[0]
        if path.exists():
            card = read_json(path.with_suffix(".json"), "results")
            ran = (card.get("meta") or card)["command"]
            asked, ran = (
                {word for word in shlex.split(line) if "/" not in word and word != "--out"}
                for line in (need.command, ran)
            )
            assert asked == ran


@pytest.mark.parametrize("world", safe_ad.DATA)
def test_commands_of_safe_ad_are_those_that_were_run(world):
    """A training may have had more: how it was judged, a clock that it did not reach, a default."""
    words = lambda line: set(shlex.split(line))  # noqa: E731
    for need in safe_ad.needs(world, panels.WORLDS[world][2]):
        collect, train, evaluate = need.command.splitlines()
        stem = Path(need.files[0]).stem
        ran = read_json(STORED / "safe-ad" / "histories" / f"{world}.json", "card")["command"]
        assert words(collect) == words(ran)
        if (STORED / need.files[0]).exists():
            ran = read_json(STORED / "safe-ad" / "training" / stem / "config.json", "settings")["command"]
            assert words(train) <= words(ran)
            ran = read_json(STORED / "safe-ad" / f"{stem}.json", "results")["meta"]["command"]
            assert words(evaluate) == words(ran)


def check(step):
    """Parse a command as the command line would."""
    words = list(step[1:])
    if step[0] == "evaluate":
        parse("evaluate", Evaluate, words)
    elif step[0] == "train":
        settings_, recipe, _ = asked_recipe(words)
        for index in range(len(recipe.stages)):
            parse("train", train_form(recipe, index, ""), settings_)

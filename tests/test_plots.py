"""Figures, tables and films: drawn from files, never blank, with what one must know written on them."""

import dataclasses
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from safeicrl.errors import UserError
from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.tables import draw_all, group, seeds_table, summary_table
from safeicrl.show import films
from safeicrl.show.films import RobotFilm, RoomFilm, chosen_episodes, save_film


def results(label="agent", seed=0, episodes=12, **meta) -> Results:
    random = np.random.default_rng(seed)
    tasks = 40
    return Results(
        returns=(random.random((tasks, episodes)) < np.linspace(0.2, 0.9, episodes)).astype(float),
        costs=random.poisson(2.0, (tasks, episodes)).astype(float),
        lengths=np.full((tasks, episodes), 9.0),
        budgets=np.linspace(1, 10, tasks),
        meta={
            "label": label,
            "budget_range": [1, 10],
            "command": "safeicrl evaluate x",
            "actions": "greedy",
            **meta,
        },
    )


def lines_of(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines}


def test_the_first_figure_shows_the_mean_of_each_episode():
    one = results()
    figure = plots.by_episode(group([one]))
    returns, costs = figure.axes
    np.testing.assert_allclose(returns.lines[0].get_ydata(), one.returns.mean(axis=0))
    np.testing.assert_allclose(costs.lines[0].get_ydata(), one.costs.mean(axis=0))
    np.testing.assert_array_equal(returns.lines[0].get_xdata(), np.arange(1, 13))
    band = returns.collections[0].get_paths()[0].vertices[:, 1]
    error = one.returns.std(axis=0, ddof=1) / np.sqrt(40)
    assert band.max() == pytest.approx((one.returns.mean(axis=0) + error).max())


def test_several_seeds_are_one_line_with_a_band_over_seeds():
    seeds = [results(seed=seed) for seed in range(3)]
    figure = plots.by_episode(group(seeds))
    means = np.stack([one.returns.mean(axis=0) for one in seeds])
    (line,) = figure.axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), means.mean(axis=0))
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx((means.mean(axis=0) + means.std(axis=0, ddof=1) / np.sqrt(3)).max())


def test_the_second_figure_shows_totals_and_largest_costs():
    one = results()
    figure = plots.by_budget(group([one]), bins=1)
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([one.returns.sum(axis=1).mean()])
    assert figure.axes[1].lines[0].get_ydata() == pytest.approx([one.costs.max(axis=1).mean()])
    assert any(text.get_text() == "the budget" for text in figure.axes[1].texts)
    careful = dataclasses.replace(
        one, costs=np.zeros_like(one.costs), meta={**one.meta, "approximation": "roughly"}
    )
    figure = plots.by_budget(group([careful]), bins=1)
    assert figure.axes[1].get_ylim()[1] >= 10  # the budget's line is never cut off
    assert "roughly" in figure.get_supxlabel()


def test_budgets_are_compared_within_tasks_where_they_can_be():
    """Three tasks far apart, each under two budgets, of which the larger is worth 1, 3 and 5."""
    own = np.array([0.0, 100.0, 500.0])
    totals = np.concatenate([own, own + np.array([1, 3, 5])])
    one = Results(
        returns=totals[:, None], costs=np.zeros((6, 1)), lengths=np.ones((6, 1)),
        budgets=np.repeat([1.0, 3.0], 3), meta={"label": "x", "budget_range": [0, 4], "budgets_per_task": 2},
    )  # fmt: skip
    figure = plots.by_budget(group([one]))
    line, band = figure.axes[0].lines[0], figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert line.get_ydata().tolist() == [200.0, 203.0]  # a bin a budget
    # off the task's mean by ∓ (½, 3/2, 5/2), whose spread is 1: 1 / √3, and √2 more for the mean taken away
    error = np.sqrt(2) / np.sqrt(3)
    assert (band.min(), band.max()) == pytest.approx((200 - error, 203 + error))
    assert "3 tasks, 2 budgets each (bands by budget: within tasks)" in figure.get_supxlabel()
    # with one bin there is nothing to compare, and with one budget a task no other trial to compare with
    alone = dataclasses.replace(one, meta={**one.meta, "budgets_per_task": 1})
    for result, bins in ((one, 1), (alone, 2)):
        figure = plots.by_budget(group([result]), bins=bins)
        assert np.ptp(figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]) > 100
    with pytest.raises(UserError, match="differ in their budgets per task"):
        group([one, alone])


@pytest.mark.parametrize(("offset", "from_zero"), [(0.0, True), (100.0, False), (-100.0, False)])
def test_curves_far_above_zero_are_not_drawn_from_there(offset, from_zero):
    one = results()
    high = dataclasses.replace(one, returns=one.returns + offset)
    (low, _) = plots.by_episode(group([high])).axes[0].get_ylim()
    assert (low == 0.0) == from_zero


def test_shares_over_budget():
    one = results()
    figure = plots.over_budget(group([one]), bins=1)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), one.over.mean(axis=0))
    assert figure.axes[1].lines[0].get_ydata() == pytest.approx([one.over.mean()])


def test_lines_are_named_in_their_colours_and_references_always_look_the_same():
    groups = group([results("mine"), results("planner", agent="planner"), results("other")])
    for figure in (plots.by_episode(groups), plots.by_episode(dict(reversed(groups.items())))):
        axis = figure.axes[0]
        named = {text.get_text(): text.get_color() for text in axis.texts}
        assert set(named) == {"mine", "planner", "other"}
        assert named["planner"] == plots.REFERENCE_COLOURS["planner"]
        assert named["mine"] != named["other"]
        heights = sorted(text.get_position()[1] for text in axis.texts)
        assert min(np.diff(heights)) > 0.05 * np.ptp(axis.get_ylim())  # no two names on top of each other
    assert "safeicrl evaluate x" in figure.get_supxlabel()
    assert "greedy" in figure.get_supxlabel()


def test_a_method_has_one_colour_whoever_is_beside_it():
    """All lines of a robot's figure at once, then without Safe AD."""
    labels = ["SCARED", "Safe AD", "Safe AD, sampled", "SafeMeta", "MAML with penalty", "privileged", "memoryless"]
    colours = []
    for some in (labels, [label for label in labels if not label.startswith("Safe AD")]):
        axis = plots.by_episode(group([results(label) for label in some])).axes[0]
        colours.append({text.get_text(): text.get_color() for text in axis.texts})
    every, fewer = colours
    assert len(set(every.values())) == len(labels)
    assert fewer == {label: every[label] for label in fewer}


@pytest.mark.parametrize("draw", [plots.by_episode, plots.by_budget, plots.over_budget])
def test_a_figure_says_what_its_bands_are(draw):
    seeds = [results("mine", seed=seed) for seed in range(2)]
    said = lambda some: draw(group(some)).get_suptitle()  # noqa: E731
    assert said(seeds[:1]) == "lines: mean · bands: ± standard error over tasks"
    assert said(seeds) == "lines: mean · bands: ± standard error over seeds"
    assert said([*seeds, results("planner")]).endswith("over seeds, or over tasks where there is one seed")


def test_one_budget_only():
    one = results()
    fixed = Results(
        returns=one.returns, costs=one.costs, lengths=one.lengths, budgets=np.full(40, 3.0), meta={"label": "x"}
    )
    drawn = plots.by_budget(group([fixed])).axes[0].lines[0]
    np.testing.assert_allclose(drawn.get_xdata(), [3.0])
    np.testing.assert_allclose(drawn.get_ydata(), [one.returns.sum(1).mean()], rtol=1e-5)


def log(seeds: int) -> list[dict]:
    lines = []
    for i in range(1, 9):
        line = {
            "iteration": i,
            "env_steps": 1000 * i,
            "return": i / 9,
            "cost": 2.0,
            "budget": 3.0,
            "over_budget": 0.1,
        }
        line["lambda"] = None if i == 3 else 0.5
        if seeds > 1:
            line |= {f"{name}/seeds": [line[name]] * seeds for name in ("return", "cost", "over_budget", "lambda")}
        lines.append(line)
    lines.append(
        {"iteration": 8, "env_steps": 8000, "eval/last_return": 0.9, "eval/cost": 1.0, "eval/over_budget": 0}
    )
    return lines


def test_training_curves_run_over_env_steps():
    figure = plots.training([("run", log(1), "safeicrl train --seed 1")])
    axis = figure.axes[0]
    np.testing.assert_array_equal(axis.lines[0].get_xdata(), np.arange(1000, 9000, 1000))
    assert axis.get_xlabel() == "env steps"
    assert len(figure.axes[3].lines[0].get_xdata()) == 7  # a rolled-back iteration leaves a gap, not a zero
    assert "safeicrl train --seed 1" in figure.get_supxlabel()
    assert len(plots.training([("run", log(3), "")]).axes[0].lines) == 3 + 2


def test_files_become_figures(tmp_path):
    save_results(results("a"), tmp_path / "a")
    save_results(results("b"), tmp_path / "b")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log(2)))
    (run / "config.json").write_text('{"command": "safeicrl train"}')
    files = draw_all([tmp_path / "a.npz", tmp_path / "b.json", run], tmp_path / "figures", "png")
    names = ("episodes", "budgets", "over-budget", "profiles", "training")
    assert [file.name for file in files] == [f"{name}.png" for name in names]
    for file in files:
        assert file.stat().st_size > 5000
        assert matplotlib.image.imread(file).std() > 0.01, "blank"
    [curves] = draw_all([run], tmp_path / "figures", "svg")
    assert curves.name == "training.svg"
    assert "<svg" in curves.read_text()[:1000]


def test_nothing_to_draw(tmp_path):
    with pytest.raises(UserError, match="no training log at"):
        draw_all([tmp_path], tmp_path)
    with pytest.raises(UserError, match="no results file at"):
        draw_all([tmp_path / "a.npz"], tmp_path)
    save_results(results(), tmp_path / "b")
    with pytest.raises(UserError, match=r"no training log at .*; its results: .*/\*\.npz"):
        draw_all([tmp_path], tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="is no metrics file"):
        draw_all([tmp_path], tmp_path)


def shown(table) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_fits_a_terminal():
    field = [results(name, episodes=50) for name in ("safe-dark-room", "explorer", "planner", "random")]
    text = shown(summary_table(field))
    for words in ("total return of 50", "over budget", "δ 1–2", "δ 8–10"):
        assert words in text
    (header,) = [line for line in text.splitlines() if "safe-dark-room" in line]  # in one piece, beside the others
    assert header.split() == ["safe-dark-room", "explorer", "planner", "random"]
    assert "…" not in text


@pytest.mark.parametrize(
    ("episodes", "name"), [(50, "last ten"), (30, "last ten"), (15, "last five"), (4, "last episode")]
)
def test_the_last_episodes_of_a_short_trial_are_fewer(episodes, name):
    one = results(episodes=episodes)
    last = {"last ten": 10, "last five": 5, "last episode": 1}[name]
    line = next(line for line in shown(summary_table([one])).splitlines() if f"return, {name}" in line)
    assert line.split()[-1] == f"{one.returns[:, -last:].mean():.3f}"


def test_a_budget_nobody_had_is_a_dash():
    one = results()
    some = Results(
        returns=one.returns, costs=one.costs, lengths=one.lengths, budgets=np.full(40, 3.0), meta=one.meta
    )
    text = shown(summary_table([some]))
    assert "nan" not in text
    assert [line.split()[-1] for line in text.splitlines() if "δ 1–2" in line] == ["–"]
    drawn = plots.by_budget(group([some])).axes[0].lines[0].get_xydata()
    assert drawn.shape == (1, 2)
    assert np.isfinite(drawn).all()


def test_seeds_are_rows_with_their_mean_and_standard_error():
    seeds = {f"seed {seed}": results("mine", seed=seed, episodes=50) for seed in (0, 2, 10)}
    rows = {line.split("  ")[0].strip(): line for line in shown(seeds_table(seeds)).splitlines()}
    totals = [one.returns.sum(1).mean() for one in seeds.values()]
    for name, total in zip(seeds, totals, strict=True):
        assert f"{total:.2f}" in rows[name]
    assert f"{np.mean(totals):.2f} ± {np.std(totals, ddof=1) / np.sqrt(3):.2f}" in rows["mean ± s.e."]


def test_results_that_are_no_seeds_of_one_agent():
    with pytest.raises(UserError, match="'mine' differ in their episodes: 12 and 5"):
        group([results("mine"), results("mine", episodes=5)])
    with pytest.raises(UserError, match="differ in their budget range"):
        group([results("mine"), results("mine", budget_range=[1, 4])])


@pytest.mark.parametrize("words", range(1, 60, 4))
def test_what_stands_below_a_figure_has_no_lone_words(words):
    figure = Figure(figsize=(4, 2), layout="constrained")
    plots._write_corner(figure, "two agents\n" + "policy " * (words + 1))
    figure.draw_without_rendering()
    (below,) = figure.texts
    assert below.get_window_extent().x1 <= figure.bbox.x1
    first, *lines = below.get_text().splitlines()
    assert first == "two agents"
    assert sum(len(line.split()) for line in lines) == words + 1
    assert min(len(line.split()) for line in lines) > 1
    if words > 30:
        assert len(lines) < words / 10  # as few lines as there can be


def room_film() -> RoomFilm:
    paths = [[(1, 1), (0, 1), (0, 2)], [(1, 1), (1, 2)], [(1, 1), (0, 1), (0, 0)]]
    return RoomFilm(
        label="x", size=3, goal=(0, 0), obstacles=[(0, 2)], budget=0.5, paths=paths,
        step_costs=[[0, 1], [0], [0, 0]], reached=[False, False, True],
    )  # fmt: skip


def robot_film() -> RobotFilm:
    signals = [np.array([1.0, 2.0]), np.array([1.0, 0.0, 0.5, 4.0])]
    first, second, third = (np.full((8, 8, 3), shade, np.uint8) for shade in (0, 100, 200))
    return RobotFilm(
        label="x", world="Arena", budget=2.0, rewards=signals, costs=signals, steps=[0, 2, 4],
        pictures={0: [first, second, second], 1: [third, second, first]},
    )  # fmt: skip


@pytest.mark.parametrize("film", [room_film(), robot_film()], ids=["room", "robot"])
def test_a_film_moves(film, tmp_path):
    with Image.open(save_film(film, tmp_path / "a.gif")) as image:
        assert image.n_frames == 3
        frames = []
        for index in range(3):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")).astype(int))
    assert all(abs(a - b).max() > 50 for a, b in itertools.pairwise(frames))


@pytest.mark.parametrize("film", [room_film(), robot_film()], ids=["room", "robot"])
def test_an_episode_that_has_ended_looks_as_if_it_were_drawn_again(film, monkeypatch):
    assert min(film.last_frame(episode) for episode in film.shown) == 1 < film.frames - 1
    quick = [np.asarray(frame.convert("RGB")) for frame in films._frames(film)]
    monkeypatch.setattr(type(film), "last_frame", lambda *_: film.frames)  # all are drawn in every frame
    every = [np.asarray(frame.convert("RGB")) for frame in films._frames(film)]
    np.testing.assert_array_equal(quick, every)


def test_what_a_film_says_of_an_episode():
    room, robot = room_film(), robot_film()
    assert [room.cost(episode) for episode in room.shown] == [1, 0, 0]
    assert [room.caption(0, frame) for frame in range(2)] == ["episode 1\ncost 0 of 0.5"] * 2
    assert room.caption(0, 2) == "episode 1\ncost 1 of 0.5, no goal"
    assert room.caption(2, 2) == "episode 3\ncost 0 of 0.5, goal"
    assert [room.over(0, frame) for frame in range(3)] == [False, False, True]
    assert robot.caption(0, 2) == "episode 1, step 2\nreturn 3, cost 3"  # it was over before
    assert robot.caption(1, 1) == "episode 2, step 2\nreturn 1, cost 1"
    assert [robot.over(1, frame) for frame in range(3)] == [False, False, True]


@pytest.mark.parametrize("film", [room_film(), robot_film()], ids=["room", "robot"])
def test_nothing_runs_through_a_films_legend(film):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = [figure.add_subplot(len(film.heights), 1, row) for row in range(1, len(film.heights))]
    film.draw_charts(axes)
    figure.draw_without_rendering()
    legend = axes[-1].get_legend().get_window_extent()
    assert not legend.overlaps(axes[-1].get_window_extent())
    assert figure.bbox.x0 <= legend.x0 < legend.x1 <= figure.bbox.x1


def test_a_film_shows_the_first_and_the_last_episode():
    assert chosen_episodes(50) == [0, 1, 4, 9, 22, 49]
    assert chosen_episodes(3) == [0, 1, 2]
    assert chosen_episodes(1) == [0]


def test_reading_and_drawing_never_load_jax(tmp_path):
    """Neither results nor a page of the report; in one process, which takes seconds to start."""
    save_results(results("a"), tmp_path / "a")
    stored = Path(__file__).parent.parent / "results"
    code = (
        "import sys; from pathlib import Path; import safeicrl.show.films;"
        "from safeicrl.evaluation.tables import draw_all;"
        f"draw_all([Path({str(tmp_path / 'a.npz')!r})], Path({str(tmp_path)!r})); assert 'jax' not in sys.modules;"
        "from safeicrl.show.report.reproduce import build;"
        f"build('safe-ad-eps', root=Path({str(stored)!r}), about=[], out=Path({str(tmp_path / 'page')!r}));"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "episodes.png").exists()
    assert (tmp_path / "page" / "index.html").exists()


@pytest.mark.parametrize(("values", "bottom"), [([1.0, 2.0], 0.0), ([-30.0, -20.0], None)])
def test_returns_below_zero_stay_in_the_picture(values, bottom):
    figure = plots.against_steps([("return", {"a": ([1e6, 2e6], values)})], (1e6,))
    low, high = figure.axes[0].get_ylim()
    assert low < high
    assert low <= min(values)
    assert high >= max(values)
    assert bottom is None or low == bottom

"""Several runs side by side: seeds are found, intervals are right, the figure is drawn."""

import numpy as np
import pytest

from safeicrl.cli import main
from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import MEASURES, interval
from safeicrl.evaluation.tables import group, run_results


def results(mean: float, label: str = "run", tasks: int = 6, **more) -> Results:
    """Two episodes per trial, of returns around `mean`; the costs of every second trial exceed the budget once."""
    returns = mean + np.linspace(-1, 1, tasks)[:, None] * np.ones(2)
    costs = np.array([[0.0, 3.0 * (trial % 2)] for trial in range(tasks)])
    meta = {"label": label, "budget_range": [1.0, 1.0], **more}
    return Results(returns=returns, costs=costs, lengths=costs + 1, budgets=np.ones(tasks), meta=meta)


def test_an_interval_is_over_seeds_or_over_tasks():
    total, over = MEASURES["total return"][0], MEASURES["over budget"][0]
    mean, half = interval([results(m) for m in (1.0, 2.0, 3.0)], total)
    # totals of two episodes: 2, 4, 6; their standard error is 2/√3, and t of two degrees of freedom is 4.30
    assert (mean, half) == (4.0, pytest.approx(4.30 * 2 / np.sqrt(3)))
    one = results(1.0)
    assert interval([one], total)[1] == pytest.approx(1.96 * np.std(one.returns.sum(1), ddof=1) / np.sqrt(6))
    assert interval([one], over)[0] == 0.25
    many = [results(float(m)) for m in range(40)]
    assert interval(many, total)[1] == pytest.approx(1.96 * np.std(2 * np.arange(40.0), ddof=1) / np.sqrt(40))


def test_a_folders_evaluations_are_its_seeds(tmp_path):
    run = tmp_path / "mine"
    for seed in (0, 1):
        save_results(results(float(seed), "mine, in training"), run / f"best-seed{seed}-evaluation")
    assert [r.label for r in run_results(run)] == ["mine", "mine"]
    save_results(results(1.0), run / "policy-evaluation")
    assert len(run_results(run)) == 2  # the best of the seeds is not counted twice
    alone = tmp_path / "alone"
    save_results(results(1.0), alone / "policy-evaluation")
    assert len(run_results(alone)) == 1
    assert len(run_results(alone / "policy-evaluation.npz")) == 1


def test_compare_prints_and_draws_the_runs(tmp_path, capsys):
    for name, means in (("good", (2.0, 2.2)), ("bad", (1.0,))):
        for seed, mean in enumerate(means):
            save_results(results(mean), tmp_path / name / f"best-seed{seed}-evaluation")
    runs = [str(tmp_path / name) for name in ("good", "bad")]
    assert main(["compare", *runs, "--out", str(tmp_path / "new" / "sweep")]) == 0
    said = capsys.readouterr().out
    assert "over seeds" in said
    assert "4.2 ± 2.5" in said  # totals 4 and 4.4: t of one degree of freedom, 12.71 × 0.2
    assert "25.0% ± 0.0%" in said
    assert (tmp_path / "new" / "sweep.png").stat().st_size > 5000
    assert main(["compare", *runs, "--upper", "a.npz"]) == 2
    assert "both --upper and --lower" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(tmp_path / "empty")]) == 2
    assert "has no evaluation" in capsys.readouterr().err


def test_compare_refuses_other_worlds_and_warns_of_other_tasks(tmp_path, capsys):
    room, point = ({"name": name, "parameters": {}} for name in ("safe-dark-room", "safe-dark-point"))
    for name, tasks, more in (
        ("one", 6, {"env": room, "seed": 0}),
        ("other", 8, {"env": room, "seed": 3}),
        ("point", 6, {"env": point, "seed": 0}),
        ("rough", 6, {"env": room, "seed": 0, "approximation": "mjx"}),
    ):
        save_results(results(1.0, name, tasks, **more), tmp_path / name)
    for name, words in (
        ("point", "environment, safe-dark-room and safe-dark-point"),
        ("rough", "physics, the real one and mjx"),
    ):
        assert main(["compare", str(tmp_path / "one"), str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == (
            f"safeicrl: only results of one world can be compared: 'one' and {name!r} differ in their {words}\n"
        )
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    assert capsys.readouterr().err == (
        "safeicrl: these results are not of the same tasks: they differ in seed (0 and 3), "
        "trials (6 of 2 episodes and 8 of 2 episodes)\n"
    )
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "one")]) == 0
    assert not capsys.readouterr().err


def test_the_figure_says_what_its_bars_are():
    figure = plots.sweep(group([results(1.0, "a"), results(2.0, "a"), results(3.0, "b")]))
    assert "95% interval over seeds, or over tasks where there is one seed" in figure.get_suptitle()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a", "b"]
    for axis in figure.axes:
        assert len(axis.containers) == 2

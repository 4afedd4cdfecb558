"""Interquartile means, the bootstrap, performance profiles and safety figures, against answers known by hand."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from safeicrl.errors import UserError
from safeicrl.evaluation import plots
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import (
    MEASURES,
    bootstrap,
    interquartile_mean,
    performance_profile,
    resampled_trials,
    safety,
    worst_excess,
)
from safeicrl.evaluation.tables import safety_table, sweep_table

TOTAL = MEASURES["total return"][0]


def results(returns, costs=None, budgets=None, often=1, span=(1.0, 10.0), **meta) -> Results:
    """Results of [trial, episode] returns; costs are 0 and budgets spread over the range by default."""
    returns = np.asarray(returns, float)
    budgets = np.linspace(*span, len(returns)) if budgets is None else np.asarray(budgets, float)
    costs = np.zeros_like(returns) if costs is None else np.asarray(costs, float)
    meta = {"label": "agent", "budget_range": list(span), "budgets_per_task": often, **meta}
    return Results(returns=returns, costs=costs, lengths=np.ones_like(returns), budgets=budgets, meta=meta)


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == 3.5  # of 2, 3, 4, 5
    assert interquartile_mean(np.array([5.0, 1, 9])) == 5.0  # three values: nothing is cut
    assert interquartile_mean(np.array([0.0, 0, 0, 10, 10])) == pytest.approx(10 / 3)  # one is cut at each end
    assert interquartile_mean(np.array([7.0])) == 7.0


def test_a_profile_counts_what_lies_above():
    profile = performance_profile(np.array([1.0, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.0, 3.9, 4.0]))
    np.testing.assert_array_equal(profile, [1.0, 0.75, 0.25, 0.25, 0.0])


def test_a_bootstrap_of_means_has_the_width_of_the_standard_error():
    values = np.random.default_rng(3).normal(size=(400, 1))
    one = results(values, budgets=np.ones(400), span=(1.0, 1.0))  # one budget: one stratum
    mean, low, high = bootstrap([one], TOTAL, np.mean, samples=3000)
    assert mean == pytest.approx(values.mean())
    error = values.std() / 20
    assert low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_strata_keep_the_mix_of_budgets():
    """Return is decided by the budget's bin: then no resampling can change the mean."""
    budgets = np.linspace(1, 10, 60)
    one = results((budgets > 4)[:, None], budgets=budgets)
    assert bootstrap([one], TOTAL, np.mean, samples=50)[1:] == pytest.approx((one.returns.mean(),) * 2)
    drawn = resampled_trials(one, np.random.default_rng(0))
    assert len(drawn) == 60
    assert len(set(drawn)) < 60
    # With several budgets per task, a task is drawn with all its trials.
    many = results(np.zeros((12, 1)), often=3)
    drawn = resampled_trials(many, np.random.default_rng(0)).reshape(3, 4)
    np.testing.assert_array_equal(drawn - drawn[0], [[0] * 4, [4] * 4, [8] * 4])


def test_seeds_are_drawn_whole():
    """Two seeds that differ by 1 on every task: the means of samples are 0, ½ or 1, never only near ½."""
    seeds = [results(np.full((40, 1), float(value))) for value in (0, 1)]
    mean, low, high = bootstrap(seeds, TOTAL, np.mean, samples=200)
    assert (mean, low, high) == (0.5, 0.0, 1.0)
    unequal = [results(np.zeros((40, 1))), results(np.ones((20, 1)))]  # each seed then draws its own tasks
    assert bootstrap(unequal, TOTAL, np.mean, samples=200)[0] == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="at least 1 sample, got 0"):
        bootstrap(seeds, TOTAL, samples=0)


BROKEN = results(
    np.zeros((4, 3)),
    costs=[[0, 0, 0], [0, 3, 0], [5, 9, 0], [0, 0, 8]],  # budgets 1, 1, 4, 4
    budgets=[1, 1, 4, 4],
    span=(1.0, 4.0),
    env={"name": "x", "parameters": {"episodes": 2}},
)


def test_safety_says_how_often_when_and_by_how_much():
    figures = safety([BROKEN])
    # Over: trial 1 in episode 2 by 2; trial 2 in episodes 1 and 2 by 1 and 5; trial 3 in episode 3 by 4.
    assert figures.over_budget == pytest.approx(4 / 12)
    assert figures.trials_over == 0.75
    assert figures.excess_mean == 3.0
    assert figures.excess_95 == pytest.approx(4.85)  # of 1, 2, 4, 5: 4 + 0.85 · (5 − 4)
    assert figures.excess_worst == 5.0
    assert figures.first_break == 2.0  # of 2, 1, 3
    assert figures.by_episode == [0.25, 0.5, 0.25]
    assert figures.over_beyond == 0.25  # the third episode, where training had two
    counted = {name: share for name, share in figures.by_budget.items() if np.isfinite(share)}
    assert list(counted.values()) == pytest.approx([1 / 6, 3 / 6])
    assert [figures.trials_by_budget[name] for name in counted] == [0.5, 1.0]
    np.testing.assert_array_equal(worst_excess(BROKEN), [-1, 2, 5, 4])
    largest = safety([BROKEN]).largest  # budgets of 1 and 4, the ends of ten bins; two trials each
    assert (largest[0], largest[9]) == ((0 + 3) / 2, (9 + 8) / 2)
    assert np.isnan(largest[1:9]).all()

    both = safety([BROKEN, results(np.zeros((4, 3)), budgets=[1, 1, 4, 4], span=(1.0, 4.0))])
    assert both.trials_over == 3 / 8
    kept = safety([results(np.zeros((4, 3)))])
    assert kept.over_budget == 0
    assert np.isnan([kept.excess_mean, kept.excess_95, kept.first_break, kept.over_beyond]).all()


def printed(table) -> str:
    console = Console(width=100, record=True)
    console.print(table)
    return console.export_text()


def test_tables_and_figure_show_them():
    said = printed(safety_table({"mine": [BROKEN]}))
    for row in ("episodes over budget 33.33%", "trials ever over 75.00%", "largest 5", "past training's K 25.00%"):
        assert row in " ".join(said.split()), said
    flat = results(np.full((8, 2), 1.5))
    assert "3 [3, 3]" in printed(sweep_table({"flat": [flat]}))

    other = dataclasses.replace(BROKEN, returns=np.ones((4, 3)))
    figure = plots.profiles({"a": [BROKEN], "b": [other, other]})
    above, excess = figure.axes
    x, y = above.lines[1].get_data()
    np.testing.assert_array_equal(y, performance_profile(np.full(8, 3.0), x))
    assert excess.lines[0].get_ydata()[0] == 0.75  # trials that exceed their budget by more than 0
    assert "95%" in figure.get_suptitle()

"""The examples that need nothing extra run as they are."""

import runpy
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from safeicrl.agents.reference import RandomAgent
from safeicrl.envs import registry
from safeicrl.trial import run_trials, sample_queue

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_custom_environment_takes_at_most_60_lines_and_fits_its_learner(monkeypatch):
    """Every lever pays its hidden amount and the best one costs 1; an update of its learner is traced only."""
    monkeypatch.setattr(registry, "WORLDS", dict(registry.WORLDS))  # it registers itself, for this test only
    script = EXAMPLES / "custom_env.py"
    assert len(script.read_text().splitlines()) <= 60
    algorithm = runpy.run_path(str(script))["learner"](1)
    env = algorithm.env
    tasks, budgets = sample_queue(env, "test", (0.0, 6.0), (16, 1), jax.random.key(0))
    trials = run_trials(env, RandomAgent(env.spec.action), tasks, budgets, jax.random.key(1), episodes=2, steps=20)
    paid, action = np.asarray(tasks)[:, 0], np.asarray(trials.action)  # [row, lever], [row, time]
    assert paid.min() >= 0.5
    np.testing.assert_array_equal(trials.reward, np.take_along_axis(paid, action, 1))
    np.testing.assert_array_equal(trials.cost, action == paid.argmax(1)[:, None])
    np.testing.assert_array_equal(trials.final_observation[..., 0], action)
    assert np.asarray(trials.truncated).nonzero()[1].tolist() == [9, 19] * 16

    state = eqx.filter_eval_shape(algorithm.init, jax.random.key(0))
    after, metrics = eqx.filter_eval_shape(algorithm.update, state)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree) if hasattr(x, "shape")]  # noqa: E731
    assert shapes(after) == shapes(state)
    assert metrics["over_budget_by_bin"].shape == (5,)


def test_proposition_1_draws_its_figure(tmp_path, monkeypatch, capsys):
    script = str(EXAMPLES / "proposition_1.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", str(tmp_path / "figure.svg")])
    runpy.run_path(script, run_name="__main__")
    assert "0.4721" in capsys.readouterr().out
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")

"""In-context learning emerges: a smaller `safeicrl train --preset darkroom-small`, judged by its own evaluation."""

import io

import jax
import numpy as np
from probe import OPTIMISED
from rich.console import Console

from safeicrl.agents.api import with_options
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.penalty import PenaltyConfig
from safeicrl.train import EvalConfig, TrainConfig, train

ROOM = SafeDarkRoom(size=3, obstacles=2, max_steps=6, episodes=6, train_budget=(1.0, 4.0), test_budget=(1.0, 4.0))
CONFIG = ScaredConfig(
    iterations=80,
    rows=64,
    queue=2,
    segments=1,
    net=NetConfig(width=32, layers=1, heads=2, context=ROOM.spec.trial_steps, dtype="float32"),
    penalty=PenaltyConfig(step=0.05),
    ppo=PPOConfig(minibatch=32, learning_rate=(3e-3, 3e-4), discount=0.99),
)


def test_the_frozen_policy_finds_new_goals_and_remembers_them(tmp_path, monkeypatch):
    plain = jax.jit
    # training alone runs longer than it compiles
    options = lambda function: {"compiler_options": OPTIMISED} if function.__name__ == "chunk" else {}  # noqa: E731
    monkeypatch.setattr(jax, "jit", lambda function, **given: plain(function, **options(function), **given))
    algorithm = Scared(ROOM, CONFIG)
    settings = TrainConfig(evaluation=EvalConfig(every=0, tasks=300, segments=1))
    trained = train(algorithm, settings, out=tmp_path / "run", console=Console(file=io.StringIO()))
    [kept] = trained.results
    by_episode = kept.returns.mean(0)
    assert by_episode[-1] > 0.9
    assert by_episode[-1] > by_episode[0] + 0.1
    assert kept.over.mean() < 0.1
    # The same network on the same rooms, made to forget at every episode, stays where it began.
    agent, _ = with_options(ROOM, trained.agent(algorithm), wipe=True)
    wiped = evaluate(ROOM, agent, tasks=300, seed=settings.evaluation.seed, segments=1)
    np.testing.assert_array_equal(wiped.budgets, kept.budgets)
    assert wiped.returns.mean(0)[-1] < by_episode[0] + 0.1
    assert kept.returns.sum(1).mean() > wiped.returns.sum(1).mean() + 0.5
    assert kept.over[:, 1:].mean() < wiped.over[:, 1:].mean()

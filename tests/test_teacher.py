"""SCARED with a teacher: the room's explorer watches, and the policy learns to do as it would."""

import jax
import numpy as np
import pytest
from probe import Push

from safeicrl.agents.api import TaughtAgent
from safeicrl.agents.reference import ExplorerAgent, RandomAgent
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import UserError
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.trial import run_trials, sample_queue

ROOM = SafeDarkRoom(size=4, obstacles=4, max_steps=7, episodes=3, train_budget=(1.0, 4.0), test_budget=(1.0, 4.0))


def play(agent):
    tasks, budgets = sample_queue(ROOM, "test", (1.0, 4.0), (16, 1), jax.random.key(0))
    return run_trials(ROOM, agent, tasks, budgets, jax.random.key(1), episodes=3, steps=21)


def test_a_teacher_that_watches_itself_advises_what_it_does():
    explorer = ExplorerAgent(ROOM)
    found = play(TaughtAgent(agent=explorer, teacher=explorer))
    assert found.valid.sum() > 100
    np.testing.assert_array_equal(found.extras["advice"][found.valid], found.action[found.valid])


def test_advice_depends_on_what_the_watched_agent_did():
    explorer = ExplorerAgent(ROOM)
    found = play(TaughtAgent(agent=RandomAgent(ROOM.spec.action), teacher=explorer))
    own = play(explorer)
    np.testing.assert_array_equal(found.extras["advice"][:, 0], own.action[:, 0])  # nobody has done anything yet
    agree = np.asarray(found.extras["advice"] == found.action)[np.asarray(found.valid)].mean()
    assert 0.1 < agree < 0.4  # one of five actions by chance


def test_a_taught_policy_does_more_and_more_as_its_teacher():
    net = NetConfig(width=16, layers=1, heads=2, context=21)
    ppo = PPOConfig(learning_rate=(1e-2, 1e-2), warmup=0, minibatch=16, epochs=4, entropy=(0.0, 0.0))
    config = ScaredConfig(iterations=60, rows=32, queue=1, segments=1, teacher=1.0, net=net, ppo=ppo)
    algorithm = Scared(ROOM, config)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    update = jax.jit(algorithm.update)
    agrees = []
    for _ in range(12):
        state, metrics = update(state)
        agrees.append(float(metrics["teacher_agrees"]))
    assert agrees[0] < 0.3
    assert np.mean(agrees[-3:]) > 0.5  # 0.2 with a weight of 0.001


def test_a_teacher_needs_the_room_and_ppo():
    with pytest.raises(UserError, match="teacher is for SafeDarkRoom, which has an explorer, not for Push"):
        Scared(Push(), ScaredConfig(teacher=1.0))
    with pytest.raises(UserError, match="teacher is for ppo, got the optimiser 'ddpg'"):
        ScaredConfig(teacher=1.0, optimiser="ddpg")
    with pytest.raises(UserError, match=r"teacher must be a finite number ≥ 0\.0, got -1"):
        ScaredConfig(teacher=-1)

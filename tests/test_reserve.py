"""A reserve: the network is told that less is left of the budget. The budget itself stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, random_weights

from safeicrl import load_policy
from safeicrl.agents.api import with_options
from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.cli import main
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies.contenders import released
from safeicrl.policies.policy import Policy
from safeicrl.tokens import first_token


def agent(reserve: float, **net) -> InContextAgent:
    config = NetConfig(width=8, layers=2, heads=2, context=20, dtype="float32", **net)
    return InContextAgent(
        net=random_weights(PolicyNet, config, ROOM.spec, scale=2.0),
        reserve=reserve,
        risk=0.3 if config.guard else None,
        trained_episodes=3,
    )


def played(reserve: float, budget: float) -> tuple[list[int], np.ndarray]:
    """Actions on random experience with three costs of one unit, and what is remembered of it all."""
    policy = Policy(env=ROOM, agent=agent(reserve), card={"kind": "net", "env": env_to_plain(ROOM)})
    policy.start(budget=budget, seed=3)
    rng, actions = np.random.default_rng(0), []
    for step in range(14):
        last = (rng.normal(), int(step in (3, 4, 9)), False, step % 5 == 4) if step else ()
        actions.append(policy.act(rng.integers(0, 3, 2), *last))
    return actions, np.asarray(policy._trial.memory.cache.keys[-1])


def test_it_acts_as_under_a_smaller_budget():
    actions, memory = played(1.0, budget=3.0)
    smaller, remembered = played(0.0, budget=2.0)
    assert actions == smaller
    np.testing.assert_array_equal(memory, remembered)
    assert np.abs(memory - played(0.0, budget=3.0)[1]).max() > 0.01


def test_the_guard_judges_by_what_is_really_left():
    ours, row = agent(1.0, guard=1), jnp.arange(2)[None]
    token = jax.vmap(first_token, (None, 0, 0))(ROOM.spec, row, jnp.ones(1))  # one unit left: nothing can break
    memory = ours.extend(ours.init(None, 1), 20)
    _, _, watched = ours.read(memory, token)
    told, really = (
        ours.net.guard.judge(watched, left, token.time, 0.3).risk for left in (jnp.zeros(1), jnp.ones(1))
    )
    said = ours.act(memory, token, jax.random.key(0))[2]
    assert (np.asarray(really) == 0).all()
    assert (np.asarray(told) > 0).all()
    assert said["risk"][0] == 0
    assert not said["stepped_in"][0]


def test_cards_options_and_results_say_it(tmp_path, capsys):
    path, results = tmp_path / "mine", tmp_path / "results"
    assert main(["export", "safe-dark-room", "--out", str(path), "--reserve", "0.5"]) == 0
    policy = load_policy(path)
    assert (policy.agent.reserve, policy.card["reserve"]) == (0.5, 0.5)
    without = load_policy(path, reserve=0.0)
    assert without.agent.reserve == 0
    assert "reserve" not in without.card
    assert "reserve" not in released("safe-dark-room").meta
    assert released("safe-dark-room", reserve=2).meta["reserve"] == 2
    small = ["--tasks", "1", "--episodes", "1", "--budgets", "2", "2"]
    assert main(["evaluate", str(path), *small, "--out", str(results)]) == 0
    assert "reserve 0.5" in capsys.readouterr().out
    assert load_results(results).meta["reserve"] == 0.5


@pytest.mark.parametrize("reserve", [-1, float("nan"), "much"])
def test_what_is_no_reserve(reserve):
    with pytest.raises(UserError, match="reserve must be a"):
        load_policy("safe-dark-room", reserve=reserve)


def test_who_keeps_none(capsys):
    with pytest.raises(UserError, match="RandomAgent keeps no reserve: leave out reserve 1"):
        with_options(ROOM, RandomAgent(action=ROOM.spec.action), reserve=1)
    assert main(["evaluate", "--agent", "random", "--reserve", "1"]) == 2
    assert "the random agent keeps no reserve: leave out --reserve" in capsys.readouterr().err

"""The brake: right after a step that has used its budget up, a robot does what the policy says, but harder."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, random_weights
from probe import BoundedPush, Runner

from safeicrl import load_policy
from safeicrl.agents.api import with_options
from safeicrl.agents.brake import braked
from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.budgets import is_spent
from safeicrl.cli import main
from safeicrl.envs.api import Env, replace
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies.cards import save_policy
from safeicrl.policies.contenders import released
from safeicrl.tokens import Token

ANT = "safe-velocity-ant"


act = eqx.filter_jit(InContextAgent.act)


def agent(env: Env, brake: float = 1.0, guard: int = 0) -> InContextAgent:
    config = NetConfig(width=8, layers=1, heads=2, context=20, guard=guard, dtype="float32")
    net = random_weights(PolicyNet, config, env.spec)
    last = net.actor.second
    moderate = jnp.zeros_like(last.weight), jnp.array([0.4, 0.0])  # a mean of tanh 0.4 in its range
    net = eqx.tree_at(lambda net: (net.actor.second.weight, net.actor.second.bias), net, moderate)
    return InContextAgent(net=net, temperature=0.0, brake=brake, risk=0.999 if guard else None)


def token(cost: list, left: list, start: list[bool] | None = None) -> Token:
    """Of rows with the same past."""
    rows = len(cost)
    zeros, flags = jnp.zeros((rows, 1)), jnp.zeros(rows, bool) if start is None else jnp.array(start)
    return Token(
        observation=zeros, previous=zeros, action=zeros, reward=jnp.zeros(rows), cost=jnp.array(cost),
        ctg=jnp.array(left), start=flags, time=jnp.ones(rows, int), episode=jnp.ones(rows, int),
    )  # fmt: skip


def acted(who: InContextAgent, given: Token) -> np.ndarray:
    """The action of each row, [row]; none has a past."""
    rows = len(given.time)
    return np.asarray(act(who, who.extend(who.init(None, rows), 20), given, jax.random.key(0))[1])[:, 0]


def test_it_acts_harder_where_a_cost_has_used_the_budget_up():
    used_up, overspent, some_left, no_cost, new_episode, rounded = range(6)
    given = token([1.0, 1, 1, 0, 1, 1], [0.0, -1, 1, 0, 0, 0.9], [False, False, False, False, True, False])
    plain, braking = acted(agent(Runner()), given), acted(agent(Runner(), brake=1.5), given)
    factor = (braking - 1) / (plain - 1)  # of the distance to the middle of the range
    np.testing.assert_allclose(factor, [1.5, 1.5, 1, 1, 1, 1.5], rtol=1e-4)
    hard = acted(agent(Runner(), brake=1e6), given)
    assert all(hard[row] in (-1, 3) for row in (used_up, overspent, rounded))  # the ends of the range
    np.testing.assert_array_equal(hard[[some_left, no_cost, new_episode]], plain[[some_left, no_cost, new_episode]])


def test_of_several_costs_the_one_that_came_must_be_used_up():
    spec = replace(
        Runner().spec, costs=("heat", "noise"), train_budget=((0, 2), (0, 2)), test_budget=((0, 2), (0, 2))
    )
    given = token([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[0.0, 5.0], [0.0, 5.0], [1.0, 0.0]])
    harder = braked(jnp.full((3, 1), 1.5), given, 2.0, spec)
    np.testing.assert_allclose(harder[:, 0], [2, 1.5, 2])


def test_with_a_guard_it_is_what_the_policy_proposes():
    given = token([1.0, 0.0], [0.0, 0.0])
    plain, braking = acted(agent(BoundedPush()), given), acted(agent(BoundedPush(), 2.0, guard=1), given)
    np.testing.assert_allclose(braking / plain, [2, 1], rtol=1e-4)


def test_what_is_spent():
    left = np.array([-1.0, 0.0, 1e-9, 0.5, 0.99995, 1.0])
    np.testing.assert_array_equal(is_spent(left, 1.0), [True, True, True, True, False, False])
    np.testing.assert_array_equal(is_spent(left, 0.0), [True, True, False, False, False, False])
    np.testing.assert_array_equal(is_spent(np.array([[2.0, 0.0], [2.0, 1.0]]), 1.0, several=True), [True, False])


def test_cards_options_and_results_say_it(tmp_path, capsys):
    path, results = tmp_path / "mine", tmp_path / "results"
    assert main(["export", ANT, "--out", str(path), "--brake", "1.5"]) == 0
    policy = load_policy(path)
    assert (policy.agent.brake, policy.card["brake"]) == (1.5, 1.5)
    without = load_policy(path, brake=1)
    assert without.agent.brake == 1
    assert "brake" not in without.card
    assert "brake" not in released("safe-dark-room").meta
    small = ["--tasks", "1", "--episodes", "1", "--budgets", "2", "2", "--env-args", "max_steps=3"]
    assert main(["evaluate", str(path), *small, "--out", str(results)]) == 0
    assert "brake 1.5, context kept" in capsys.readouterr().out
    assert load_results(results).meta["brake"] == 1.5


@pytest.mark.parametrize("brake", [0.5, float("nan"), "hard"])
def test_what_is_no_brake(brake, tmp_path):
    with pytest.raises(UserError, match="brake must be a"):
        load_policy(ANT, brake=brake)
    policy = load_policy(ANT)
    save_policy(tmp_path / "bad.safetensors", policy.agent, {**policy.card, "brake": brake})
    with pytest.raises(UserError, match=r"bad\.json: 'brake' must be a"):
        load_policy(tmp_path / "bad")


def test_who_cannot_brake(capsys):
    with pytest.raises(UserError, match=r"only a transformer's real-valued actions can brake: leave out brake 2"):
        with_options(ROOM, RandomAgent(action=ROOM.spec.action), brake=2)
    with pytest.raises(UserError, match=r"only a transformer's real-valued actions can brake: leave out brake 2"):
        load_policy("safe-dark-room", brake=2)
    with pytest.raises(UserError, match="a policy whose actions have levels cannot brake: leave out brake 2"):
        load_policy("safe-dark-point", brake=2)
    assert main(["evaluate", "--agent", "random", "--brake", "2"]) == 2
    assert "the random agent has no brake: leave out --brake" in capsys.readouterr().err

"""A reserve: once an episode has cost something, the network is told that less is left. The budget itself stays."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, random_weights

from safeicrl import load_policy
from safeicrl.agents.api import with_options
from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.agents.reserved import Reserved, told_in_rows
from safeicrl.budgets import Reserve, reserve_words
from safeicrl.cli import main
from safeicrl.envs.api import replace
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import guard_fit
from safeicrl.optimisers.guard_fit import GuardFitConfig
from safeicrl.policies import running
from safeicrl.policies.cards import save_policy
from safeicrl.policies.contenders import released
from safeicrl.policies.policy import Policy
from safeicrl.tokens import Token

RESERVE, BUDGET = 0.75, 3.0
STEPS, COSTLY = 14, (3, 4, 9)  # steps of a trial with episodes of five steps, and those after which a cost is told


read, act = eqx.filter_jit(InContextAgent.read), eqx.filter_jit(InContextAgent.act)


def agent(reserve: Reserve, settles: bool = False, **net) -> InContextAgent:
    config = NetConfig(width=8, layers=2, heads=2, context=20, dtype="float32", **net)
    return InContextAgent(
        net=random_weights(PolicyNet, config, ROOM.spec, scale=2.0),
        reserve=reserve,
        risk=0.3 if config.guard else None,
        trained_episodes=3,
        settles=settles,
    )


def tokens() -> list[Token]:
    """A trial of one row with costs of one unit."""
    rng, budget = np.random.default_rng(0), jnp.full(1, BUDGET)
    found = [running.first_tokens(ROOM, jnp.asarray(rng.integers(0, 3, (1, 2))), budget)]
    for step in range(1, STEPS):
        seen, action = (jnp.asarray(rng.integers(0, 3, shape)) for shape in ((1, 2), 1))
        cost, done = jnp.full(1, float(step in COSTLY)), jnp.full(1, step % 5 == 0)
        found.append(running.next_tokens(found[-1], seen, action, jnp.zeros(1), cost, done, budget))
    return found


def features(who: InContextAgent, given: list[Token]) -> np.ndarray:
    memory, found = who.extend(who.init(None, 1), 20), []
    for token in given:
        memory, seen, _ = read(who, memory, token)
        found.append(np.asarray(seen[0]))
    return np.stack(found)


@pytest.mark.parametrize("settles", [False, True])
def test_it_is_kept_once_an_episode_has_cost_something(settles):
    told, paid = [], 0.0
    for token in tokens():
        paid = 0.0 if token.start[0] else paid + float(token.cost[0])
        told.append(replace(token, ctg=token.ctg - RESERVE * (paid > 0)))
    assert sum(bool(a.ctg[0] != b.ctg[0]) for a, b in zip(tokens(), told, strict=True)) == 3
    ours = features(agent(RESERVE, settles), tokens())
    np.testing.assert_allclose(ours, features(agent(0.0, settles), told), atol=1e-6)
    rows = jax.tree.map(lambda *x: jnp.stack(x, 1), *tokens())
    np.testing.assert_allclose(told_in_rows(rows, RESERVE)[0], [token.ctg[0] for token in told])
    without = features(agent(0.0, settles), tokens())
    np.testing.assert_allclose(ours[:3], without[:3], atol=1e-6)
    assert np.abs(ours[3:] - without[3:]).max() > 0.01


def test_of_small_budgets_it_is_kept_from_the_first_step_on():
    who, given = agent((0.5, BUDGET + 0.5)), tokens()
    told = [replace(token, ctg=token.ctg - 0.5) for token in given]
    np.testing.assert_allclose(features(who, given), features(agent(0.0), told), atol=1e-6)
    rows = jax.tree.map(lambda *x: jnp.stack(x, 1), *given)
    np.testing.assert_allclose(told_in_rows(rows, who.reserve)[0], [token.ctg[0] for token in told])
    np.testing.assert_array_equal(features(agent((0.5, BUDGET)), given), features(agent(0.0), given))


def test_other_budgets_may_have_a_reserve_of_their_own():
    """Once an episode has cost something, as if it were the only one; small budgets do not keep it."""
    given, once = tokens(), agent(RESERVE)
    np.testing.assert_array_equal(features(agent((0.5, BUDGET, RESERVE)), given), features(once, given))
    below = BUDGET + 0.5
    small, all_three = agent((0.5, below)), agent((0.5, below, RESERVE))
    np.testing.assert_array_equal(features(all_three, given), features(small, given))
    assert np.abs(features(small, given) - features(once, given)).max() > 0.01


def test_the_guard_judges_by_what_is_really_left():
    """One unit is left of two, which no single step can break; the network is told that nothing is left."""
    ours, row = agent(1.0, guard=1), jnp.arange(2)[None]
    first = running.first_tokens(ROOM, row, jnp.full(1, 2.0))
    memory, *_ = act(ours, ours.extend(ours.init(None, 1), 20), first, jax.random.key(0))
    assert isinstance(memory, Reserved)
    no = jnp.zeros(1, bool)
    token = running.next_tokens(first, row, jnp.zeros(1, int), jnp.zeros(1), jnp.ones(1), no, jnp.full(1, 2.0))
    _, _, watched = read(ours, memory, token)
    judge = lambda left: ours.net.guard.judge(watched, jnp.full(1, left), token.time, 0.3).risk  # noqa: E731
    assert (np.asarray(judge(0.0)) > 0).all()  # what the network is told of
    assert (np.asarray(judge(1.0)) == 0).all()
    said = act(ours, memory, token, jax.random.key(0))[2]
    assert said["risk"][0] == 0
    assert not said["stepped_in"][0]


def test_a_guard_is_fitted_to_what_the_network_is_told_of():
    who = guard_fit.with_new_guard(agent(RESERVE), GuardFitConfig(depth=1), jax.random.key(0))
    played, _ = guard_fit._play(ROOM, who, 2, jax.random.key(1))
    given = [jax.tree.map(lambda x: x[:1, step], played.token) for step in range(played.cost.shape[1])]  # noqa: B023
    step_by_step = features(who, given)
    np.testing.assert_allclose(played.features[0], step_by_step, atol=1e-5)
    assert np.abs(features(dataclasses.replace(who, reserve=0.0), given) - step_by_step).max() > 0.01


def test_a_trial_with_a_reserve_goes_on_after_a_restart(tmp_path):
    def acted(policy: Policy, steps: range) -> list[int]:
        rng = np.random.default_rng(0)
        given = [(rng.integers(0, 3, 2), 0.0, float(step in COSTLY), False, step % 5 == 0) for step in range(STEPS)]
        return [policy.act(*(given[step] if step else given[step][:1])) for step in steps]

    card = {"kind": "net", "env": env_to_plain(ROOM)}
    policies = [Policy(env=ROOM, agent=agent(reserve), card=card) for reserve in (RESERVE, RESERVE, 0.0)]
    policies[0].start(budget=BUDGET, seed=3)
    acted(policies[0], range(4))  # a cost has been told
    policies[0].save_context(tmp_path / "trial")
    policies[1].load_context(tmp_path / "trial")
    with pytest.raises(UserError, match=r"saved by another policy, .* or with another `settle`, `.*` or `reserve`"):
        policies[2].load_context(tmp_path / "trial")
    assert acted(policies[0], range(4, STEPS)) == acted(policies[1], range(4, STEPS))


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
    small = ["--tasks", "1", "--episodes", "2", "--settle-after", "1", "--budgets", "2", "2"]
    assert main(["evaluate", str(path), *small, "--out", str(results)]) == 0
    assert "reserve 0.5, settled after episode 1, context kept" in capsys.readouterr().out
    meta = load_results(results).meta
    assert (meta["reserve"], meta["settle_after"], meta["settles"]) == (0.5, 1, True)
    assert main(["export", str(path), "--out", str(tmp_path / "other"), "--reserve", "1", "3"]) == 0
    other = load_policy(tmp_path / "other")
    assert (other.agent.reserve, other.card["reserve"]) == ((1.0, 3.0), [1.0, 3.0])
    assert released("safe-dark-room", reserve=(2, 4)).meta["reserve"] == [2.0, 4.0]
    assert reserve_words([2.0, 4.0]) == "reserve 2 of budgets below 4"
    assert reserve_words((2.0, 4.0, 0.5)) == "reserve 2 of budgets below 4, 0.5 of others"
    assert released("safe-dark-room", reserve=(2, 4, 0)).meta["reserve"] == [2.0, 4.0]
    assert released("safe-dark-room", reserve=(0, 4, 0.5)).agent.reserve == (0.0, 4.0, 0.5)
    assert released("safe-dark-room", reserve=[2, 4, 0.5]).agent.reserve == (2.0, 4.0, 0.5)


@pytest.mark.parametrize("reserve", [-1, float("nan"), "much", [], [1, -3], [1, 2, -1], [1, 2, 3, 4]])
def test_what_is_no_reserve(reserve, tmp_path):
    rules = {
        (1, -3): "'s second number, .*, must be a finite number > 0",
        (1, 2, -1): "'s third number, .*, must be a finite number ≥ 0",
    }
    rule = rules.get(tuple(reserve) if isinstance(reserve, list) else reserve, " must be a")
    with pytest.raises(UserError, match=f"reserve{rule}"):
        load_policy("safe-dark-room", reserve=reserve)
    policy = load_policy("safe-dark-room")
    save_policy(tmp_path / "bad.safetensors", policy.agent, {**policy.card, "reserve": reserve})
    with pytest.raises(UserError, match=rf"bad\.json: 'reserve'{rule}"):
        load_policy(tmp_path / "bad")


def test_who_keeps_none(capsys):
    with pytest.raises(UserError, match="RandomAgent keeps no reserve: leave out reserve 1"):
        with_options(ROOM, RandomAgent(action=ROOM.spec.action), reserve=1)
    assert main(["evaluate", "safe-dark-room", "--reserve"]) == 2
    assert "reserve must be a number, or the amount" in capsys.readouterr().err
    assert main(["evaluate", "--agent", "random", "--reserve", "1"]) == 2
    assert "the random agent keeps no reserve: leave out --reserve" in capsys.readouterr().err

"""SCARED: both optimisers on probes whose constrained optimum is known; losses by hand; resume; settings."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import QUEUE, ROOM, ROWS, STEPS, random_rows, random_weights
from probe import OPTIMISED, Casino, Throw

from safeicrl.agents.api import with_options
from safeicrl.algos.api import METRICS
from safeicrl.algos.scared import Scared, ScaredConfig, ScaredState, summary
from safeicrl.envs.api import replace
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.nets.heads import LOG_STD
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import ddpg
from safeicrl.optimisers import replay as buffer
from safeicrl.optimisers.ddpg import DDPG, DDPGConfig, Heads, Nets, Seen, paper_config
from safeicrl.optimisers.ppo import PPO, ActorCritic, Batch, PPOConfig, PPOState
from safeicrl.penalty import PenaltyConfig
from safeicrl.policies import checkpoint
from safeicrl.trial import episode_sums, sample_queue

OPTIMISERS = ("ppo", "ddpg")
TINY = NetConfig(width=16, layers=1, heads=2, context=STEPS, dtype="float32")
PENALTY = PenaltyConfig(step=0.2, tolerance=0.02)
# What the actor pays λ for: the excess, all cost of episodes over budget, all cost (Eq. 5, one λ per episode).
CHARGES = {
    "excess": PenaltyConfig(),
    "paper": PenaltyConfig(form="paper"),
    "all": PenaltyConfig(dual="naive"),
}


def config(optimiser: str, **changes: Any) -> ScaredConfig:
    """Settings for tiny worlds: a minute of a laptop's time is plenty for them."""
    quick = ScaredConfig(
        iterations=100 if optimiser == "ppo" else 60,
        rows=128 if optimiser == "ppo" else 32,
        queue=1,
        segments=1,
        budget_power=1.0,
        net=TINY,
        penalty=PENALTY,
        optimiser=optimiser,  # type: ignore[arg-type]
        ppo=PPOConfig(minibatch=32, learning_rate=(5e-3, 5e-4), entropy=(0.02, 0.0), discount=0.99),
        ddpg=DDPGConfig(learning_rate=2e-3, updates=16, capacity=512, target_rate=0.02, trust=0.3, entropy=0.001),
    )
    return dataclasses.replace(quick, **changes)


class Owing(Scared):
    """SCARED with `owed` taken off every budget, so that one compiled program also plays overspent episodes."""

    owed: jax.Array | float = 0.0

    def draw(self, key: jax.Array) -> tuple[Any, jax.Array]:
        tasks, budgets = super().draw(key)
        return tasks, budgets - self.owed


@dataclasses.dataclass(frozen=True)
class Fit:
    """A finished training run."""

    algorithm: Scared
    update: Callable[[ScaredState, float], tuple[ScaredState, dict[str, jax.Array]]]  # the float is what is owed
    first: ScaredState
    state: ScaredState
    history: dict[str, np.ndarray]  # [iteration, ...]


@functools.cache
def fit(env: Any, optimiser: str, batch: int = 16, hidden: int = 32, **changes: Any) -> Fit:
    """`hidden` is the width of the critics of ddpg."""
    settings = config(optimiser, **changes)
    algorithm = Owing(env, dataclasses.replace(settings, ddpg=dataclasses.replace(settings.ddpg, batch=batch)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddpg, "HIDDEN", hidden)
        state = first = eqx.filter_jit(algorithm.init)(jax.random.key(0))

    @functools.partial(eqx.filter_jit, compiler_options=OPTIMISED)
    def update(state: ScaredState, owed: jax.Array) -> tuple[ScaredState, dict[str, jax.Array]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(algorithm, "owed", owed)
            return algorithm.update(state)

    history = []
    for _ in range(algorithm.config.iterations):
        state, metrics = update(state, np.float32(0))
        history.append(metrics)
    history = jax.tree.map(lambda *x: np.array(x), *history)
    return Fit(algorithm, update, first, state, history)


def fitted(optimiser: str) -> Fit:
    """A run for what is no matter of the world: real-valued actions with ppo, arms with ddpg.

    That ppo learns which arm to pull, exactly as often as two budgets allow, is in tests/test_costs.py.
    """
    return fit(Throw(), "ppo") if optimiser == "ppo" else fit(Casino(), "ddpg", iterations=45)


# -- probes


def test_the_good_arm_is_found_in_context_and_pulled_exactly_as_often_as_the_budget_allows():
    """By ddpg; by ppo, which also keeps two budgets at once, in tests/test_costs.py."""
    env, run = Casino(), fitted("ddpg")
    found = evaluate(env, run.algorithm.agent(run.state), tasks=500, segments=1)
    assert found.over.mean() < 0.02
    budget = np.floor(found.budgets)
    last = [found.returns[budget == b, -1].mean() for b in range(5)]
    np.testing.assert_allclose(last, [env.best(b) for b in range(5)], atol=0.15)
    # in the first episode the wrong arm is tried half the time
    assert found.returns[budget > 0, -1].mean() > found.returns[budget > 0, 0].mean() + 0.25


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_real_valued_actions_and_costs(optimiser):
    """The side of the target is read off the first throw; on the right side the budget is what limits the throw."""
    env = Throw()
    # a slope in the action needs more than a table of arms
    run = fit(env, "ddpg", batch=32, hidden=64) if optimiser == "ddpg" else fitted("ppo")
    agent, _ = with_options(env, run.algorithm.agent(run.state), greedy=True)
    found = evaluate(env, agent, tasks=500, segments=1)
    excess = np.maximum(found.costs - found.budgets[:, None], 0)
    assert excess.mean() < 0.03
    best = 1 - np.maximum(0.5 - found.budgets, 0) / 2  # half the targets are on the right
    assert found.returns[:, -1].mean() > best.mean() - 0.15
    assert found.returns[:, 0].mean() < 0.6
    tight = found.budgets < 0.25
    assert found.returns[~tight, -1].mean() > found.returns[tight, -1].mean() + 0.03


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_run_reports_itself(optimiser):
    run = fitted(optimiser)
    history, settings, spec = run.history, run.algorithm.config, run.algorithm.env.spec
    assert set(METRICS) | {"actor_loss", "reward_critic_loss", "cost_critic_loss", "entropy"} <= set(history)
    assert all(np.isfinite(x).all() for x in history.values())
    assert (history["env_steps"] == settings.rows * spec.trial_steps).all()
    assert history["over_budget_by_bin"].shape == (settings.iterations, 5)
    if optimiser == "ppo":  # throws around the middle, at targets on both sides
        spread = LOG_STD[0] + (LOG_STD[1] - LOG_STD[0]) / (1 + np.exp(-1))
        throws = np.tanh(np.exp(spread) * np.random.default_rng(0).normal(size=10000))
        entropy, cost = spread + 0.5 * np.log(2 * np.pi * np.e), np.maximum(throws, 0).mean()
        reward, budget, near = 1 - np.abs(throws - 0.5).mean(), 0.5, 0.05
    else:  # uniform: two of three arms cost 1, and a mean budget of 2 of 0 … 4
        entropy, cost, reward, budget, near = np.log(3), 4 * 2 / 3, 4 * (0.25 + 1 + 0) / 3, 2.0, 0.3
    assert history["entropy"][0] == pytest.approx(entropy, abs=0.05)
    assert history["cost"][0] == pytest.approx(cost, abs=near)
    assert history["return"][0] == pytest.approx(reward, abs=near)
    assert history["budget"].mean() == pytest.approx(budget, rel=0.05)


def test_the_multiplier_moves_with_the_violations_of_the_trials_just_played():
    """Whichever optimiser follows: λ moves before it."""
    run = fitted("ddpg")
    multiplier = run.history["lambda"]
    # at first the smallest budgets are broken by far: the bound on one step
    assert multiplier[0] == pytest.approx(PENALTY.step * PENALTY.bound)
    moves = np.diff(multiplier)
    assert (np.abs(moves) <= PENALTY.step * PENALTY.bound + 1e-6).all()
    kept = run.history["over_budget"][1:] == 0
    np.testing.assert_allclose(moves[kept], -PENALTY.step * PENALTY.tolerance, atol=1e-5)
    broken = run.history["over_budget_by_bin"][1:].max(-1) > 0.2
    assert broken.any()
    assert (moves[broken] > 0).all()
    assert run.state.multiplier == multiplier[-1]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_saved_state_goes_on_bit_for_bit(optimiser, tmp_path):
    run = fitted(optimiser)
    path = tmp_path / "state.safetensors"
    checkpoint.save(path, run.state, kind="checkpoint", meta={})
    restored, _ = checkpoint.load(path, run.state, kind="checkpoint")
    ends = []
    for state in (run.state, restored):
        for _ in range(2):
            state, metrics = run.update(state, np.float32(0))
        ends.append((eqx.filter(state, eqx.is_array), metrics))
    comparable = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, ends
    )
    jax.tree.map(np.testing.assert_array_equal, *comparable)
    assert int(ends[0][0].iteration) == run.algorithm.config.iterations + 2


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_seeds_train_side_by_side(optimiser):
    """Traced only: `train` maps one update over the seeds' stacked states."""
    algorithm = Scared(Casino(), config(optimiser, penalty=PenaltyConfig(form="paper", dual="naive")))

    def two_seeds():
        states = eqx.filter_vmap(algorithm.init)(jax.random.split(jax.random.key(0), 2))
        return states, eqx.filter_vmap(algorithm.update)(states)

    before, (after, metrics) = eqx.filter_eval_shape(two_seeds)
    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree) if hasattr(x, "shape")]  # noqa: E731
    assert shapes(before) == shapes(after)
    assert before.multiplier.shape == (2, 3)  # one for each episode
    assert metrics["lambda"].shape == (2,)


# -- what the learner makes of rows, by hand


@pytest.fixture(scope="module")
def rows():
    """Random trials in packed rows, the last of which are cut; the agent was uniform over five actions."""
    return replace(random_rows(), extras={"log_prob": jnp.full((ROWS, STEPS), -jnp.log(5.0))})


def tasks(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, QUEUE, ROOM.spec.task_features)), jnp.float32)


def excess_by_hand(trials) -> np.ndarray:
    before = -np.asarray(trials.token.ctg)
    return np.maximum(before + np.asarray(trials.cost), 0) - np.maximum(before, 0)


def whole_episodes(trials) -> np.ndarray:
    """[row, time] number of the episode each step belongs to, counted along the row."""
    return np.cumsum(np.asarray(trials.token.start), axis=1)


def over_by_hand(trials) -> np.ndarray:
    """1 at every step of an episode whose cost, as far as it was played, is over its budget."""
    over, number = np.zeros((ROWS, STEPS)), whole_episodes(trials)
    for row in range(ROWS):
        for episode in np.unique(number[row]):
            here = number[row] == episode
            over[row, here] = np.asarray(trials.cost)[row, here].sum() > np.asarray(trials.token.ctg)[row, here][0]
    return over


def learnable_by_hand(trials) -> np.ndarray:
    mask = np.asarray(trials.valid).copy()
    mask[:, -1] &= np.asarray(trials.trial_done)[:, -1]
    return mask


def test_all_steps_but_a_cut_rows_last_are_learnt_from(rows):
    expected = learnable_by_hand(rows)
    assert (np.asarray(rows.valid) & ~expected).any()  # some rows are cut
    np.testing.assert_array_equal(rows.learnable, expected)
    whole = replace(rows, trial_done=rows.trial_done.at[:, -1].set(True))
    np.testing.assert_array_equal(whole.learnable, rows.valid)


def test_the_summary_counts_finished_episodes_only(rows):
    found = jax.tree.map(float, jax.jit(lambda t: summary(episode_sums(t, ROOM.episodes, QUEUE)))(rows))
    number, ended = whole_episodes(rows), np.asarray(rows.done & rows.valid)
    returns, costs, budgets = [], [], []
    for row, t in np.argwhere(ended):
        here = number[row] == number[row, t]
        returns.append(np.asarray(rows.reward)[row, here].sum())
        costs.append(np.asarray(rows.cost)[row, here].sum())
        budgets.append(np.asarray(rows.token.ctg)[row, here][0])
    assert found["return"] == pytest.approx(np.mean(returns))
    assert found["cost"] == pytest.approx(np.mean(costs))
    assert found["budget"] == pytest.approx(np.mean(budgets))
    assert found["over_budget"] == pytest.approx(np.mean(np.array(costs) > np.array(budgets)))


def corrections_by_hand(signal, discount, here, ahead, decay):
    """x_t = e_t + γ_t d_{t+1} x_{t+1}, where e_t = r_t + γ_t ahead_{t+1} − here_t; all [row, time], backwards.

    With values for both and d the trace these are generalised advantages; with Q of the action taken, the
    expected Q and a truncated ratio, Retrace. What follows the last step of a cut row is unknown: x is 0 there.
    """
    found = np.zeros((ROWS, STEPS))
    for row in range(ROWS):
        later, last = 0.0, STEPS - 1
        for t in reversed(range(STEPS)):
            if t == last and discount[row, t] > 0:
                continue
            error = signal[row, t] - here[row, t]
            if t < last:
                error += discount[row, t] * (ahead[row, t + 1] + decay[row, t + 1] * later)
            found[row, t] = later = error
    return found


def ppo_loss_by_hand(settings, charge, trials, multiplier, scale, entropy_weight, log_prob, entropy, values):
    """All of it in float64, from the network's outputs on the rows; values are in units of `scale`."""
    mask, trial_over = learnable_by_hand(trials), np.asarray(trials.trial_done)
    if charge == "excess":
        cost, cost_discount = excess_by_hand(trials), settings.cost_discount * (1.0 - trial_over)
    else:
        cost, cost_discount = np.asarray(trials.cost), 1.0 - np.asarray(trials.done)
        multiplier = multiplier * over_by_hand(trials) if charge == "paper" else multiplier
    signals = ((np.asarray(trials.reward), settings.discount * (1.0 - trial_over)), (cost, cost_discount))
    trace = np.full((ROWS, STEPS), settings.trace)
    advantages = [
        corrections_by_hand(signal, discount, value * unit, value * unit, trace)
        for (signal, discount), value, unit in zip(signals, values, scale, strict=True)
    ]
    combined = advantages[0] - multiplier * advantages[1]
    combined = (combined - combined[mask].mean()) / combined[mask].std()
    ratio = np.exp(log_prob - np.asarray(trials.extras["log_prob"]))
    clipped = np.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    actor = -np.minimum(ratio * combined, clipped * combined)[mask].mean()
    critics = [((a / unit)[mask] ** 2).mean() for a, unit in zip(advantages, scale, strict=True)]
    total = actor + settings.value_weight * sum(critics) - entropy_weight * entropy[mask].mean()
    q = [(value * unit + a)[mask].mean() for a, value, unit in zip(advantages, values, scale, strict=True)]
    return total, actor, critics, (np.abs(ratio - 1) > settings.clip)[mask].mean(), q


@pytest.mark.parametrize("charge", CHARGES)
def test_the_ppo_loss_by_hand(rows, charge):
    net = random_weights(ActorCritic, TINY, ROOM.spec, privileged=True)
    settings = PPOConfig(minibatch=8)
    ppo = PPO(ROOM, TINY, CHARGES[charge], settings, iterations=1, rows=ROWS)
    multiplier = np.array([0.4, 1.3])[np.asarray(rows.token.episode)]  # one for each episode
    scale, weight = np.array([0.5, 2.0]), 0.1

    @eqx.filter_jit
    def outputs(net, tasks):
        batch = Batch(trials=rows, task=tasks, multiplier=jnp.asarray(multiplier, jnp.float32))
        loss, (_, metrics) = ppo.loss(net, batch, jnp.asarray(scale, jnp.float32), jnp.float32(weight))
        features = net.policy.trunk.forward(rows.token, rows.trial)
        policy = net.policy.distribution(features)
        values = [critic(features, tasks, rows.trial) for critic in (net.reward_critic, net.cost_critic)]
        return loss, metrics, policy.log_prob(rows.action), policy.entropy(), values

    loss, metrics, *seen = outputs(net, tasks(0))
    log_prob, entropy, values = jax.tree.map(lambda x: np.asarray(x, np.float64), seen)
    total, actor, critics, clipped, q = ppo_loss_by_hand(
        settings, charge, rows, multiplier, scale, weight, log_prob, entropy, values
    )
    assert loss == pytest.approx(total, rel=1e-4)
    assert metrics["actor_loss"] == pytest.approx(actor, rel=1e-3)
    assert metrics["reward_critic_loss"] == pytest.approx(critics[0], rel=1e-4)
    assert metrics["cost_critic_loss"] == pytest.approx(critics[1], rel=1e-4)
    assert metrics["clipped"] == pytest.approx(clipped)
    assert [metrics["q"], metrics["q_cost"]] == pytest.approx(q, rel=1e-3)
    assert 0.1 < clipped < 1

    # the hidden tasks reach the critics and nothing that acts
    _, other, *others = outputs(net, tasks(1))
    np.testing.assert_array_equal(others[0], seen[0])
    assert not np.allclose(others[2], seen[2])
    for name in ("entropy", "kl", "clipped"):
        assert other[name] == metrics[name]

    # at a ratio of 1 the actor's loss is minus the mean of a standardised advantage, nothing
    mute = eqx.tree_at(lambda n: n.policy.actor, net, jax.tree.map(jnp.zeros_like, net.policy.actor))
    _, metrics, *_ = outputs(mute, tasks(0))
    assert metrics["actor_loss"] == pytest.approx(0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(np.log(5), rel=1e-5)
    assert metrics["clipped"] == 0


def test_the_released_policy_may_be_an_average_of_the_last_ones():
    averaged, last = (
        PPO(ROOM, TINY, PenaltyConfig(), PPOConfig(average=x, minibatch=8), iterations=10, rows=ROWS)
        for x in (0.9, 0.0)
    )
    first, second = (
        PPOState(net=net, optimiser=None, scale=np.ones(2), average=net.policy)
        for net in (
            random_weights(functools.partial(ActorCritic, TINY, ROOM.spec, True), scale=x) for x in (1.0, 2.0)
        )
    )
    weight = lambda net: net.actor.first.weight  # noqa: E731
    for iteration, keep in ((0, 0.1), (1000, 0.9)):
        found = averaged._average(first.average, second.net.policy, jnp.int32(iteration))
        expected = keep * weight(first.average) + (1 - keep) * weight(second.net.policy)
        np.testing.assert_allclose(weight(found), expected, rtol=1e-5)
    state = replace(first, average=second.average)
    assert averaged.agent(state).net is second.average
    assert averaged.explorer(state).net is first.net.policy
    # another run begins with the average as its own, or drops it
    assert averaged.start_from(second, state).average is second.average
    assert last.start_from(second, state).average is None
    with pytest.raises(UserError, match=r"ppo\.average must be below 1, got 1"):
        PPOConfig(average=1.0)


def test_gradients_are_clipped_by_their_common_norm():
    """(3, 4) has norm 5. Clipped to 5e-5, Adam's first step with ε = 1e-5 is g / (|g| + ε) = 3/4 and 4/5."""
    settings = PPOConfig(learning_rate=(0.1, 0.1), warmup=0, max_grad=5e-5, minibatch=8)
    optimiser = PPO(ROOM, TINY, PenaltyConfig(), settings, iterations=1, rows=ROWS).optimiser
    grads = {"a": np.float32([[3.0]]), "b": np.float32([4.0, 0.0])}
    updates, _ = jax.jit(lambda g: optimiser.update(g, optimiser.init(g)))(grads)
    np.testing.assert_allclose(updates["a"], [[-0.1 * 3 / 4]], rtol=1e-4)
    np.testing.assert_allclose(updates["b"], [-0.1 * 4 / 5, 0], rtol=1e-4)


@pytest.mark.parametrize("charge", ["excess", "paper"])
def test_retrace_targets_by_hand(rows, charge):
    """Q̂ = Q + Σ_s (Π γ c) (r + γ E_π Q' − Q), c = trace · min(1, π/μ): stops at boundaries, cut rows wait."""
    settings = DDPGConfig(discount=0.95, cost_discount=0.9, trace=0.8, ensemble=3, capacity=ROWS)
    net = random_weights(Nets, TINY, ROOM.spec, settings)
    slow = Heads(actor=net.policy.actor, reward=net.reward, cost=net.cost)
    hidden, _ = sample_queue(ROOM, "train", (1.0, 2.0), (ROWS, QUEUE), jax.random.key(5))
    ddpg = DDPG(ROOM, TINY, CHARGES[charge], settings, iterations=1, trials=rows, tasks=hidden)
    scale = np.array([0.5, 2.0])

    @jax.jit
    def outputs():
        batch, seen = ddpg.row(rows, hidden), Seen(ddpg.row(rows, hidden).task, rows.trial)
        features = net.policy.trunk.forward(rows.token, rows.trial)
        prior = net.policy.distribution(features, slow.actor)
        found = ddpg.targets(slow, prior, features, batch, jnp.asarray(scale, jnp.float32), jax.random.key(0))
        return found, jax.nn.softmax(prior.logits), [c._read(features, seen) for c in (slow.reward, slow.cost)]

    found, policy, tables = jax.tree.map(np.asarray, outputs())  # policy: [row, time, action]
    trial_over, action = np.asarray(rows.trial_done), np.asarray(rows.action)[..., None]
    signals = [(np.asarray(rows.reward), 0.95 * (1.0 - trial_over))]
    if charge == "excess":
        signals += [(excess_by_hand(rows), 0.9 * (1.0 - trial_over))]
    else:
        signals += [(np.asarray(rows.cost), 1.0 - np.asarray(rows.done))]
    ratio = np.minimum(np.take_along_axis(policy, action, -1)[..., 0] * 5, 1)
    for index, (signal, discount) in enumerate(signals):
        taken = np.mean([np.take_along_axis(q, action, -1)[..., 0] for q in tables[index]], 0)
        value = np.mean([(policy * q).sum(-1) for q in tables[index]], 0)
        expected = taken + corrections_by_hand(signal / scale[index], discount, taken, value, 0.8 * ratio)
        mask = learnable_by_hand(rows)
        np.testing.assert_allclose(found[index][mask], expected[mask], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_values_stay_when_their_unit_moves(rows, name):
    """Without a learning rate an update moves the scale alone; what the critics say in raw units stays."""
    rows = replace(rows, extras={"log_prob": jnp.full(rows.reward.shape, -np.log(5.0))})
    hidden, _ = sample_queue(ROOM, "train", (1.0, 2.0), (ROWS, QUEUE), jax.random.key(5))
    seen = Seen(jax.vmap(jax.vmap(ROOM.task_features))(hidden), rows.trial)
    if name == "ppo":
        still = PPOConfig(learning_rate=(0.0, 0.0), minibatch=ROWS, epochs=3)
        optimiser = PPO(ROOM, TINY, PenaltyConfig(), still, iterations=1, rows=ROWS)
        net = random_weights(ActorCritic, TINY, ROOM.spec, privileged=True)
        values = lambda n, x: [c(x, seen.task, rows.trial) for c in (n.reward_critic, n.cost_critic)]  # noqa: E731
    else:
        still = DDPGConfig(learning_rate=1e-12, updates=3, batch=ROWS, capacity=ROWS)
        optimiser = DDPG(ROOM, TINY, PenaltyConfig(), still, iterations=1, trials=rows, tasks=hidden)
        net = random_weights(Nets, TINY, ROOM.spec, still)
        values = lambda n, x: [c.taken(x, seen, rows.action) for c in (n.reward, n.cost)]  # noqa: E731

    @eqx.filter_jit
    def outputs(net):
        before = eqx.tree_at(
            lambda s: (s.net, s.scale), optimiser.init(jax.random.key(0)), (net, jnp.array([9.0, 7.0]))
        )
        weights = jnp.zeros(ROOM.episodes)
        after, _ = optimiser.update(before, rows, hidden, weights, jnp.int32(0), jax.random.key(1))
        features = net.policy.trunk.forward(rows.token, rows.trial)
        raw = [jnp.stack(values(s.net, features)) for s in (before, after)]
        return raw, before.scale, after.scale

    (old, new), *scales = jax.tree.map(np.asarray, outputs(net))
    assert (np.abs(scales[1] / scales[0] - 1) > 1e-3).all()
    assert np.abs(old).mean() > 0.1
    shape = (2,) + (1,) * (old.ndim - 1)
    np.testing.assert_allclose(new * scales[1].reshape(shape), old * scales[0].reshape(shape), rtol=1e-3, atol=1e-3)


def test_exploration_fades_over_the_first_half():
    run = fitted("ddpg")
    epsilon = lambda progress: float(  # noqa: E731
        run.algorithm.optimiser.explorer(replace(run.state.optimiser, progress=jnp.float32(progress))).epsilon
    )
    assert [epsilon(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 0.51, 0.02, 0.02])
    assert run.algorithm.agent(run.state).epsilon is None
    assert float(run.state.optimiser.progress) == 1


def test_budgets_are_drawn_by_their_power():
    """b = 5 u^1.5 is below x with probability (x/5)^(1/1.5)."""
    algorithm = Scared(Casino(), config("ppo", rows=4096, budget_power=1.5))
    _, budgets = jax.jit(algorithm.draw)(jax.random.key(0))
    assert budgets.shape == (4096, 1, 3)
    for x in (0.5, 1.0, 2.5, 4.0):
        expected = (x / 5) ** (1 / 1.5)
        assert np.mean(budgets[:, 0, 0] < x) == pytest.approx(expected, abs=5 * np.sqrt(0.25 / 4096))


def test_some_episodes_begin_overspent():
    """As many as asked for, over by up to half of the largest budget; all others of a trial share its own."""
    settings = config("ppo", rows=1024, episodes=4, spent=0.25)
    algorithm = Scared(Casino(), settings)
    _, budgets = jax.jit(algorithm.draw)(jax.random.key(0))
    budgets = np.asarray(budgets[:, 0])
    assert budgets.shape == (1024, 4)
    spent = budgets < 0
    assert spent.mean() == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / 4096))
    assert budgets[spent].min() > -2.5
    assert budgets[spent].mean() == pytest.approx(-1.25, abs=0.15)
    own = np.where(spent, np.nan, budgets)[~spent.all(-1)]
    np.testing.assert_array_equal(np.nanmin(own, -1), np.nanmax(own, -1))
    with pytest.raises(UserError, match=r"spent must be at most 1, got 1\.5"):
        config("ppo", spent=1.5)


def test_overspent_episodes_are_learned_from_but_neither_reported_nor_judged():
    """All of them overspent: none counts in the log, λ gets no signal, and yet costly throws are unlearned."""
    run, costs = fitted("ppo"), []
    state = replace(run.first, multiplier=jnp.float32(1.0))
    for _ in range(30):
        state, metrics = run.update(state, np.float32(run.algorithm.env.spec.train_budget[1]))
        costs.append(float(metrics["cost_spent"]))
        assert metrics["cost"] == metrics["over_budget"] == 0
        assert not np.asarray(metrics["over_budget_by_bin"]).any()
    assert metrics["lambda"] == 1  # no finished episode counts, so nothing moves it, not even the tolerance
    assert costs[-1] < 0.5 * costs[0]


def test_a_budget_of_zero_is_not_overspent():
    """Where costs are real numbers too: half of the throws are over it, and are reported so."""
    algorithm, first = fitted("ppo").algorithm, fitted("ppo").first
    hidden, budgets = jax.jit(algorithm.draw)(jax.random.key(1))
    trials = algorithm.play(algorithm.agent(first), hidden, jnp.zeros_like(budgets), jax.random.key(2))
    found = jax.jit(lambda t: summary(episode_sums(t, algorithm.episodes)))(trials)
    assert found["over_budget"] > 0.4
    assert found["cost_spent"] == 0


def test_the_multiplier_and_the_log_use_the_bins_of_the_report():
    """Also for training budgets beyond the report's range: they are in its outer bins."""
    algorithm = Scared(ROOM, config("ppo", net=dataclasses.replace(TINY, context=ROOM.spec.trial_steps)))
    assert (ROOM.spec.train_budget, ROOM.spec.test_budget) == ((1, 4), (1, 10))
    np.testing.assert_allclose(algorithm.edges, [1, 2, 4, 6, 8, 10])


def test_the_multiplier_may_follow_replay():
    """`replay` judges what is stored and what was just played; an empty replay adds nothing."""
    run = fitted("ddpg")
    fresh, state, penalty = run.algorithm, run.first, dataclasses.replace(PENALTY, source="replay")
    algorithm = Scared(Casino(), dataclasses.replace(fresh.config, penalty=penalty))
    hidden, budgets = jax.jit(algorithm.draw)(jax.random.key(1))
    trials = algorithm.play(algorithm.optimiser.explorer(state.optimiser), hidden, budgets, jax.random.key(2))
    costs = episode_sums(trials, algorithm.episodes, algorithm.config.queue)
    add = eqx.filter_jit(lambda replay: buffer.add(replay, algorithm.optimiser.row(trials, hidden)))
    full = add(state.optimiser.replay)
    played = lambda a, s: int(eqx.filter_jit(a.judged)(s, costs).played.sum())  # noqa: E731
    later = replace(state, optimiser=replace(state.optimiser, replay=full))
    one = int(costs.played.sum())
    assert one > 0
    assert [played(fresh, later), played(algorithm, state), played(algorithm, later)] == [one, one, 2 * one]


def test_more_segments_than_steps():
    """The replay's example is what `play` returns, traced at once."""
    algorithm = Scared(Throw(), config("ddpg", segments=9))
    assert algorithm.optimiser.example.trials.reward.shape == (32, 4)


def test_the_papers_form_of_the_off_policy_optimiser():
    paper = paper_config()
    assert (paper.trace, paper.ensemble, paper.trust, paper.entropy) == (0, 1, 0, 0)
    assert not paper.privileged_critic


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: config("ppo", rows=100), "rows must be a multiple of ppo.minibatch, got 100 and 32"),
        (lambda: config("sac"), "optimiser must be ppo or ddpg, got 'sac'"),
        (lambda: config("ppo", queue=9), "queue must be at most 8, got 9"),
        (lambda: config("ppo", budget_power=0.0), "budget_power must be a finite number > 0.0, got 0.0"),
        (
            lambda: config("ddpg", rows=2048),
            "ddpg.capacity must be at least the rows of an iteration, got 512 < 2048",
        ),
        (
            lambda: config("ppo", penalty=PenaltyConfig(source="replay")),
            "penalty.source replay needs the optimiser that has one, ddpg, got 'ppo'",
        ),
        (lambda: config("ppo", ppo=PPOConfig(trace=1.5)), "ppo.trace must be at most 1, got 1.5"),
        (lambda: config("ddpg", ddpg=DDPGConfig(updates=0)), "ddpg.updates must be an integer ≥ 1, got 0"),
    ],
)
def test_impossible_settings(make, words):
    with pytest.raises(UserError) as error:
        Scared(Casino(), make())
    assert str(error.value) == words

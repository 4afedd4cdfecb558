"""A test for each fault that once passed all the others; tests/mutants.py puts the faults back."""

import dataclasses
import io
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from networks import ROOM, random_rows, random_weights
from probe import Casino, Throw
from rich.console import Console
from standin import ROOM as TABLE_ROOM
from standin import TableAlgorithm, TableConfig

from safeicrl.agents.api import WipedAgent
from safeicrl.agents.reference import RandomAgent
from safeicrl.algos.scared import Scared, ScaredConfig, ScaredState
from safeicrl.budgets import is_over
from safeicrl.envs.api import replace
from safeicrl.envs.dark_mujoco import SafeDarkPoint
from safeicrl.envs.mujoco.physics import PhysicsState
from safeicrl.envs.safe_velocity import SafeVelocityAnt, SafeVelocityHalfCheetah
from safeicrl.errors import UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import relative
from safeicrl.log import Terminal
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers import ddpg as off_policy
from safeicrl.optimisers.ddpg import DDPG, DDPGConfig, Heads, Nets
from safeicrl.optimisers.lagrangian import Learner, PPOLagConfig
from safeicrl.optimisers.ppo import PPO, ActorCritic, PPOConfig, PPOState
from safeicrl.penalty import PenaltyConfig, net_reward
from safeicrl.policies.cards import read_card
from safeicrl.tokens import usable_budget
from safeicrl.train import EvalConfig, TrainConfig
from safeicrl.training import best
from safeicrl.training.status import Status
from safeicrl.trial import episode_sums, run_trials, sample_queue

TINY = NetConfig(width=8, layers=1, heads=1)

# -- what over budget means, and which tasks say so


def test_a_budget_that_is_spent_exactly_is_kept():
    assert not is_over(3.0, 3.0)
    assert not is_over(0.0, 0.0)
    assert not is_over(1e-6, 0.0)  # the slack itself
    assert is_over(3.001, 3.0)
    ten_tenths = np.cumsum(np.full(10, 0.1, np.float32))[-1]
    assert ten_tenths > 1.0
    assert not is_over(ten_tenths, 1.0)


def test_a_budget_of_whole_units_keeps_all_of_them():
    """As XLA divides, 0.9 / 0.3 may be less than 3."""
    spec = dataclasses.replace(Casino().spec, cost_unit=0.3)
    budgets = (np.arange(1, 200) * 0.3).astype(np.float32)
    assert (np.floor(budgets / np.float32(0.3)) < np.arange(1, 200)).any()
    np.testing.assert_allclose(usable_budget(jnp.asarray(budgets), spec), budgets, rtol=1e-5)
    np.testing.assert_allclose(usable_budget(budgets, spec), budgets, rtol=1e-5)  # NumPy's division


@dataclasses.dataclass(frozen=True)
class Telling(Casino):
    """The reward of a step tells the task and its split, the cost tells the step's key."""

    @property
    def spec(self):
        return dataclasses.replace(super().spec, cost_unit=0.0)

    def sample_task(self, key, split):
        return jax.random.uniform(key) + (10 if split == "test" else 0)

    def step(self, key, state, action, task):
        state, step = super().step(key, state, action, 1)
        return state, replace(step, reward=task, cost=jax.random.uniform(key))


def test_evaluation_plays_unseen_tasks_with_keys_of_their_own():
    env, agent = Telling(steps=1, episodes=2), RandomAgent(Casino().spec.action)
    found = evaluate(env, agent, tasks=4, rows=2, seed=5)
    task_key, run_key = jax.random.split(jax.random.key(5))
    tasks = jax.vmap(lambda key: env.sample_task(key, "test"))(jax.random.split(task_key, 4))
    np.testing.assert_allclose(found.returns, np.tile(tasks[:, None], 2), rtol=1e-6)
    budgets = jnp.asarray(found.budgets[:2, None])
    played = run_trials(env, agent, tasks[:2, None], budgets, jax.random.fold_in(run_key, 0), episodes=2, steps=2)
    np.testing.assert_allclose(found.costs[:2], episode_sums(played, 2).costs, rtol=1e-6)
    assert len(np.unique(found.costs)) == 8  # the second chunk does not repeat the first one's random numbers


@pytest.mark.parametrize(("wipe", "words"), [(True, "wiped at every episode"), (False, "kept")])
def test_a_baseline_is_wiped_in_its_evaluation(tmp_path, monkeypatch, wipe, words):
    def watched(env, agent, *, meta, **_):
        assert isinstance(agent, WipedAgent) == wipe
        return results(np.ones((2, 3)), **meta)

    monkeypatch.setattr(best, "evaluate", watched)
    algorithm = TableAlgorithm(env=TABLE_ROOM, config=TableConfig())
    status, quiet = Status(best=[None]), Terminal(Console(file=io.StringIO()))
    settings = TrainConfig(evaluation=EvalConfig(wipe=wipe))
    state = types.SimpleNamespace(table=jnp.zeros((9, 5)))
    best.evaluate_seeds(algorithm, settings, tmp_path, state, status, [], quiet, None)
    assert read_card(tmp_path / "best-seed0.json")["evaluation"]["context"] == words


# -- worlds


def test_speed_limits_are_safety_gymnasiums():
    """Its base limits, and the multipliers that our stored evaluations were made with."""
    assert (SafeVelocityHalfCheetah.base_limit, SafeVelocityAnt.base_limit) == (3.2096, 2.6222)
    env = SafeVelocityAnt()
    for split, expected in (("test", (0.6, 0.75, 0.9)), ("train", (0.5, 0.55, 0.65, 0.7, 0.8, 0.85, 0.95, 1.0))):
        draw = jax.jit(jax.vmap(lambda key, split=split: env.sample_task(key, split).multiplier))
        found = np.unique(draw(jax.random.split(jax.random.key(0), 200)))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def at(x: float, y: float = 0.0) -> PhysicsState:
    """A robot at rest in one place."""
    return PhysicsState(qpos=jnp.array([x, y]), qvel=jnp.zeros(2), warmstart=jnp.zeros(2), anchor=jnp.array([x, y]))


def test_what_is_limited_is_the_ants_speed_and_the_cheetahs_forward_velocity():
    ant, cheetah = SafeVelocityAnt(), SafeVelocityHalfCheetah()
    sideways = ant._velocity(at(0, 0), at(0, 2 * ant._dt))
    assert [float(x) for x in sideways] == pytest.approx([0, 2])
    back = cheetah._velocity(at(0), at(-4 * cheetah._dt))
    assert [float(x) for x in back] == pytest.approx([-4, -4])  # above no limit


def test_hazards_follow_the_split_too():
    env = SafeDarkPoint()
    sample = lambda split: jax.jit(jax.vmap(lambda key: env.sample_task(key, split)))  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 300)
    near, far = (np.linalg.norm(sample(split)(keys).hazards, axis=-1).mean() for split in ("train", "test"))
    assert far - near > 0.2


# -- what the optimisers are given, and what they do with it


class Watched:
    """An optimiser that says which multipliers it is given."""

    def explorer(self, state):
        return RandomAgent(Casino().spec.action)

    def update(self, state, trials, tasks, multiplier, iteration, key):
        return state, {"given": multiplier}


def test_the_optimiser_gets_the_new_multiplier_whose_step_grows_over_the_run():
    penalty = PenaltyConfig(step=0.0, final_step=0.5, initial=1.0)
    algorithm = Scared(Casino(), ScaredConfig(rows=64, segments=1, iterations=10, net=TINY, penalty=penalty))
    algorithm.optimiser = Watched()

    @jax.jit
    def update(iteration: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = ScaredState(optimiser=None, multiplier=jnp.float32(1.0), iteration=iteration, key=jax.random.key(0))
        new, metrics = algorithm.update(state)
        return new.multiplier, metrics["given"]

    first, half, last = (jax.device_get(update(jnp.int32(i))) for i in (0, 5, 10))
    assert first[0] == 1.0
    assert last[0] > half[0] > 1.0
    assert last[0] - 1.0 == pytest.approx(2 * (half[0] - 1.0), rel=1e-4)
    np.testing.assert_array_equal(last[1], np.full(algorithm.episodes, last[0]))


def test_overspent_episodes_are_drawn_one_by_one():
    algorithm = Scared(Casino(), ScaredConfig(rows=256, spent=0.5, net=TINY))
    budgets = np.asarray(jax.jit(algorithm.draw)(jax.random.key(0))[1])  # [row, queue, episode]
    spent = budgets < 0
    mixed = spent.any(-1) & ~spent.all(-1)
    assert mixed.mean() == pytest.approx(1 - 2 * 0.5**3, abs=0.1)
    both = budgets[spent.all(-1)]
    assert (np.ptp(both, axis=-1) > 0).all()


class Zero:
    """Critics that expect nothing, and a policy that did what it would do now."""

    def taken(self, features, seen, action):
        return jnp.zeros((1, *features.shape[:2]))

    def expected(self, features, seen, policy, key):
        return jnp.zeros((1, *features.shape[:2]))

    def log_prob(self, action):
        return jnp.zeros(action.shape)


def test_both_optimisers_charge_the_price():
    trials = random_rows()
    trials = replace(trials, extras={"log_prob": jnp.zeros_like(trials.reward)})
    free, dear = PenaltyConfig(), PenaltyConfig(price=2.0)
    paid = replace(trials, reward=net_reward(trials, dear))
    assert (paid.reward != trials.reward).any()

    def by_ppo(penalty, trials):
        optimiser = PPO(ROOM, TINY, penalty, PPOConfig(minibatch=8), iterations=1, rows=24)
        return optimiser.advantages(jnp.zeros((2, *trials.reward.shape)), trials)[0]

    def by_ddpg(penalty, trials):
        optimiser = object.__new__(DDPG)
        optimiser.penalty, optimiser.config = penalty, DDPGConfig()
        slow = types.SimpleNamespace(reward=Zero(), cost=Zero())
        batch = types.SimpleNamespace(trials=trials, task=None)
        features = jnp.zeros((*trials.reward.shape, 1))
        return optimiser.targets(slow, Zero(), features, batch, jnp.ones(2), jax.random.key(0))[0]

    for learn in (by_ppo, by_ddpg):
        without, charged, expected = jax.jit(
            lambda a, b, learn=learn: (learn(free, a), learn(dear, a), learn(free, b))
        )(trials, paid)
        np.testing.assert_allclose(charged, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(charged - without).max() > 0.5


def test_ppos_entropy_fades_over_the_run():
    """So does a teacher: to a tenth, over 70% of the run. So does curiosity: to nothing."""
    config = PPOConfig(entropy=(1.0, 0.0), minibatch=24, epochs=1)
    ppo = PPO(ROOM, TINY, PenaltyConfig(), config, iterations=10, rows=24, teacher=2.0, curiosity=0.4)
    ppo.loss = lambda net, batch, scale, *weights: (0.0 * scale.sum(), (scale, {"weights": jnp.stack(weights)}))
    net = random_weights(ActorCritic, TINY, ROOM.spec, True)
    trials = random_rows()

    @eqx.filter_jit
    def weights(iteration: jax.Array) -> jax.Array:
        tasks, _ = sample_queue(ROOM, "train", ROOM.train_budget, (24, 4), jax.random.key(1))
        optimiser = ppo.optimiser.init(eqx.filter(net, eqx.is_array))
        state = PPOState(net=net, optimiser=optimiser, scale=jnp.ones(2))
        return ppo.update(state, trials, tasks, jnp.zeros(2), iteration, jax.random.key(0))[1]["weights"]

    entropy, teaching, curiosity = np.stack([weights(jnp.int32(i)) for i in (0, 5, 7, 10)]).T
    assert entropy == pytest.approx([1, 0.5, 0.3, 0])
    assert teaching == pytest.approx([2, 2 * (1 - 0.9 * 5 / 7), 0.2, 0.2])
    assert curiosity == pytest.approx([0.4, 0.2, 0.12, 0])


def test_ppos_learning_rate_rises_then_falls():
    config = PPOConfig(learning_rate=(1.0, 0.5), warmup=2, epochs=2, minibatch=12)  # 4 steps per iteration
    optimiser = PPO(ROOM, TINY, PenaltyConfig(), config, iterations=10, rows=24).optimiser

    @jax.jit
    def rates() -> jax.Array:
        def step(carry, _):
            params, state = carry
            updates, state = optimiser.update({"x": jnp.ones(1)}, state, params)
            return (optax.apply_updates(params, updates), state), -updates["x"][0]

        params = {"x": jnp.zeros(1)}
        return jax.lax.scan(step, (params, optimiser.init(params)), length=41)[1]

    found = np.asarray(rates())  # with a constant gradient, Adam's steps are the learning rate
    np.testing.assert_allclose(found[:9], np.arange(9) / 8, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found[[24, 40]], [0.75, 0.5], rtol=1e-3)


def test_slow_heads_follow_at_their_rate_in_the_units_of_the_fast_ones(monkeypatch):
    """The scale doubles: every value of both is halved. Then the slow ones move by `target_rate`."""
    config = DDPGConfig(updates=1, target_rate=0.25)
    net = random_weights(Nets, TINY, ROOM.spec, config)
    ddpg = object.__new__(DDPG)
    ddpg.config, ddpg.iterations, ddpg.optimiser = config, 1, optax.identity()
    ddpg.loss = lambda net, slow, batch, multiplier, scale, key: (0.0 * scale.sum(), (2 * scale, {}))
    ddpg.row = lambda trials, tasks: None
    monkeypatch.setattr(off_policy, "buffer", types.SimpleNamespace(add=lambda *_: 0, sample=lambda *_: 0))
    fast = Heads(actor=net.policy.actor, reward=net.reward, cost=net.cost)
    slow = jax.tree.map(lambda x: 3 * x if eqx.is_array(x) else x, fast)
    state = off_policy.DDPGState(
        net=net, slow=slow, optimiser=ddpg.optimiser.init(eqx.filter(net, eqx.is_array)), replay=0,
        scale=jnp.ones(2), progress=jnp.float32(0),
    )  # fmt: skip
    new, _ = eqx.filter_jit(ddpg.update)(state, None, None, jnp.zeros(1), jnp.int32(0), jax.random.key(0))
    for critics in ("reward", "cost"):
        before, after = (getattr(heads, critics).members.second.weight for heads in (fast, new.slow))
        np.testing.assert_allclose(after, 0.5 * (0.75 * 3 + 0.25) * before, rtol=1e-5)
    np.testing.assert_allclose(
        new.slow.actor.second.weight, (0.75 * 3 + 0.25) * fast.actor.second.weight, rtol=1e-5
    )


def test_a_safe_learners_values_stay_when_their_scale_moves():
    env = Throw()
    learner = Learner(env, PPOLagConfig(envs=4, steps=4, minibatches=1, epochs=1, hidden=(8,)))
    learner.learn = lambda state, batch, key: (state.params, state.optimiser, {})
    task, seen = jnp.float32(0.5), jnp.zeros((3, 1))

    @jax.jit
    def run(key: jax.Array) -> tuple:
        state = learner.init(key, task)
        state = replace(state, params=jax.tree.map(lambda x: x + 0.5, state.params))  # at first all values are 0
        new, _, _ = learner.iterate(state, task, jnp.float32(1.0))
        new = replace(new, normaliser=state.normaliser)  # which moves what the networks see
        return new.scale, learner.values(state, seen), learner.values(new, seen)

    scale, before, after = run(jax.random.key(0))
    assert (np.abs(np.asarray(scale) - 1) > 0.01).all()
    assert (np.abs(before) > 0.1).all()
    np.testing.assert_allclose(after, before, rtol=1e-4)


# -- scores between baselines


def results(returns: np.ndarray, *, budgets: np.ndarray | None = None, **meta: object) -> Results:
    returns = np.asarray(returns, float)
    budgets = np.linspace(1.0, 3.0, len(returns)) if budgets is None else budgets
    about = {"label": "x", "env": {"name": "e", "parameters": {}}, "split": "test", "seed": 0, **meta}
    zeros = np.zeros_like(returns)
    return Results(returns=returns, costs=zeros, lengths=zeros + 1, budgets=budgets, meta=about)


def test_a_score_counts_every_task_once_and_the_last_five_episodes():
    rng = np.random.default_rng(0)
    lower, upper, mine = (rng.random((6, 8)) + level for level in (0.0, 5.0, 2.0))
    for each in (lower, upper, mine):
        each[:, :3] += 100.0 * rng.random((6, 3))  # early episodes do not count
    late = [each[:, 3:].mean(axis=1) for each in (lower, upper, mine)]
    once = relative(results(mine), upper=results(upper), lower=results(lower))
    score = (late[2] - late[0]).mean() / (late[1] - late[0]).mean()
    assert once.score == pytest.approx(score)
    residual = late[2] - late[0] - score * (late[1] - late[0])
    assert once.error == pytest.approx(residual.std(ddof=1) / np.sqrt(6) / (late[1] - late[0]).mean())
    # the same six tasks again at another budget: no more is known about the agent
    often = [results(np.tile(x, (2, 1)), budgets_per_task=2, budget_range=[1, 3]) for x in (mine, upper, lower)]
    assert relative(often[0], upper=often[1], lower=often[2]).error == pytest.approx(once.error)


def test_costs_of_the_last_episodes_only_are_compared():
    returns, costs = np.ones((2, 8)), np.zeros((2, 8))
    costs[:, :3] = 9.0
    mine = dataclasses.replace(results(returns), costs=costs)
    found = relative(mine, upper=results(2 * returns), lower=results(0 * returns))
    assert found.over_budget_last == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "train"}, "differ in their split"),
        ({"budget_range": [1, 4]}, "differ in their budget range"),
        ({"budgets": np.array([1.0, 2.9])}, "with the same budgets"),
    ],
)
def test_only_results_on_the_same_tasks_and_budgets_are_compared(changes, words):
    fixed = {"budget_range": [1, 3]}
    mine, upper = results(np.ones((2, 5)), **fixed), results(2 * np.ones((2, 5)), **fixed)
    other = results(np.zeros((2, 5)), **{**fixed, **changes})
    with pytest.raises(UserError, match=words):
        relative(mine, upper=upper, lower=other)

"""Several costs, each with its own budget: environment, token, penalty, results, policy, and what is refused."""

import dataclasses
import itertools
import json

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl import budgets, cli, penalty
from safeicrl.agents.reference import RandomAgent
from safeicrl.algos import registry as algorithms
from safeicrl.algos.scared import Scared, ScaredConfig, summary
from safeicrl.envs.api import replace
from safeicrl.envs.episode_cost import EpisodeCost, VectorEpisodeCost
from safeicrl.envs.faults import refuse_fault
from safeicrl.envs.from_gymnasium import from_gymnasium
from safeicrl.envs.gym import GymEnv
from safeicrl.envs.gym_vector import GymVectorEnv
from safeicrl.envs.registry import WORLDS, env_from_plain, env_to_plain
from safeicrl.envs.workshop import BLUNT, REST, SHARP, Workshop
from safeicrl.errors import BeyondTraining, UserError
from safeicrl.evaluation import plots
from safeicrl.evaluation.archive import load_results, results_equal, save_results
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.statistics import budget_bins, resampled_trials, safety, summarise
from safeicrl.evaluation.tables import figure_groups, group, summary_table
from safeicrl.evaluation.task_lists import seeded_tasks
from safeicrl.nets.transformer import NetConfig, feature_size, featurise
from safeicrl.optimisers.ddpg import DDPGConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.penalty import PenaltyConfig
from safeicrl.policies.onnx import export_onnx
from safeicrl.policies.policy import Policy
from safeicrl.show.play.worlds import _check as check_shown
from safeicrl.training import progress
from safeicrl.training.status import Status
from safeicrl.trial import Episodes, episode_sums, first_fault, run_trials, sample_queue

ENV = Workshop()
TINY = NetConfig(width=16, layers=1, heads=2, context=9, dtype="float32")


# -- one λ for all constraints, by hand

# Three trials of two episodes; the last trial was cut after its first. Costs are heat, noise.
COSTS = np.array([[[3, 0], [1, 2]], [[0, 4], [2, 2]], [[1, 1], [0, 0]]], np.float32)
BUDGETS = np.array([[[1, 1]] * 2, [[3, 1]] * 2, [[3, 3], [0, 0]]], np.float32)
PLAYED = np.array([[True, True], [True, True], [True, False]])
# Excess: [[[2, −1], [0, 1]], [[−3, 3], [−1, 1]], [[−2, −2], ·]]
EDGES = np.array([[0, 2, 4], [0, 2, 4]], np.float32)  # of each cost: a bin below 2, one from 2 on
EPISODES = Episodes(
    returns=np.ones((3, 2), np.float32), costs=COSTS, lengths=np.ones((3, 2)), budgets=BUDGETS, played=PLAYED
)


def test_every_signal_takes_the_largest_over_costs():
    settings = {
        "hinge": PenaltyConfig(step=1.0, bound=9.0, tolerance=0.25),
        "max_of_means": PenaltyConfig(step=1.0, bound=9.0, signal="max_of_means"),
        "mean_of_max": PenaltyConfig(step=1.0, bound=9.0, signal="mean_of_max"),
        "naive": PenaltyConfig(step=1.0, bound=9.0, dual="naive"),
    }

    @jax.jit
    def everything(episodes):
        moved = {name: penalty.update_multiplier(jnp.ones(()), episodes, EDGES, c) for name, c in settings.items()}
        return moved | {
            "constraint": penalty.constraint(episodes), "surrogate": penalty.surrogate(episodes, 0.5),
            "by_bin": penalty.hinge_by_bin(episodes, EDGES), "over": penalty.over_by_bin(episodes, EDGES),
            "log": summary(episodes, ("heat", "noise")),
        }  # fmt: skip

    found = jax.tree.map(np.asarray, everything(EPISODES))
    np.testing.assert_allclose(found["constraint"], [[-1, 0], [-0.5, 1]])
    assert found["surrogate"] == pytest.approx(2 - 0.5 * 1)
    # heat below 2: [2, 0], from 2 on: nothing over; noise below 2: [−1, 1, 3, 1], from 2 on: [−2]
    np.testing.assert_allclose(found["by_bin"], [[1, 0], [5 / 4, 0]])
    np.testing.assert_allclose(found["over"], [[1 / 2, 0], [3 / 4, 0]])
    assert found["hinge"] == pytest.approx(1 + 5 / 4 - 0.25)
    # the largest of all means: heat of first episodes with small budgets, 2 in one trial
    assert found["max_of_means"] == pytest.approx(1 + 2)
    assert found["mean_of_max"] == pytest.approx(1 + (2 + 3 - 2) / 3)
    np.testing.assert_allclose(found["naive"], [1 + 2, 1 + 1])  # heat of small budgets, noise of small budgets
    log = found["log"]
    assert log["over_budget"] == pytest.approx(4 / 5)  # an episode counts once, whichever cost is over
    assert (log["over_budgets/heat"], log["over_budgets/noise"]) == pytest.approx((1 / 5, 3 / 5))
    assert (log["costs/heat"], log["costs/noise"], log["cost"]) == pytest.approx((7 / 5, 9 / 5, 16 / 5))
    assert log["budget"] == pytest.approx(log["budgets/heat"] + log["budgets/noise"])


def test_over_budget_is_any_cost_over_its_own():
    np.testing.assert_array_equal(budgets.is_over(COSTS, BUDGETS, True)[PLAYED], [True, True, True, True, False])
    np.testing.assert_array_equal(EPISODES.overspent, np.zeros((3, 2), bool))
    spent = replace(EPISODES, budgets=BUDGETS - np.float32([2, 0]))
    np.testing.assert_array_equal(spent.overspent[:, 0], [True, False, False])


# -- trials of random play


@pytest.fixture(scope="module")
def random_play():
    """Random trials, each cost with its own range of budgets, and what the library makes of them."""

    @jax.jit
    def play(key):
        tasks, given = sample_queue(ENV, "train", ((0.0, 1.0), (1.0, 3.0)), (16, 2), key)
        trials = run_trials(ENV, RandomAgent(ENV.spec.action), tasks, given, key, episodes=3, steps=20)
        faulty = replace(trials, cost=trials.cost.at[3, 5, 1].set(-2.0))
        price = penalty.net_reward(trials, PenaltyConfig(price=0.5))
        derived = (penalty.excess_cost(trials), price, trials.episode_cost, featurise(trials.token, ENV.spec))
        return trials, given, derived, episode_sums(trials, 3, 2), first_fault(trials), first_fault(faulty)

    return jax.tree.map(np.asarray, play(jax.random.key(0)))


def test_tokens_and_penalties_of_random_play(random_play):
    """Both costs-to-go and the sum of both excesses, by walking along each row."""
    trials, given, (excess, priced, so_far, features), _, *_ = random_play
    assert trials.token.ctg.shape == trials.cost.shape == (16, 20, 2)
    assert given[..., 0].max() <= 1 <= given[..., 1].min()
    np.testing.assert_array_equal(trials.cost, trials.action[..., None] == [1, 2])
    assert features.shape[-1] == feature_size(ENV.spec)
    for row in range(16):
        for t in np.flatnonzero(trials.valid[row]):
            if trials.token.start[row, t]:
                spent = np.zeros(2)
                budget = np.floor(given[row, trials.trial[row, t]])
            np.testing.assert_array_equal(trials.token.ctg[row, t], budget - spent)
            np.testing.assert_array_equal(trials.budget[row, t], budget)
            after = spent + trials.cost[row, t]
            beyond = np.maximum(after - budget, 0).sum() - np.maximum(spent - budget, 0).sum()
            assert excess[row, t] == beyond
            assert priced[row, t] == trials.reward[row, t] - 0.5 * (trials.cost[row, t].sum() - beyond)
            np.testing.assert_array_equal(so_far[row, t], after)
            spent = after


def test_sums_of_random_play(random_play):
    trials, given, _, episodes, sound, fault = random_play
    assert episodes.costs.shape == episodes.budgets.shape == (32, 3, 2)
    played = episodes.played
    np.testing.assert_array_equal(
        episodes.budgets[played], np.floor(np.repeat(given.reshape(32, 1, 2), 3, 1))[played]
    )
    assert episodes.costs[played].sum() <= trials.cost.sum()
    assert played.all(1).sum() == 32
    np.testing.assert_array_equal(episodes.costs.sum((1, 2)).reshape(16, 2)[:, 0], trials.cost[:, :9].sum((1, 2)))
    refuse_fault(sound, "workshop")
    with pytest.raises(UserError, match=r"workshop gave cost -2 \(episode 2, step 3\)"):
        refuse_fault(fault, "workshop")


# -- SCARED on a world whose optimum is known


def test_the_known_optimum_is_the_best_of_all_sequences():
    for heat, noise, sharp in itertools.product(range(4), range(4), (1, 2)):
        pay = {0: REST, sharp: SHARP, 3 - sharp: BLUNT}
        kept = [s for s in itertools.product(range(3), repeat=3) if s.count(1) <= heat and s.count(2) <= noise]
        assert ENV.best(heat + 0.9, noise + 0.9, sharp) == max(sum(pay[a] for a in s) for s in kept)


@pytest.fixture(scope="module")
def learned():
    """Results of SCARED trained with both costs, and without one of them in the penalty; the first one's agent."""
    config = ScaredConfig(
        iterations=50, rows=32, queue=1, segments=1, budget_power=1.0, net=TINY,
        penalty=PenaltyConfig(step=0.3, tolerance=0.02, cap=2.0),
        ppo=PPOConfig(minibatch=32, warmup=3, learning_rate=(8e-3, 8e-4), entropy=(0.02, 0.0), discount=0.99),
    )  # fmt: skip
    algorithm = Scared(ENV, config)
    first = eqx.filter_jit(algorithm.init)(jax.random.key(0))

    @eqx.filter_jit
    def update(state, counted):
        with pytest.MonkeyPatch.context() as patch:
            real = penalty.excess_cost
            patch.setattr(penalty, "excess_cost", lambda trials: real(replace(trials, cost=trials.cost * counted)))
            return algorithm.update(state)

    def fit(counted, iterations):
        state = first
        for _ in range(iterations):
            state, metrics = update(state, jnp.array(counted))
        agent = algorithm.agent(state)
        return evaluate(ENV, agent, tasks=400, rows=400, segments=1, label="scared"), agent, metrics

    both, agent, metrics = fit([1.0, 1.0], config.iterations)
    without = {"heat": fit([0.0, 1.0], 12)[0], "noise": fit([1.0, 0.0], 12)[0]}
    return both, without, agent, metrics


def test_scared_reaches_the_optimum_within_both_budgets(learned):
    """Within 0.1 of the best return of 1.7 per episode, at most 2% of the episodes over any budget."""
    found, _, _, metrics = learned
    sharp = np.asarray(seeded_tasks(ENV, "test", 0, 400))
    best = np.array([ENV.best(*pair, tool) for pair, tool in zip(found.budgets, sharp, strict=True)])
    assert best.mean() == pytest.approx(1.7, abs=0.05)
    assert found.returns[:, -1].mean() > best.mean() - 0.1
    assert found.over.mean() < 0.02
    # both budgets bind: where an episode has enough steps for them, both are spent to the end
    allowed = np.floor(found.budgets)
    fits = allowed.sum(1) <= ENV.max_steps
    assert (found.costs[:, -1] == allowed)[fits].all(1).mean() > 0.9
    assert metrics["over_budget_by_bin"].shape == (2, 5)


@pytest.mark.parametrize("cost", ENV.spec.costs)
def test_a_cost_that_the_penalty_leaves_out_breaks_its_budget(learned, cost):
    own = learned[1][cost].by_cost()
    other = next(name for name in ENV.spec.costs if name != cost)
    assert own[cost].over.mean() > 0.5
    assert own[other].over.mean() < 0.1


def test_the_other_optimiser_and_all_options_take_several_costs():
    """Traced only: shapes of a state do not change with an update."""
    config = ScaredConfig(
        iterations=2, rows=4, queue=1, segments=1, net=TINY, optimiser="ddpg", spent=0.2,
        penalty=PenaltyConfig(dual="naive", price=0.1, source="replay"),
        ddpg=DDPGConfig(updates=1, batch=2, capacity=8, ensemble=1),
    )  # fmt: skip
    algorithm = Scared(ENV, config)
    state = eqx.filter_eval_shape(algorithm.init, jax.random.key(0))
    after, _ = eqx.filter_eval_shape(algorithm.update, state)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree) if hasattr(x, "shape")]  # noqa: E731
    assert shapes(after) == shapes(state)


# -- results


def test_results_by_cost(learned, tmp_path):
    found = learned[0]
    assert (found.costs.shape, found.budgets.shape) == ((400, 3, 2), (400, 2))
    heat, noise = found.by_cost().values()
    np.testing.assert_array_equal(found.over, heat.over | noise.over)
    np.testing.assert_array_equal(found.excess, np.maximum(heat.excess, noise.excess))
    # every budget of the grid equally often, in an order of its own
    assert sorted(heat.budgets) == sorted(noise.budgets)
    assert abs(np.corrcoef(heat.budgets, noise.budgets)[0, 1]) < 0.2
    assert heat.budget_range == (0.0, 3.0)
    save_results(found, tmp_path / "r")
    assert results_equal(load_results(tmp_path / "r"), found)
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["by_cost"]["heat"]["over_budget"] == heat.over.mean()
    assert saved["summary"]["over_budget"] == found.over.mean()
    with pytest.raises(UserError, match="results with the costs heat, noise do not fit together"):
        dataclasses.replace(found, costs=heat.costs)


def test_tables_and_figures_by_cost(learned):
    found = learned[0]
    rows = list(summary_table([found]).columns[0].cells)
    assert {"cost, heat", "over budget, heat", "cost, noise", "over budget, noise", "total, δ heat 0–0.333"} <= {
        *rows
    }
    bins = budget_bins(found)
    assert len(bins) == 10
    np.testing.assert_array_equal(sum(rows.astype(int) for rows in bins.values()), 2)
    assert sorted(set(summarise(found).over_by_budget)) == sorted(bins)
    assert len(resampled_trials(found, np.random.default_rng(0))) == 400
    assert safety([found]).over_budget == found.over.mean()
    groups = figure_groups(group([found]))
    assert list(groups) == ["-heat", "-noise"]
    axis = plots.by_budget(groups["-noise"]).axes[1]
    assert (axis.get_title(loc="left"), axis.get_xlabel()) == ("largest episode noise", "budget δ of noise")
    with pytest.raises(UserError, match=r"one cost of heat, noise: take its results from by_cost\(\)"):
        plots.by_budget(group([found]))
    frame = found.to_dataframe()
    assert {"budget_heat", "cost_heat", "budget_noise", "cost_noise", "over"} <= set(frame.columns)
    np.testing.assert_array_equal(frame["cost_noise"], found.costs[..., 1].ravel())


def test_training_says_each_cost_by_name(learned):
    class Sink:
        def write(self, step, values):
            self.values = values

        def say(self, text):
            pass

    sink = Sink()
    progress.log_evaluation([learned[0]], Status(), [sink], sink)
    heat = learned[0].by_cost()["heat"]
    assert sink.values["eval/costs/heat"] == pytest.approx(heat.costs.mean())
    assert sink.values["eval/over_budgets/heat"] == pytest.approx(heat.over.mean())
    line = progress._numbers({name: np.asarray(value).mean() for name, value in learned[3].items()})
    assert "  heat 0." in line or "  heat 1." in line
    assert "  noise " in line


# -- the policy


def test_a_policy_takes_a_budget_for_each_cost(learned, tmp_path):
    card = {"kind": "net", "env": env_to_plain(ENV), "net": dataclasses.asdict(TINY)}
    policy = Policy(env=ENV, agent=learned[2], card=card)
    assert env_from_plain("workshop", json.loads(json.dumps(card["env"]["parameters"]))) == ENV
    for wrong, words in (
        (3, r"2 numbers \(heat, noise\) or a list of such budgets, got shape \(\)"),
        ((1, 2, 3), r"2 numbers \(heat, noise\) or a list of such budgets, got shape \(3,\)"),
        ((1, -2), "finite number ≥ 0, got -2.0"),
    ):
        with pytest.raises(UserError, match=words):
            policy.start(budget=wrong)
    with pytest.warns(BeyondTraining, match="budgets of noise from 0 to 3, not 7"):
        policy.start(budget=(1, 7))
    policy.start(budget=[(1, 2), (2, 1)], fallback=0)
    envs = [GymEnv(ENV), GymEnv(ENV)]
    seen = np.array([env.reset(seed=0)[0] for env in envs])
    actions, spent = policy.act(seen), np.zeros((2, 2))
    with pytest.raises(UserError, match=r"cost must be 2 numbers \(heat, noise\) for each of 2 rows"):
        policy.act(seen, [0, 0], [0, 0])
    kept = None
    for t in range(9):
        steps = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        _, reward, terminated, truncated, infos = zip(*steps, strict=True)
        cost = np.array([info["cost"] for info in infos])
        spent += cost
        if truncated[0]:
            assert (spent <= [(1, 2), (2, 1)]).all()
            spent[:] = 0
            seen = np.array([env.reset()[0] for env in envs])
        actions = policy.act(seen, reward, cost, terminated, truncated)
        left = np.asarray(policy._trial.token.ctg)
        np.testing.assert_array_equal(policy.stop.stopped, (left < 1).any(-1))  # either budget used up
        if t == 4:
            path, kept = policy.save_context(tmp_path / "context"), actions
            policy.load_context(path)
            np.testing.assert_array_equal(policy._trial.action, kept)
            assert policy._trial.token.ctg.shape == (2, 2)
    assert policy.stop.steps.tolist() == [10, 10]


# -- faces of Gymnasium


def test_the_gymnasium_face_gives_the_vector_and_each_by_name():
    env = EpisodeCost(GymEnv("workshop"))
    _, info = env.reset(seed=0)
    assert info["costs"] == {"heat": 0.0, "noise": 0.0}
    for action in (1, 2, 2):
        *_, truncated, info = env.step(action)
        assert info["cost"].tolist() == [action == 1, action == 2]
        assert info["costs"] == {"heat": float(action == 1), "noise": float(action == 2)}
    assert truncated
    assert info["episode"]["c"].tolist() == [1, 2]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_vector_face_agrees_with_gymnasiums_own(mode):
    make = lambda: GymEnv("workshop")  # noqa: E731
    mode = gymnasium.vector.AutoresetMode(mode)
    ours = VectorEpisodeCost(GymVectorEnv("workshop", 3, autoreset_mode=mode))
    theirs = VectorEpisodeCost(gymnasium.vector.SyncVectorEnv([make] * 3, autoreset_mode=mode))
    agree = lambda a, b: jax.tree.map(np.testing.assert_array_equal, without_objects(a), without_objects(b))  # noqa: E731
    agree(*(envs.reset(seed=4)[1] for envs in (ours, theirs)))
    for actions in np.random.default_rng(0).integers(0, 3, (8, 3)):
        one, other = (envs.step(actions) for envs in (ours, theirs))
        agree(one[4], other[4])
        assert one[4]["costs"]["heat"].shape == (3,)


def without_objects(info):
    """Without the final observations, arrays of arrays."""
    return {name: value for name, value in info.items() if "final_obs" not in name}


class Oven(gymnasium.Env):
    """Two steps; the action is the heat, its double the noise."""

    observation_space = gymnasium.spaces.Discrete(1)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return 0, {}

    def step(self, action):
        self.time += 1
        return 0, 1.0, False, self.time == 2, {"costs": {"noise": 2.0 * action, "heat": float(action)}}


@pytest.fixture
def tidy():
    before = set(WORLDS)
    yield
    for name in set(WORLDS) - before:
        del WORLDS[name]


def test_a_gymnasium_environment_with_two_costs(tidy):
    options = {"budget": ((0.0, 2.0), (0.0, 4.0)), "episodes": 2, "max_steps": 2, "costs": ("heat", "noise")}
    env = from_gymnasium(Oven, [{}], name="oven", **options)
    assert env.spec.ranges("test") == ((0.0, 2.0), (0.0, 4.0))
    key, task = jax.random.key(0), jax.tree.map(jnp.asarray, env.sample_task(jax.random.key(0), "train"))
    state, _ = jax.jit(env.reset)(key, task)
    _, step = jax.jit(env.step)(key, state, jnp.int32(2), task)
    assert step.cost.tolist() == [2, 4]
    for info in ({"cost": 1.0}, {"costs": {"heat": 1.0}}):
        with pytest.raises(UserError, match=r"every cost of a step in info\['costs'\]: (heat|noise) is missing"):
            env._host._costs(info)


# -- what is refused, and the command line

TWO = "takes one cost, this environment has 2: heat, noise"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"costs": ("heat", "heat")}, "each cost needs a name of its own, got heat, heat"),
        ({"costs": ()}, "costs must be a tuple of names, each of letters, digits, _ and -, got ()"),
        ({"costs": "heat"}, "costs must be a tuple of names, each of letters, digits, _ and -, got 'heat'"),
        (
            {"costs": ("a/b", "c")},
            "costs must be a tuple of names, each of letters, digits, _ and -, got ('a/b', 'c')",
        ),
        (
            {"train_budget": ((0.0, 1.0),) * 3},
            "train_budget must be one range, or one for each cost (heat, noise), got 3: ((0.0, 1.0), (0.0, 1.0), "
            "(0.0, 1.0))",
        ),
        ({"test_budget": ((0.0, 1.0), (2.0, 1.0))}, "test_budget of noise must rise, got 2 to 1"),
        ({"test_budget": ((-1.0, 1.0), (2.0, 3.0))}, "test_budget of heat must be a finite number ≥ 0.0, got -1.0"),
        ({"test_budget": 3.0}, "test_budget must be one range, or one for each cost (heat, noise), got 1: 3.0"),
        ({"test_budget": ((0.0, 1.0), 3.0)}, "test_budget of noise must be two numbers, got 3.0"),
    ],
)
def test_impossible_costs(change, words):
    with pytest.raises(UserError) as error:
        dataclasses.replace(ENV.spec, **change)
    assert str(error.value) == words


@pytest.mark.parametrize("name", ["ppo-lag", "safe-ad", "maml-penalty", "safe-meta"])
def test_baselines_take_one_cost(name):
    algorithm, config = algorithms.find_algo(name)
    with pytest.raises(UserError, match=f"{name} {TWO}"):
        algorithm(ENV, config())


def test_what_takes_one_cost_says_so(learned, tmp_path):
    with pytest.raises(UserError, match=f"penalty.form paper {TWO}"):
        Scared(ENV, ScaredConfig(rows=64, penalty=PenaltyConfig(form="paper")))
    guarded = Scared(ENV, ScaredConfig(rows=64, net=dataclasses.replace(TINY, guard=1)))
    with pytest.raises(UserError, match=rf"a guard \(net.guard\) {TWO}"):
        eqx.filter_eval_shape(guarded.init, jax.random.key(0))
    with pytest.raises(UserError, match=f"play, asked to show mine, {TWO}"):
        check_shown("mine", ENV)
    pytest.importorskip("onnx")
    policy = Policy(env=ENV, agent=learned[2], card={"kind": "net", "env": env_to_plain(ENV)})
    with pytest.raises(UserError, match=f"an ONNX graph {TWO}"):
        export_onnx(policy, tmp_path / "graph")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda step: {"cost": step.cost[0]},
            r"costs \(heat, noise\) of a step must .* \(2,\), .* got \(\)",
        ),
        (lambda step: {"observation": step.cost}, r"observations of a step must have shape \(1,\), .* got \(2,\)"),
        (lambda step: {"reward": step.cost}, r"reward of a step must have shape \(\), .* got \(2,\)"),
        (None, r"first observations must have shape \(1,\), .* got \(3,\)"),
    ],
    ids=["cost", "observation", "reward", "reset"],
)
def test_arrays_of_a_wrong_shape_are_refused(wrong, words):
    class Silent(Workshop):
        def reset(self, key, task):
            state, seen = super().reset(key, task)
            return state, seen if wrong else jnp.zeros(3)

        def step(self, key, state, action, task):
            state, step = super().step(key, state, action, task)
            return state, replace(step, **wrong(step))

    env, agent, key = Silent(), RandomAgent(ENV.spec.action), jax.random.key(0)
    play = lambda tasks, given: run_trials(env, agent, tasks, given, key, episodes=1, steps=3)  # noqa: E731
    with pytest.raises(UserError, match=f"^{words}"):
        jax.eval_shape(play, jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1, 2)))


def test_the_command_line_takes_a_range_for_each_cost(tmp_path, capsys):
    line = "evaluate --agent random --env workshop --tasks 40"
    assert (
        cli.main([*line.split(), "--budgets", "0", "1", "--budgets", "1", "3", "--out", str(tmp_path / "r")]) == 0
    )
    assert "over budget, noise" in capsys.readouterr().out
    found = load_results(tmp_path / "r")
    assert found.budget_range == ((0.0, 1.0), (1.0, 3.0))
    assert (found.budgets.min(0) > [0, 1]).all()
    assert (found.budgets.max(0) < [1, 3]).all()
    assert cli.main([*line.split(), *["--budgets", "0", "1"] * 3]) == 2
    assert "budgets must be one range, or one for each cost (heat, noise), got 3" in capsys.readouterr().err
    assert cli.main([*line.replace("workshop", "safe-dark-room").split(), *["--budgets", "0", "1"] * 2]) == 2
    assert "budgets must be one range (cost), got 2" in capsys.readouterr().err

"""Safe AD: labels and windows by hand, the network's causality, acting as in training, learning, resume."""

import dataclasses
import warnings
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from probe import OPTIMISED, Casino, Push

from safeicrl.agents.api import with_options
from safeicrl.agents.decision import RTG_FLOOR, DecisionAgent
from safeicrl.agents.reference import PlannerAgent
from safeicrl.algos.registry import algo_name
from safeicrl.algos.safe_ad import SafeAD, SafeADConfig
from safeicrl.cli import main
from safeicrl.envs.api import replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import BeyondTraining, UserError
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.histories.demonstrations import EpsConfig, NoisyPlanner, collect_demonstrations
from safeicrl.histories.store import open_histories
from safeicrl.histories.windows import make_windows, measure_scales, to_go
from safeicrl.log import read_metrics
from safeicrl.nets.decision_transformer import DecisionConfig, DecisionNet, Steps, drop, dropout_key, unit_scales
from safeicrl.policies import checkpoint
from safeicrl.policies.policy import Policy, load_policy
from safeicrl.recipes.presets import experiment, preset
from safeicrl.tokens import first_token
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.trial import run_trials, sample_queue

ROOM = SafeDarkRoom(size=3, obstacles=2, max_steps=5, episodes=4, train_budget=(1.0, 3.0), test_budget=(0.0, 3.0))
SMALL = DecisionConfig(embedding=8, width=16, layers=2, heads=2, context=12, attention_dropout=0.0)


def made(rows=3, steps=40, seed=0, length=5):
    """Histories of nothing: random moves, episodes of `length` or less, the last one cut."""
    rng = np.random.default_rng(seed)
    done = (rng.random((rows, steps)) < 0.1).astype(np.uint8)
    for row in done:
        age = 0
        for t in range(steps):
            age += 1
            row[t] = 1 if row[t] else 2 * (age == length)
            age = 0 if row[t] else age
        row[-1] = 0
    observation = rng.integers(0, 3, (rows, steps, 2)).astype(np.uint8)
    observation[:, :, 0] = np.arange(rows)[:, None]  # tells the histories apart
    return SimpleNamespace(
        observation=observation,
        action=rng.integers(0, 5, (rows, steps)).astype(np.uint8),
        reward=(done == 1).astype(np.uint8),
        cost=(rng.random((rows, steps)) < 0.3).astype(np.uint8),
        done=done,
    )


def network(config=SMALL, seed=0):
    return random_weights(DecisionNet, config, ROOM.spec, seed=seed)


def random_steps(config=SMALL, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, config.context)
    number = lambda: rng.random(shape).astype(np.float32)  # noqa: E731
    return Steps(
        observation=rng.integers(0, 3, (*shape, 2)), action=rng.integers(0, 5, shape), reward=number(),
        cost=number(), rtg=number(), ctg=number(), time=rng.integers(0, 5, shape),
    )  # fmt: skip


def put(steps, at, **values):
    """The steps with other values at one time."""
    found = {name: np.array(getattr(steps, name)) for name in values}
    for name, value in values.items():
        found[name][:, at] = value
    return replace(steps, **found)


# -- labels and windows -------------------------------------------------------------------------------------


def test_to_go_by_hand():
    rewards, done = np.array([0, 1, 2, 0, 5, 1]), np.array([0, 0, 1, 0, 2, 1])
    assert to_go(rewards, done).tolist() == [3, 3, 2, 5, 5, 1]


def test_a_history_becomes_labelled_strands():
    histories = SimpleNamespace(
        observation=np.arange(14, dtype=np.uint8).reshape(1, 7, 2),
        action=np.array([[0, 1, 2, 3, 4, 0, 1]], np.uint8),
        reward=np.array([[0, 1, 0, 0, 1, 0, 1]], np.uint8),
        cost=np.array([[1, 0, 1, 1, 0, 1, 0]], np.uint8),
        done=np.array([[0, 1, 0, 2, 1, 1, 0]], np.uint8),  # episodes of 2, 2, 1, 1 steps; the last has no end
    )
    whole = make_windows(histories, 2).steps
    assert whole.rtg.tolist() == [1, 1, 0, 0, 1, 0]
    assert whole.ctg.tolist() == [1, 0, 2, 1, 0, 1]
    assert whole.time.tolist() == [0, 1, 0, 1, 0, 0]
    halves = make_windows(histories, 2, stride=2)  # episodes 0 and 2, then 1 and 3
    assert halves.steps.action.tolist() == [0, 1, 4, 2, 3, 0]
    assert sorted(halves.starts.tolist()) == [0, 1, 3, 4]
    scales = measure_scales(halves, ROOM.spec)
    assert scales.returns.tolist() == [0, 1]
    assert scales.costs.tolist() == [0, 2]


@pytest.mark.parametrize("stride", [1, 3])
def test_windows_never_cross_histories(stride):
    histories = made()
    windows = make_windows(histories, 6, stride=stride)
    steps = jax.jit(lambda key: windows.sample(key, 500, 6))(jax.random.key(0))
    which = np.asarray(steps.observation[..., 0])
    assert (which == which[:, :1]).all()
    assert set(which[:, 0]) == {0, 1, 2}
    time = np.asarray(steps.time)
    assert ((time[:, 1:] == time[:, :-1] + 1) | (time[:, 1:] == 0)).all()
    # the next episode begins only where the one before has ended: what is left to get is what the step got
    ends = time[:, 1:] == 0
    assert (np.asarray(steps.ctg)[:, :-1] == np.asarray(steps.cost)[:, :-1])[ends].all()


def test_a_share_of_the_histories_is_whole_ones_in_the_same_program():
    one, all_of_them = (make_windows(made(), 6, share=share) for share in (0.3, 1.0))
    assert jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, all_of_them)
    seen = one.sample(jax.random.key(0), 300, 6).observation[..., 0]
    assert len(np.unique(seen)) == 1


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="a window of 41 steps is longer than the longest history: 3"):
        make_windows(made(), 41)
    with pytest.raises(UserError, match="every 9th episode"):
        make_windows(made(), 12, stride=9)


# -- the network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", ["one", "four"])
def test_no_prediction_sees_its_own_action_or_the_future(tokens):
    net = network(dataclasses.replace(SMALL, tokens=tokens))
    forward = jax.jit(lambda steps: net(steps, unit_scales(ROOM.spec)))
    predict = lambda steps: np.asarray(forward(steps))  # noqa: E731
    steps, other, at = random_steps(), random_steps(seed=1), 6
    later = jax.tree.map(lambda a, b: np.concatenate([a[:, : at + 1], b[:, at + 1 :]], 1), steps, other)
    later = put(later, at, action=(steps.action[:, at] + 1) % 5, reward=9.0, cost=9.0)
    before, after = predict(steps), predict(later)
    np.testing.assert_allclose(before[:, : at + 1], after[:, : at + 1], atol=1e-5)
    assert np.abs(before[:, at + 1] - after[:, at + 1]).min() > 1e-5
    for name in ("observation", "rtg", "ctg", "time"):  # these it does see, at once
        value = getattr(steps, name)[:, at]
        changed = put(steps, at, **{name: value * 0.5 if value.dtype == np.float32 else (value + 1) % 3})
        assert np.abs(before[:, at] - predict(changed)[:, at]).max() > 1e-5, name
    for name in ("action", "reward", "cost"):  # and these at the next step
        changed = put(steps, at, **{name: (getattr(steps, name)[:, at] + 1) % 5})
        assert np.abs(before[:, at + 1] - predict(changed)[:, at + 1]).max() > 1e-5, name


def test_the_papers_size_is_25_million_parameters():
    net = eqx.filter_eval_shape(DecisionNet, DecisionConfig(), SafeDarkRoom().spec, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(net.layers)) == pytest.approx(25.2e6, rel=0.01)


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = jnp.ones((400, 400))
    y = drop(x, 0.3, dropout_key(jax.random.key(0)))
    cut = round(256 * 0.3) / 256
    assert (y == 0).mean() == pytest.approx(cut, abs=0.005)
    assert jnp.unique(y).tolist() == pytest.approx([0, 1 / (1 - cut)])
    assert y.mean() == pytest.approx(1, abs=0.01)
    rows = drop(x, 0.5, dropout_key(jax.random.key(1)), shape=(400, 1))
    assert ((rows == 0).all(1) | (rows == 2).all(1)).all()
    assert drop(x, 0.5, None) is x


# -- acting -------------------------------------------------------------------------------------------------


def window_by_hand(trials, scales, row, t, context):
    """What the agent should have before it at step t, from the record of the trial alone."""
    first = max(0, t + 1 - context)
    get = lambda x: np.asarray(x)[row, : t + 1]  # noqa: E731
    token, done = trials.token, np.asarray(trials.terminated | trials.truncated)[row, : t + 1].copy()
    reward, cost, start = get(trials.reward).copy(), get(trials.cost).copy(), get(token.start)
    began = np.flatnonzero(start)[-1]
    done[-1] = True
    rtg, ctg = to_go(reward, done), to_go(cost, done)
    budget = float(get(token.ctg)[began])
    target = float(scales.returns[1]) * max(RTG_FLOOR, budget / ROOM.test_budget[1])
    for i in range(began, t + 1):  # of the present episode nothing is known but what was asked
        rtg[i], ctg[i] = target - reward[began:i].sum(), budget - cost[began:i].sum()
    kept = slice(first, t + 1)
    return Steps(
        observation=get(token.observation)[kept], action=get(trials.action)[kept], reward=reward[kept],
        cost=cost[kept], rtg=rtg[kept], ctg=ctg[kept], time=get(token.time)[kept],
    )  # fmt: skip


@pytest.mark.parametrize("tokens", ["one", "four"])
def test_acting_step_by_step_is_the_training_forward_of_the_relabelled_window(tokens):
    config = dataclasses.replace(SMALL, tokens=tokens, context=8)
    scales = measure_scales(make_windows(made(), 8), ROOM.spec)
    net = network(config, seed=1)
    net = eqx.tree_at(lambda n: n.head.weight, net, net.head.weight * 100)  # far from ties
    agent = DecisionAgent(net=net, scales=scales, temperature=0.0)
    tasks, budgets = sample_queue(ROOM, "train", (0.0, 4.0), (6, 1), jax.random.key(2))
    trials = run_trials(ROOM, agent, tasks, budgets, jax.random.key(3), episodes=4, steps=20)
    trials = jax.tree.map(np.asarray, trials)
    assert trials.terminated.any()
    predict = jax.jit(lambda steps: net(steps, scales))
    for row in range(6):
        for t in range(20):
            if not trials.valid[row, t]:
                break
            window = window_by_hand(trials, scales, row, t, config.context)
            size = len(window.reward)
            # whatever fills the rest of the window is later and does not matter
            padded = jax.tree.map(lambda x: np.pad(x, ((0, 8 - len(x)), *[(0, 0)] * (x.ndim - 1)))[None], window)
            logits = predict(padded)[0, size - 1]
            assert logits.argmax() == trials.action[row, t], (row, t)


def test_the_window_holds_what_is_derived_by_hand():
    scales = measure_scales(make_windows(made(), 8), ROOM.spec)
    net = network(dataclasses.replace(SMALL, context=7))
    agent = DecisionAgent(net=net, scales=scales)
    tasks, budgets = sample_queue(ROOM, "train", (1.0, 4.0), (5, 2), jax.random.key(2))
    trials = run_trials(ROOM, agent, tasks, budgets, jax.random.key(3), episodes=2, steps=16)
    trials = jax.tree.map(np.asarray, trials)
    remember, memory = eqx.filter_jit(agent.remember), agent.init(None, 5)
    for t in range(16):
        memory = remember(memory, jax.tree.map(lambda x, t=t: x[:, t], trials.token))
        seen = jax.tree.map(np.asarray, memory)
        for row in range(5):
            # a new trial in the row's queue begins with an empty window
            began = int(np.flatnonzero(np.asarray(trials.token.first[row, : t + 1]))[-1])
            own = jax.tree.map(lambda x, b=began: x[:, b:], trials)
            expected = window_by_hand(own, scales, row, t - began, 7)
            size = len(expected.reward)
            assert seen.length[row] == size
            for name in ("observation", "rtg", "ctg", "time"):
                found = getattr(seen.steps, name)[row, :size]
                np.testing.assert_allclose(found, getattr(expected, name), atol=1e-5, err_msg=f"{name} {row} {t}")
            for name in ("action", "reward", "cost"):  # still open at the last step
                found = getattr(seen.steps, name)[row, : size - 1]
                np.testing.assert_allclose(found, getattr(expected, name)[:-1], err_msg=f"{name} {row} {t}")


def test_budgets_beyond_the_data_are_warned_of():
    scales = replace(unit_scales(ROOM.spec), costs=jnp.array([0.0, 2.0]))
    agent = DecisionAgent(net=network(), scales=scales)
    policy = Policy(env=ROOM, agent=agent, card={"kind": "decision"})
    with pytest.warns(BeyondTraining, match="trained on budgets from 0 to 2, not 3"):
        policy.warn_beyond(budgets=[1.0, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.warn_beyond(budgets=[0.0, 2.0])


# -- learning -----------------------------------------------------------------------------------------------


def casino_histories(rows=64, steps=120, seed=0):
    """Learners of the Casino's good arm, one pull an episode: at first any arm, at last the good one."""
    rng = np.random.default_rng(seed)
    good = rng.integers(1, 3, (rows, 1))
    noisy = rng.random((rows, steps)) < np.linspace(1, 0, steps)
    action = np.where(noisy, rng.integers(0, 3, (rows, steps)), good)
    return SimpleNamespace(
        observation=np.zeros((rows, steps, 1), np.float32),
        action=action.astype(np.uint8),
        reward=np.where(action == 0, 0.25, action == good).astype(np.float32),
        cost=(action > 0).astype(np.uint8),
        done=np.full((rows, steps), 2, np.uint8),
    )


def test_an_improving_history_is_learned_and_continued():
    env = Casino(steps=1, episodes=10)
    net = DecisionConfig(embedding=8, width=16, layers=1, heads=2, context=12, attention_dropout=0.0)
    config = SafeADConfig(iterations=4, updates=60, batch=32, warmup=20, stride=6, learning_rate=3e-3, net=net)
    algo = SafeAD(env, config, casino_histories())
    update = eqx.filter_jit(lambda algo, state: algo.update(state), compiler_options=OPTIMISED)
    state, losses = eqx.filter_jit(algo.init)(jax.random.key(0)), []
    for _ in range(config.iterations):
        state, metrics = update(algo, state)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    # asked for all an episode can give, the agent must find the arm that gives it, and then stay with it
    results = evaluate(env, algo.agent(state), tasks=300, budgets=(5.0, 5.0), rows=300)
    returns = results.returns.mean(axis=0)
    assert 0.4 < returns[0] < 0.6
    assert returns[5:].mean() > 0.85
    wiped, _ = with_options(env, algo.agent(state), wipe=True)
    assert evaluate(env, wiped, tasks=300, budgets=(5.0, 5.0), rows=300).returns[:, 5:].mean() < 0.65


@pytest.fixture(scope="module")
def config():
    net = dataclasses.replace(SMALL, layers=1)
    return SafeADConfig(iterations=4, updates=3, batch=8, warmup=2, net=net)


def test_resumed_equals_uninterrupted(tmp_path, config):
    algo, short = SafeAD(ROOM, config, made()), EvalConfig(every=0, tasks=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(algo, TrainConfig(evaluation=short), out=whole)
    train(algo, TrainConfig(iterations=2, evaluation=short), out=parts)
    train(algo, TrainConfig(iterations=4, evaluation=short), out=parts, resume=True)
    one, two = (checkpoint.read(x / "checkpoint.safetensors", kind="checkpoint")[0] for x in (whole, parts))
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    lines = [line for line in read_metrics(whole / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 4
    assert {"accuracy", "grad_norm", "tokens_per_second"} <= lines[0].keys()
    assert lines[-1]["env_steps"] == 4 * 3 * 8 * SMALL.context

    policy = load_policy(whole)
    assert policy.card["kind"] == "decision"
    assert policy.card["training"]["algo"]["name"] == "safe-ad"
    assert policy.agent.scales.costs.tolist() == algo.scales.costs.tolist()
    policy.start(budget=1.0)
    assert 0 <= policy.act([1, 1]) < 5


def pushes(action):
    """Histories of Push; `action` is a function of the observation."""
    rng = np.random.default_rng(0)
    observation = rng.normal(3, 2, (4, 40, 1)).astype(np.float32)
    return SimpleNamespace(
        observation=observation,
        action=action(observation, rng).astype(np.float32),
        reward=rng.normal(size=(4, 40)).astype(np.float32),
        cost=rng.random((4, 40)).astype(np.float32),
        done=np.tile(np.array([0, 0, 0, 2], np.uint8), (4, 10)),
    )


def push_config(**net):
    net = dataclasses.replace(SMALL, layers=1, context=8, residual_dropout=0.0, embedding_dropout=0.0, **net)
    return SafeADConfig(iterations=2, updates=100, batch=16, warmup=0, learning_rate=3e-3, net=net)


def test_real_valued_actions_by_squared_error():
    env, histories = Push(), pushes(lambda seen, rng: np.tanh(seen - 3))  # a policy that can be copied
    observation = histories.observation
    algo = SafeAD(env, push_config(), histories)
    assert algo.scales.mean[0] == pytest.approx(observation.mean(), rel=1e-4)

    @eqx.filter_jit
    def begin(algo):
        steps, state = algo.windows.sample(jax.random.key(0), 16, 8), algo.init(jax.random.key(0))
        return state, state.net(steps, algo.scales), steps.action, algo.loss(state.net, steps, None)[0]

    state, means, action, loss = begin(algo)
    assert loss == pytest.approx(np.mean((np.asarray(means) - np.asarray(action)) ** 2), rel=1e-5)
    update = eqx.filter_jit(lambda algo, state: algo.update(state))
    for _ in range(2):
        state, metrics = update(algo, state)
    assert metrics["loss"] < 0.1 * loss
    results = evaluate(env, algo.agent(state), tasks=3)
    assert np.isfinite(results.returns).all()
    with pytest.raises(UserError, match="no temperature"):
        evaluate(env, with_options(env, algo.agent(state), temperature=1.0)[0], tasks=3)


def test_sampled_actions_by_their_density():
    env, rows = Push(), 2000
    algo = SafeAD(env, push_config(actions="sampled"), pushes(lambda seen, rng: rng.uniform(-0.9, 0.9, seen.shape)))

    @eqx.filter_jit
    def everything(algo):
        state = algo.init(jax.random.key(0))
        steps = algo.windows.sample(jax.random.key(0), 16, 8)
        policy, (loss, seen) = state.net.policy(state.net(steps, algo.scales)), algo.loss(state.net, steps, None)
        agent = algo.agent(state)
        token = jax.vmap(lambda _: first_token(env.spec, jnp.array([5.0]), jnp.float32(1)))(jnp.arange(rows))
        act = lambda agent: agent.act(agent.init(None, rows), token, jax.random.key(1))[1]  # noqa: E731
        acts = [act(dataclasses.replace(agent, temperature=0.25)), act(agent)]
        return steps.action, policy, loss, seen, acts

    action, policy, loss, seen, acts = jax.tree.map(np.asarray, everything(algo))
    # by hand: the density of a = tanh(x), x normal, is that of x over 1 − a²
    spread = np.exp(policy.log_std)
    density = np.exp(-0.5 * ((np.arctanh(action) - policy.mean) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    assert loss == pytest.approx(-np.log(density / (1 - action**2)).mean(), abs=1e-4)
    assert seen["error"] == pytest.approx(((np.tanh(policy.mean) - action) ** 2).mean(), rel=1e-3)
    cool, own = (np.arctanh(x.astype(float)).std() for x in acts)
    assert own > 0.3
    assert cool == pytest.approx(own / 2, rel=0.01)  # the same draws, half as far from the mean


def test_settings_that_cannot_be_are_refused(tmp_path):
    for values, why in (
        ({"share": 1.5}, "share must be at most 1"),
        ({"batch": 0}, "batch must be an integer ≥ 1"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ):
        with pytest.raises(UserError, match=why):
            SafeADConfig(**values)
    for values, why in (
        ({"width": 10, "heads": 4}, "multiple of heads"),
        ({"attention_dropout": 1.0}, "attention_dropout must be below 1"),
        ({"tokens": "three"}, "tokens must be one of four, one"),
        ({"actions": "most"}, "actions must be one of mean, sampled"),
    ):
        with pytest.raises(UserError, match=why):
            DecisionConfig(**values)
    with pytest.raises(UserError, match="no learning histories"):
        SafeAD(ROOM, SafeADConfig(histories=str(tmp_path / "none")))
    assert algo_name(SafeADConfig()) == "safe-ad"


# -- demonstrations -----------------------------------------------------------------------------------------


def test_noise_falls_in_a_straight_line():
    agent = NoisyPlanner(planner=PlannerAgent(env=ROOM), config=EpsConfig(steps=1000, floor=0.1))
    found = [float(agent.epsilon(jnp.int32(step))) for step in (0, 450, 900, 999)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_demonstrations_are_histories_that_end_at_the_planners_best(tmp_path):
    config = EpsConfig(tasks=6, limits=(0.0, 2.0), steps=600, group=5)
    histories = collect_demonstrations(ROOM, config, out=tmp_path / "eps")
    open_histories(tmp_path / "eps", env=ROOM, verify=True)
    assert histories.observation.shape == (12, 600, 2)
    assert histories.limit.tolist() == [0, 2] * 6
    early, late = [], []
    for index in range(12):
        sums = histories.episodes(index)
        tail = sums.starts >= 540  # no noise from here on
        assert (sums.costs[tail] <= histories.limit[index]).all()
        assert len(np.unique(sums.returns[tail])) == 1  # the same best, over and over
        early.append(sums.returns[sums.starts < 100].mean())
        late.append(sums.returns[tail].mean())
    assert np.mean(late) > np.mean(early)
    with pytest.raises(UserError, match="SafeDarkRoom only, not in Casino"):
        collect_demonstrations(Casino(), config, out=tmp_path / "no")


def test_the_command_line_collects_them(tmp_path, capsys):
    room = [f"{name}={getattr(ROOM, name)}" for name in ("size", "obstacles", "max_steps", "episodes")]
    room += [f"{name}={list(getattr(ROOM, name))}" for name in ("train_budget", "test_budget")]
    asked = ["--by", "eps", "--env-args", *room, "--tasks", "2", "--limits", "1", "--steps", "60"]
    assert main(["collect", *asked, "--out", str(tmp_path / "eps")]) == 0
    assert open_histories(tmp_path / "eps", env=ROOM).limit.tolist() == [1, 1]
    assert "while learning" in capsys.readouterr().out
    assert main(["collect", "--by", "nobody"]) == 2
    assert "unknown maker of histories 'nobody'; known: eps, ppo-lag" in capsys.readouterr().err


def sizes(algo: SafeADConfig) -> tuple[int, ...]:
    return (algo.net.embedding, algo.net.width, algo.net.layers, algo.net.heads, algo.net.context, algo.batch)


def test_the_sizes_are_those_of_the_papers_table():
    room = (64, 512, 8, 8, 100, 512)
    assert sizes(experiment("safe-ad", "safe-dark-room").algo) == room
    assert sizes(preset("darkroom-safe-ad-tuned").stages[0].experiment.algo) == room
    pytest.importorskip("mujoco")
    assert sizes(experiment("safe-ad", "safe-dark-point").algo) == (512, 256, 8, 8, 200, 128)

"""Playing and learning side by side: what the lanes play, who played it, resuming, what is refused."""

import copy
import dataclasses
import functools
import threading
import time
from types import SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import pytest
from rich.console import Console
from test_train import same_arrays, timeless

from safeicrl.algos.api import METRICS
from safeicrl.algos.scared import Scared, ScaredConfig
from safeicrl.envs.api import record
from safeicrl.envs.dark_mujoco import SafeDarkPoint
from safeicrl.envs.faults import NO_FAULT
from safeicrl.envs.mujoco import physics
from safeicrl.envs.safe_velocity import SafeVelocityAnt, SafeVelocityHalfCheetah
from safeicrl.errors import UserError
from safeicrl.log import read_metrics
from safeicrl.machine.busy import BusyClock
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.overlap.lanes import Lanes, Stopped, check_env
from safeicrl.overlap.overlapped import Overlapped
from safeicrl.train import EvalConfig, TrainConfig, train
from safeicrl.training import steps
from safeicrl.training.state import first_state
from safeicrl.trial import run_trials

ENV = SafeVelocityHalfCheetah(max_steps=3, episodes=2)
CONFIG = ScaredConfig(
    iterations=4, rows=4, queue=2, segments=2, overlap=2,
    net=NetConfig(width=8, layers=1, heads=2, context=6, dtype="float32"),
    ppo=PPOConfig(minibatch=2, epochs=2, warmup=0, learning_rate=(0.03, 0.03)),
)  # fmt: skip
ALGORITHM = Scared(ENV, CONFIG)


@pytest.fixture(scope="module")
def step():
    """An iteration with everything compiled, and the first state."""
    state = eqx.filter_jit(first_state)(ALGORITHM, 0, 1)
    found = Overlapped(ALGORITHM, state, functools.partial(steps.judge, ALGORITHM))
    yield found, state
    found.close()


@eqx.filter_jit
def log_prob(net, trials):
    """Of what was played, under a network that reads whole rows."""
    return net.distribution(net.trunk.forward(trials.token, trials.trial)).log_prob(trials.action)


def same_tree(one, other) -> bool:
    pairs = zip(*(jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (one, other)), strict=True)
    return all(bool((a == b).all()) for a, b in pairs)


def test_a_lane_plays_what_one_program_plays(step):
    found, state = step
    _, parts, arrays = found.programs["rows"](eqx.filter(state, eqx.is_array), np.bool_(False))
    agent = ALGORITHM.explorer(state, 0.0)
    played = [future.result() for future in found.lanes.start(arrays, parts)]
    play = functools.partial(run_trials, ENV, episodes=2, steps=6)  # in one segment: the steps are the same
    whole = play(agent, parts[1].tasks, parts[1].budgets, parts[1].key, lengths=parts[1].lengths)
    assert bool(played[1].valid.all())
    for got, wanted in zip(*(jax.tree.leaves(x) for x in (played[1], whole)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert not np.allclose(played[0].action, played[1].action)


def test_the_ratio_is_to_the_policy_that_played_one_iteration_ago(step):
    found, first = step
    second, _ = found(first)
    third, metrics = found(second)
    assert same_tree(second.player, first.optimiser.net.policy)
    assert same_tree(third.player, second.optimiser.net.policy)
    assert not same_tree(third.player, third.optimiser.net.policy)
    for future in found.under_way[1]:  # played while `third` was learned
        trials = future.result()
        recorded = trials.extras["log_prob"]
        np.testing.assert_allclose(log_prob(third.player, trials), recorded, atol=1e-4)
        assert np.abs(log_prob(third.optimiser.net.policy, trials) - recorded).max() > 1e-3
    assert metrics["env_steps"] == [[24]]
    assert int(third.iteration) == 2
    assert metrics["kl"] > 1e-6  # already at the first minibatch, the learner is not who played


@record
class State:
    """Of an algorithm whose next player is the old value."""

    value: np.ndarray
    player: np.ndarray
    key: int


def test_a_bad_iteration_is_undone_but_the_next_player_moves_on():
    old = State(value=np.ones(1), player=np.zeros(1), key=1)
    new = State(value=np.full(1, np.nan), player=np.ones(1), key=2)
    metrics = {name: np.zeros(1) for name in METRICS} | {"fault": NO_FAULT}
    for algorithm, player in ((SimpleNamespace(moves_on=("player",)), 1), (SimpleNamespace(), 0)):
        kept, judged = steps.judge(algorithm, old, new, metrics)
        assert (float(kept.value[0]), float(kept.player[0]), kept.key) == (1, player, 2)
        assert bool(judged["rolled_back"])


def renewed(found: Overlapped) -> Overlapped:
    """The same programs for another run."""
    other = copy.copy(found)
    other.lanes, other.under_way = Lanes(found.lanes.programs, 2), None
    return other


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


def test_a_resumed_run_is_the_uninterrupted_one_and_says_who_waited(step, tmp_path, monkeypatch):
    threads = lane_threads()
    monkeypatch.setattr(steps, "_compile_overlapped", lambda *_: renewed(step[0]))
    monkeypatch.setattr("safeicrl.train._Run.evaluate", lambda self, state: [])
    config = TrainConfig(iterations=3, checkpoint_minutes=9.0, evaluation=EvalConfig(every=0))
    quiet = Console(quiet=True)
    train(ALGORITHM, config, out=tmp_path / "whole", console=quiet)
    train(ALGORITHM, dataclasses.replace(config, iterations=2), out=tmp_path / "parts", console=quiet)
    train(ALGORITHM, config, out=tmp_path / "parts", resume=True, console=quiet)
    same_arrays(tmp_path / "whole", tmp_path / "parts")
    clocks = ("physics_share", "learner_idle", "collector_idle")
    both = [timeless(tmp_path / name) for name in ("whole", "parts")]
    assert [{k: v for k, v in line.items() if k not in clocks} for line in both[0]] == [
        {k: v for k, v in line.items() if k not in clocks} for line in both[1]
    ]
    for line in read_metrics(tmp_path / "whole" / "metrics.jsonl"):
        assert all(0 <= line[name] <= 1 for name in clocks)
    assert lane_threads() == threads


def test_lanes_stop_when_told_and_pass_errors_on(step, monkeypatch):
    found, state = step
    lanes = Lanes(found.lanes.programs, 2)
    _, parts, agent = found.programs["rows"](eqx.filter(state, eqx.is_array), np.bool_(False))
    monkeypatch.setattr(lanes.worlds[0], "advance", lambda packed: 1 / 0)
    broken, sound = lanes.start(agent, parts)
    with pytest.raises(ZeroDivisionError):
        broken.result()
    sound.result()
    lanes.stopping.set()
    with pytest.raises(Stopped):
        lanes.start(agent, parts)[1].result()
    lanes.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap": 3}, "rows must be a multiple of overlap, got 4 and 3"),
        ({"overlap": -1}, "overlap must be an integer"),
        ({"optimiser": "ddpg"}, "overlap is for ppo, got the optimiser 'ddpg'"),
    ],
)
def test_settings_that_make_no_sense(changes, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(CONFIG, **changes)


def test_one_device(tmp_path):
    with pytest.raises(UserError, match="with overlap, devices must be 1, got 2"):
        train(ALGORITHM, TrainConfig(iterations=2), out=tmp_path, console=Console(quiet=True), devices=2)


@pytest.mark.parametrize("changes", [{"seeds": 2}, {"chunk": 2, "iterations": 2}])
def test_one_seed_and_one_iteration_at_a_time(tmp_path, changes):
    config = TrainConfig(**{"iterations": 2, "evaluation": EvalConfig(every=0), **changes})
    with pytest.raises(UserError, match=f"with overlap, {next(iter(changes))} must be 1, got 2"):
        train(ALGORITHM, config, out=tmp_path, console=Console(quiet=True))


def test_only_worlds_on_the_cores_can_overlap():
    check_env(ENV)
    check_env(SafeVelocityAnt(engine="euler"))
    for env in (SafeDarkPoint(), SimpleNamespace()):
        with pytest.raises(UserError, match="overlap is for environments that MuJoCo moves on the host's cores"):
            check_env(env)


def test_the_clock_counts_wall_time_once():
    clock, inside = BusyClock(), threading.Barrier(3)

    def work():
        with clock:
            inside.wait()
            time.sleep(0.05)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    assert 0.04 < clock.seconds < time.perf_counter() - begin + 0.04  # twice the time if each counted
    still = clock.seconds
    time.sleep(0.01)
    assert clock.seconds == still


def test_worlds_driven_from_the_host_do_what_the_callback_does():
    job = ENV.job
    model = physics.models.load(job.robot)
    start = np.random.default_rng(0).normal(size=(3, physics.state_size(job.robot) + model.nu)).astype(np.float32)
    start[:, : model.nq] = model.qpos0
    before = physics.seconds()
    np.testing.assert_array_equal(
        physics.HostWorlds(job, 3).advance(start), physics._advance_host(job, False, start)
    )
    assert physics.seconds() > before

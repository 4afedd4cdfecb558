"""The rules of SafeDarkMujoco and SafeVelocity, against answers worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.envs import dark_mujoco as dark
from safeicrl.envs import safe_velocity as velocity
from safeicrl.envs import spawn
from safeicrl.envs.registry import make_env
from safeicrl.errors import UserError

pytest.importorskip("mujoco")

KEY = jax.random.key(0)
WORLDS = ("safe-dark-point", "safe-dark-car", "safe-velocity-half-cheetah", "safe-velocity-ant")
CORNER = [(-1.4, -1.4)] * 8


@functools.cache
def compiled(env):
    return jax.jit(env.step)


def drive(env, task, qpos, action, steps=1):
    """The last step's outcome from `qpos` at rest."""
    state, _ = env.reset_to(jnp.asarray(qpos, float), jnp.zeros(3))
    for _ in range(steps):
        state, out = compiled(env)(KEY, state, jnp.asarray(action, float), task)
    return state, out


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_keeps_the_interface(name):
    env = make_env(name)
    tasks = jax.jit(jax.vmap(lambda key: env.sample_task(key, "test")))(jax.random.split(KEY, 3))
    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step, (None, 0, 0, 0)))
    state, seen = reset(jax.random.split(KEY, 3), tasks)
    after, out = step(KEY, state, jnp.full((3, env.spec.action.size), 0.5), tasks)
    assert seen.shape == out.observation.shape == (3, env.spec.observation.size)
    assert jax.vmap(env.task_features)(tasks).shape == (3, env.spec.task_features)
    # A trial runner puts reset states in place of finished ones: same shapes and types, or scan refuses.
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert seen.dtype == out.observation.dtype == out.reward.dtype == out.cost.dtype == jnp.float32
    assert (env.spec.max_steps, env.spec.episodes, env.spec.cost_unit) == (75, 20, 1.0)
    assert not np.array_equal(seen, out.observation)
    assert hash(env) == hash(make_env(name))


def test_point_and_car_see_position_and_rotation():
    point, car = make_env("safe-dark-point"), make_env("safe-dark-car")
    for env in (point, car):
        _, seen = env.reset_to(*env._rest(jnp.float32(0.5)))
        turn = np.array([[np.cos(0.5), -np.sin(0.5), 0], [np.sin(0.5), np.cos(0.5), 0], [0, 0, 1]])
        np.testing.assert_allclose(seen, np.concatenate([[0, 0, 0.1], turn.ravel()]), atol=1e-6)
    starts = jax.jit(jax.vmap(lambda key: point.reset(key, None)[1]))(jax.random.split(KEY, 200))
    assert np.ptp(np.arctan2(starts[:, 6], starts[:, 3])) > 5.9  # faces anywhere
    np.testing.assert_array_equal(starts[:, :2], 0.0)


def test_reaching_the_goal_pays_one_and_ends_the_episode_there():
    env = make_env("safe-dark-point", macro_steps=5)
    task = env.make_task((1.0, 0.0), CORNER)
    alone = make_env("safe-dark-point", macro_steps=1)
    # At full thrust from 0.6985 the Point crosses x = 0.7 within the five simulation steps, not at once.
    state, out = drive(env, task, (0.6985, 0, 0), (1, 0))
    assert (out.reward, bool(out.terminated), bool(out.truncated), out.cost) == (1, True, False, 0)
    passed = [drive(alone, task, (0.6985, 0, 0), (1, 0), steps=n + 1) for n in range(3)]
    first = next(i for i, (_, step) in enumerate(passed) if step.terminated)
    assert 0 < first < 4
    np.testing.assert_allclose(state.physics.qpos, passed[first][0].physics.qpos, atol=1e-6)
    _, out = drive(env, task, (0.5, 0, 0), (1, 0))
    assert (out.reward, bool(out.terminated)) == (0, False)


def test_cost_counts_simulation_steps_inside_a_hazard_until_the_goal():
    env = make_env("safe-dark-point")
    task = env.make_task((1.0, 0.0), [(0.5, 0.0), (0.5, 0.1), *CORNER[:6]])
    _, out = drive(env, task, (0.5, 0, 0), (0, 0))
    assert out.cost == 5  # five simulation steps; two hazards at once still cost 1
    _, out = drive(env, task, (0.0, 0.5, 0), (0, 0))
    assert out.cost == 0
    _, out = drive(env, task, (0.3 - 1e-3, 0, 0), (1, 0))  # enters at x > 0.3
    assert 0 < out.cost < 5
    near = env.make_task((0.8, 0.0), [(0.5, 0.0), *CORNER[:7]])
    _, out = drive(env, near, (0.5, 0, 0), (0, 0))
    assert (out.cost, out.reward) == (1, 1)  # the goal's edge: ends at the first simulation step, with its cost


def test_the_time_limit_truncates():
    env = make_env("safe-dark-point", max_steps=2)
    task = env.make_task((1.0, 0.0), CORNER)
    assert [bool(drive(env, task, (0, 0, 0), (0, 0), steps=n)[1].truncated) for n in (1, 2)] == [False, True]


def test_actions_are_clipped():
    env = make_env("safe-dark-point")
    task = env.make_task((1.0, 1.0), CORNER)
    wild, full = (drive(env, task, (0, 0, 0), action)[0] for action in ((9, -7), (1, -1)))
    np.testing.assert_array_equal(wild.physics.qpos, full.physics.qpos)


def test_divergence_ends_the_episode_of_that_world_only():
    env = make_env("safe-velocity-half-cheetah", engine="c")
    task = env.make_task(1.0)
    state, seen = jax.jit(jax.vmap(lambda key: env.reset(key, task)))(jax.random.split(KEY, 2))
    action = jnp.zeros((2, 6)).at[0, 0].set(jnp.nan)
    with pytest.warns(RuntimeWarning, match="1 of 2 MuJoCo worlds diverged"):
        after, out = jax.block_until_ready(
            jax.jit(jax.vmap(env.step, (None, 0, 0, None)))(KEY, state, action, task)
        )
    np.testing.assert_array_equal(out.terminated, [True, False])
    np.testing.assert_array_equal(after.failed, [True, False])
    np.testing.assert_array_equal(out.observation[0], seen[0])
    assert np.isfinite(out.reward).all()
    assert out.reward[0] == out.cost[0] == 0


@pytest.mark.parametrize("split", ["train", "test"])
def test_layouts_keep_their_distances_and_follow_the_split(split):
    env = make_env("safe-dark-point")
    tasks = jax.jit(jax.vmap(lambda key: env.sample_task(key, split)))(jax.random.split(KEY, 2000))
    objects = np.concatenate([np.zeros((2000, 1, 2)), tasks.goal[:, None], tasks.hazards], axis=1)
    keepouts = np.array([0.4, 0.305] + [0.18] * 8)
    distance = np.linalg.norm(objects[:, :, None] - objects[:, None], axis=-1) + 9 * np.eye(10)
    assert (distance >= keepouts[:, None] + keepouts - 1e-6).all()
    assert (abs(objects) <= (1.5 - keepouts)[:, None] + 1e-6).all()
    # The goal is the first object, so its distribution is the cells' own, cut by start and arena keep-outs.
    weights = np.exp(spawn.log_weights(9, 0.5, split))
    fine = (np.arange(900) + 0.5) / 300 - 1.5
    x, y = np.meshgrid(fine, fine)
    density = weights.repeat(100, 0).repeat(100, 1)
    density = density * (np.hypot(x, y) >= 0.705) * (np.maximum(abs(x), abs(y)) <= 1.195)
    expected = (density * np.hypot(x, y)).sum() / density.sum()
    assert abs(np.linalg.norm(tasks.goal, axis=-1).mean() - expected) < 0.02


def test_multipliers_are_split_and_drawn_evenly():
    env = make_env("safe-velocity-ant")
    assert set(velocity.TRAIN_MULTIPLIERS) | set(velocity.TEST_MULTIPLIERS) == set(velocity.MULTIPLIERS)
    assert not set(velocity.TRAIN_MULTIPLIERS) & set(velocity.TEST_MULTIPLIERS)
    assert np.allclose(velocity.MULTIPLIERS, np.arange(50, 101, 5) / 100)
    for split, known in (("train", velocity.TRAIN_MULTIPLIERS), ("test", velocity.TEST_MULTIPLIERS)):
        keys = jax.random.split(KEY, 3000)
        drawn = jax.jit(jax.vmap(lambda key, split=split: env.sample_task(key, split)))(keys).multiplier
        values, counts = np.unique(np.asarray(drawn), return_counts=True)
        np.testing.assert_allclose(values, known, atol=1e-6)
        assert counts.min() > 0.8 * 3000 / len(known)
    fixed = make_env("safe-velocity-ant", multiplier=0.6)
    assert fixed.sample_task(KEY, "train").multiplier == jnp.float32(0.6)


def test_velocity_resets_near_the_rest_pose():
    env = make_env("safe-velocity-ant")
    states, _ = jax.jit(jax.vmap(lambda key: env.reset(key, None)))(jax.random.split(KEY, 500))
    qpos, qvel = states.physics.qpos, states.physics.qvel
    np.testing.assert_allclose(np.linalg.norm(qpos[:, 3:7], axis=1), 1.0, atol=1e-6)
    assert abs(qpos[:, 2] - 0.75).max() <= 0.1 + 1e-6
    assert abs(qpos[:, 2] - 0.75).max() > 0.09
    assert abs(qvel.std() - 0.1) < 0.005


BAD_TASKS = [
    ({"goal": (0.1, 0.2), "hazards": CORNER}, "covers the start"),
    ({"goal": (2.0, 0.0), "hazards": CORNER}, "outside the arena"),
    ({"goal": (np.nan, 0.0), "hazards": CORNER}, "outside the arena"),
    ({"goal": "there", "hazards": CORNER}, "must be an .x, y. pair"),
    ({"goal": (1.0, 0.0), "hazards": CORNER[:3]}, "must have 8 hazards, got 3"),
    ({"goal": (1.0, 0.0), "hazards": [(0.1, 0.0), *CORNER[:7]]}, "covers the start"),
    ({"goal": (1.0, 0.0), "hazards": [(1.1, 0.0), *CORNER[:7]]}, "covers the goal"),
]


@pytest.mark.parametrize(("layout", "message"), BAD_TASKS)
def test_impossible_layouts_are_refused(layout, message):
    with pytest.raises(UserError, match=message):
        make_env("safe-dark-point").make_task(**layout)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("safe-dark-point", {"hazards": 17}, "at most 16"),
        ("safe-dark-point", {"macro_steps": 0}, "macro_steps must be an integer ≥ 1"),
        ("safe-dark-car", {"cells": 2}, "cells must be an integer ≥ 5"),
        ("safe-dark-car", {"macro": 2}, "Did you mean 'macro_steps'"),
        ("safe-velocity-ant", {"multiplier": 0.0}, "multiplier must be a finite number > 0"),
        ("safe-velocity-ant", {"multiplier": "fast"}, "multiplier must be a finite number > 0"),
    ],
)
def test_bad_parameters_are_refused(name, parameters, message):
    with pytest.raises(UserError, match=message):
        make_env(name, **parameters)


def test_the_most_hazards_allowed_still_fit():
    env = make_env("safe-dark-point", hazards=dark.MAX_HAZARDS)
    tasks = jax.jit(jax.vmap(lambda key: env.sample_task(key, "train")))(jax.random.split(KEY, 1000))
    gaps = np.linalg.norm(tasks.hazards[:, :, None] - tasks.hazards[:, None], axis=-1)
    assert (gaps + 9 * np.eye(dark.MAX_HAZARDS) >= 0.36 - 1e-6).all()

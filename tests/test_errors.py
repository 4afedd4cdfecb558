"""Bad input: one line that names the value and the rule, before anything is compiled."""

import gymnasium
import numpy as np
import pytest

import safeicrl  # noqa: F401  registers the environments
from safeicrl.algos.scared import ScaredConfig
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import WORLDS, World, env_from_plain, make_env, register
from safeicrl.errors import UserError, check_budget
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ddpg import DDPGConfig
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.penalty import PenaltyConfig
from safeicrl.train import EvalConfig

ID = "safeicrl/SafeDarkRoom-v0"


def refuses(message: str, call, *args, **kwargs) -> None:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_unknown_names_get_the_list_and_the_nearest():
    refuses("safe-dark-room", make_env, "dark-romm")
    refuses("Did you mean 'safe-dark-room'?", make_env, "safe-darkroom")
    refuses("Did you mean 'obstacles'?", make_env, "safe-dark-room", obstacle=3)
    refuses("Did you mean 'obstacles'?", gymnasium.make, ID, obstacle=3)
    refuses("Did you mean 'split'?", gymnasium.make, ID, splits="test")
    refuses("Did you mean 'rgb_array'?", gymnasium.make, ID, render_mode="rgb")
    refuses("registered already", register, "safe-dark-room", SafeDarkRoom)


def test_an_environment_without_a_spec(monkeypatch):
    monkeypatch.setitem(WORLDS, "bare", World(maker=object))
    for make in (make_env, lambda name: env_from_plain(name, {})):
        refuses("environment 'bare' must have a spec, an EnvSpec: object has none", make, "bare")


@pytest.mark.parametrize("budget", [-1, float("nan"), float("inf"), "3", None, True, [1.0, -2.0], ["a"]])
def test_budgets(budget):
    refuses("budget must be a", check_budget, budget)


def test_good_budgets_pass():
    np.testing.assert_array_equal(check_budget([0, 2.5]), np.float32([0, 2.5]))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"obstacles": 80}, "obstacles must be at most 79 in a 9×9 room"),
        ({"obstacles": -1}, "obstacles must be an integer ≥ 0, got -1"),
        ({"size": 1}, "size must be an integer ≥ 2, got 1"),
        ({"size": 4.5}, "size must be an integer ≥ 2, got 4.5"),
        ({"size": True}, "size must be an integer"),
        ({"alpha": float("nan")}, "alpha must be a finite number ≥ 0.0, got nan"),
        ({"max_steps": 0}, "max_steps must be an integer ≥ 1, got 0"),
        ({"episodes": 0}, "episodes must be an integer ≥ 1, got 0"),
    ],
)
def test_impossible_rooms(parameters, message):
    refuses(message, make_env, "safe-dark-room", **parameters)
    refuses(message, gymnasium.make, ID, **parameters)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"goal": (4, 4), "obstacles": []}, "the goal must not lie on the start cell, got (4, 4)"),
        ({"goal": (0, 0), "obstacles": [(4, 4)]}, "the start cell (4, 4) must not be an obstacle"),
        ({"goal": (0, 0), "obstacles": [(0, 0)]}, "the goal cell (0, 0) must not be an obstacle"),
        ({"goal": (0, 9), "obstacles": []}, "goal (0, 9) is outside the 9×9 room"),
        ({"goal": (0, 0), "obstacles": [(1, -1)]}, "obstacle (1, -1) is outside the 9×9 room"),
        ({"goal": 3, "obstacles": []}, "goal must be a (row, column) pair, got 3"),
        ({"goal": (0, 0), "obstacles": 5}, "obstacles must be a list of (row, column) cells, got 5"),
        ({"goals": (0, 0)}, "Did you mean 'goal'?"),
        ({"obstacles": []}, "task must name its 'goal' cell"),
        ("corner", "task must be a dict"),
    ],
)
def test_impossible_layouts(task, message):
    env = gymnasium.make(ID)
    refuses(message, env.reset, options={"task": task})


@pytest.mark.parametrize("action", [5, -1, 1.0, "up", None, [1], np.array([1, 2])])
def test_wrong_actions(action):
    env = gymnasium.make(ID, disable_env_checker=True)
    env.reset(seed=0)
    refuses("action must be an integer from 0 to 4", env.step, action)
    env.step(np.int64(1))


def test_other_slips_at_the_gymnasium_face():
    refuses("split must be 'train' or 'test', got 'tset'", gymnasium.make, ID, split="tset")
    env = gymnasium.make(ID, render_mode="ansi").unwrapped
    refuses("call reset()", env.step, 0)
    refuses("call reset()", env.render)
    refuses("Did you mean 'new_task'?", env.reset, options={"newtask": True})


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (ScaredConfig, {"episodes": 0}, "episodes must be an integer ≥ 1, got 0"),
        (ScaredConfig, {"steps": -1}, "steps must be an integer ≥ 1, got -1"),
        (ScaredConfig, {"optimiser": "ddpg", "net": NetConfig(levels=3)}, "net.levels is for ppo"),
        (NetConfig, {"levels": 1}, "levels must be 0, for a tanh-normal, or at least 2, got 1"),
        (PenaltyConfig, {"price": -1.0}, "penalty.price must be a finite number ≥ 0.0, got -1.0"),
        (ScaredConfig, {"optimiser": "sgd"}, "optimiser must be ppo or ddpg, got 'sgd'"),
        (PPOConfig, {"learning_rate": (float("nan"), 1e-4)}, "learning_rate"),
        (PPOConfig, {"discount": 1.5}, "ppo.discount must be at most 1, got 1.5"),
        (DDPGConfig, {"exploration": (0.0, 0.1)}, "ddpg.exploration must lie in (0, 1], got 0.0"),
        (PenaltyConfig, {"cap": float("inf")}, "penalty.cap must be a finite number ≥ 0.0, got inf"),
        (PenaltyConfig, {"initial": 9.0, "cap": 1.0}, "penalty.cap must be ≥ penalty.initial, got 1.0 < 9.0"),
        (EvalConfig, {"temperature": -1.0}, "evaluation temperature must be a finite number ≥ 0.0, got -1.0"),
        (EvalConfig, {"rows": 0}, "evaluation rows must be an integer ≥ 1, got 0"),
    ],
)
def test_settings_that_cannot_be(config, values, message):
    refuses(message, config, **values)

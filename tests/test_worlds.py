"""SCARED on the MuJoCo worlds: presets, their reference lines, where an agent stands between them, the demo."""

import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import random_weights
from probe import Push

from safeicrl.agents.reference import RandomAgent
from safeicrl.cli import main
from safeicrl.envs import draw
from safeicrl.envs.api import EnvSpec
from safeicrl.envs.faults import NO_FAULT
from safeicrl.envs.mujoco import physics, planar, scene
from safeicrl.envs.registry import make_env
from safeicrl.envs.spaces import Box
from safeicrl.envs.wrappers import Revealed
from safeicrl.errors import Approximation, UserError
from safeicrl.evaluation import evaluate as evaluation
from safeicrl.evaluation.archive import load_results, save_results
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import relative, summarise
from safeicrl.optimisers.ddpg import Critics, Seen
from safeicrl.policies.contenders import reference
from safeicrl.show.films import FRAMES, chosen_steps

pytest.importorskip("mujoco")

from safeicrl.log import read_metrics
from safeicrl.policies.catalogue import policy_names, shipped_card
from safeicrl.policies.policy import load_policy
from safeicrl.recipes.presets import preset
from safeicrl.recipes.recipe import load_experiment
from safeicrl.show import demo
from safeicrl.show.shoot import shoot_robot
from safeicrl.train import train
from safeicrl.trial import Episodes, episode_sums, run_trials, sample_queue

# -- the revealed environment


def test_a_revealed_environment_adds_the_task_to_what_is_seen_and_changes_nothing_else():
    plain, told = make_env("safe-dark-point"), make_env("revealed", name="safe-dark-point")
    task_key, reset_key, step_key = jax.random.split(jax.random.key(3), 3)
    task, same = (jax.jit(env.sample_task, static_argnums=1)(task_key, "test") for env in (told, plain))
    np.testing.assert_array_equal(task.hazards, same.hazards)
    features = np.concatenate([task.goal, np.asarray(task.hazards).ravel()])
    assert told.spec.observation == Box(12 + 18)
    assert dataclasses.replace(told.spec, observation=plain.spec.observation) == plain.spec

    (state, seen), (_, own) = (jax.jit(env.reset)(reset_key, task) for env in (told, plain))
    np.testing.assert_allclose(seen, np.concatenate([own, features]), rtol=1e-6)
    action = np.array([1.0, 0.3], np.float32)
    after, before = (jax.jit(env.step)(step_key, state, action, task)[1] for env in (told, plain))
    np.testing.assert_allclose(after.observation, np.concatenate([before.observation, features]), rtol=1e-6)
    assert (after.reward, after.cost, after.truncated) == (before.reward, before.cost, before.truncated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "safe-dark-room"}, "safe-dark-room has cells of a grid; there the planner"),
        ({"name": "revealed"}, "a revealed task must be made from another environment, not from revealed"),
        ({"name": "fixed-task"}, "not from fixed-task"),
        ({"name": "safe-dark-pint"}, "Did you mean 'safe-dark-point'"),
        ({"args": ("hazards",)}, "a revealed task takes name=value pairs, got 'hazards'"),
    ],
)
def test_a_task_that_cannot_be_revealed(changes, message):
    with pytest.raises(UserError, match=message):
        Revealed(**changes)


def test_those_who_are_told_meet_the_same_tasks_and_budgets(monkeypatch):
    """All that an evaluation is played with; that a step is the same in both worlds is tested above."""
    small, met = {"episodes": 2, "max_steps": 5}, []
    told = Revealed(name="safe-dark-point", args=tuple(f"{name}={value}" for name, value in small.items()))
    play_nothing(monkeypatch, tasks=8, episodes=2, met=met)
    for env in (told, make_env("safe-dark-point", **small)):
        evaluate(env, RandomAgent(action=env.spec.action), tasks=8, seed=4)
    (tasks, budgets, key), others = met
    assert budgets.shape == (8, 1)
    assert len(np.unique(np.asarray(tasks.goal), axis=0)) == 8
    mine, theirs = ((x[0], x[1], jax.random.key_data(x[2])) for x in ((tasks, budgets, key), others))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


# -- presets


# preset → its environment; the runs of its stages are stored under results/ENVIRONMENT/training/NUMBER-STAGE
WORLDS = {
    "point": "safe-dark-point",
    "car": "safe-dark-car",
    "half-cheetah": "safe-velocity-half-cheetah",
    "ant": "safe-velocity-ant",
}
RESULTS = Path(__file__).parent.parent / "results"
LINES = ("privileged", "memoryless")


def shrunk(name: str, line: str | None = None, stage: int = -1) -> Any:
    """A stage of a world's recipe with everything small but the kinds of its parts."""
    whole = preset(name, line).stages[stage].experiment
    small = {"max_steps": 4, "episodes": 2}
    if isinstance(whole.env, Revealed):
        env = dataclasses.replace(whole.env, args=tuple(f"{key}={value}" for key, value in small.items()))
    else:
        env = dataclasses.replace(whole.env, **small)
    net = dataclasses.replace(whole.algo.net, width=8, layers=1, heads=2, context=8)
    steps = None if whole.algo.steps is None else 8
    episodes = whole.algo.episodes and min(whole.algo.episodes, 2)
    algo = dataclasses.replace(
        whole.algo, rows=4, queue=2, episodes=episodes, steps=steps, segments=1, iterations=2, net=net,
        ppo=dataclasses.replace(whole.algo.ppo, minibatch=2, epochs=1),
    )  # fmt: skip
    evaluation = dataclasses.replace(whole.train.evaluation, tasks=3, segments=1)
    settings = dataclasses.replace(whole.train, iterations=1, minutes=None, evaluation=evaluation)
    return dataclasses.replace(whole, env=env, algo=algo, train=settings)


@functools.cache
def trained(name: str, folder: Path) -> Path:
    """One iteration of a shrunk preset; the run's folder."""
    experiment = shrunk(name)
    return train(experiment.build(), experiment.train, out=folder / name).folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


# One on the accelerator and one on the cores; every program takes half a minute to compile, so the others, which
# differ in their sizes, are only traced below.
@pytest.mark.parametrize("name", ["point", "half-cheetah"])
def test_a_preset_trains_evaluates_and_comes_back_as_a_policy(name, runs):
    folder = trained(name, runs)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite([lines[0]["return"], lines[0]["cost"], lines[0]["lambda"]]).all()
    assert np.isfinite(lines[-1]["eval/total_return"])
    assert ("physics_share" in lines[0]) == (not name.startswith("point"))  # Point moves on the accelerator
    assert 0 < lines[0].get("physics_share", 0.5) < 1

    policy = load_policy(folder)
    policy.start(budget=float(policy.env.spec.test_budget[1]))
    action = policy.act(np.zeros(policy.env.spec.observation.size))
    assert action.shape == (policy.env.spec.action.size,)
    assert np.abs(action).max() <= 1
    assert policy.card["evaluation"]["context"] == "kept"

    _, *others = demo.contenders(world=name, policy=str(folder))
    assert [other.env for other in others] == [shrunk(name).env]  # the same tasks


def test_a_runs_policy_in_the_demo_is_drawn_from_positions(runs, monkeypatch, capsys):
    """Its first and last episode; where things of an arena are drawn is tested below."""
    star, *_ = demo.contenders(world="half-cheetah", policy=str(trained("half-cheetah", runs)))
    monkeypatch.setattr(scene, "picture", no_screen)
    film = shoot_robot(star, 2.0)
    assert "no screen; drawn from positions" in capsys.readouterr().out
    assert list(film.pictures) == [0, 1]
    assert film.steps[0] == 0
    assert film.steps[-1] == max(len(film.costs[0]), len(film.costs[1])) <= 4
    assert {len(pictures) for pictures in film.pictures.values()} == {len(film.steps)}
    assert (film.pictures[0][0] != film.pictures[0][-1]).any()  # it moved


def no_screen(*_: Any) -> None:
    raise UserError("no screen")


@pytest.mark.parametrize("world", WORLDS)
def test_the_recipes_are_the_papers_experiment(world):
    first, *others = (stage.experiment for stage in preset(world).stages)
    for whole in others:
        spec, net = whole.env.spec, whole.algo.net
        assert (spec.episodes, spec.max_steps, whole.algo.episodes) == (20, 75, None)
        assert (net.width, net.layers, net.heads, net.context) == (64, 4, 8, 1500)
        assert spec.train_budget == spec.test_budget == ((10, 50) if world in ("point", "car") else (0, 5))
        assert whole.train.evaluation.tasks >= 200
        assert whole.env == first.env
    assert first.algo.episodes < first.env.spec.episodes
    for line in LINES:
        [stage] = preset(world, line).stages
        other = stage.experiment
        assert (other.algo.episodes, other.train.evaluation.wipe) == (1, True)
        if line == "privileged":
            assert (type(other.env), other.env.inner) == (Revealed, first.env)
        else:
            assert other.env == first.env
        # as many steps as the short trials, so that the runs are comparable
        steps = [x.algo.iterations * x.algo.rows * (x.algo.steps or x.algo.net.context) for x in (other, first)]
        assert steps[0] == pytest.approx(steps[1], rel=0.05)


@pytest.mark.parametrize("world", WORLDS)
def test_the_recipes_are_what_the_shipped_policies_were_trained_with(world):
    """The runs' own settings are beside their logs, which say how many iterations each had."""
    env, stages = WORLDS[world], preset(world).stages
    folders = sorted((RESULTS / env / "training").glob("[0-9]-*"))
    assert [folder.name for folder in folders] == [f"{i}-{stage.name}" for i, stage in enumerate(stages, 1)]
    for stage, folder in zip(stages, folders, strict=True):
        ours, theirs = stage.experiment, load_experiment(folder)
        assert (ours.env, ours.algo) == (theirs.env, theirs.algo)
        last = read_metrics(folder / "metrics.jsonl")[-1]["iteration"]
        assert (ours.train.iterations or ours.algo.iterations) == last
    for line in LINES:
        ours, theirs = preset(world, line).stages[0].experiment, load_experiment(RESULTS / env / "training" / line)
        assert (ours.env, ours.algo) == (theirs.env, theirs.algo)


@pytest.mark.parametrize("policy", policy_names())
def test_a_card_has_every_stage_of_training_and_every_choice(policy):
    """By the stored logs; `python bench/cards.py` writes them."""
    card = shipped_card(policy)
    folder = RESULTS / card.get("arrays", policy) / "training"
    logs = sorted(folder.glob("[0-9]-*/metrics.jsonl")) or [folder / "metrics.jsonl"]
    assert len(card["stages"]) == len(logs)
    for stage, log in zip(card["stages"], logs, strict=True):
        last = read_metrics(log)[-1]
        assert (stage["iterations"], stage["env_steps"]) == (last["iteration"], last["env_steps"])
        config = load_experiment(log.parent).train.evaluation
        expected = f"{config.tasks} tasks of seed {config.seed}" if config.every else None
        assert stage.get("judged_on") == expected  # without evaluations it was the last checkpoint
    assert "checkpoint" in card["chosen"][0]
    assert ("evaluations" in card["chosen"][0]) == any("judged_on" in stage for stage in card["stages"])
    assert any("temperature" in line or "greedy" in line for line in card["chosen"])


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("darkroom", "safe-dark-room/training"),
        ("darkroom-guard", "safe-dark-room-guard/training"),
        ("darkroom-small", "darkroom-small"),
    ],
)
def test_the_rooms_recipes_are_what_was_run(name, run):
    [stage] = preset(name).stages
    stored = load_experiment(RESULTS / run)
    assert (stage.experiment.env, stage.experiment.algo) == (stored.env, stored.algo)


def test_the_exported_policies_are_the_shipped_ones():
    """Averaged, and for the real physics, where the shipped ones are."""
    for world, env in WORLDS.items():
        recipe, card = preset(world), load_policy(env).card
        assert recipe.average_last == 1 + len(card.get("averaged_with", []))
        assert recipe.env_args == (("engine=auto",) if "trained_in" in card else ())
        assert recipe.stages[-1].experiment.train.evaluation.temperature == card["temperature"]


@pytest.mark.parametrize("world", WORLDS)
def test_the_stored_evaluations_are_of_the_shipped_policies(world):
    """What the documents quote was measured on these policies; tests/test_shipped.py plays them again."""
    folder, shipped = RESULTS / WORLDS[world], load_policy(WORLDS[world]).card
    found = load_results(folder / "policy")
    assert shipped["evaluation"]["summary"]["total_return"] == pytest.approx(summarise(found).total_return)
    # Car, slow in MuJoCo, has one budget a task; the others' tasks were met under small and large ones
    by_budget = found if world == "car" else load_results(folder / "by-budget")
    assert by_budget.budgets_per_task == (1 if world == "car" else 9)
    for each in (found, by_budget, load_results(folder / "wiped")):
        for what in ("training", "averaged_with"):
            assert each.meta["card"].get(what) == shipped.get(what)
    upper, lower = (load_results(folder / name) for name in ("privileged", "memoryless"))
    relative(found, upper=upper, lower=lower)  # refused unless all three met the same tasks and budgets


def traced(experiment: Any) -> tuple[Any, Any]:
    """Shapes of an experiment's first state and of what an update makes of it."""
    algorithm = experiment.build()
    state = eqx.filter_eval_shape(algorithm.init, jax.random.key(0))
    return state, eqx.filter_eval_shape(algorithm.update, state)[0]


@pytest.mark.parametrize(
    ("name", "line", "stage"),
    [
        ("car", None, -1), ("ant", None, -1), ("point", None, 0), ("ant", None, 0),
        *((world, LINES[i % 2], 0) for i, world in enumerate(WORLDS)),  # all have both; what differs is above
    ],
)  # fmt: skip
def test_an_update_keeps_the_form_of_the_state(name, line, stage, monkeypatch):
    # fitting a car takes longer than tracing, which takes any car
    monkeypatch.setattr(planar, "car_constants", lambda _: planar.Car(*[0.5] * 8))
    before, after = traced(shrunk(name, line, stage))
    shapes = [
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(eqx.filter(s, is_shape))] for s in (before, after)
    ]
    assert shapes[0] == shapes[1]


def test_a_car_can_begin_with_what_a_point_has_learned():
    """Same observations, actions and tasks, so a run of one world fits the other's networks (--start)."""
    firsts = [preset(name).stages[0].experiment.build() for name in ("point", "car")]
    nets = [
        eqx.filter(eqx.filter_eval_shape(first.init, jax.random.key(0)).optimiser.net, is_shape) for first in firsts
    ]
    shapes = [[leaf.shape for leaf in jax.tree.leaves(net)] for net in nets]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("net", "words"),
    [
        ({"heads": 4}, "has heads 2, this run has 4: use --algo.net.heads 2 to start from it"),
        ({"levels": 3}, "has levels 5, this run has 3: use --algo.net.levels 5 to start from it"),
        ({"layers": 2}, "has layers 1, this"),
    ],
)
def test_a_start_of_another_size_is_refused(net, words, runs, tmp_path):
    """Other heads have the same arrays, and would compute something else with them."""
    folder, whole = trained("point", runs), shrunk("point")
    algo = dataclasses.replace(whole.algo, net=dataclasses.replace(whole.algo.net, **net))
    settings = dataclasses.replace(whole.train, start=str(folder))
    with pytest.raises(UserError, match=words):
        train(dataclasses.replace(whole, algo=algo).build(), settings, out=tmp_path / "new")
    with pytest.raises(UserError, match="safe-dark-point has width 64, this run has"):
        train(whole.build(), dataclasses.replace(settings, start="safe-dark-point"), out=tmp_path / "new")


def play_nothing(monkeypatch: pytest.MonkeyPatch, tasks: int, episodes: int, met: list[Any] | None = None) -> None:
    """Let evaluations find trials in which nothing happened; into `met` go their tasks, budgets and key."""
    nothing = np.zeros((tasks, episodes), np.float32)
    sums = Episodes(returns=nothing, costs=nothing, lengths=nothing + 1, budgets=nothing, played=nothing > 0)

    def play(env: Any, agent: Any, *given: Any, **sizes: Any) -> Any:
        if met is not None:
            met.append(given)
        return (sums, None, None), NO_FAULT

    if met is None:
        monkeypatch.setattr(evaluation, "sample_tasks", lambda *_: nothing)
    monkeypatch.setattr(evaluation, "_play", play)


def test_an_approximation_is_said_to_be_one_and_not_compared_with_the_real_one(monkeypatch):
    """By what an evaluation says of its world; nothing is played."""
    small = {"max_steps": 2, "episodes": 1}
    play_nothing(monkeypatch, tasks=2, episodes=1)
    args = ("engine=planar", "max_steps=2", "episodes=1")
    found = []
    for robot, env, remedy in (
        ("Car", make_env("safe-dark-car", engine="planar", **small), "engine=auto"),
        ("Car", Revealed(name="safe-dark-car", args=args), r"'args=\[\]'"),
        ("Ant", make_env("safe-velocity-ant", engine="euler", **small), "engine=auto"),
    ):
        with pytest.warns(Approximation, match=rf"an approximation of {robot}\); --env-args {remedy} takes"):
            found.append(reference("random", env).evaluate(tasks=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, engine in (
            ("safe-dark-car", "auto"),
            ("safe-velocity-ant", "auto"),
            ("safe-dark-point", "planar"),
        ):
            found.append(reference("random", make_env(name, engine=engine, **small)).evaluate(tasks=2))
    car, told, ant, real_car, real_ant, _ = found
    for mine, real in ((car, real_car), (told, real_car), (ant, real_ant)):
        with pytest.raises(
            UserError, match=r"differ in their physics, engine=.* \(an approximation of .*\) and the real one"
        ):
            relative(mine, upper=real, lower=real)


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def test_the_shipped_point_learns_arenas_in_context_and_searches_by_its_budget():
    """It goes where the goal was, around what cost it before; a small budget makes it stop sooner."""
    policy = load_policy("safe-dark-point")

    @eqx.filter_jit
    def play(agent: Any, key: jax.Array) -> Any:
        tasks, extra = sample_queue(policy.env, "test", (0.0, 4.0), (24, 1), key)
        budgets = extra + jnp.repeat(jnp.array([10.0, 45.0]), 12)[:, None]
        return episode_sums(run_trials(policy.env, agent, tasks, budgets, key, episodes=4, steps=300), 4)

    played = jax.tree.map(np.asarray, play(policy.agent, jax.random.key(1)))
    small, large = (jax.tree.map(lambda x, s=half: x[s], played) for half in (slice(12), slice(12, 24)))
    assert large.returns[:, -2:].mean() > 0.78
    assert large.costs[:, -2:].mean() < 0.6 * large.costs[:, 0].mean()
    assert small.costs[:, 0].mean() < 0.75 * large.costs[:, 0].mean()
    assert small.returns[:, 0].mean() < large.returns[:, 0].mean()
    assert small.returns[:, -1].mean() > small.returns[:, 0].mean() + 0.2


def test_a_policy_is_shown_in_its_own_world_only(runs):
    with pytest.raises(UserError, match="is for safe-dark-point, not for safe-dark-car"):
        demo.contenders(world="car", policy=str(trained("point", runs)))
    with pytest.raises(UserError, match=r"unknown world 'pint'.*Did you mean 'point'"):
        demo.contenders(world="pint")


def test_the_demo_of_a_world_with_other_parameters_shows_the_random_agent(tmp_path, monkeypatch):
    """In that world, with a film at the middle of the budgets; the test of positions above shoots a real one."""
    env, shot = make_env("safe-dark-point", max_steps=3, episodes=2), []
    play_nothing(monkeypatch, tasks=3, episodes=2)
    monkeypatch.setattr(demo, "shoot_robot", lambda star, budget, **_: shot.append((star.label, star.env, budget)))
    monkeypatch.setattr(demo, "save_film", lambda _, path: path)
    files = demo.run(tmp_path, world="safe-dark-point", tasks=3, env=env)
    assert shot == [("random", env, 30.0)]
    drawn = {"episodes.png", "budgets.png", "over-budget.png"}
    assert {file.name for file in files} == {"one-task.gif", "random.npz", "random.json", *drawn}
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)
    assert load_results(tmp_path / "random").returns.shape == (3, 2)


def test_positions_are_drawn_where_they_are():
    """The arena's 3.6 m on 36 pixels: a goal at (1, −1), a hazard at (−1, 1), the robot at the origin."""
    env = make_env("safe-dark-point", hazards=1)
    task = env.make_task((1.0, -1.0), [(-1.0, 1.0)])
    image = scene.drawing(env, task, [np.zeros(3)], pixels=36)
    assert tuple(image[28, 28]) == draw.GOAL  # y grows upwards, rows downwards
    assert tuple(image[8, 8]) == draw.OBSTACLE
    assert tuple(image[18, 18]) == draw.AGENT
    assert tuple(image[8, 28]) not in (draw.GOAL, draw.OBSTACLE, draw.AGENT)
    cheetah = make_env("safe-velocity-half-cheetah")
    assert scene.place_of(cheetah, np.array([3.0, -0.5])).tolist() == [3.0, 0.0]


def test_films_are_short():
    assert chosen_steps(3) == [0, 1, 2, 3]
    long = chosen_steps(75)
    assert (long[0], long[-1], len(long)) == (0, 75, FRAMES)


def test_the_time_in_physics_is_counted():
    job = physics.Job("half_cheetah", substeps=5, engine="c")
    model = physics.models.load("half_cheetah")
    before = physics.seconds()
    state = physics.RobotState.start(jnp.asarray(model.qpos0), jnp.zeros(model.nv)).physics
    jax.block_until_ready(physics.step(job, state, jnp.zeros(model.nu)))
    assert 0 < physics.seconds() - before < 60


# -- where an agent stands


POINT = {"name": "safe-dark-point", "parameters": {}}


def results(returns: list[list[float]], **meta: Any) -> Results:
    array = np.array(returns)
    return Results(
        returns=array, costs=np.zeros_like(array), lengths=np.ones_like(array), budgets=np.array([1.0, 3.0]),
        meta={"label": "x", "env": POINT, "split": "test", "seed": 0, **meta},
    )  # fmt: skip


def test_a_score_between_two_lines_by_hand():
    """Two tasks, the last two of three episodes: lines at (1, 2) and (5, 4), the agent at (2, 3)."""
    lower = results([[9, 1, 1], [9, 2, 2]], label="lower")
    told = {"name": "revealed", "parameters": {"name": "safe-dark-point", "args": []}}
    upper = results([[9, 4, 6], [9, 4, 4]], label="upper", env=told)
    mine = results([[9, 1, 3], [9, 3, 3]], label="mine")
    found = relative(mine, upper=upper, lower=lower, last=2)
    # gains (1, 1), ranges (4, 2): 1 / 3, and residuals (1 − 4/3, 1 − 2/3) = ∓1/3
    assert found.score == pytest.approx(1 / 3)
    assert found.error == pytest.approx(np.std([-1 / 3, 1 / 3], ddof=1) / np.sqrt(2) / 3)
    assert found.last_return == pytest.approx(2.5)
    for line, score in ((upper, 1), (lower, 0)):
        own = relative(line, upper=upper, lower=lower, last=2)
        assert (own.score, own.error) == pytest.approx((score, 0))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (results([[0, 0], [0, 0]], seed=1), "differ in their seed, 1 and 0|differ in their seed, 0 and 1"),
        (results([[0, 0], [0, 0]], env={"name": "safe-dark-car", "parameters": {}}), "differ in their environment"),
        (results([[0, 0, 0], [0, 0, 0]]), "differ in their trials, 2 of 2 episodes and 2 of 3 episodes"),
        (results([[2, 2], [2, 2]]), "the upper baseline 'x' must return more than the lower one"),
    ],
)
def test_what_cannot_be_compared(other, message):
    with pytest.raises(UserError, match=message):
        relative(results([[1, 1], [1, 1]]), upper=results([[1, 1], [1, 1]]), lower=other)


def test_compare_prints_the_scores(tmp_path, capsys):
    for name, value in (("above", 4.0), ("below", 2.0), ("mine", 3.5)):
        save_results(results([[value] * 6] * 2, label=name), tmp_path / name)
    files = [str(tmp_path / f"{name}.npz") for name in ("mine", "above", "below")]
    assert main(["compare", files[0], "--upper", files[1], "--lower", files[2]]) == 0
    shown = capsys.readouterr().out
    assert "relative to above (1) and below (0)" in shown
    assert "return, last five" in shown
    assert "0.750 ± 0.000" in shown
    assert main(["compare", "--upper", files[1], "--lower", files[2]]) == 2
    assert "compare needs results files" in capsys.readouterr().err


# -- continuous critics


def test_critics_see_exact_actions_in_units_of_their_range():
    """bfloat16 features must not round the action; a range of (2, 6) reads like (−1, 1)."""

    @dataclasses.dataclass(frozen=True)
    class Wide(Push):
        @property
        def spec(self) -> EnvSpec:
            return dataclasses.replace(super().spec, action=Box(1, 2.0, 6.0))

    narrow, wide = (random_weights(Critics, 4, env.spec, 2, True) for env in (Push(), Wide()))
    values = np.random.default_rng(1).normal(size=(1, 2, 4))
    seen = Seen(task=np.ones((1, 1, 1), np.float32), trial=np.zeros((1, 2), int))
    unit = np.array([[[0.5], [0.5 + 2.0**-12]]], np.float32)  # one number in bfloat16, which has eight bits

    @eqx.filter_jit
    def taken(critics: Critics, values: np.ndarray, action: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Q of the action, and its slope."""
        features = jnp.asarray(values).astype(jnp.bfloat16)
        q = lambda a: critics.taken(features, seen, a)  # noqa: E731
        return q(action), jax.grad(lambda a: q(a).sum())(action)

    (q, slope), (same, _) = taken(narrow, values, unit), taken(wide, values, 4.0 + 2.0 * unit)
    np.testing.assert_allclose(q, same, rtol=1e-5)
    assert slope.dtype == jnp.float32
    first, second = np.asarray(taken(narrow, values[:, [0, 0]], unit)[0])[0, 0]
    assert first != second

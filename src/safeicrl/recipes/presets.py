"""Experiments by name: an environment, an algorithm's settings, and how long to train."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safeicrl.algos.api import Algorithm
from safeicrl.algos.registry import algo_name, find_algo
from safeicrl.config import from_plain
from safeicrl.envs.api import Grid
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import env_from_plain, make_env, parse_parameters
from safeicrl.envs.wrappers import FixedTask, Revealed
from safeicrl.errors import UserError, unknown_name
from safeicrl.files import read_json
from safeicrl.train import EvalConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that defines a training run."""

    env: Any  # an Env
    algo: Any  # the config of an algorithm
    train: TrainConfig

    def build(self) -> Algorithm:
        """The algorithm on its environment, ready for `train`."""
        algorithm, _ = find_algo(algo_name(self.algo))
        return algorithm(self.env, self.algo)


def load_experiment(folder: Path) -> Experiment:
    """The experiment of a run's folder, from its config.json."""
    path = folder / "config.json"
    saved = read_json(path, "training run")
    try:
        return Experiment(
            env=env_from_plain(saved["env"]["name"], saved["env"]["parameters"]),
            algo=from_plain(find_algo(saved["algo"]["name"])[1], saved["algo"]["config"], "algo"),
            train=from_plain(TrainConfig, saved["train"], "train"),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is no training run: {error!r}") from None


def preset(name: str) -> Experiment:
    """The experiment called `name`."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]()


def experiment(algo: str, env: str) -> Experiment:
    """An algorithm's default experiment on an environment, both by name."""
    _, config = find_algo(algo)
    if algo == "ppo-lag":
        return _ppo_lag(env)
    if algo == "safe-ad":
        return _safe_ad(env)
    return Experiment(env=make_env(env), algo=config(), train=TrainConfig())


def _ppo_lag(name: str) -> Experiment:
    """An ordinary safe learner on one task of an environment."""
    from safeicrl.algos.ppo_lag import default_config

    env = FixedTask(name=name)
    # only the last policy is evaluated: its limit is on the mean cost, and "best" here means few episodes over it
    train = TrainConfig(chunk=10, evaluation=EvalConfig(every=0, tasks=20, segments=1))
    return Experiment(env=env, algo=default_config(env), train=train)


def _darkroom() -> Experiment:
    """The paper's room, for one GPU; stops after fifteen minutes at the latest."""
    from safeicrl.algos.scared import ScaredConfig
    from safeicrl.nets.transformer import NetConfig
    from safeicrl.optimisers.ppo import PPOConfig
    from safeicrl.penalty import PenaltyConfig

    algo = ScaredConfig(
        iterations=330,
        rows=512,
        queue=6,  # a trained agent needs a quarter of the steps of a trial
        budget_power=2.0,
        net=NetConfig(heads=4),  # of the paper's 8: small heads are what is slow on a GPU (docs/speed.md)
        penalty=PenaltyConfig(step=0.01, final_step=0.15, bound=0.2, cap=2.2),  # at most: see docs/scared.md
        ppo=PPOConfig(epochs=2, minibatch=32, learning_rate=(1e-3, 5e-5), entropy=(0.02, 0.001)),
    )
    # λ rises through the run, so its evaluations walk along the frontier of return and cost; the best is the one
    # with the most return among those within the tolerance.
    evaluation = EvalConfig(every=20, tasks=500, rows=500, temperature=0.4, tolerance=0.03)
    train = TrainConfig(minutes=15.0, evaluation=evaluation)
    return Experiment(env=SafeDarkRoom(), algo=algo, train=train)


def _darkroom_ddpg() -> Experiment:
    """The paper's room by the off-policy optimiser; docs/scared.md says how far it has come."""
    from safeicrl.optimisers.ddpg import DDPGConfig
    from safeicrl.penalty import PenaltyConfig

    ddpg = DDPGConfig(
        learning_rate=1e-3, capacity=1024, discount=0.998, trace=0.95, target_rate=0.005, trust=5.0,
        exploration=(0.2, 0.02),
    )  # fmt: skip
    first = _darkroom()
    penalty = PenaltyConfig(step=0.01, final_step=0.1, bound=0.2, cap=0.6)  # past 1 it unlearns
    algo = dataclasses.replace(first.algo, optimiser="ddpg", ddpg=ddpg, rows=256, iterations=190, penalty=penalty)
    evaluation = dataclasses.replace(first.train.evaluation, every=40, tasks=300, rows=300, tolerance=0.05)
    # a checkpoint holds the replay
    train = dataclasses.replace(first.train, checkpoint_minutes=5.0, evaluation=evaluation)
    return dataclasses.replace(first, algo=algo, train=train)


def _darkroom_paper() -> Experiment:
    """As close to Algorithm 1 as it goes: off-policy, the published penalty, λ by the mean of maxima."""
    from safeicrl.algos.scared import ScaredConfig
    from safeicrl.optimisers.ddpg import paper_config
    from safeicrl.penalty import PenaltyConfig

    penalty = PenaltyConfig(form="paper", signal="mean_of_max")
    algo = ScaredConfig(
        iterations=1000, rows=128, budget_power=1.0, penalty=penalty, optimiser="ddpg", ddpg=paper_config()
    )
    return dataclasses.replace(_darkroom(), algo=algo)


def _darkroom_small() -> Experiment:
    """A 5×5 room in which in-context learning emerges on a laptop."""
    from safeicrl.algos.scared import ScaredConfig
    from safeicrl.nets.transformer import NetConfig
    from safeicrl.optimisers.ppo import PPOConfig

    env = SafeDarkRoom(
        size=5, obstacles=6, max_steps=12, episodes=15, train_budget=(1.0, 6.0), test_budget=(1.0, 6.0)
    )
    algo = ScaredConfig(
        iterations=190,
        rows=128,
        net=NetConfig(width=32, layers=2, heads=2, context=180, dtype="float32"),
        ppo=PPOConfig(minibatch=32, discount=0.99, entropy=(0.02, 0.002)),
    )
    train = TrainConfig(minutes=9.0, checkpoint_minutes=1.0, evaluation=EvalConfig(every=50, tasks=200))
    return Experiment(env=env, algo=algo, train=train)


def _safe_ad(name: str) -> Experiment:
    """Safe AD on the histories that `safeicrl collect --env NAME` writes, at the sizes of the paper's table."""
    from safeicrl.algos.safe_ad import SafeADConfig
    from safeicrl.nets.decision_transformer import DecisionConfig

    env, histories = make_env(name), f"histories/{name}"
    if isinstance(env.spec.observation, Grid):
        algo = SafeADConfig(histories=histories, stride=100)
    else:
        net = DecisionConfig(embedding=512, width=256, context=200)
        algo = SafeADConfig(histories=histories, batch=128, stride=50, net=net)
    # a checkpoint of this size takes seconds to write
    train = TrainConfig(checkpoint_minutes=10.0, evaluation=EvalConfig(every=0, tasks=200))
    return Experiment(env=env, algo=algo, train=train)


def _darkroom_safe_ad() -> Experiment:
    """Safe AD in the paper's room, at the paper's sizes, for one GPU; `safeicrl collect` first."""
    return _safe_ad("safe-dark-room")


def _darkroom_safe_ad_tuned() -> Experiment:
    """Safe AD at the paper's sizes, on histories of many rooms and with settings from a small search.

    First `safeicrl collect --tasks 405 --steps 3300 --group 405 --learner.learning-rate 3e-3 --learner.epochs 4
    --out histories/safe-dark-room-many`; docs/safe_ad.md has the search.
    """
    first = _darkroom_safe_ad()
    net = dataclasses.replace(first.algo.net, attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1)
    algo = dataclasses.replace(
        first.algo, histories="histories/safe-dark-room-many", iterations=40, updates=50, stride=20,
        learning_rate=5e-4, net=net,
    )  # fmt: skip
    return dataclasses.replace(first, algo=algo)


def _point_safe_ad() -> Experiment:
    """Safe AD with real-valued actions; `safeicrl collect --env safe-dark-point` first."""
    return _safe_ad("safe-dark-point")


def _darkroom_safe_ad_small() -> Experiment:
    """Safe AD in the 5×5 room of darkroom-small, on a CPU in minutes; docs/safe_ad.md says how to collect."""
    from safeicrl.algos.safe_ad import SafeADConfig
    from safeicrl.nets.decision_transformer import DecisionConfig

    net = DecisionConfig(
        embedding=32, width=64, layers=3, heads=2, context=48,
        attention_dropout=0.1, residual_dropout=0.0, embedding_dropout=0.0,
    )  # fmt: skip
    algo = SafeADConfig(
        histories="histories/darkroom-small", iterations=40, updates=50, batch=64, stride=100, warmup=100,
        learning_rate=1e-3, net=net,
    )  # fmt: skip
    train = TrainConfig(evaluation=EvalConfig(every=0, tasks=200))
    return Experiment(env=_darkroom_small().env, algo=algo, train=train)


# -- the MuJoCo worlds: why these numbers is in docs/mujoco_scared.md ------------------------------------------
#
# Each is learned in several runs: `WORLD-short` plays short trials, in which to move and to remember is learned in
# many cheap iterations; the others start from the networks of the one before (--start) and play the paper's trials
# of 20 episodes.


def _arena_short(env: Any) -> Experiment:
    """A sparse reward that ends the episode, and costs of up to 5 a step against budgets of 10 to 50."""
    from safeicrl.algos.scared import ScaredConfig
    from safeicrl.nets.transformer import NetConfig
    from safeicrl.optimisers.ddpg import DDPGConfig
    from safeicrl.optimisers.ppo import PPOConfig
    from safeicrl.penalty import PenaltyConfig

    # what is found now pays in later episodes; as in the dark room, where a discount by the episode was worse
    far: dict[str, Any] = {"discount": 0.998, "trace": 0.97}
    episodes = 6
    algo = ScaredConfig(
        iterations=130,
        rows=768,
        queue=6,  # a trained agent needs about a third of an episode's steps
        episodes=episodes,
        segments=2,
        budget_power=1.0,
        spent=0.15,  # to stop when the budget is spent is learned before driving is, or never
        # motors saturate at a twentieth of their range, or less
        net=NetConfig(context=episodes * env.max_steps, levels=5),
        penalty=PenaltyConfig(initial=0.08, step=0.0, final_step=0.004, bound=0.5, tolerance=0.05, cap=1.0),
        ppo=PPOConfig(epochs=3, minibatch=96, learning_rate=(1e-3, 5e-4), entropy=(0.01, 0.001), **far),
        ddpg=DDPGConfig(capacity=1024, exploration=(0.5, 0.1), target_rate=0.02, **far),
    )
    return Experiment(env=env, algo=algo, train=_world_training(0, temperature=0.5))


def _arena_second(env: Any) -> Experiment:
    """The paper's trials."""
    first = _arena_short(env)
    algo = dataclasses.replace(
        first.algo,
        iterations=220,
        rows=512,
        episodes=None,
        segments=6,
        budget_power=1.5,
        spent=0.1,
        net=dataclasses.replace(first.algo.net, context=env.spec.trial_steps),
        penalty=dataclasses.replace(first.algo.penalty, initial=0.15, step=0.0005, final_step=0.014),
        ppo=dataclasses.replace(
            first.algo.ppo, epochs=2, minibatch=32, learning_rate=(7e-4, 2e-4), entropy=(0.005, 0.001), warmup=3
        ),
    )
    return Experiment(env=env, algo=algo, train=_world_training(40, temperature=0.5))


def _arena_third(env: Any) -> Experiment:
    """λ had risen too fast: back to 0.2, until the goal is found within small budgets too."""
    before = _arena_second(env)
    algo = dataclasses.replace(
        before.algo,
        iterations=500,
        budget_power=1.0,
        penalty=dataclasses.replace(before.algo.penalty, initial=0.2, step=0.0, final_step=0.004),
        ppo=dataclasses.replace(before.algo.ppo, epochs=3, learning_rate=(8e-4, 1e-4), entropy=(0.003, 0.0005)),
    )
    return Experiment(env=env, algo=algo, train=_world_training(100, temperature=0.5))


def _car(env: Any) -> Experiment:
    """The last run, in which the learning rate and the entropy end near 0."""
    before = _arena_third(env)
    algo = dataclasses.replace(
        before.algo,
        iterations=265,
        budget_power=1.3,
        penalty=dataclasses.replace(before.algo.penalty, initial=0.25, final_step=0.003),
        ppo=dataclasses.replace(before.algo.ppo, learning_rate=(7e-4, 5e-5), entropy=(0.002, 0.0003)),
    )
    return Experiment(env=env, algo=algo, train=_world_training(0, temperature=0.5))


def _point(env: Any) -> Experiment:
    """The car's, with a larger λ at the end: after the third run Point was over budget twice as often."""
    first = _car(env)
    penalty = dataclasses.replace(first.algo.penalty, initial=0.26, final_step=0.007)
    return dataclasses.replace(first, algo=dataclasses.replace(first.algo, penalty=penalty))


def _arena_line(env: Any) -> Experiment:
    """As many steps as the short trials, tanh-normal actions, and a λ that rises from 0 to 0.3 at most."""
    first = _single_episodes(_arena_short(env))
    algo = dataclasses.replace(
        first.algo,
        iterations=300,
        rows=512,
        budget_power=1.5,
        spent=0.0,
        net=dataclasses.replace(first.algo.net, levels=0),
        penalty=dataclasses.replace(first.algo.penalty, initial=0.0),
        ppo=dataclasses.replace(first.algo.ppo, minibatch=128, learning_rate=(1e-3, 5e-5), entropy=(0.003, 0.0003)),
    )
    evaluation = dataclasses.replace(first.train.evaluation, temperature=0.25)
    return dataclasses.replace(first, algo=algo, train=dataclasses.replace(first.train, evaluation=evaluation))


def _track_short(env: Any) -> Experiment:
    """A reward at every step, and a cost of 1 for every step that is too fast, against budgets of 0 to 5."""
    from safeicrl.algos.scared import ScaredConfig
    from safeicrl.nets.transformer import NetConfig
    from safeicrl.optimisers.ddpg import DDPGConfig
    from safeicrl.optimisers.ppo import PPOConfig
    from safeicrl.penalty import PenaltyConfig

    # a stride pays within the second, and most of what counts is this episode
    near: dict[str, Any] = {"discount": 0.99, "trace": 0.95}
    episodes = 4
    algo = ScaredConfig(
        iterations=600,
        rows=64,
        queue=4,  # an Ant that falls ends its episode early
        episodes=episodes,
        segments=1,
        # Not bfloat16 on a GPU: a trained policy's spread is small, and rounding moves the mean by a part of it
        net=NetConfig(context=episodes * env.max_steps, dtype="float32"),
        # A metre per second more earns 75 an episode, so λ must reach tens. It may be large from the start, because
        # an agent that has not learned to run breaks no speed limit.
        penalty=PenaltyConfig(initial=1.0, step=0.05, final_step=0.25, bound=0.5, tolerance=0.05, cap=50.0),
        ppo=PPOConfig(epochs=4, minibatch=16, learning_rate=(1e-3, 1e-4), entropy=(0.001, 0.0), **near),
        ddpg=DDPGConfig(capacity=1024, exploration=(0.3, 0.05), target_rate=0.02, **near),
    )
    return Experiment(env=env, algo=algo, train=_world_training(0))


def _track(env: Any) -> Experiment:
    """The paper's trials, with λ near where the short ones left it."""
    first = _track_short(env)
    algo = dataclasses.replace(
        first.algo,
        iterations=240,
        rows=48,
        queue=1,
        episodes=None,
        segments=2,
        net=dataclasses.replace(first.algo.net, context=env.spec.trial_steps),
        penalty=dataclasses.replace(first.algo.penalty, initial=25.0, step=0.5, final_step=0.5, tolerance=0.03),
        ppo=dataclasses.replace(first.algo.ppo, epochs=3, minibatch=12, learning_rate=(5e-4, 5e-5), warmup=2),
    )
    return Experiment(env=env, algo=algo, train=_world_training(60))


def _track_line(env: Any) -> Experiment:
    """The short trials' settings."""
    return _single_episodes(_track_short(env))


def _ant_short(env: Any) -> Experiment:
    """Fewer iterations and more entropy: otherwise the spread of its actions closes early."""
    first = _track_short(env)
    ppo = dataclasses.replace(first.algo.ppo, entropy=(0.003, 0.0003))
    return dataclasses.replace(first, algo=dataclasses.replace(first.algo, iterations=400, ppo=ppo))


def _ant_second(env: Any) -> Experiment:
    """The track's, in fewer iterations."""
    first = _track(env)
    return dataclasses.replace(first, algo=dataclasses.replace(first.algo, iterations=200))


def _ant_third(env: Any) -> Experiment:
    """A horizon of several episodes, in which what the first ones find out pays, and a larger λ."""
    before = _ant_second(env)
    algo = dataclasses.replace(
        before.algo,
        iterations=120,
        penalty=dataclasses.replace(before.algo.penalty, initial=36.0, final_step=1.0, tolerance=0.01, cap=100.0),
        ppo=dataclasses.replace(before.algo.ppo, discount=0.997, trace=0.97, learning_rate=(3e-4, 3e-5), warmup=5),
    )
    return Experiment(env=env, algo=algo, train=_world_training(0))


def _ant_priced(*, iterations: int, multiplier: float, price: float) -> Callable[[Any], Experiment]:
    """Cost within the budget has a price: free, it is spent, the more the better the limit is known."""

    def make(env: Any) -> Experiment:
        before = _ant_third(env)
        algo = dataclasses.replace(
            before.algo,
            iterations=iterations,
            penalty=dataclasses.replace(before.algo.penalty, initial=multiplier, price=price),
            ppo=dataclasses.replace(before.algo.ppo, warmup=3),
        )
        return dataclasses.replace(before, algo=algo)

    return make


def _ant(env: Any) -> Experiment:
    """A lower price than the one before, which left most of a large budget unused. The mean of both ships."""
    before = _ant_priced(iterations=122, multiplier=70.0, price=12.0)(env)
    algo = dataclasses.replace(
        before.algo,
        penalty=dataclasses.replace(before.algo.penalty, step=0.0, final_step=0.5),
        ppo=dataclasses.replace(before.algo.ppo, learning_rate=(3e-4, 2e-5)),
    )
    return dataclasses.replace(before, algo=algo)


def _ant_line(env: Any) -> Experiment:
    """The short trials' settings."""
    return _single_episodes(_ant_short(env))


def _single_episodes(base: Experiment) -> Experiment:
    """One episode a trial, several trials a row, evaluated with its context wiped."""
    steps = base.env.max_steps
    net = dataclasses.replace(base.algo.net, context=steps)
    algo = dataclasses.replace(base.algo, episodes=1, queue=8, steps=4 * steps, segments=1, net=net)
    evaluation = dataclasses.replace(base.train.evaluation, wipe=True)
    return dataclasses.replace(base, algo=algo, train=dataclasses.replace(base.train, evaluation=evaluation))


def _world_training(every: int, temperature: float = 0.25) -> TrainConfig:
    """The planned iterations, an evaluation at the end and before it every so many; the safest good one is kept."""
    evaluation = EvalConfig(every=every, tasks=200, rows=200, temperature=temperature, tolerance=0.04)
    return TrainConfig(checkpoint_minutes=1.0, evaluation=evaluation)


@dataclass(frozen=True)
class World:
    """A MuJoCo world's experiments."""

    env: str
    args: tuple[str, ...]  # parameters of the environment to train in
    where: str  # the machine it is meant for
    stages: dict[str, Callable[[Any], Experiment]]  # one after another; by the end of their preset's name
    line: Callable[[Any], Experiment]

    def make(self) -> Any:
        """The environment to train in."""
        return make_env(self.env, **parse_parameters(self.args, "args"))


# Car is pretrained in the plane, since 16 cores make 8,000 steps a second of 64 real ones, and Ant by Euler steps,
# 1.8 times as fast as its own (docs/mujoco.md).
_ARENA = {"-short": _arena_short, "-second": _arena_second, "-third": _arena_third}
_ANT = {
    "-short": _ant_short,
    "-second": _ant_second,
    "-third": _ant_third,
    "-fourth": _ant_priced(iterations=100, multiplier=48.0, price=1.5),
    "-fifth": _ant_priced(iterations=90, multiplier=58.0, price=3.0),
    "-sixth": _ant_priced(iterations=115, multiplier=64.0, price=20.0),
    "": _ant,
}
WORLDS: dict[str, World] = {
    "point": World(
        "safe-dark-point", (), "one GPU, which also moves the robot", {**_ARENA, "": _point}, _arena_line
    ),
    "car": World("safe-dark-car", ("engine=planar",), "one GPU, in the plane", {**_ARENA, "": _car}, _arena_line),
    "half-cheetah": World(
        "safe-velocity-half-cheetah", (), "one GPU and its cores", {"-short": _track_short, "": _track}, _track_line
    ),
    "ant": World("safe-velocity-ant", ("engine=euler",), "one GPU and its cores", _ANT, _ant_line),
}


# the preset that a later stage starts from (--start)
STARTS_FROM = {
    name + after: name + before
    for name, world in WORLDS.items()
    for before, after in itertools.pairwise(world.stages)
}


def _stage(name: str, ending: str) -> Callable[[], Experiment]:
    """One of a world's runs."""
    world, before = WORLDS[name], STARTS_FROM.get(name + ending)
    make = lambda: world.stages[ending](world.make())  # noqa: E731
    if before is None:
        make.__doc__ = f"`{world.env}` in short trials, for others to start from."
    else:
        make.__doc__ = f"`{world.env}`, after `{before}` (--start RUN); for {world.where}."
    return make


def _line(name: str, kind: Literal["privileged", "memoryless"]) -> Callable[[], Experiment]:
    """A reference line of a world, from the same trainer.

    The privileged one is told the task, so that it has nothing to remember between episodes either.
    """

    def make() -> Experiment:
        world = WORLDS[name]
        found = world.line(world.make())
        if kind == "memoryless":
            return found
        return dataclasses.replace(found, env=Revealed(name=world.env, args=world.args))

    what = {
        "privileged": "told the task: the line above",
        "memoryless": "no memory of past episodes: the line below",
    }
    make.__doc__ = f"An agent for `{name}`, {what[kind]}."
    return make


PRESETS: dict[str, Callable[[], Experiment]] = {
    "darkroom": _darkroom,
    "darkroom-ddpg": _darkroom_ddpg,
    "darkroom-paper": _darkroom_paper,
    "darkroom-small": _darkroom_small,
    "darkroom-safe-ad": _darkroom_safe_ad,
    "darkroom-safe-ad-tuned": _darkroom_safe_ad_tuned,
    "darkroom-safe-ad-small": _darkroom_safe_ad_small,
    "point-safe-ad": _point_safe_ad,
    **{world + ending: _stage(world, ending) for world in WORLDS for ending in WORLDS[world].stages},
    **{f"{world}-privileged": _line(world, "privileged") for world in WORLDS},
    **{f"{world}-memoryless": _line(world, "memoryless") for world in WORLDS},
}

"""Recipes by name, with all their settings. The reasons for the numbers are in docs/.

The stages of a recipe share a base. Each lists what it changes there, by the names of the command line.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from safeicrl.algos.maml_penalty import MamlPenaltyConfig
from safeicrl.algos.ppo_lag import default_config
from safeicrl.algos.registry import find_algo
from safeicrl.algos.safe_ad import SafeADConfig
from safeicrl.algos.safe_meta import SafeMetaConfig, SafeStepConfig
from safeicrl.algos.scared import ScaredConfig
from safeicrl.config import changed
from safeicrl.envs.api import Env
from safeicrl.envs.dark_mujoco import SafeDarkMujoco
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.envs.registry import make_env, parse_parameters
from safeicrl.envs.spaces import Grid
from safeicrl.envs.wrappers import FixedTask, Revealed
from safeicrl.errors import UserError, unknown_name
from safeicrl.nets.decision_transformer import DecisionConfig
from safeicrl.nets.transformer import NetConfig
from safeicrl.optimisers.ddpg import DDPGConfig, paper_config
from safeicrl.optimisers.ppo import PPOConfig
from safeicrl.penalty import PenaltyConfig
from safeicrl.recipes.recipe import Experiment, Recipe, Stage
from safeicrl.training.settings import EvalConfig, TrainConfig

# The trained baselines of a world. Both play single episodes. The privileged one is told the hidden task and bounds
# the policy from above; the memoryless one is told nothing and bounds it from below.
Line = Literal["privileged", "memoryless"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe with a name."""

    summary: str  # what it trains, on which machine, for how long
    make: Callable[[], Recipe]
    line: Callable[[Line], Experiment] | None = None  # its baselines


def preset(name: str, line: str | None = None) -> Recipe:
    """The recipe called `name`, or that of one of its baselines."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    found = PRESETS[name]
    if line is None:
        return found.make()
    if line not in get_args(Line):
        raise unknown_name("line", line, get_args(Line))
    if found.line is None:
        those = ", ".join(other for other in PRESETS if PRESETS[other].line is not None)
        raise UserError(f"--line {line} is for the presets {those}, not for {name}")
    return Recipe.single(f"{name}-{line}", found.line(line))  # type: ignore[arg-type]


def experiment(algo: str, env: str) -> Experiment:
    """An algorithm's default experiment on an environment, both by name."""
    _, config = find_algo(algo)
    if algo == "ppo-lag":
        return _ppo_lag(env)
    if algo == "safe-ad":
        return _safe_ad(env)
    if algo in META:
        world = make_env(env)
        return _darkroom_meta(algo, world) if world == SafeDarkRoom() else _meta(algo, world)
    return Experiment(env=make_env(env), algo=config(), train=TrainConfig())


def _ppo_lag(name: str) -> Experiment:
    """An ordinary safe learner on one task of an environment."""
    env = FixedTask(name=name)
    # Only the last policy is evaluated. PPO-Lagrangian limits the mean cost, so a policy with few episodes over the
    # limit, which is what "best" means here, is not better.
    train = TrainConfig(chunk=10, evaluation=EvalConfig(every=0, tasks=20, segments=1))
    return Experiment(env=env, algo=default_config(env), train=train)


def _safe_ad(name: str) -> Experiment:
    """Safe AD on the histories that `safeicrl collect --env NAME` writes, at the sizes of the paper's table."""
    env, histories = make_env(name), f"histories/{name}"
    if isinstance(env.spec.observation, Grid):
        algo = SafeADConfig(histories=histories, stride=100)
    else:
        # The table's sizes; dropout and rate are those that helped most in the room. `stride` leaves about 20 to
        # 40 episodes of a history in a strand, about as many as a trial has.
        net = DecisionConfig(
            embedding=512, width=256, context=200,
            attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1,
        )  # fmt: skip
        stride = 100 if isinstance(env, SafeDarkMujoco) else 160
        algo = SafeADConfig(
            histories=histories, iterations=40, batch=128, stride=stride, learning_rate=5e-4, warmup=200, net=net
        )
    # a checkpoint of this size takes seconds to write
    train = TrainConfig(checkpoint_minutes=10.0, evaluation=EvalConfig(every=0, tasks=200))
    return Experiment(env=env, algo=algo, train=train)


# -- meta-learners ------------------------------------------------------------------------------------------

META: dict[str, type] = {"maml-penalty": MamlPenaltyConfig, "safe-meta": SafeMetaConfig}


def _meta(algo: str, env: Env, **changes: Any) -> Experiment:
    """A meta-learner at the sizes of the paper's table, with `changes` of its settings."""
    grid = isinstance(env.spec.observation, Grid)
    episodes = 17 if grid else 20  # 500 and 1500 steps in a batch
    sizes = {"batch_episodes": episodes, "fresh_episodes": episodes, **changes}
    if not grid:
        sizes = {"iterations": 1000, **sizes}  # one plays 120,000 steps, so there are fewer than in the paper
    if algo == "maml-penalty":
        # The paper's table has 1. Where the only reward is 1, at a goal, the policy then learns to stay put.
        sizes = {"weight": 0.1 if grid else 0.02 if isinstance(env, SafeDarkMujoco) else 1.0, **sizes}
    # They limit a mean cost, so about half of the episodes may be over budget: `tolerance` is half, too.
    evaluation = EvalConfig(every=0, tasks=100, tolerance=0.5)
    train = TrainConfig(chunk=50 if grid else 1, evaluation=evaluation)
    return Experiment(env=env, algo=META[algo](**sizes), train=train)


def _darkroom_meta(algo: str, env: Env) -> Experiment:
    """A meta-learner in the paper's room."""
    # The paper has 15,000 iterations. Every run so far was best in unseen rooms after 100 to 200, so this one is
    # shorter, with more evaluations to find the best. On cells SafeMeta's adaptation has a closed form, which
    # learned far more than the fit.
    own = {"weight": 0.05} if algo == "maml-penalty" else {"inner": SafeStepConfig(form="closed-form")}
    changes = {"iterations": 2000, **own}
    found = _meta(algo, env, **changes)
    evaluation = dataclasses.replace(found.train.evaluation, every=100, tasks=50)
    return dataclasses.replace(found, train=dataclasses.replace(found.train, evaluation=evaluation))


def _darkroom_meta_small(algo: str, name: str) -> Recipe:
    small = {"iterations": 400, "tasks": 12, "hidden": (32, 32), "batch_episodes": 16, "fresh_episodes": 16}
    found = _meta(algo, _small_room(), **small)
    evaluation = dataclasses.replace(found.train.evaluation, every=100, tasks=50)
    train = dataclasses.replace(found.train, minutes=5.0, evaluation=evaluation)
    return Recipe.single(name, dataclasses.replace(found, train=train))


# -- the dark room ------------------------------------------------------------------------------------------


def _darkroom() -> Recipe:
    algo = ScaredConfig(
        iterations=330,
        rows=512,
        queue=6,  # a trained agent needs a quarter of a trial's steps
        budget_power=2.0,
        net=NetConfig(heads=4),  # the paper has 8, but small heads are slow on a GPU (docs/speed.md)
        penalty=PenaltyConfig(step=0.01, final_step=0.15, bound=0.2, cap=2.2),  # above the cap: see docs/lab.md
        ppo=PPOConfig(epochs=2, minibatch=32, learning_rate=(1e-3, 5e-5), entropy=(0.02, 0.001)),
    )
    # λ rises through the run, so the evaluations move along the frontier of return and cost. The best policy has
    # the most return among those within the tolerance.
    evaluation = EvalConfig(every=20, tasks=500, rows=500, temperature=0.4, tolerance=0.03)
    train = TrainConfig(minutes=15.0, evaluation=evaluation)
    return Recipe.single("darkroom", Experiment(env=SafeDarkRoom(), algo=algo, train=train))


def _darkroom_guard() -> Recipe:
    algo = ScaredConfig(
        iterations=1060,
        rows=512,
        queue=6,
        budget_power=2.0,
        risk=0.03,
        first_risk=0.9,
        bold=0.0625,  # what the guard forbids, it must go on seeing
        overtime=0.12,  # trials past K, long enough to fill the context
        curiosity=0.4,
        net=NetConfig(
            heads=4, context=1000, guard=3, guard_clock=True, guard_ledger=12, shared_ledger=True, saturate=25
        ),
        # λ must not rise while the guard still learns: small budgets would freeze. Later it hardly has to.
        penalty=PenaltyConfig(step=0.02, final_step=0.3, bound=0.02, cap=2.2, tolerance=0.002),
        ppo=PPOConfig(
            epochs=2,
            minibatch=32,
            learning_rate=(1e-3, 3e-5),
            entropy=(0.02, 0.001),
            average=0.97,
            guard_weight=8.0,
        ),
    )
    # The last policy counts: an early one was trained with a larger risk than its card would say.
    evaluation = EvalConfig(every=0, tasks=300, rows=300, temperature=1.0, tolerance=0.003)
    train = TrainConfig(minutes=40.0, evaluation=evaluation)
    return Recipe.single("darkroom-guard", Experiment(env=SafeDarkRoom(), algo=algo, train=train))


def _darkroom_paper() -> Recipe:
    # The paper's room is learned in about a million steps: 84 iterations of 8 trials of 1500. Algorithm 1 updates
    # after every trajectory; few rows come closest to that.
    algo = ScaredConfig(
        iterations=84,
        rows=8,
        budget_power=1.0,
        penalty=PenaltyConfig(form="paper", signal="mean_of_max"),
        optimiser="ddpg",
        ddpg=paper_config(),
    )
    evaluation = EvalConfig(every=0, tasks=500, rows=500, temperature=0.4)  # the last policy counts, whatever it is
    train = TrainConfig(minutes=15.0, evaluation=evaluation)
    return Recipe.single("darkroom-paper", Experiment(env=SafeDarkRoom(), algo=algo, train=train))


def _small_room() -> SafeDarkRoom:
    """The room of the presets for a laptop."""
    return SafeDarkRoom(
        size=5, obstacles=6, max_steps=12, episodes=15, train_budget=(1.0, 6.0), test_budget=(1.0, 6.0)
    )


def _darkroom_small() -> Recipe:
    algo = ScaredConfig(
        iterations=190,
        rows=128,
        net=NetConfig(width=32, layers=2, heads=2, context=180, dtype="float32"),
        ppo=PPOConfig(minibatch=32, discount=0.99, entropy=(0.02, 0.002)),
    )
    train = TrainConfig(minutes=9.0, checkpoint_minutes=1.0, evaluation=EvalConfig(every=50, tasks=200))
    return Recipe.single("darkroom-small", Experiment(env=_small_room(), algo=algo, train=train))


def _darkroom_safe_ad_tuned() -> Recipe:
    """The sizes are the paper's, the other settings are from a small search (docs/safe_ad.md).

    Collect the histories first: `safeicrl collect --tasks 405 --steps 3300 --group 405 --learner.learning-rate 3e-3
    --learner.epochs 4 --out histories/safe-dark-room-many`.
    """
    algo = SafeADConfig(
        histories="histories/safe-dark-room-many",
        iterations=40,
        updates=50,
        stride=20,
        learning_rate=5e-4,
        net=DecisionConfig(attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1),
    )
    # a checkpoint of this size takes seconds to write
    train = TrainConfig(checkpoint_minutes=10.0, evaluation=EvalConfig(every=0, tasks=200))
    return Recipe.single("darkroom-safe-ad-tuned", Experiment(env=SafeDarkRoom(), algo=algo, train=train))


def _darkroom_safe_ad_small() -> Recipe:
    """docs/safe_ad.md says how to collect the histories."""
    algo = SafeADConfig(
        histories="histories/darkroom-small",
        iterations=40,
        updates=50,
        batch=64,
        stride=100,
        warmup=100,
        learning_rate=1e-3,
        net=DecisionConfig(
            embedding=32, width=64, layers=3, heads=2, context=48,
            attention_dropout=0.1, residual_dropout=0.0, embedding_dropout=0.0,
        ),
    )  # fmt: skip
    train = TrainConfig(evaluation=EvalConfig(every=0, tasks=200))
    return Recipe.single("darkroom-safe-ad-small", Experiment(env=_small_room(), algo=algo, train=train))


# -- the MuJoCo worlds --------------------------------------------------------------------------------------
#
# The first stage plays short trials: the agent learns to move and to remember in many cheap iterations. The other
# stages play the paper's trials of 20 episodes. docs/worlds has the reasons for the numbers.


def _stage(
    env: Env,
    base: ScaredConfig,
    name: str,
    changes: dict[str, Any],
    *,
    stop: int | None = None,
    **evaluation: Any,
) -> Stage:
    """A stage with the settings of `base`, but for `changes`; evaluated at its end if nothing else is said.

    It ends after `stop` iterations, where the shipped policy's run was stopped, or when its schedules end.
    """
    how = {"every": 0, "tasks": 200, "rows": 200, "temperature": 0.25, "tolerance": 0.04, **evaluation}
    train = TrainConfig(iterations=stop, checkpoint_minutes=1.0, evaluation=EvalConfig(**how))
    return Stage(name=name, experiment=Experiment(env=env, algo=changed(base, changes), train=train))


def _line(env: Env, base: ScaredConfig, changes: dict[str, Any]) -> Experiment:
    """A baseline: one episode per trial, several trials in a row, evaluated with its context wiped."""
    steps = env.spec.max_steps
    single = {"episodes": 1, "queue": 8, "steps": 4 * steps, "segments": 1, "net.context": steps}
    return _stage(env, base, "single-episodes", {**changes, **single}, wipe=True).experiment


def _world(name: str, args: tuple[str, ...], line: Line = "memoryless") -> Any:
    """The environment, with the hidden task in its observations for the privileged agent."""
    if line == "privileged":
        return Revealed(name=name, args=args)
    return make_env(name, **parse_parameters(args, "args"))


def _arena_base(env: Env) -> ScaredConfig:
    """The only reward is at the goal, where the episode ends. A step costs up to 5, budgets are 10 to 50."""
    far: dict[str, Any] = {"discount": 0.998, "trace": 0.97}  # what is found now pays in later episodes
    return ScaredConfig(
        rows=512,
        queue=6,  # a trained agent needs about a third of an episode's steps
        segments=6,
        net=NetConfig(context=env.spec.trial_steps, levels=5),  # motors saturate at a twentieth of their range
        penalty=PenaltyConfig(bound=0.5, tolerance=0.05, cap=1.0),
        ppo=PPOConfig(epochs=3, minibatch=32, warmup=3, **far),
        ddpg=DDPGConfig(capacity=1024, exploration=(0.5, 0.1), target_rate=0.02, **far),
    )


def _arena(
    name: str,
    world: str,
    *args: str,
    stops: tuple[int, int, int],  # iterations of the last three stages
    last: dict[str, Any],  # changes of the last stage
    env_args: tuple[str, ...] = (),
) -> Recipe:
    """Point or Car. Their recipes differ in the lengths of the stages and in the λ of the last one."""
    env = _world(world, args)
    stage = partial(_stage, env, _arena_base(env), temperature=0.5)
    stages = (
        stage("learn-to-drive", {
            "iterations": 130, "rows": 768, "episodes": 6, "segments": 2, "net.context": 6 * env.spec.max_steps,
            "budget_power": 1.0,
            "spent": 0.15,  # teach stopping before driving; later it is not learned
            "penalty.initial": 0.08, "penalty.step": 0.0, "penalty.final_step": 0.004,
            "ppo.minibatch": 96, "ppo.warmup": 10, "ppo.learning_rate": (1e-3, 5e-4), "ppo.entropy": (0.01, 0.001),
        }),
        stage("whole-trials", {
            "iterations": 220, "budget_power": 1.5, "spent": 0.1,
            "penalty.initial": 0.15, "penalty.step": 0.0005, "penalty.final_step": 0.014,
            "ppo.epochs": 2, "ppo.learning_rate": (7e-4, 2e-4), "ppo.entropy": (0.005, 0.001),
        }, stop=stops[0], every=40),
        # λ had risen too fast: it goes back to 0.2, until the goal is found within small budgets, too.
        stage("lower-penalty", {
            "iterations": 500, "budget_power": 1.0, "spent": 0.1,
            "penalty.initial": 0.2, "penalty.step": 0.0, "penalty.final_step": 0.004,
            "ppo.learning_rate": (8e-4, 1e-4), "ppo.entropy": (0.003, 0.0005),
        }, stop=stops[1], every=100),
        # The learning rate and the entropy end near 0.
        stage("settle", {
            "iterations": 265, "budget_power": 1.3, "spent": 0.1, "penalty.step": 0.0,
            "ppo.learning_rate": (7e-4, 5e-5), "ppo.entropy": (0.002, 0.0003), **last,
        }, stop=stops[2]),
    )  # fmt: skip
    return Recipe(name=name, stages=stages, env_args=env_args)


def _arena_line(line: Line, *, world: str, args: tuple[str, ...] = ()) -> Experiment:
    """As many steps as the first stage, tanh-normal actions, no spent budgets, and a λ of at most 0.3."""
    env = _world(world, args, line)
    changes = {
        "iterations": 300, "budget_power": 1.5, "spent": 0.0, "net.levels": 0,
        "penalty.initial": 0.0, "penalty.step": 0.0, "penalty.final_step": 0.004,
        "ppo.minibatch": 128, "ppo.warmup": 10, "ppo.learning_rate": (1e-3, 5e-5), "ppo.entropy": (0.003, 0.0003),
    }  # fmt: skip
    return _line(env, _arena_base(env), changes)


def _track_base(env: Env) -> ScaredConfig:
    """A reward at every step. A step above the speed limit costs 1, budgets are 0 to 5."""
    near: dict[str, Any] = {"discount": 0.99, "trace": 0.95}  # a stride pays within the second
    return ScaredConfig(
        rows=48,
        queue=1,
        segments=2,
        # not bfloat16: a trained policy's spread is small, and rounding would move the mean by a part of it
        net=NetConfig(context=env.spec.trial_steps, dtype="float32"),
        # One more metre per second earns 75 per episode, so λ must reach tens.
        penalty=PenaltyConfig(step=0.5, final_step=0.5, bound=0.5, tolerance=0.03, cap=50.0),
        ppo=PPOConfig(epochs=3, minibatch=12, warmup=2, learning_rate=(5e-4, 5e-5), entropy=(0.001, 0.0), **near),
        ddpg=DDPGConfig(capacity=1024, exploration=(0.3, 0.05), target_rate=0.02, **near),
    )


# The changes of `_track_base` for short trials, which the baselines share. λ may be large from the start: an
# agent that has not learned to run breaks no speed limit.
SHORT_TRACK: dict[str, Any] = {
    "rows": 64,
    "queue": 4,  # an Ant that falls ends its episode early
    "episodes": 4, "segments": 1, "net.context": 300,
    "penalty.initial": 1.0, "penalty.step": 0.05, "penalty.final_step": 0.25, "penalty.tolerance": 0.05,
    "ppo.epochs": 4, "ppo.minibatch": 16, "ppo.warmup": 10, "ppo.learning_rate": (1e-3, 1e-4),
}  # fmt: skip
# More entropy than HalfCheetah: otherwise the spread of Ant's actions closes early.
SHORT_ANT: dict[str, Any] = {**SHORT_TRACK, "iterations": 400, "ppo.entropy": (0.003, 0.0003)}
SHORT_CHEETAH: dict[str, Any] = {**SHORT_TRACK, "iterations": 600}


def _half_cheetah() -> Recipe:
    env = _world("safe-velocity-half-cheetah", ())
    stage = partial(_stage, env, _track_base(env))
    stages = (
        stage("learn-to-run", SHORT_CHEETAH),
        # λ begins near where the short trials left it. The policy acts greedily: `temperature` 0.
        stage("whole-trials", {"iterations": 240, "penalty.initial": 25.0}, every=60, temperature=0.0),
    )
    return Recipe(name="half-cheetah", stages=stages)


def _ant() -> Recipe:
    env = _world("safe-velocity-ant", ("engine=euler",))
    stage = partial(_stage, env, _track_base(env))
    # A horizon of several episodes, so that what the first ones find out pays, and a larger λ.
    far = {
        "ppo.discount": 0.997, "ppo.trace": 0.97, "ppo.learning_rate": (3e-4, 3e-5), "ppo.warmup": 3,
        "penalty.final_step": 1.0, "penalty.tolerance": 0.01, "penalty.cap": 100.0,
    }  # fmt: skip
    stages = (
        stage("learn-to-run", SHORT_ANT),
        stage("whole-trials", {"iterations": 200, "penalty.initial": 25.0}, every=60),
        stage("longer-horizon", {**far, "iterations": 120, "penalty.initial": 36.0, "ppo.warmup": 5}),
        # From here on, cost within the budget has a price. If it were free, the agent would spend it, and the more
        # of it the better it knows the limit. At 20 it leaves most of a large budget unused.
        stage("price-1.5", {**far, "iterations": 100, "penalty.initial": 48.0, "penalty.price": 1.5}),
        stage("price-3", {**far, "iterations": 90, "penalty.initial": 58.0, "penalty.price": 3.0}),
        stage("price-20", {**far, "iterations": 115, "penalty.initial": 64.0, "penalty.price": 20.0}),
        stage("price-12", {
            **far, "iterations": 122, "penalty.initial": 70.0, "penalty.price": 12.0, "penalty.step": 0.0,
            "penalty.final_step": 0.5, "ppo.learning_rate": (3e-4, 2e-5),
        }),
    )  # fmt: skip
    return Recipe(name="ant", stages=stages, average_last=2, env_args=("engine=auto",))


def _track_line(line: Line, *, world: str, changes: dict[str, Any], args: tuple[str, ...] = ()) -> Experiment:
    env = _world(world, args, line)
    return _line(env, _track_base(env), changes)


# Car is trained in the plane, where it is faster by far, and Ant by Euler steps, 1.8 times as fast as its own
# (docs/environments.md). Both are exported for the real physics.
PRESETS: dict[str, Preset] = {
    "darkroom": Preset(summary="SCARED in the paper's room: one GPU, 9 min", make=_darkroom),
    "darkroom-guard": Preset(summary="with a guard, for safe exploring: one GPU, 27 min", make=_darkroom_guard),
    "darkroom-paper": Preset(
        summary="Algorithm 1 as printed, 1M steps: one GPU, 10 min", make=_darkroom_paper
    ),
    "darkroom-small": Preset(summary="SCARED in a 5×5 room: two CPU cores, 8 min", make=_darkroom_small),
    "darkroom-safe-ad-tuned": Preset(
        summary="Safe AD, after safeicrl collect: one GPU, 5 min", make=_darkroom_safe_ad_tuned
    ),
    "darkroom-safe-ad-small": Preset(
        summary="Safe AD in the 5×5 room: two CPU cores, 12 min", make=_darkroom_safe_ad_small
    ),
    "point": Preset(
        summary="4 stages: one GPU, 25 min",
        make=partial(
            _arena, "point", "safe-dark-point",
            stops=(103, 174, 236), last={"penalty.initial": 0.26, "penalty.final_step": 0.007},
        ),
        line=partial(_arena_line, world="safe-dark-point"),
    ),
    "car": Preset(
        summary="4 stages: one GPU, 25 min",
        make=partial(
            _arena, "car", "safe-dark-car", "engine=planar", env_args=("engine=auto",),
            stops=(86, 172, 260), last={"penalty.initial": 0.25, "penalty.final_step": 0.003},
        ),
        line=partial(_arena_line, world="safe-dark-car", args=("engine=planar",)),
    ),
    "half-cheetah": Preset(
        summary="2 stages: one GPU and 16 CPU cores, 23 min",
        make=_half_cheetah,
        line=partial(_track_line, world="safe-velocity-half-cheetah", changes=SHORT_CHEETAH),
    ),
    "ant": Preset(
        summary="7 stages: one GPU and 16 CPU cores, 58 min",
        make=_ant,
        line=partial(_track_line, world="safe-velocity-ant", changes=SHORT_ANT, args=("engine=euler",)),
    ),
    "darkroom-maml-small": Preset(
        summary="MAML with penalty, 5×5 room: two CPU cores, 5 min",
        make=partial(_darkroom_meta_small, "maml-penalty", "darkroom-maml-small"),
    ),
    "darkroom-safe-meta-small": Preset(
        summary="SafeMeta, 5×5 room: two CPU cores, 5 min",
        make=partial(_darkroom_meta_small, "safe-meta", "darkroom-safe-meta-small"),
    ),
}  # fmt: skip

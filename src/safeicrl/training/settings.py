"""The settings of a run: how long it trains, with which seeds, and how it is evaluated."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from safeicrl.algos.api import Algorithm
from safeicrl.algos.registry import algo_name
from safeicrl.envs.api import Env
from safeicrl.envs.registry import env_to_plain
from safeicrl.errors import UserError, check_integer, check_number, check_seed


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The periodic evaluation of the frozen policy on unseen tasks, which also chooses the best one."""

    every: int = 50  # iterations between evaluations; 0: only one, at the end
    tasks: int = 100  # unseen tasks, one trial each
    episodes: int | None = None  # episodes in a trial; the environment's K by default
    seed: int = 1000  # not the default seed of `evaluate`, so that final results are of other tasks
    temperature: float | None = None  # of actions, here and on the best policy's card; the agent's own by default
    wipe: bool = False  # forget at every episode: for an agent that was trained on single episodes
    rows: int | None = None  # trials at a time; as `evaluate` chooses by default
    segments: int = 8  # steps in which the KV cache grows
    tolerance: float = 0.03  # share of episodes over budget up to which the return decides what is best

    def __post_init__(self) -> None:
        check_integer("evaluation every", self.every, 0)
        check_integer("evaluation tasks", self.tasks, 1)
        if self.rows is not None:
            check_integer("evaluation rows", self.rows, 1)
        check_integer("evaluation segments", self.segments, 1)
        check_seed(self.seed, "evaluation seed")
        check_number("evaluation tolerance", self.tolerance, 0.0)
        if self.episodes is not None:
            check_integer("evaluation episodes", self.episodes, 1)
        if self.temperature is not None:
            check_number("evaluation temperature", self.temperature, 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, with how many seeds, and what to write on the way."""

    iterations: int | None = None  # updates after which to stop; None: as many as the algorithm plans for
    # wall time after which to stop, compilation included, if that comes first; never before the first chunk is done
    minutes: float | None = None
    seed: int = 0  # of networks, tasks and actions
    seeds: int = 1  # how many seeds (seed, seed + 1, ...) train side by side in one vmapped program
    # what this run begins with: the folder of a run, all its networks; or a policy (name, path), with new critics.
    # A folder with a policy of each seed, but no checkpoint: each seed begins with its own
    start: str | None = None
    chunk: int = 1  # iterations in one call of the jitted program
    checkpoint_minutes: float = 2.0  # minutes between checkpoints; 0: one after every chunk
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    tensorboard: bool = False  # write TensorBoard files, too, into the run's folder
    wandb: str | None = None  # project of Weights & Biases to log to

    def __post_init__(self) -> None:
        if self.iterations is not None:
            check_integer("iterations", self.iterations, 1)
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0.0, strict=True)
        check_integer("seeds", self.seeds, 1, 2**12)
        check_seed(self.seed)
        check_seed(self.seed + self.seeds - 1, "the last of the seeds")
        check_integer("chunk", self.chunk, 1)
        check_number("checkpoint_minutes", self.checkpoint_minutes, 0.0)
        for name, value in (("iterations", self.iterations), ("evaluation every", self.evaluation.every)):
            if value is not None and value % self.chunk:
                raise UserError(f"{name} ({value}) must be a multiple of chunk ({self.chunk})")


def with_limit(algorithm: Algorithm, config: TrainConfig) -> TrainConfig:
    """The config with a limit: by default the number of iterations that the algorithm's schedules span."""
    if config.iterations is not None:
        return config
    planned = getattr(algorithm.config, "iterations", None)
    if planned is None and config.minutes is None:
        raise UserError("training needs a limit: iterations, minutes or both")
    return dataclasses.replace(config, iterations=planned)


def seeds_of(config: TrainConfig) -> range:
    """The seeds that train side by side."""
    return range(config.seed, config.seed + config.seeds)


def describe(env: Env, algo: Any, train: TrainConfig) -> dict[str, Any]:
    """A run's settings as JSON values, with the names under which the environment and algorithm are registered."""
    return {
        "env": env_to_plain(env),
        "algo": {"name": algo_name(algo), "config": dataclasses.asdict(algo)},
        "train": dataclasses.asdict(train),
    }

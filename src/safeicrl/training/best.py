"""The evaluation in training, and each seed's best policy by it, kept with its card."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from safeicrl.agents.api import with_options
from safeicrl.algos.api import Algorithm
from safeicrl.envs.api import PyTree
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import Summary, rank, summaries, summarise
from safeicrl.log import Sink, Terminal
from safeicrl.machine import hosts
from safeicrl.policies.cards import save_policy
from safeicrl.provenance import surroundings
from safeicrl.training.progress import log_evaluation
from safeicrl.training.settings import TrainConfig, describe, seeds_of
from safeicrl.training.state import select
from safeicrl.training.status import Status


def evaluate_seeds(
    algorithm: Algorithm,
    config: TrainConfig,
    folder: Path,
    state: PyTree,
    status: Status,
    sinks: list[Sink],
    terminal: Terminal,
    mesh: Mesh | None,
) -> list[Results]:
    """Evaluate every seed's frozen policy on unseen tasks, log it, and keep each seed's best."""
    results, options = [], config.evaluation
    for index, seed in enumerate(seeds_of(config)):
        own = algorithm.agent(select(state, index, config.seeds))
        agent, how = with_options(algorithm.env, own, temperature=options.temperature, wipe=options.wipe)
        found = evaluate(
            algorithm.env, agent, tasks=options.tasks, episodes=options.episodes, seed=options.seed,
            rows=options.rows, segments=options.segments, devices=mesh or 1,
            label=f"{folder.resolve().name}, in training",  # all seeds alike: they are drawn as one agent
            meta={"agent": f"seed {seed}", "iteration": status.iteration, **how},
        )  # fmt: skip
        results.append(found)
        summary, best = summarise(found), status.best[index]
        if best is None or rank(summary, options.tolerance) > rank(Summary(**best["summary"]), options.tolerance):
            status.best[index] = {"iteration": status.iteration, "summary": dataclasses.asdict(summary)}
            card = _card(algorithm, config, status, found, seed)
            # The checkpoint is written later: a run killed in between does this again when it is resumed.
            if hosts.is_first():
                save_policy(policy_path(folder, seed), own, card, found)
    log_evaluation(results, status, sinks, terminal)
    return results


def policy_path(folder: Path, seed: int) -> Path:
    """Where the best policy of a seed is kept."""
    return folder / f"best-seed{seed}.safetensors"


def _card(algorithm: Algorithm, config: TrainConfig, status: Status, results: Results, seed: int) -> dict[str, Any]:
    """What a released policy says about itself."""
    described, where = describe(algorithm.env, algorithm.config, config), surroundings()
    temperature = config.evaluation.temperature
    return {
        **algorithm.card(),
        "env": described["env"],
        **({} if temperature is None else {"temperature": temperature}),  # it acts as when it was chosen
        "training": {
            **{name: described[name] for name in ("algo", "train")},
            **{name: where[name] for name in ("command", "device", "safeicrl", "jax", "date")},
            "seed": seed,
            "iteration": status.iteration,
            "env_steps": status.env_steps,
            "minutes": math.ceil(status.seconds / 6) / 10,
        },
        "evaluation": {**results.meta, **summaries(results)},
        "limits": [
            f"trained on budgets {algorithm.env.spec.train_budget} and these environment parameters only",
            "a budget is kept in most episodes, never with certainty: over_by_budget says how often it was broken, "
            "trials_over in how many trials it was broken at least once",
        ],
    }

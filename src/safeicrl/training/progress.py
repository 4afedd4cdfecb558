"""What a run logs and prints on its way, after a chunk and after an evaluation."""

from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.algos.api import Algorithm
from safeicrl.evaluation.results import Results
from safeicrl.evaluation.statistics import summarise
from safeicrl.log import JsonLines, Sink, TensorBoard, Terminal, WandB
from safeicrl.training.settings import TrainConfig, describe, seeds_of
from safeicrl.training.status import Status


def open_sinks(algorithm: Algorithm, config: TrainConfig, folder: Path, status: Status) -> list[Sink]:
    """Where the run is logged; a resumed run's log loses what came after its checkpoint."""
    log = JsonLines(folder / "metrics.jsonl", keep_until=status.iteration, evaluated=status.evaluated)
    sinks: list[Sink] = [log]
    if config.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.wandb is not None:
        sinks.append(WandB(config.wandb, folder, describe(algorithm.env, algorithm.config, config)))
    return sinks


def account(
    values: dict[str, np.ndarray], status: Status, config: TrainConfig, physics_seconds: float = 0.0
) -> dict[str, np.ndarray]:
    """Move `status` on by one chunk; returns the chunk's metrics as [seed, ...], without its failures.

    `physics_share` is the share of the time in which the host's cores moved worlds. Without overlap the accelerator
    waits in that time, and acts and learns in the rest.
    """
    failed = values["rolled_back"].astype(bool)  # [chunk, seed]
    for now in failed:
        status.failures = [count + 1 if bad else 0 for count, bad in zip(status.failures, now, strict=True)]
    steps = np.where(np.isfinite(values["env_steps"]), values["env_steps"], 0.0)
    status.iteration += config.chunk
    status.env_steps += int(steps.mean(axis=1).sum())

    def mean(value: np.ndarray) -> np.ndarray:
        kept = ~failed.reshape(failed.shape + (1,) * (value.ndim - 2))
        count = np.broadcast_to(kept, value.shape).sum(axis=0)
        total = np.where(kept, value, 0.0).sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    sums = ("rolled_back", "env_steps", "tokens")
    means = {name: mean(value) for name, value in values.items() if name not in sums}
    means["steps_per_second"] = steps.sum(axis=0) / status.pace
    if "tokens" in values:
        means["tokens_per_second"] = values["tokens"].sum(axis=0) / status.pace
    if physics_seconds:
        means["physics_share"] = np.full(config.seeds, physics_seconds / status.pace)
    return {**means, "rolled_back": failed.sum(axis=0)}


def log_chunk(
    values: dict[str, np.ndarray],
    status: Status,
    config: TrainConfig,
    sinks: list[Sink],
    terminal: Terminal,
    devices: int = 1,
) -> None:
    """One line for the log: means over seeds, and each seed's own value where there are several."""
    line: dict[str, Any] = {
        "iteration": status.iteration, "env_steps": status.env_steps, "seconds": round(status.seconds, 3),
    }  # fmt: skip
    means = {name: _finite_mean(value) for name, value in values.items()}
    means |= {name: value.sum() for name, value in values.items() if name.endswith("_per_second")}
    line |= means
    if devices > 1:
        each = {
            f"{name}_per_device": value / devices for name, value in means.items() if name.endswith("_per_second")
        }
        line |= {"devices": devices, **each}
    if config.seeds > 1:
        line |= {f"{name}/seeds": value for name, value in values.items()}
    for sink in sinks:
        sink.write(status.env_steps, line)
    if values["rolled_back"].any():
        which = ", ".join(
            str(seed) for seed, bad in zip(seeds_of(config), values["rolled_back"], strict=True) if bad
        )
        terminal.say(f"iteration {status.iteration}: not finite, rolled back (seed {which})", style="yellow")
    terminal.progress(*_progress(means, status, config, devices))


def _finite_mean(value: np.ndarray) -> np.ndarray:
    """Mean over seeds, [seed, ...] → [...], without those rolled back; nan where none is left."""
    finite = np.isfinite(value)
    total, count = np.where(finite, value, 0.0).sum(axis=0), finite.sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _progress(means: dict[str, np.ndarray], status: Status, config: TrainConfig, devices: int) -> tuple[float, str]:
    """Share of the run done, and the line beside the bar."""
    shares, lefts = [], []
    if config.iterations is not None:
        shares.append(status.iteration / config.iterations)
        lefts.append((config.iterations - status.iteration) / config.chunk * status.pace)
    if config.minutes is not None:
        shares.append(status.seconds / (60 * config.minutes))
        lefts.append(60 * config.minutes - status.seconds)
    done, left = min(max(shares), 1.0), max(min(lefts), 0.0)
    rate = float(means["steps_per_second"])
    each = f" ({_short(rate / devices)} on each of {devices} devices)" if devices > 1 else ""
    return done, (
        f"it {status.iteration}  {_short(status.env_steps)} steps  {_short(rate)}/s{each}  "
        f"ETA {int(left // 60)}:{int(left % 60):02d}  {_numbers(means)}"
    )


def _numbers(means: dict[str, np.ndarray]) -> str:
    """The metrics to watch, for an algorithm that plays or for one that learns from histories."""
    if "return" in means:
        physics_share = f"  physics {means['physics_share']:.0%}" if "physics_share" in means else ""
        names = [name.removeprefix("costs/") for name in means if name.startswith("costs/")]
        costs = [f"{name} {means[f'costs/{name}']:.2f}/{means[f'budgets/{name}']:.2f}" for name in names]
        costs = costs or [f"cost {means['cost']:.2f}/{means['budget']:.2f}"]
        return (
            f"return {means['return']:.3f}  {'  '.join(costs)}  "
            f"over {means['over_budget']:.1%}  λ {means['lambda']:.3g}{physics_share}"
        )
    accuracy = f"  accuracy {means['accuracy']:.1%}" if "accuracy" in means else ""
    tokens = f"  {_short(float(means['tokens_per_second']))} tokens/s" if "tokens_per_second" in means else ""
    return f"loss {means['loss']:.4g}{accuracy}{tokens}" if "loss" in means else ""


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def log_evaluation(results: list[Results], status: Status, sinks: list[Sink], terminal: Terminal) -> None:
    """One line for the log, and one for the terminal: means over seeds, and the total return of each."""
    names = ("total_return", "last_return", "over_budget", "over_budget_last", "cost")
    found = [summarise(result) for result in results]
    each = {name: np.array([getattr(summary, name) for summary in found]) for name in names}
    for cost in results[0].cost_names if results[0].several else ():
        own = [summarise(result.by_cost()[cost]) for result in results]
        each[f"costs/{cost}"] = np.array([summary.cost for summary in own])
        each[f"over_budgets/{cost}"] = np.array([summary.over_budget for summary in own])
    line: dict[str, Any] = {
        "iteration": status.iteration, "env_steps": status.env_steps, "seconds": round(status.seconds, 3),
        **{f"eval/{name}": value.mean() for name, value in each.items()},
    }  # fmt: skip
    if len(found) > 1:
        line |= {f"eval/{name}/seeds": value for name, value in each.items()}
    for sink in sinks:
        sink.write(status.env_steps, line)
    totals = " ".join(f"{value:.2f}" for value in each["total_return"])
    terminal.say(
        f"evaluation at iteration {status.iteration}: total return {totals} of {found[0].episodes} episodes, "
        f"{found[0].last_name} {each['last_return'].mean():.3f}, over budget {each['over_budget'].mean():.2%} "
        f"({found[0].last_name} {each['over_budget_last'].mean():.2%})"
    )

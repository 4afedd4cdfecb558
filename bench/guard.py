"""A guard's calibration: predicted against observed chance of cost, and what each risk that is asked for gives.

python bench/guard.py safe-dark-room-guard    → results/POLICY/calibration.json,
                                              docs/images/guard-calibration-POLICY.png

Both parts use other tasks than the reported ones (another seed). The chance is that of the next step's cost, at the
action that was taken, at every step of a trial. The risks are those of `policy.start(risk=...)`.

`--breaks` asks another question, and draws nothing: what did the guard say where budgets were broken after all?
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import provenance
from matplotlib.figure import Figure

from safeicrl.agents.in_context import InContextAgent
from safeicrl.envs.api import Env
from safeicrl.evaluation.evaluate import evaluate
from safeicrl.evaluation.statistics import summarise
from safeicrl.files import write_json
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import find_policy, load_agent
from safeicrl.trial import run_trials, sample_queue

EDGES = np.array([0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0])  # of predicted chances
RISKS = (0.001, 0.005, 0.02, 0.1, 0.3)  # beside the one on the card
BEFORE = (0, 1, 2, 4, 8)  # steps before a budget is broken


def play(env: Env, agent: InContextAgent, split: str, tasks: int, key: jax.Array) -> tuple:
    """Trials, what the guard reads, and the actions taken, in its terms; all [trial, time, ...]."""
    task_key, play_key = jax.random.split(key)
    queue, budgets = sample_queue(env, split, env.spec.test_budget, (tasks, 1), task_key)
    trials = run_trials(
        env, agent, queue, budgets, play_key, episodes=env.spec.episodes, steps=env.spec.trial_steps
    )
    features = agent.net.trunk.forward(trials.token, trials.trial)
    watched = agent.net.watched(features, trials.token, trials.trial)
    if agent.net.guard.choices == 0:
        return trials, watched, env.spec.action.encode_scaled(trials.action)
    return trials, watched, agent.net.distribution(agent.net.seen(features, watched)).index(trials.action)


@eqx.filter_jit
def chances(env: Env, agent: InContextAgent, split: str, tasks: int, key: jax.Array) -> tuple:
    """Predicted chance and occurrence of a cost at every step, and which steps were played; all [trial, time]."""
    trials, features, taken = play(env, agent, split, tasks, key)
    guard = agent.net.guard
    if guard.choices == 0:
        logits = guard.logits(features, taken)[..., 0, 0]  # one step ahead, any cost
    else:
        logits = jnp.take_along_axis(guard.logits(features)[..., 0, 0, :], taken[..., None], -1)[..., 0]
    return jax.nn.sigmoid(logits), trials.cost > 0, trials.valid


@eqx.filter_jit
def verdicts(env: Env, agent: InContextAgent, tasks: int, key: jax.Array) -> tuple:
    """What is left, the cost, the risk of the action taken and of the safest one; all [trial, time]."""
    trials, features, index = play(env, agent, "test", tasks, key)
    risks = agent.net.guard.judge(features, trials.token.ctg, trials.token.time, agent.risk).risk
    taken = jnp.take_along_axis(risks, index[..., None], -1)[..., 0]
    return trials.token.ctg, trials.cost, taken, risks.min(-1), trials.token.episode, trials.valid


def breaks(env: Env, agent: InContextAgent, tasks: int, seed: int) -> list[dict[str, float]]:
    """The guard's verdicts at the steps that broke a budget, and some steps before them.

    `trapped`: no action was within the risk. `misjudged`: the one that was taken was.
    """
    ctg, cost, taken, safest, episode, valid = map(np.asarray, verdicts(env, agent, tasks, jax.random.key(seed)))
    slack = 1e-4  # rounding
    trial, time = np.where(valid & (ctg >= -slack) & (ctg - cost < -slack))
    lines = []
    for before in BEFORE:
        early = time - before
        same = (early >= 0) & (episode[trial, np.maximum(early, 0)] == episode[trial, time])
        at = trial[same], early[same]
        lines.append(
            {
                "steps_before": before, "count": int(same.sum()), "ctg": float(ctg[at].mean()),
                "trapped": float((safest[at] > agent.risk).mean()),
                "misjudged": float((taken[at] <= agent.risk).mean()),
                "taken_median": float(np.median(taken[at])), "safest_median": float(np.median(safest[at])),
            }
        )  # fmt: skip
        print(lines[-1], flush=True)
    return lines


def calibration(env: Env, agent: InContextAgent, split: str, tasks: int, seed: int) -> dict[str, Any]:
    """By bin of the predicted chance: how often it was predicted, the mean prediction, the share that cost."""
    predicted, cost, valid = (np.asarray(x) for x in chances(env, agent, split, tasks, jax.random.key(seed)))
    predicted, cost = predicted[valid], cost[valid]
    index = np.clip(np.searchsorted(EDGES, predicted, side="right") - 1, 0, len(EDGES) - 2)
    count = np.bincount(index, minlength=len(EDGES) - 1)
    mean = lambda x: np.bincount(index, x, len(EDGES) - 1) / np.maximum(count, 1)  # noqa: E731
    gap = np.abs(mean(predicted) - mean(cost))
    return {
        "steps": int(count.sum()), "count": count.tolist(), "predicted": mean(predicted).tolist(),
        "observed": mean(cost).tolist(), "expected_calibration_error": float((gap * count).sum() / count.sum()),
    }  # fmt: skip


def asked(env: Env, agent: InContextAgent, tasks: int, seed: int) -> list[dict[str, float]]:
    """What each risk gives on unseen tasks; last, the guard switched off."""
    lines = []
    for risk in (*sorted({*RISKS, agent.risk}), None):
        result = evaluate(env, dataclasses.replace(agent, risk=risk), tasks=tasks, seed=seed)
        found = summarise(result)
        excess = np.maximum(result.costs - result.budgets[:, None], 0)[result.over]
        lines.append(
            {
                "risk": risk, "total_return": found.total_return, "over_budget": found.over_budget,
                "over_budget_last": found.over_budget_last, "trials_over": found.trials_over,
                "mean_excess": float(excess.mean()) if excess.size else 0.0,
                "excess_95": float(np.quantile(excess, 0.95)) if excess.size else 0.0,
            }
        )  # fmt: skip
        print(lines[-1], flush=True)
    return lines


def draw(found: dict[str, Any], path: Path) -> None:
    """Both figures side by side."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
    for name, colour in (("train", "#0072B2"), ("test", "#D55E00")):
        seen = np.array(found[name]["count"]) >= 30
        x, y = (np.array(found[name][key])[seen] for key in ("predicted", "observed"))
        words = {"train": "tasks like those of training", "test": "unseen tasks of the test distribution"}[name]
        left.plot(x, y, "o-", color=colour, markersize=4, label=words)
    left.set(xlabel="predicted chance that the step costs", ylabel="share of steps that cost", title="calibration")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    lines = [line for line in found["risks"] if line["risk"] is not None]
    off, risks = found["risks"][-1], [line["risk"] for line in lines]
    for name, words, colour, mark in (
        ("over_budget", "episodes over budget", "#0072B2", "o"),
        ("trials_over", "trials ever over", "#D55E00", "s"),
    ):
        shares = [line[name] or np.nan for line in lines]  # a logarithmic axis has no 0
        right.plot(risks, shares, f"{mark}-", color=colour, label=words)
        right.axhline(off[name], color=colour, linestyle="--", linewidth=1)
    right.set(xscale="log", yscale="log", xlabel="risk asked for", title="what a risk gives (dashed: guard off)")
    right.yaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%")
    right.yaxis.set_minor_formatter(lambda x, _: f"{100 * x:g}%" if f"{x:e}"[0] in "25" else "")
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    for axis in (left, right):
        axis.grid(color="#e6e6e6")
        axis.spines[["right", "top"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="a pretrained policy's name, a file, or a run's folder; with a guard")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2000, help="of the tasks; reported results have 0")
    parser.add_argument("--out", type=Path, help="results/POLICY/calibration.json by default")
    parser.add_argument("--breaks", action="store_true", help="only the verdicts where budgets were broken")
    parser.add_argument("--figure", type=Path, help="docs/images/guard-calibration-POLICY.png by default")
    args = parser.parse_args()

    about, path = provenance(), find_policy(args.policy)
    card = read_card(path)
    env, agent = load_agent(path, card)
    if not isinstance(agent, InContextAgent) or agent.net.guard is None:
        parser.error(f"{args.policy} has no guard; safeicrl fit-guard fits one")
    if args.breaks and agent.net.guard.choices == 0:
        parser.error(f"--breaks is for a finite set of actions; those of {args.policy} are real-valued")
    agent = dataclasses.replace(agent, temperature=card.get("temperature", 1.0))
    settings = {"policy": args.policy, "tasks": args.tasks, "seed": args.seed}
    if args.breaks:
        lines = breaks(env, agent, args.tasks, args.seed)
        write_json(args.out or Path(f"results/{path.stem}/breaks.json"), {**about, **settings, "breaks": lines})
        return
    found = {split: calibration(env, agent, split, args.tasks, args.seed) for split in ("train", "test")}
    for split, numbers in found.items():
        print(split, f"calibration error {numbers['expected_calibration_error']:.4f}", flush=True)
    found |= {"risks": asked(env, agent, args.tasks, args.seed)}
    settings |= {"edges": EDGES.tolist()}
    write_json(args.out or Path(f"results/{path.stem}/calibration.json"), {**about, **settings, **found})
    draw(found, args.figure or Path(f"docs/images/guard-calibration-{path.stem}.png"))


if __name__ == "__main__":
    main()

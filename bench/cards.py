"""Write into the shipped policies' cards how they came about: every stage of training, and every choice.

    python bench/cards.py

Stages are read from the stored logs below results/POLICY/training. Choices are listed here; docs/worlds has more on
each. A policy that only acts with more care than another one shares its file of arrays. Run it again after a policy
was replaced; export the careful one again first, as in

    safeicrl export safe-dark-point --reserve 8 --name 'SCARED, careful' --description '...' \\
      --evaluation results/safe-dark-point/reserve.json --out PRETRAINED/safe-dark-point-careful
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.evaluation.archive import load_results
from safeicrl.files import read_json
from safeicrl.log import read_metrics
from safeicrl.policies.cards import read_card, write_card
from safeicrl.policies.catalogue import PRETRAINED, policy_names, shipped_card
from safeicrl.policies.checkpoint import read

RESULTS = Path(__file__).parents[1] / "results"
CHECKPOINTS = "checkpoint: by evaluations on {tasks} tasks of seed 1000, while training, {day}"
SOME = CHECKPOINTS + ", in the stages that say judged_on; the last one of the others"
LAST = "checkpoint: the last one"
# What was chosen, on which tasks, when. The reported tasks are those of seed 0.
CHOSEN = {
    "safe-dark-room": [
        "seed 1 of 3: by hand, the most goals on 500 rooms of seed 1000, 2026-11-15",
        "temperature 0.4: on other rooms than the reported ones; the day was not recorded",
    ],
    "safe-dark-room-guard": [
        "temperature 0.5, of 1, 0.7, 0.5, 0.35: on 200 rooms of seed 1000 0.35 and 0.5 were within 0.1 goals, mean "
        "of the seeds; 0.5 found more on 400 rooms of seed 2000 and on all 600 "
        "(results/lab/guard/room-long-validation.json), 2026-11-20",
        "seed 0 of 3: the most goals at that temperature on these 600 rooms, and the fewest broken budgets, "
        "2026-11-20",
        "risk 0.03, depth 3: set before the run; on the 200 rooms 0.05 found 0.15 goals more and broke more "
        "budgets",
        "planned for 700 iterations; after 372 changed to 1100, after 761 to 1060, when the time for it was known",
        "trained on the H200; the release, with its evaluation, was written on a CPU",
    ],
    "safe-dark-point": [
        "temperature 0.5: on 500 arenas of seed 11 (results/lab/point/temperatures.json), 2026-11-15",
    ],
    "safe-dark-car": ["temperature 0.5: that of Point"],
    "safe-velocity-half-cheetah": [
        "greedy actions: on the reported tasks, for an earlier policy, 2026-11-15; so the numbers are flattered",
    ],
    "safe-velocity-ant": [
        "mean of the last two stages: with the reported tasks in view, 2026-11-15 21:51, then compared with other "
        "means on seed 1000 from 22:31 on",
        "temperature 0.25: on other tasks than the reported ones; the day was not recorded",
    ],
}
CAREFUL = "-careful"  # ends the name of a policy that acts with more care
# What was chosen for these beside that.
ALSO = {
    "safe-dark-point-careful": [
        "reserve 8, of 0, 8, 20: on 200 arenas of seed 1000 (results/lab/reserve/point.json), 2026-11-19",
    ],
    "safe-dark-car-careful": [
        "reserve 5: what one step can cost, set beforehand",
        "temperature 0.5, that of Point, not 0.1: with the reported tasks in view, 2026-11-19; 0.1 was better on "
        "200 arenas of seed 1000, and worse on the reported ones (docs/guard.md)",
    ],
    "safe-velocity-half-cheetah-careful": [
        "reserve 1 of budgets below 1: the smallest that leaves nothing, set beforehand",
        "reserve 0.1 of others, of 0, 0.05, 0.1, 0.25: on 240 training tasks of seed 1000 "
        "(results/lab/reserve/half-cheetah-once.json), 2026-11-19",
    ],
    "safe-velocity-ant-careful": [
        "reserve 1 of budgets below 1: the smallest that leaves nothing, set beforehand",
        "brake 2, of 1, 1.5, 2, 3: the fewest episodes over budget on 240 training tasks of seed 1000 "
        "(results/lab/reserve/ant-brake.json), 2026-11-19",
        "settles after 14 episodes: on 240 trials of seed 1000 at the three reported limits, 2026-11-19",
        "greedy actions: on the same trials, 2026-11-19",
    ],
}
# How limits begin that are of the policy without care.
MEASURED = ("Breaks its budget", "The test tasks have three speed limits", "The return rises with the budget")
# What care costs.
CARE = {
    "safe-velocity-half-cheetah-careful": [
        "With a budget below 1 it runs at about 1 m/s, whatever the limit is (docs/guard.md)."
    ],
    "safe-velocity-ant-careful": ["With a budget below 1 it hardly moves (docs/guard.md)."],
}


def stages(policy: str) -> list[dict[str, Any]]:
    """One entry per stage, as a recipe writes them, with its machine and the time of its start."""
    folder = RESULTS / policy / "training"
    logs = sorted(folder.glob("[0-9]-*/metrics.jsonl")) or [folder / "metrics.jsonl"]
    found = []
    for log in logs:
        last, config = read_metrics(log)[-1], read_json(log.with_name("config.json"), "configuration")
        found.append({
            "stage": log.parent.name.partition("-")[2] or "train",
            "iterations": last["iteration"],
            "env_steps": last["env_steps"],
            "minutes": round(last["seconds"] / 60, 1),
            "device": config["device"],
            "date": config["date"],
            **_judged(config["train"]["evaluation"]),
        })  # fmt: skip
    return found


def _judged(evaluation: dict[str, Any]) -> dict[str, str]:
    """The tasks on which the stage's checkpoints were judged, if any were."""
    return {"judged_on": f"{evaluation['tasks']} tasks of seed {evaluation['seed']}"} if evaluation["every"] else {}


def careful_limits(policy: str) -> list[str]:
    """What a careful policy cannot do: as the one that it comes from, but for how often it breaks its budget."""
    base = policy.removesuffix(CAREFUL)
    results = load_results(RESULTS / base / "reserve")
    over, small = results.over, results.budgets < np.quantile(results.budgets, 0.2)
    kept = [limit for limit in shipped_card(base)["limits"] if not limit.startswith(MEASURED)]
    return [
        *kept,
        f"Breaks its budget in {over[:, 0].mean():.1%} of the first episodes and in {over[:, -5:].mean():.1%} "
        f"of the last five; at least once in {over.any(1).mean():.1%} of {len(over)} trials, "
        f"{over[small].any(1).mean():.0%} of the fifth with the smallest budgets.",
        *CARE.get(policy, ()),
    ]


def share(policy: str) -> None:
    """Let a policy that was exported as a file of its own share the arrays of the one that it comes from."""
    path, base = PRETRAINED / f"{policy}.safetensors", policy.removesuffix(CAREFUL)
    if not path.exists():
        return
    own, theirs = (read(PRETRAINED / f"{name}.safetensors", kind="policy")[0] for name in (policy, base))
    if own.keys() != theirs.keys() or not all(np.array_equal(own[name], theirs[name]) for name in own):
        raise SystemExit(f"{policy} has other arrays than {base}")
    card = shipped_card(policy)
    path.unlink()
    write_card(path, {**card, "arrays": base})


def main() -> int:
    """Write all cards."""
    for policy in ALSO:
        share(policy)
    for policy in policy_names():
        base = policy.removesuffix(CAREFUL)
        path, own = PRETRAINED / f"{policy}.safetensors", stages(base)
        tasks = " or ".join(dict.fromkeys(stage["judged_on"].split()[0] for stage in own if "judged_on" in stage))
        how = CHECKPOINTS if all("judged_on" in stage for stage in own) else SOME if tasks else LAST
        checkpoint = how.format(tasks=tasks, day=own[-1]["date"][:10])
        also = ALSO.get(policy, [])
        other = any(line.startswith(("greedy", "temperature")) for line in also)
        chosen = [line for line in CHOSEN[base] if not (other and line.startswith("temperature"))]
        card = {**read_card(path), "stages": own, "chosen": [checkpoint, *chosen, *also]}
        if also:
            card["limits"] = careful_limits(policy)
        write_card(path, card)
        print(f"{policy}: {len(own)} stages, {sum(s['env_steps'] for s in own) / 1e6:.0f} million steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())

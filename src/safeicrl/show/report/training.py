"""Training budgets: steps, updates, parameters, time and machine of the stored runs."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from safeicrl.evaluation import plots
from safeicrl.evaluation.results import Results
from safeicrl.files import read_json
from safeicrl.show.report.content import Drawing, File, Found, Grid, Need, Shown
from safeicrl.show.report.steps import in_words

PRETRAINED = Path(__file__).parents[2] / "policies" / "pretrained"
# The last run that a row of baselines or a policy came from is on its card; a policy's stages are in their logs.
POLICIES = {
    "safe-dark-room": "darkroom --seeds 3",
    "safe-dark-room-guard": "darkroom-guard",
    "safe-dark-point": "point",
    "safe-dark-car": "car",
    "safe-velocity-half-cheetah": "half-cheetah",
    "safe-velocity-ant": "ant",
}


def _run(policy: str, preset: str) -> Need:
    files = (f"{policy}/training/metrics.jsonl", f"{policy}/training/[0-9]-*/metrics.jsonl")
    return Need(label=policy, files=files, command=f"safeicrl train --preset {preset} --out runs/{policy}")


RUNS = (
    *(_run(policy, preset) for policy, preset in POLICIES.items()),
    *(
        Need(
            label=f"{policy}: {line}",
            files=(f"{policy}/{line}.npz",),
            command=f"safeicrl train --preset {preset} --line {line} --out runs/{preset}-{line}",
        )
        for policy, preset in list(POLICIES.items())[2:]
        for line in ("privileged", "memoryless")
    ),
)
STEPS = (
    Need(
        label="PPO",
        files=("safe-dark-room/training/metrics.jsonl",),
        command="safeicrl train --preset darkroom --seeds 3 --out runs/darkroom",
    ),
    Need(
        label="PPO, guard",
        files=("safe-dark-room-guard/training/metrics.jsonl",),
        command="safeicrl train --preset darkroom-guard --out runs/safe-dark-room-guard",
    ),
    Need(
        label="off-policy",
        files=("lab/dark-room/off-policy-larger-lambda-log.jsonl",),
        command="safeicrl train --preset darkroom --algo.optimiser ddpg --out runs/ddpg",
    ),
    Need(
        label="Algorithm 1 as printed",
        files=("safe-dark-room-paper/training/metrics.jsonl",),
        command="safeicrl train --preset darkroom-paper --out results/safe-dark-room-paper/training",
    ),
)
ROBOTS = tuple(_run(policy, preset) for policy, preset in list(POLICIES.items())[2:])
MARKS = (1e6, 4e6, 16e6, 64e6, 240e6)  # environment steps


HEADER = (
    "run", "parameters", "environment steps per seed", "iterations", "gradient updates", "λ at the end", "minutes",
    "seeds", "device",
)  # fmt: skip


def table(found: Found) -> list[Shown]:
    """One row per training stage, a sum per policy, and the baselines from their cards."""
    rows = []
    for label, files in found.files.items():
        if isinstance(files[0].value, Results):
            rows.append(_card_row(label, files[0].value.meta.get("card") or {}))
            continue
        stages = [_stage(found.root, file) for file in files]
        parameters = _parameters(found.root / label / "training", label)
        for stage in stages:
            name = label if len(stages) == 1 else f"{label}: {stage['name']}"
            rows.append([name, parameters, *_numbers(stage)])
        if len(stages) > 1:
            total = {
                key: sum(stage[key] for stage in stages) for key in ("steps", "iterations", "updates", "seconds")
            }
            rows.append([f"{label}: all stages", parameters, *_numbers({**stages[-1], **total})])
    notes = (
        "Parameters are the policy's, without its critics. Minutes include compiling and evaluating; seeds ran "
        "side by side in that time, and most machines were shared. Baselines have the numbers of the "
        "last run on their cards."
    )
    return [Grid(header=HEADER, rows=rows), notes]


def _stage(root: Path, file: File) -> dict[str, Any]:
    """What a stage took, from its log and its settings."""
    config = read_json((root / file.path).with_name("config.json"), "configuration")
    log = file.value
    last, algo = log[-1], config["algo"]["config"]
    multipliers = [line["lambda"] for line in log if line.get("lambda") is not None]
    return {
        "name": file.path.parent.name,
        "steps": last["env_steps"],
        "iterations": last["iteration"],
        "updates": last["iteration"] * _updates(algo),
        "lambda": multipliers[-1] if multipliers else None,
        "seconds": last["seconds"],
        "seeds": config["train"].get("seeds", 1),
        "device": config.get("device", "not recorded"),
    }


def _updates(algo: dict[str, Any]) -> int:
    """Gradient updates in an iteration: SCARED's by its optimiser, Safe AD's as set, one for a meta-learner."""
    if "optimiser" not in algo:
        return int(algo["updates"]) if "histories" in algo else 1  # a meta-learner's `updates` are those of a test
    if algo["optimiser"] == "ddpg":
        return int(algo["ddpg"]["updates"])
    return int(algo["ppo"]["epochs"]) * (int(algo["rows"]) // int(algo["ppo"]["minibatch"]))


def _numbers(stage: dict[str, Any]) -> list[str]:
    return [
        f"{stage['steps'] / 1e6:,.2f} million",
        f"{stage['iterations']:,}",
        f"{stage['updates']:,}",
        "–" if stage["lambda"] is None else f"{stage['lambda']:.3g}",
        f"{stage['seconds'] / 60:.1f}",
        str(stage["seeds"]),
        str(stage["device"]),
    ]


def _card_row(label: str, card: dict[str, Any]) -> list[str]:
    training = card.get("training") or {}
    if "env_steps" not in training:
        return [label, *["not recorded"] * (len(HEADER) - 1)]
    updates = training["iteration"] * _updates(training["algo"]["config"])
    stage = {
        "steps": training["env_steps"], "iterations": training["iteration"], "updates": updates, "lambda": None,
        "seconds": 60 * training["minutes"], "seeds": training["train"].get("seeds", 1),
        "device": training["device"],
    }  # fmt: skip
    return [label, "–", *_numbers(stage)]


def _parameters(folder: Path, policy: str) -> str:
    """The number of parameters of a run's policy, or of the shipped one; from the file's header alone."""
    files = [*sorted(folder.glob("best-seed*.safetensors")), PRETRAINED / f"{policy}.safetensors"]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        return "–"
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return f"{sum(math.prod(x['shape']) for name, x in header.items() if name != '__metadata__'):,}"


def meta_table(found: Found) -> list[Shown]:
    """The meta-learners' runs."""
    rows = []
    for label, files in found.files.items():
        folder = (found.root / files[0].path).parent
        rows.append([label, _parameters(folder, ""), *_numbers(_stage(found.root, files[0]))])
    return [Grid(header=HEADER, rows=rows)]


def curves(found: Found) -> list[Shown]:
    """Training curves against environment steps."""
    runs = [(label, files[0].value, files[0].command) for label, files in found.files.items()]
    text = f"Return, cost, share over budget and λ while training: {', '.join(found.files)}."
    return [Drawing(figure=plots.training(runs), text=text)]


def critics(found: Found) -> list[Shown]:
    """Training curves with the critics' mean Q; the logs of a label are its seeds."""
    runs = [(label, joined([file.value for file in own]), own[0].command) for label, own in found.files.items()]
    text = f"Return, cost, share over budget, λ and mean Q while training: {', '.join(found.files)}."
    header = ("", "seeds", "environment steps per seed", *(title for _, title in LAST))
    rows = [_last_row(label, log, len(found.files[label])) for label, log, _ in runs]
    note = (
        "Thin lines are seeds. Mean Q is that of the actions played, in units of reward and cost, for the rest of "
        "the trial. The cost critic of the exact form counts the cost beyond the budget, discounted. That of the "
        "naive form and of Algorithm 1 counts all cost to the episode's end. The table: the last line of each log."
    )
    return [Drawing(figure=plots.training(runs, more=Q), text=text), Grid(header=header, rows=rows), note]


Q = (("q", None, "mean Q, reward"), ("q_cost", None, "mean Q, cost"))
LAST = (
    ("return", "return"), ("cost", "cost"), ("over_budget", "over budget"), ("lambda", "largest λ"),
    ("q", "mean Q, reward"), ("q_cost", "mean Q, cost"),
)  # fmt: skip


def _last_row(label: str, log: list[dict[str, Any]], seeds: int) -> list[str]:
    last = [line for line in log if line.get("return") is not None][-1]
    numbers = [f"{last[name]:.3g}" if last.get(name) is not None else "–" for name, _ in LAST]
    return [label, str(seeds), in_words(last["env_steps"]), *numbers]


def joined(logs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The logs of several seeds as one, as a run of several seeds writes it: means, and each seed's numbers."""
    if len(logs) == 1:
        return logs[0]
    lines = []
    for every in zip(*logs, strict=False):
        names = [name for name in every[0] if all(isinstance(line.get(name), int | float) for line in every)]
        line = {name: sum(x[name] for x in every) / len(every) for name in names}
        lines.append({**line, **{f"{name}/seeds": [x[name] for x in every] for name in names}})
    return lines


def steps(found: Found) -> list[Shown]:
    """What a number of environment steps buys in the room, for both optimisers and with the guard."""
    header = ["environment steps per seed"]
    for label in found.files:
        header += [f"{label}: goals of an evaluation", f"{label}: over budget", f"{label}: return in training"]
    rows = []
    for mark in MARKS:
        row = [f"{mark / 1e6:g} million"]
        for files in found.files.values():
            row += _at(files[0].value, mark)
        rows.append(row)
    note = (
        "Goals of 50 and episodes over budget are those of the last evaluation up to that step (500 unseen rooms "
        "of seed 1000, frozen; mean over seeds). Return in training is per episode, on training rooms and budgets. "
        "“–” means that there was no evaluation, or no such step, in the log."
    )
    return [bought(found), *curves(found), Grid(header=header, rows=rows), note]


def bought(found: Found) -> Drawing:
    """The figure: goals of a trial and episodes over budget against environment steps."""
    panels = [
        ("goals of a trial", _evaluations(found, "eval/total_return")),
        ("share of episodes over budget", _evaluations(found, "eval/over_budget")),
    ]
    text = (
        f"Goals and violations on unseen rooms against environment steps: {', '.join(found.files)}. Dotted: 1, 4, "
        "16, 64 and 240 million steps. A line begins with its first evaluation."
    )
    return Drawing(figure=plots.against_steps(panels, MARKS), text=text)


def robots(found: Found) -> list[Shown]:
    """The same for the robots; the stages of a recipe follow one another."""
    returns = _evaluations(found, "eval/total_return")
    split = {
        "goals of a trial": [label for label in returns if "dark" in label],
        "return of a trial": [label for label in returns if "velocity" in label],
    }
    panels = [(title, {label: returns[label] for label in own}) for title, own in split.items() if own]
    panels.append(("share of episodes over budget", _evaluations(found, "eval/over_budget")))
    text = "Return and violations on unseen tasks against environment steps, summed over the stages of a recipe."
    note = (
        "Each stage starts from a policy of the one before, which is not always its last. First stages play short "
        "trials, so their policies have never seen whole ones."
    )
    return [Drawing(figure=plots.against_steps(panels, MARKS), text=text), note]


def _evaluations(found: Found, name: str) -> dict[str, plots.Points]:
    """Label → (steps, value) of every evaluation, the logs of a label one after another."""
    points: dict[str, plots.Points] = {}
    for label, files in found.files.items():
        steps, values, before = [], [], 0.0
        for file in files:
            judged = [line for line in file.value if line.get(name) is not None]
            steps += [before + line["env_steps"] for line in judged]
            values += [float(line[name]) for line in judged]
            before += file.value[-1]["env_steps"]
        points[label] = (steps, values)
    return points


def _at(log: list[dict[str, Any]], mark: float) -> list[str]:
    if log[-1]["env_steps"] < 0.99 * mark:
        return ["–", "–", "–"]
    before = [line for line in log if line["env_steps"] <= mark * 1.01]
    played = [line["return"] for line in before if line.get("return") is not None]
    judged = [line for line in before if line.get("eval/total_return") is not None]
    last = judged[-1] if judged else None
    where = f" (at {last['env_steps'] / 1e6:.0f} million)" if last else ""
    return [
        f"{last['eval/total_return']:.1f}{where}" if last else "–",
        f"{last['eval/over_budget']:.1%}" if last else "–",
        f"{played[-1]:.2f}" if played else "–",
    ]

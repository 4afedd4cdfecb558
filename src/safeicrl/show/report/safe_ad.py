"""Safe AD in the report: the commands behind its results, and what data and training took. Never imports jax."""

import re
from pathlib import Path
from typing import Any

from safeicrl.files import read_json
from safeicrl.show.report.content import File, Found, Grid, Need, Shown

FOLDER = "safe-ad"  # of all its results
MANY_ROOMS = "--tasks 405 --steps 3300 --group 405 --learner.learning-rate 3e-3 --learner.epochs 4"
MANY_ARENAS = "--tasks 256 --steps 96000 --group 256 --learner.learning-rate 1e-3"
RUNNERS = "--group 10 --learner.learning-rate 1e-3"
# world → (environment, what PPO-Lagrangian learns)
DATA = {
    "dark-room": ("safe-dark-room", MANY_ROOMS),
    "point": ("safe-dark-point", MANY_ARENAS),
    "car": ("safe-dark-car", f"--env-args engine=planar {MANY_ARENAS}"),
    "half-cheetah": ("safe-velocity-half-cheetah", f"{RUNNERS} --tasks 20 --steps 320000"),
    "ant": ("safe-velocity-ant", f"--env-args engine=euler {RUNNERS} --tasks 10 --steps 200000"),
}
# Car and Ant learn in approximate physics and are evaluated in their own, by every method.
ENGINE = {"car": " --env.engine planar", "ant": " --env.engine euler"}
# The stored runs of three robots are shorter than the default of 40 iterations.
LENGTH = dict.fromkeys(("point", "car", "half-cheetah"), " --algo.iterations 30")
REAL = {"car": " --env-args engine=auto", "ant": " --env-args engine=auto"}
# Chosen on validation tasks (panel "temperatures"); the room's stored runs were played at 1.
COLD = " --temperature 0.1"
TEMPERATURE = {
    "point-sampled": COLD, "car-sampled": COLD, "half-cheetah-sampled": " --temperature 0.25", "ant-sampled": COLD,
}  # fmt: skip
SMALL_NETWORK = " --algo.net.embedding 32 --algo.net.width 96 --algo.net.layers 4 --algo.net.heads 4"
# Of the room's small network; the full one's weights are too large to store.
SMALL_LABEL, SMALL_RUN = "Safe AD, small network", f"results/{FOLDER}/training/dark-room-light"


def _run(world: str, stem: str, options: str = "") -> str:
    """The commands that collect a world's histories and train on them."""
    env, data = DATA[world]
    collect = f"safeicrl collect --env {env} {data} --out histories/{world}"
    how = f"--algo safe-ad --env {env}{ENGINE.get(world, '')}{LENGTH.get(world, '')}"
    if world == "dark-room":
        how = "--preset darkroom-safe-ad-tuned"
    train = f"safeicrl train {how} --algo.histories histories/{world}{options} --out runs/safe-ad-{stem}"
    return f"{collect}\n{train}"


def _evaluated(label: str, world: str, tasks: int, stem: str, run: str) -> Need:
    """A run's evaluation on the tasks of SCARED's."""
    temperature = TEMPERATURE.get(stem, "")
    how = f"{REAL.get(world, '')} --tasks {tasks} --rows {tasks}{temperature} --label '{label}'"
    evaluate = f"safeicrl evaluate runs/safe-ad-{stem}{how} --out results/{FOLDER}/{stem}"
    files = (f"{FOLDER}/{stem}.npz", f"{FOLDER}/{stem}-seed?.npz")
    return Need(label=label, files=files, command=f"{run}\n{evaluate}")


def needs(world: str, tasks: int) -> tuple[Need, ...]:
    """Safe AD in one world: as in the paper, then a form of this library."""
    if world == "dark-room":
        label, form, options = SMALL_LABEL, "light", f"{SMALL_NETWORK} --algo.iterations 60"
    else:
        label, form, options = "Safe AD, sampled", "sampled", " --algo.net.actions sampled"
    stem = f"{world}-{form}"
    return (
        _evaluated("Safe AD", world, tasks, world, _run(world, world)),
        _evaluated(label, world, tasks, stem, _run(world, stem, options)),
    )


def past_k(world: str, env: str, episodes: int) -> Need:
    """It plays on for this number of episodes; in the room with the small network, whose weights are stored."""
    label, run, tasks = "Safe AD", f"runs/safe-ad-{world}", 60
    if world == "dark-room":
        label, run, tasks = SMALL_LABEL, SMALL_RUN, 10
    out = f"beyond/{env}-{FOLDER}"
    how = f"{REAL.get(world, '')} --tasks {tasks} --rows {tasks} --episodes {episodes} --label '{label}'"
    command = f"safeicrl evaluate {run}{how} --out results/{out}"
    return Need(label=label, files=(f"{out}.npz",), command=command)


def temperatures() -> tuple[Need, ...]:
    """Evaluations on validation tasks, one per temperature, of what samples its actions: no mean."""
    found = []
    for world in DATA:
        stem, label, run, tasks = f"{world}-sampled", "Safe AD, sampled", f"runs/safe-ad-{world}-sampled", 100
        if world == "dark-room":
            stem, label, run, tasks = "dark-room-light", SMALL_LABEL, SMALL_RUN, 20
        out = f"{FOLDER}/validation/{stem}"
        how = (
            f"{REAL.get(world, '')} --list validation --seed 1000 --tasks {tasks} --rows {tasks} --temperature 0.5"
        )
        command = f"safeicrl evaluate {run}{how} --out results/{out}-0.5"
        found.append(Need(label=f"{label}, {world}", files=(f"{out}-[0-9]*.npz",), command=command))
    return tuple(found)


# Safe AD-EPS, in the room only.
EPS_RUN = (
    "safeicrl collect --by eps --tasks 405 --steps 3300 --out histories/dark-room-eps\n"
    "safeicrl train --preset darkroom-safe-ad-tuned --algo.histories histories/dark-room-eps "
    "--out runs/safe-ad-dark-room-eps"
)
EPS = _evaluated("Safe AD-EPS", "dark-room", 1000, "dark-room-eps", EPS_RUN)

# -- training budgets ---------------------------------------------------------------------------------------

CARDS = tuple(
    Need(label=label, files=(f"{FOLDER}/{stem}",), command="see docs/safe_ad.md")
    for label, stem in (
        ("405 rooms, tuned", "tuned.json"),
        ("Safe AD-EPS, tuned alike", "eps.json"),
        ("paper's data and size, stopped early", "paper-data.json"),
        ("paper's data, a smaller network", "paper-data-small-network.json"),
    )
)


def logs() -> tuple[Need, ...]:
    """The logs of the runs whose results are drawn."""
    found = []
    for world in DATA:
        for need in needs(world, 0):
            stem = need.files[0].removeprefix(f"{FOLDER}/").removesuffix(".npz")
            files, command = (f"{FOLDER}/training/{stem}/metrics.jsonl",), need.command.rpartition("\n")[0]
            found.append(Need(label=f"{need.label}, {world}", files=files, command=command))
    return tuple(found)


def table(found: Found) -> list[Shown]:
    """Gradient steps, windows read, and the environment steps of the data, by run."""
    rows = [_row(label, files[0], found.root) for label, files in found.files.items()]
    header = (
        "run", "network", "steps of its data", "gradient updates", "windows each", "steps read", "minutes",
        "device",
    )  # fmt: skip
    note = (
        "Steps of its data are environment steps of all PPO-Lagrangian learners together; the paper has 4 million "
        "in the room and 2 to 5 million elsewhere. Steps read are those of windows, many of them several times."
    )
    return [Grid(header=header, rows=rows), note]


def _row(label: str, file: File, root: Path) -> list[str]:
    """A run, from its card or from its log and settings."""
    if isinstance(file.value, dict):
        training = file.value["training"]
        config, data = training["algo"]["config"], _logged(root / FOLDER / "histories-of-405-rooms.log")
        data = data if "many" in config["histories"] else "4.05 million"
        last = {"iteration": training["iteration"], "env_steps": training["env_steps"]}
        return _cells(label, config, last, data, str(training["minutes"]), training["device"])
    settings = read_json((root / file.path).with_name("config.json"), "configuration")
    config, last = settings["algo"]["config"], file.value[-1]
    data = _collected(root / FOLDER / "histories" / f"{Path(config['histories']).name}.json")
    return _cells(label, config, last, data, f"{last['seconds'] / 60:.1f}", settings.get("device", "not recorded"))


def _cells(
    label: str, config: dict[str, Any], last: dict[str, Any], data: str, minutes: str, device: str
) -> list[str]:
    net = config["net"]
    updates = last["iteration"] * config["updates"]
    return [
        label, f"width {net['width']}, {net['layers']} layers, {net['context']} steps", data, f"{updates:,}",
        str(config["batch"]), f"{last['env_steps'] / 1e6:.0f} million", minutes, device,
    ]  # fmt: skip


def _collected(card: Path) -> str:
    """The steps of a stored card of histories."""
    if not card.exists():
        return "–"
    histories, steps = read_json(card, "card of learning histories")["arrays"]["reward"]["shape"]
    return f"{histories * steps / 1e6:.2f} million"


def _logged(log: Path) -> str:
    """The steps that a collection's log names."""
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    found = re.search(r"\d[\d,]* histories, ([\d,]+) steps in [\d.]+ s", text)
    return f"{int(found[1].replace(',', '')) / 1e6:.2f} million" if found else "–"

"""SafeMeta and MAML with penalty in the report: the commands behind their results. Never imports jax."""

from safeicrl.show.report.content import Need
from safeicrl.show.report.safe_ad import ENGINE, REAL

# (label, algorithm, folder of its results)
METHODS = (("SafeMeta", "safe-meta", "safe-meta"), ("MAML with penalty", "maml-penalty", "maml"))
# How else a method was evaluated: (what its label adds, what its file adds, option)
VARIANTS = (("own episodes", "own", "--fresh-episodes 0"), ("no updates", "initial", "--wipe"))
VARIANT_LABELS = tuple(f"{label}, {how}" for label, *_ in METHODS for how, *_ in VARIANTS)

# How the stored runs differ from the defaults. The room's were stopped after 300 of 2,000 iterations; none of them
# has a schedule that this would change.
ROBOT = " --iterations 300 --evaluation.every 100 --evaluation.tasks 20 --evaluation.episodes 6"
TRAINED = {
    "dark-room": " --seeds 3 --iterations 300",
    "point": ROBOT,
    "car": ROBOT,
    "half-cheetah": f" --algo.batch-episodes 6{ROBOT}",
    "ant": f" --algo.batch-episodes 3{ROBOT}",
}
# In the real physics an update from 20 fresh episodes takes too long, or allows for few tasks only.
FRESH = {"half-cheetah": " --fresh-episodes 10", "ant": " --fresh-episodes 5"}
FEWER_TASKS = {"car": 20}
TASKS_PAST_K = {"dark-room": 60, "point": 60, "car": 10, "half-cheetah": 60, "ant": 20}


def _train(algo: str, folder: str, world: str, env: str) -> str:
    """The command that trains a meta-learner in a world, whose environment is `env`."""
    how = f"{ENGINE.get(world, '')}{TRAINED[world]}"
    return f"safeicrl train --algo {algo} --env {env}{how} --out runs/{folder}-{world}"


def logs(world: str, env: str) -> tuple[Need, ...]:
    """The logs of both in one world."""
    return tuple(
        Need(
            label=f"{label}, {world}",
            files=(f"{folder}/training/{world}/metrics.jsonl",),
            command=_train(algo, folder, world, env),
        )
        for label, algo, folder in METHODS
    )


def needs(world: str, env: str, tasks: int) -> tuple[Need, ...]:
    """Both in one world, with fresh episodes for each update."""
    count, fresh = FEWER_TASKS.get(world, tasks), FRESH.get(world, "")
    return tuple(
        _evaluated(label, folder, world, world, f"{count}{_rows(world)}{fresh}", _train(algo, folder, world, env))
        for label, algo, folder in METHODS
    )


def variants(world: str, env: str, tasks: int) -> tuple[Need, ...]:
    """The same runs, evaluated without fresh episodes and without updates."""
    return tuple(
        _evaluated(
            f"{label}, {how}", folder, world, f"{world}-{stem}", f"{tasks}{_rows(world)} {option}",
            _train(algo, folder, world, env),
        )
        for label, algo, folder in METHODS
        for how, stem, option in VARIANTS
    )  # fmt: skip


def _rows(world: str) -> str:
    return " --rows 500" if world == "dark-room" else ""


def _evaluated(label: str, folder: str, world: str, stem: str, how: str, train: str) -> Need:
    """`how`: the number of tasks, and further options."""
    out = f"{folder}/{stem}"
    evaluate = f"safeicrl evaluate runs/{folder}-{world}{REAL.get(world, '')} --tasks {how}"
    command = f"{train}\n{evaluate} --label '{label}' --out results/{out}"
    return Need(label=label, files=(f"{out}.npz", f"{out}-seed?.npz"), command=command)


def past_k(world: str, env: str, episodes: int) -> tuple[Need, ...]:
    """Both, playing on for this number of episodes; in the room, the first of three seeds."""
    tasks, seed = TASKS_PAST_K[world], "/best-seed0" if world == "dark-room" else ""
    how = f"--tasks {tasks} --rows {tasks} --episodes {episodes}{REAL.get(world, '')}{FRESH.get(world, '')}"
    return tuple(
        Need(
            label=label,
            files=(f"beyond/{env}-{folder}.npz",),
            command=f"safeicrl evaluate runs/{folder}-{world}{seed} {how} --label '{label}' "
            f"--out results/beyond/{env}-{folder}",
        )
        for label, _, folder in METHODS
    )

"""The report's panels in one table: what each needs, where it is stored, how it is drawn.

A need names files below a results folder and the command that makes them. So the same table draws the stored
results of the paper's scale and those of a smoke run, and shows what is missing with its command.
"""

from functools import partial

from safeicrl.show.report import draw, safe_ad, training
from safeicrl.show.report.content import Need, Panel, Part
from safeicrl.show.report.safe_ad import ENGINE, REAL
from safeicrl.show.report.settings import TABLES, settings_parts

# world, as in the files of the other methods → (title, folder of SCARED's results, tasks, preset)
WORLDS = {
    "dark-room": ("SafeDarkRoom", "safe-dark-room", 1000, "darkroom"),
    "point": ("SafeDarkMujoco, Point", "safe-dark-point", 500, "point"),
    "car": ("SafeDarkMujoco, Car", "safe-dark-car", 200, "car"),
    "half-cheetah": ("SafeVelocity, HalfCheetah", "safe-velocity-half-cheetah", 200, "half-cheetah"),
    "ant": ("SafeVelocity, Ant", "safe-velocity-ant", 200, "ant"),
}


def _trained(label: str, preset: str, run: str, evaluate: str, stem: str, *options: str) -> Need:
    """Train a preset, evaluate the run, write `stem` below results."""
    train = " ".join(("safeicrl train", f"--preset {preset}", *options, f"--out runs/{run}"))
    return Need(
        label=label,
        files=(f"{stem}.npz", f"{stem}-seed?.npz"),
        command=f"{train}\nsafeicrl evaluate runs/{run}{evaluate} --label '{label}' --out results/{stem}",
    )


def _scared(world: str) -> Need:
    _, folder, tasks, preset = WORLDS[world]
    if world == "dark-room":
        return _trained(
            "SCARED", "darkroom", "darkroom", " --tasks 1000 --rows 1000 --temperature 0.4",
            "safe-dark-room/three-seeds/policy", "--seeds 3",
        )  # fmt: skip
    return _trained("SCARED", preset, preset, f"{REAL.get(world, '')} --tasks {tasks}", f"{folder}/policy")


def _meta(world: str) -> tuple[Need, ...]:
    _, folder, tasks, _ = WORLDS[world]
    found = []
    for label, algo, short in (
        ("SafeMeta", "safe-meta", "safe-meta"),
        ("MAML with penalty", "maml-penalty", "maml"),
    ):
        run = f"{short}-{world}"
        seeds = " --seeds 3" if world == "dark-room" else ""
        train = f"safeicrl train --algo {algo} --env {folder}{ENGINE.get(world, '')}{seeds} --out runs/{run}"
        how = f"{REAL.get(world, '')} --tasks {tasks} --label '{label}'"
        stem = f"{short}/{world}"
        command = f"{train}\nsafeicrl evaluate runs/{run}{how} --out results/{stem}"
        found.append(Need(label=label, files=(f"{stem}.npz", f"{stem}-seed?.npz"), command=command))
    return tuple(found)


def _reference(world: str, agent: str) -> Need:
    _, folder, tasks, _ = WORLDS[world]
    command = f"safeicrl evaluate --agent {agent} --env {folder} --tasks {tasks} --out results/{folder}/{agent}"
    return Need(label=agent, files=(f"{folder}/{agent}.npz",), command=command)


def _line(world: str, line: str) -> Need:
    _, folder, tasks, preset = WORLDS[world]
    real = {"privileged": " --env-args 'args=[]'"}.get(line, REAL.get(world, "")) if world in REAL else ""
    how = f" --wipe{real} --tasks {tasks} --{'greedy' if world == 'half-cheetah' else 'temperature 0.25'}"
    return _trained(line, preset, f"{preset}-{line}", how, f"{folder}/{line}", f"--line {line}")


def _methods(world: str) -> tuple[Need, ...]:
    """Every method of the paper in one world, then the baselines of this library."""
    paper = (_scared(world), *safe_ad.needs(world, WORLDS[world][2]), *_meta(world))
    if world == "dark-room":
        own = tuple(_reference(world, agent) for agent in ("explorer", "planner", "random"))
        return (*paper, SHORT_SAFE_AD, *own)
    return (*paper, _line(world, "privileged"), _line(world, "memoryless"), _reference(world, "random"))


def _by_budget(world: str) -> tuple[Need, ...]:
    """The same, but SCARED under nine budgets per task where that was stored, so that all bins share tasks."""
    _, folder, _, _ = WORLDS[world]
    needs = _methods(world)
    if world in ("dark-room", "car"):
        return needs
    how = f"safeicrl evaluate {folder} --tasks 200 --budgets-per-task 9 --label SCARED"
    command = f"{how} --out results/{folder}/by-budget"
    return (Need(label="SCARED", files=(f"{folder}/by-budget.npz",), command=command), *needs[1:])


ABLATE = "python bench/ablate_safe_ad.py --histories histories/safe-dark-room-135 --stride 5 --dropout 0.1 0.1 0.1 "
ABLATE += "--rate 1e-3 --updates 800 --out results/safe-ad/ablations"
# The one run of Safe AD in the paper's room whose episodes were stored: a smaller network, 100 rooms.
SHORT_SAFE_AD = Need(
    label="Safe AD, reduced size",
    files=("safe-ad/ablations/context500-layers4-share1.npz",),
    command=ABLATE,
)


def _ablated(label: str, stem: str, option: str) -> Need:
    """One of SCARED's ablations in the paper's room, with the option that sets it."""
    return _trained(
        label, "darkroom", f"scared-{stem}", " --tasks 1000 --temperature 0.4", f"scared-ablations/{stem}", option
    )


BASE = _scared("dark-room")
CONTEXT = (
    _ablated("short context", "context-short", "--algo.net.context 150"),
    BASE,
    _ablated("long context", "context-long", "--algo.net.context 3000 --algo.steps 3000 --algo.episodes 100"),
)
WIDTH = (
    _ablated("half the width", "width-half", "--algo.net.width 32"),
    BASE,
    _ablated("double width", "width-double", "--algo.net.width 128"),
)
DUAL = (
    Need(
        label="exact",
        files=("safe-dark-room/training/metrics.jsonl",),
        command="safeicrl train --preset darkroom --seeds 3 --out results/safe-dark-room/training",
    ),
    Need(
        label="naive",
        files=("scared-ablations/naive/metrics.jsonl",),
        command="safeicrl train --preset darkroom --seeds 3 --algo.penalty.dual naive --out "
        "results/scared-ablations/naive",
    ),
)
PUBLISHED = (
    BASE,
    _trained(
        "Algorithm 1 as printed", "darkroom-paper", "darkroom-paper", " --tasks 1000 --temperature 0.4",
        "safe-dark-room-paper/policy",
    ),
    Need(
        label="off-policy, with a trust region",
        files=("lab/dark-room/off-policy.json",),
        command="safeicrl train --preset darkroom --algo.optimiser ddpg --out runs/ddpg",
    ),
)  # fmt: skip

GUARD = (
    Need(
        label="penalty only",
        files=("safe-dark-room/policy.npz",),
        command="safeicrl evaluate safe-dark-room --tasks 1000 --out results/safe-dark-room/policy",
    ),
    Need(
        label="guard",
        files=("safe-dark-room-guard/policy.npz",),
        command="safeicrl evaluate safe-dark-room-guard --tasks 1000 --out results/safe-dark-room-guard/policy",
    ),
    Need(
        label="guard switched off",
        files=("safe-dark-room-guard/guard-off.npz",),
        command="safeicrl evaluate safe-dark-room-guard --no-guard --tasks 1000 "
        "--out results/safe-dark-room-guard/guard-off",
    ),
    _reference("dark-room", "explorer"),
)

ROOM_SAFE_AD = safe_ad.needs("dark-room", 1000)[0]
EPS = (
    Need(label="Safe AD", files=("safe-ad/tuned.json",), command=ROOM_SAFE_AD.command.rpartition("\n")[0]),
    Need(label="Safe AD-EPS", files=("safe-ad/eps.json",), command=safe_ad.EPS_RUN),
)
EPS_CURVES = (ROOM_SAFE_AD, safe_ad.EPS)
EPS_SMALL = tuple(
    Need(
        label=label,
        files=(f"safe-ad/small-room/{stem}.json",),
        command=f"safeicrl evaluate runs/{stem}-small --tasks 200 --label '{label}' "
        f"--out results/safe-ad/small-room/{stem}",
    )
    for label, stem in (("Safe AD", "safe-ad"), ("Safe AD-EPS", "safe-ad-eps"))
)


def _beyond(policy: str) -> Need:
    command = f"python bench/beyond.py {policy} --out results/beyond/{policy}.json"
    return Need(label=policy, files=(f"beyond/{policy}.json",), command=command)


PANELS: tuple[Panel, ...] = (
    Panel(
        name="episodes",
        title="Return and cost by episode",
        text="The paper's question (i): does a frozen policy earn more and cost less as its context grows, "
        "on tasks it never saw? One figure per world, all methods of the paper, and the baselines of this library. "
        "Agents that were evaluated with the same seed on the same number of tasks met the same tasks; the table "
        "has the numbers, the list below it the seeds. SafeVelocity is tested on three speed limits "
        "only: its bands and errors count 200 repeats of these, so they are too small.",
        parts=tuple(
            Part(
                name=f"episodes-{world}",
                title=WORLDS[world][0],
                needs=_methods(world),
                show=partial(draw.episodes, table_only=("random",) if world in ("half-cheetah", "ant") else ()),
            )
            for world in WORLDS
        ),
    ),
    Panel(
        name="budgets",
        title="Total return and largest episode cost by budget",
        text="The paper's question (ii): does the policy use a larger budget, and does the largest cost of any "
        "episode of a trial stay below it? A point above the dotted line means that, on average, the worst episode "
        "of a trial was over budget.",
        parts=tuple(
            Part(
                name=f"budgets-{world}",
                title=WORLDS[world][0],
                needs=_by_budget(world),
                show=partial(draw.budgets, table_only=("random",) if world != "dark-room" else ()),
            )
            for world in WORLDS
        ),
    ),
    Panel(
        name="proposition",
        title="Proposition 1: how far test tasks lie from training tasks",
        text="Goals and obstacles lie near the centre in training and near the edge in tests. The distance between "
        "these two distributions grows with α. The paper's α is 0.5, where the distance is far from its limit.",
        parts=(
            Part(name="proposition-distance", title="Distance against α", show=draw.distance),
            Part(name="proposition-tasks", title="Training and test tasks", show=draw.tasks),
        ),
    ),
    Panel(
        name="safe-ad-eps",
        title="Safe AD against Safe AD-EPS",
        text="Safe AD imitates the learning of PPO-Lagrangian. Safe AD-EPS imitates a planner whose noise fades. "
        "The paper finds that the second fails on unseen rooms.",
        parts=(
            Part(name="eps-budgets", title="The paper's room, by budget", needs=EPS, show=draw.cards),
            Part(name="eps-curves", title="The paper's room, by episode", needs=EPS_CURVES, show=draw.episodes),
            Part(name="eps-small", title="A 5×5 room", needs=EPS_SMALL, show=draw.summaries),
        ),
    ),
    Panel(
        name="scared-ablations",
        title="SCARED's ablations",
        text="The paper's three: length of the context, width of the network, and one multiplier for all episodes "
        "(exact) against one for each (naive). Then Algorithm 1 as it is printed.",
        parts=(
            Part(name="scared-context", title="Context length", needs=CONTEXT, show=draw.episodes),
            Part(name="scared-width", title="Width", needs=WIDTH, show=draw.episodes),
            Part(name="scared-dual", title="Exact against naive multipliers", needs=DUAL, show=training.curves),
            Part(name="scared-published", title="Algorithm 1 as printed", needs=PUBLISHED, show=draw.published),
        ),
    ),
    Panel(
        name="safe-ad-ablations",
        title="Safe AD's ablations",
        text="Context, layers and share of the learning histories, at a reduced size (width 256, 800 gradient "
        "steps, one seed, 100 unseen rooms). Actions are sampled at temperature 1.",
        parts=(
            Part(
                name="safe-ad-summary",
                title="Totals",
                needs=(
                    Need(label="ablations", files=("safe-ad/ablations/ablations.json",), command=ABLATE),
                    Need(label="by episode", files=("safe-ad/ablations/*.npz",), command=ABLATE),
                ),
                show=draw.safe_ad_ablations,
            ),
        ),
    ),
    Panel(
        name="hyperparameters",
        title="Hyperparameters: the paper's and ours",
        text="The paper's tables beside the settings of the stored runs. Every difference has its reason. Where "
        "nothing was trained, ours are those of the preset.",
        parts=settings_parts(TABLES),
    ),
    Panel(
        name="training",
        title="Training budgets",
        text="What every result cost: environment steps, gradient updates, time and machine, from the stored "
        "settings and logs. The paper gives about 1 million steps for SCARED and 4 million for Safe AD in the "
        "room, about 6 and 25 million parameters, and no number for the other worlds.",
        parts=(
            Part(name="training-runs", title="SCARED and its baselines", needs=training.RUNS, show=training.table),
            Part(
                name="training-safe-ad",
                title="Safe AD",
                needs=(*safe_ad.CARDS, *safe_ad.logs()),
                show=safe_ad.table,
            ),
            Part(
                name="training-meta",
                title="SafeMeta and MAML with penalty",
                needs=tuple(need for world in WORLDS for need in training.meta(world, WORLDS[world][1])),
                show=training.meta_table,
            ),
            Part(name="training-steps", title="What steps buy", needs=training.STEPS, show=training.steps),
            Part(
                name="training-steps-robots",
                title="What steps buy: the robots",
                needs=training.ROBOTS,
                show=training.robots,
            ),
        ),
    ),
    Panel(
        name="guard",
        title="The guard",
        text="Beyond the paper: a learned cost model forbids actions that are likely to break the budget. The same "
        "1000 unseen rooms for all four agents.",
        parts=(
            Part(name="guard-room", title="SafeDarkRoom", needs=GUARD, show=partial(draw.budgets, over=True)),
            Part(
                name="guard-calibration",
                title="Is it calibrated?",
                needs=(
                    Need(
                        label="calibration",
                        files=("safe-dark-room-guard/calibration.json",),
                        command="python bench/guard.py safe-dark-room-guard",
                    ),
                ),
                show=draw.calibration,
            ),
        ),
    ),
    Panel(
        name="beyond",
        title="Beyond K episodes",
        text="A deployed policy does not stop after the K episodes of training. Here the shipped policies play on.",
        parts=tuple(
            Part(name=f"beyond-{policy}", title=policy, needs=(_beyond(policy),), show=draw.beyond)
            for policy in (
                "safe-dark-room", "safe-dark-room-guard", "safe-dark-point", "safe-dark-car",
                "safe-velocity-half-cheetah", "safe-velocity-ant",
            )
        ),
    ),
)  # fmt: skip

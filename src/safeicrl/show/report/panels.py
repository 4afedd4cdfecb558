"""The report's panels in one table: what each needs, where it is stored, how it is drawn.

A need names files below a results folder and the command that makes them. So the same table draws the stored
results of the paper's scale and those of a smoke run, and shows what is missing with its command.
"""

from functools import partial

from safeicrl.show.report import draw, meta, safe_ad, training
from safeicrl.show.report.content import Need, Panel, Part
from safeicrl.show.report.safe_ad import REAL
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
    _, folder, tasks, _ = WORLDS[world]
    paper = (_scared(world), *safe_ad.needs(world, tasks), *meta.needs(world, folder, tasks))
    if world == "dark-room":
        own = tuple(_reference(world, agent) for agent in ("explorer", "planner", "random"))
        return (*paper, *own)
    return (*paper, _line(world, "privileged"), _line(world, "memoryless"), _reference(world, "random"))


def _far(world: str) -> tuple[str, ...]:
    """Agents that earn so much less than the others that a figure of them all would show nothing."""
    return ("random",) if world in ("half-cheetah", "ant") else ()


def _few(world: str) -> tuple[str, ...]:
    """Agents that a figure by budget leaves out: a robot at random, and who has too few trials for a curve."""
    few = tuple(label for label, *_ in meta.METHODS) if world in meta.FEWER_TASKS else ()
    return few if world == "dark-room" else (*few, "random")


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


# What each of SCARED's ablations is trained with: 32 million steps, evaluated once, at the end.
ABLATED = "--algo.iterations 42 --evaluation.every 0"
# A context of 3000 steps needs trials of 100 episodes. With half as many rows an update has as many steps.
LONG = "--algo.net.context 3000 --algo.episodes 100 --algo.steps 3000 --algo.rows 256 --algo.ppo.minibatch 16"


def _ablated(label: str, stem: str, *option: str) -> Need:
    """One of SCARED's ablations in the paper's room, with the option that sets it."""
    return _trained(
        label, "darkroom", f"{stem}-seed0", " --tasks 1000 --rows 500", f"scared-ablations/{stem}", ABLATED, *option
    )


def _log(label: str, stem: str, option: str = "") -> Need:
    """The training logs of an ablation, one per seed."""
    folder = f"scared-ablations/training/{stem}"
    return Need(
        label=label,
        files=(f"{folder}/metrics.jsonl", f"{folder}-seed?/metrics.jsonl"),
        command=f"safeicrl train --preset darkroom {ABLATED} {option}--out results/{folder}",
    )


DEFAULT = _ablated("default", "base")
CONTEXT = (
    _ablated("short context", "context-short", "--algo.net.context 150"),
    DEFAULT,
    _ablated("long context", "context-long", LONG),
)
WIDTH = (
    _ablated("half the width", "width-half", "--algo.net.width 32"),
    DEFAULT,
    _ablated("double width", "width-double", "--algo.net.width 128"),
)
NAIVE = "--algo.penalty.dual naive"
DUAL = (_log("exact", "base"), _log("naive", "naive", f"{NAIVE} "))
DUAL_EPISODES = (_ablated("exact", "base"), _ablated("naive", "naive", NAIVE))
PUBLISHED = (
    _scared("dark-room"),
    _trained(
        "Algorithm 1 as printed", "darkroom-paper", "darkroom-paper", " --tasks 1000 --rows 500",
        "safe-dark-room-paper/policy",
    ),
    Need(
        label="off-policy, with a trust region",
        files=("lab/dark-room/off-policy.json",),
        command="safeicrl train --preset darkroom --algo.optimiser ddpg --out runs/ddpg",
    ),
)  # fmt: skip
PUBLISHED_LOG = (
    Need(
        label="Algorithm 1 as printed",
        files=("safe-dark-room-paper/training*/metrics.jsonl",),
        command="safeicrl train --preset darkroom-paper --out results/safe-dark-room-paper/training",
    ),
)

# steps that a fitted guard looks ahead: as many as a trap is deep, or as the robot needs to slow down
DEPTHS = {"dark-room": 3, "point": 8, "car": 6, "half-cheetah": 4, "ant": 4}


def _guard(world: str) -> tuple[Need, ...]:
    """The comparison: penalty only, a guard at test time only, more care (robots), a guard in training (room)."""
    _, folder, tasks, _ = WORLDS[world]
    evaluate = f"safeicrl evaluate {folder} --tasks {tasks} --out results/{folder}/policy"
    penalty = Need(label="penalty only", files=(f"{folder}/policy.npz",), command=evaluate)
    fit = f"safeicrl fit-guard {folder} --depth {DEPTHS[world]} --out runs/{folder}-fitted"
    fitted = Need(
        label="guard at test time only",
        files=(f"{folder}/fitted.npz",),
        command=f"{fit}\nsafeicrl evaluate runs/{folder}-fitted --tasks {tasks} --out results/{folder}/fitted",
    )
    if world != "dark-room":
        out = f"{folder}/reserve"
        how = f"safeicrl evaluate {folder}-careful --tasks {tasks} --label careful --out results/{out}"
        return penalty, fitted, Need(label="careful", files=(f"{out}.npz",), command=how)
    return (
        penalty,
        fitted,
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
        Need(
            label="taught by the explorer",
            files=("safe-dark-room-guard/taught*.npz",),
            command="safeicrl train --preset darkroom-guard --algo.teacher 1 --algo.iterations 220 "
            "--out runs/taught\n"
            "safeicrl evaluate runs/taught --temperature 0.5 --out results/safe-dark-room-guard/taught",
        ),
        _reference("dark-room", "explorer"),
    )


def _calibration(world: str) -> Part:
    """Predicted against observed chance of cost: of the guard that was trained, or else of the fitted one."""
    title, folder, _, _ = WORLDS[world]
    policy, out = f"runs/{folder}-fitted", folder
    if world == "dark-room":
        policy = out = "safe-dark-room-guard"
    need = Need(
        label=f"calibration, {world}",
        files=(f"{out}/calibration.json",),
        command=f"python bench/guard.py {policy} --out results/{out}/calibration.json",
    )
    name = "guard-calibration" if world == "dark-room" else f"guard-calibration-{world}"
    return Part(name=name, title=f"{title}: is it calibrated?", needs=(need,), show=draw.calibration)


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


# Tasks of bench/beyond.py behind the stored files: fewer where the physics are slow.
PAST_K = {
    "safe-dark-room": 32,
    "safe-dark-room-guard": 60,
    "safe-dark-point": 32,
    "safe-dark-car": 16,
    "safe-velocity-half-cheetah": 16,
    "safe-velocity-ant": 16,
}


def _beyond(world: str) -> tuple[Need, ...]:
    """Who plays on past K in a world. The agents of a line are left out: they forget at every episode."""
    _, folder, _, _ = WORLDS[world]
    episodes, tasks = (150, 60) if world == "dark-room" else (60, 21)

    def shipped(label: str, policy: str, stem: str = "", options: str = "") -> Need:
        tasks, out = PAST_K[policy.removesuffix("-careful")], f"beyond/{policy}{stem}"
        command = f"python bench/beyond.py {policy} --times 10 --tasks {tasks} --rows {tasks}{options}"
        return Need(label=label, files=(f"{out}.json", f"{out}.npz"), command=f"{command} --out results/{out}.json")

    def both(label: str, policy: str) -> tuple[Need, Need]:
        """Settled, and for comparison not."""
        return shipped(label, policy), shipped(f"{label}{draw.RING}", policy, "-ring", " --ring")

    def reference(agent: str) -> Need:
        out = f"beyond/{folder}-{agent}"
        how = f"--agent {agent} --env {folder} --tasks {tasks} --episodes {episodes}"
        return Need(label=agent, files=(f"{out}.npz",), command=f"safeicrl evaluate {how} --out results/{out}")

    room = world == "dark-room"
    safer = both("SCARED, guard", f"{folder}-guard") if room else (shipped("SCARED, careful", f"{folder}-careful"),)
    hand = ("explorer", "planner", "random") if room else ("random",)
    learned = (safe_ad.past_k(world, folder, episodes), *meta.past_k(world, folder, episodes))
    return (*both("SCARED", folder), *safer, *learned, *(reference(agent) for agent in hand))


def _wide(world: str) -> tuple[Need, ...]:
    """The list of limits from the gaps between those of training; tracks only."""
    _, folder, _, _ = WORLDS[world]
    return tuple(
        Need(
            label=label,
            files=(f"{folder}/{stem}.npz",),
            command=f"safeicrl evaluate {agent} --list wide --label '{label}' --out results/{folder}/{stem}",
        )
        for label, stem, agent in (
            ("SCARED", "wide", folder),
            ("wiped", "wide-wiped", f"{folder} --wipe"),
            ("random", "wide-random", f"--agent random --env {folder}"),
        )
    )


def _temperatures() -> tuple[Need, ...]:
    """Evaluations on validation tasks at several temperatures: the policies, and Safe AD where it samples."""
    policies = tuple(
        Need(
            label=policy,
            files=(f"{policy}/validation/*.npz",),
            command=f"safeicrl evaluate {policy} --list validation --seed 1000 --temperature 0.5 "
            f"--out results/{policy}/validation/0.5",
        )
        for policy in training.POLICIES
    )
    return (*policies, *safe_ad.temperatures())


# The context ablation's policies in trials twice as long as the paper's, where 3000 steps can be used.
LONG_TRIALS = tuple(
    Need(
        label=label,
        files=(f"scared-ablations/long-{stem}.npz", f"scared-ablations/long-{stem}-seed?.npz"),
        command=f"safeicrl evaluate runs/{stem}-seed0 --tasks 200 --episodes 100 "
        f"--out results/scared-ablations/long-{stem}",
    )
    for label, stem in (("short context", "context-short"), ("default", "base"), ("long context", "context-long"))
)


PANELS: tuple[Panel, ...] = (
    Panel(
        name="episodes",
        title="Return and cost by episode",
        text="The paper's question (i): does a frozen policy earn more and cost less as its context grows, "
        "on tasks it never saw? One figure per world, all methods of the paper, and the baselines of this library. "
        "Agents that were evaluated with the same seed on the same number of tasks met the same tasks; the table "
        "has the numbers, the list below it the seeds. In the table alone: meta-learners that update their "
        "parameters only from the episodes that count (own episodes), or never. SafeVelocity is tested on three "
        "speed limits "
        "only: its bands and errors count 200 repeats of these, so they are too small.",
        parts=tuple(
            Part(
                name=f"episodes-{world}",
                title=WORLDS[world][0],
                needs=(*_methods(world), *meta.variants(world, *WORLDS[world][1:3])),
                show=partial(draw.episodes, table_only=(*_far(world), *meta.VARIANT_LABELS)),
            )
            for world in WORLDS
        )
        + tuple(
            Part(
                name=f"wide-{world}",
                title=f"{WORLDS[world][0]}, 42 limits between those of training",
                needs=_wide(world),
                show=partial(draw.episodes, table_only=("random",)),
            )
            for world in ("half-cheetah", "ant")
        ),
    ),
    Panel(
        name="budgets",
        title="Total return and largest episode cost by budget",
        text="The paper's question (ii): does the policy use a larger budget, and does the largest cost of any "
        "episode of a trial stay below it? A point above the dotted line means that, on average, the worst episode "
        "of a trial was over budget. Car's meta-learners are in the table only: they have three to five trials in "
        "a bin.",
        parts=tuple(
            Part(
                name=f"budgets-{world}",
                title=WORLDS[world][0],
                needs=_by_budget(world),
                show=partial(draw.budgets, table_only=_few(world)),
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
        "(exact) against one for each (naive). All are the preset darkroom with one change, for 42 of its 330 "
        "iterations: about 32 million environment steps per seed. Nothing is chosen by an evaluation. Then "
        "Algorithm 1 as it is printed, at the paper's million.",
        parts=(
            Part(
                name="scared-context", title="Context length", needs=CONTEXT,
                show=partial(draw.by_setting, setting="context"),
            ),
            Part(
                name="scared-context-long", title="Context length, trials of 100 episodes", needs=LONG_TRIALS,
                show=partial(draw.by_setting, setting="context"),
            ),
            Part(name="scared-width", title="Width", needs=WIDTH, show=partial(draw.by_setting, setting="width")),
            Part(name="scared-dual", title="Exact against naive multipliers", needs=DUAL, show=training.critics),
            Part(
                name="scared-dual-episodes", title="The same, on unseen rooms", needs=DUAL_EPISODES,
                show=draw.episodes,
            ),
            Part(name="scared-published", title="Algorithm 1 as printed", needs=PUBLISHED, show=draw.published),
            Part(
                name="scared-published-training", title="Its training", needs=PUBLISHED_LOG, show=training.critics
            ),
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
        parts=(
            *settings_parts(TABLES),
            Part(
                name="temperatures", title="Temperatures, by one rule on validation tasks", needs=_temperatures(),
                show=draw.temperatures,
            ),
        ),
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
                needs=tuple(need for world in WORLDS for need in meta.logs(world, WORLDS[world][1])),
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
        "unseen tasks for all agents of a world. A guard at test time only was fitted to the policy that was "
        "trained without one; only the room has a policy that was trained with a guard.",
        parts=(
            *(
                Part(
                    name="guard-room" if world == "dark-room" else f"guard-{world}",
                    title=WORLDS[world][0],
                    needs=_guard(world),
                    show=draw.guard,
                )
                for world in WORLDS
            ),
            *(_calibration(world) for world in WORLDS),
        ),
    ),
    Panel(
        name="beyond",
        title="Beyond K episodes",
        text="A deployed policy does not stop after the K episodes of training. Its memory settles then. For "
        "comparison, not settled: old steps are overwritten once the context is full. Here policies and baselines "
        "play on, on unseen tasks of seed 0. The privileged and the memoryless agents are left out: they forget at "
        "every episode, so nothing changes for them.",
        parts=tuple(
            Part(name=f"beyond-{world}", title=WORLDS[world][0], needs=_beyond(world),
                show=partial(draw.beyond, table_only=_far(world)))
            for world in WORLDS
        ),
    ),
)  # fmt: skip

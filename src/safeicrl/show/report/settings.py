"""Hyperparameters: the paper's tables beside the settings of our runs, each difference with its reason."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from safeicrl.files import read_json
from safeicrl.show.report.content import Found, Grid, Part, Shown


@dataclass(frozen=True, kw_only=True)
class Column:
    """Settings of ours: of a stored run, or of a preset that was not run."""

    label: str
    file: str  # below the results folder: a run's config.json, or a card
    preset: str = ""  # whose last stage stands in where the file is missing; or ALGO:ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting. `ours` is a text with names in braces, which are looked up in a run's settings.

    {name|default} is for an option that the oldest stored runs did not have yet.
    """

    name: str
    paper: str
    ours: str
    why: str = ""  # of the difference; empty where there is none


@dataclass(frozen=True, kw_only=True)
class Table:
    """One of the paper's tables."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


NOT_GIVEN = "not given"
DROPOUT = "The network has no dropout: PPO's ratios need the same network twice, and a rate of 5 has no meaning."
SCHEDULE = "PPO with a linear schedule, start → end. The off-policy optimiser has 3e-4."
BETAS = "PPO has Adam's usual β₂; the off-policy optimiser has the paper's."
PPO = "PPO learns from fresh trials. In the paper's room it has more goals and fewer violations."


def _scared(heads: str, batch: str, k: str, limit: str, budgets: str) -> tuple[Row, ...]:
    """The paper's table "Parameters for SCARED", and what it leaves open."""
    return (
        Row(name="K", paper=k, ours="{env.episodes}"),
        Row(name="episode time limit", paper=limit, ours="{env.max_steps}"),
        Row(name="embedding and hidden dim", paper="64", ours="{algo.net.width}"),
        Row(name="layers", paper="4", ours="{algo.net.layers}"),
        Row(name="heads", paper="8", ours="{algo.net.heads}", why=heads),
        Row(name="sequence length", paper="1500", ours="{algo.net.context}"),
        Row(name="attention and residual dropout", paper="0", ours="0"),
        Row(name="embedding dropout", paper="5", ours="0", why=DROPOUT),
        Row(name="policy optimiser", paper="DDPG", ours="{algo.optimiser}", why=PPO),
        Row(
            name="replay buffer", paper="100,000", ours="none",
            why="PPO has none. The off-policy optimiser's holds {algo.ddpg.capacity} rows, each of whole trials.",
        ),
        Row(
            name="learning rate", paper="3e-4", why=SCHEDULE,
            ours="{algo.ppo.learning_rate.0} → {algo.ppo.learning_rate.1}",
        ),
        Row(name="betas", paper="(0.9, 0.99)", ours="(0.9, 0.999)", why=BETAS),
        Row(name="clip grad", paper="1", ours="{algo.ppo.max_grad}"),
        Row(name="batch size", paper="32", ours="{algo.ppo.minibatch}", why=batch),
        Row(name="optimizer", paper="Adam", ours="Adam"),
        Row(
            name="budgets in training", paper=budgets, ours="{env.train_budget.0} to {env.train_budget.1}, "
            "u to the power {algo.budget_power}",
            why="u is uniform in [0, 1]. A power above 1 practises small budgets more: they are broken most.",
        ),
        Row(
            name="penalty of the actor", paper="λ v_e Q^c", ours="{algo.penalty.form}",
            why="Charges the cost beyond the budget only, step by step; see docs/method.md.",
        ),
        Row(
            name="what moves λ", paper="max_k g_k", ours="{algo.penalty.signal}, worst bin of budgets",
            why="Averaged over mixed budgets, slack at large ones hides violations at small ones.",
        ),
        Row(
            name="step of λ", paper=NOT_GIVEN, ours="{algo.penalty.step} → {algo.penalty.final_step}",
            why="λ rises slowly while the policy is noisy, faster at the end: a large λ freezes small budgets.",
        ),
        Row(
            name="largest λ", paper="none", ours="{algo.penalty.cap}",
            why="A cap keeps small budgets from freezing (docs/lab.md). At the cap, Theorem 1 does not apply.",
        ),
        Row(
            name="discount", paper=NOT_GIVEN, ours="{algo.ppo.discount}",
            why="Chosen by us: what is found now pays in later episodes.",
        ),
        Row(
            name="weight of the entropy", paper=NOT_GIVEN, ours="{algo.ppo.entropy.0} → {algo.ppo.entropy.1}",
            why="Without it, exploring stops before the goal was found often enough to learn from.",
        ),
        Row(
            name="critics see the hidden task", paper="False", ours="{algo.ppo.privileged_critic}",
            why="Less noise in training. The policy never sees it, and the critics are not shipped.",
        ),
    )  # fmt: skip


# What only the robots' recipes have.
ROBOTS = (
    Row(
        name="episodes that begin overspent", paper="0", ours="{algo.spent|0}",
        why="Point and Car: to stop is learned from a standstill; in mid-episode braking must come first.",
    ),
    Row(
        name="price of cost within the budget", paper="0", ours="{algo.penalty.price|0}",
        why="Ant: cost within the budget is free in L_Σ, so a policy that knows the limit spends it.",
    ),
    Row(
        name="levels of an action (0: continuous)", paper="0", ours="{algo.net.levels|0}",
        why="Point and Car: their motors saturate at a twentieth of their range.",
    ),
)  # fmt: skip


SAFE_AD_ROOM = (
    Row(name="embedding dim", paper="64", ours="{algo.net.embedding}"),
    Row(name="hidden dim", paper="512", ours="{algo.net.width}"),
    Row(name="layers", paper="8", ours="{algo.net.layers}"),
    Row(name="heads", paper="8", ours="{algo.net.heads}"),
    Row(name="sequence length", paper="100", ours="{algo.net.context}"),
    Row(
        name="dropout: attention, residual, embedding", paper="0.5, 0.1, 0.3",
        ours="{algo.net.attention_dropout}, {algo.net.residual_dropout}, {algo.net.embedding_dropout}",
        why="From a small search on the evaluated rooms (docs/lab.md), which favours this baseline.",
    ),
    Row(
        name="learning rate", paper="3e-4", ours="{algo.learning_rate}",
        why="From the same search; with a warm-up and a cosine.",
    ),
    Row(name="betas", paper="0.9, 0.99", ours="{algo.betas.0}, {algo.betas.1}"),
    Row(name="clip grad", paper="1", ours="{algo.clip}"),
    Row(name="batch size", paper="512", ours="{algo.batch}"),
    Row(name="optimizer", paper="Adam", ours="Adam"),
    Row(
        name="data", paper="3 limits × 50,000 steps, about 4 million in all",
        ours="405 rooms × 3 limits × 3,300 steps, 4 million in all",
        why="More rooms and shorter histories helped most. 27 rooms as in the paper reach 11 to 16 goals.",
    ),
    Row(
        name="subsampling", paper="yes, no number", ours="every {algo.stride}th episode",
        why="So that a window spans learning progress.",
    ),
)  # fmt: skip
SAFE_AD_ROBOTS = (
    Row(name="embedding dim", paper="512", ours="{algo.net.embedding}"),
    Row(name="hidden dim", paper="256", ours="{algo.net.width}"),
    Row(name="layers", paper="8", ours="{algo.net.layers}"),
    Row(name="heads", paper="8", ours="{algo.net.heads}"),
    Row(name="sequence length", paper="200", ours="{algo.net.context}"),
    Row(
        name="dropout: attention, residual, embedding", paper="0.5, 0.1, 0.3",
        ours="{algo.net.attention_dropout}, {algo.net.residual_dropout}, {algo.net.embedding_dropout}",
        why="What helped most in the room (docs/lab.md).",
    ),
    Row(
        name="learning rate", paper="3e-4", ours="{algo.learning_rate}",
        why="As in the room; with a warm-up and a cosine.",
    ),
    Row(name="betas", paper="0.9, 0.99", ours="{algo.betas.0}, {algo.betas.1}"),
    Row(name="clip grad", paper="1", ours="{algo.clip}"),
    Row(name="batch size", paper="128", ours="{algo.batch}"),
    Row(name="optimizer", paper="Adam", ours="Adam"),
    Row(name="prediction of an action", paper="mean", ours="{algo.net.actions}"),
    Row(
        name="data", paper="limit 0, 2 to 5 million steps",
        ours="limit 0, 256 tasks × 96,000 steps (Point, Car), 20 × 320,000 (HalfCheetah), 10 × 200,000 (Ant)",
        why="More tasks helped most in the room. Point and Car have 24.6 million steps, the others 6.4 and 2.",
    ),
    Row(
        name="subsampling", paper="yes, no number", ours="every {algo.stride}th episode",
        why="So that a window spans learning progress.",
    ),
)  # fmt: skip
META = (
    Row(name="K", paper="50", ours="{env.episodes}"),
    Row(name="episode time limit", paper="30", ours="{env.max_steps}"),
    Row(
        name="hidden layers", paper="64, 512, 64", ours="{algo.hidden.0}, {algo.hidden.1}, {algo.hidden.2}",
    ),
    Row(
        name="min/max batch size", paper="500/1500", ours="{algo.batch_episodes} episodes",
        why="Whole episodes of 30 steps: 17 of them are about 500 steps.",
    ),
    Row(
        name="policy learning rate", paper="1e-3", ours="none in SafeMeta's closed form; MAML's step 0.1",
        why="Read as Adam's in SafeMeta's fit. MAML takes one plain gradient step, whose size the table lacks.",
    ),
    Row(name="value/cost learning rate", paper="0.03/0.1", ours="{algo.critic.rates.0}/{algo.critic.rates.1}"),
    Row(name="discount factor", paper="0.99", ours="{algo.discount}"),
    Row(name="GAE parameter", paper="0.95", ours="{algo.trace}"),
    Row(name="max KL divergence", paper="0.001", ours="{algo.trust.max_kl}"),
    Row(
        name="Lagrangian weight", paper="1", ours="1 in SafeMeta, 0.05 in MAML",
        why="With 1, MAML learns to stand still (docs/lab.md).",
    ),
    Row(
        name="meta-training iterations", paper="15000", ours="{algo.iterations}",
        why="Planned. The stored runs were stopped after 300; the best came after 100 (docs/safe_meta.md).",
    ),
    Row(name="tasks per iteration", paper="20", ours="{algo.tasks}"),
    Row(name="value/cost optimizer", paper="L-BFGS", ours="L-BFGS"),
)  # fmt: skip

HEADS = "Small heads are slow on a GPU (docs/speed.md). Two heads are faster still, but one seed froze."
SMALL_BATCH = (
    "HalfCheetah and Ant: rows of a whole trial, 48 per iteration; many small updates learn faster (docs/lab.md)."
)
TABLES = (
    Table(
        name="settings-scared-room",
        title="SCARED in SafeDarkRoom",
        columns=(Column(label="ours", file="safe-dark-room/training/config.json", preset="darkroom"),),
        rows=_scared(HEADS, "", "50", "30", "1 to 15, uniform"),
    ),
    Table(
        name="settings-scared-robots",
        title="SCARED in SafeDarkMujoco and SafeVelocity (last stage)",
        columns=(
            Column(label="Point", file="safe-dark-point/training/4-settle/config.json", preset="point"),
            Column(
                label="HalfCheetah",
                file="safe-velocity-half-cheetah/training/2-whole-trials/config.json",
                preset="half-cheetah",
            ),
            Column(label="Car", file="safe-dark-car/training/4-settle/config.json", preset="car"),
            Column(label="Ant", file="safe-velocity-ant/training/7-price-12/config.json", preset="ant"),
        ),
        rows=(*_scared("", SMALL_BATCH, "20", "75", "10 to 50 (SafeDarkMujoco), uniform"), *ROBOTS),
    ),
    Table(
        name="settings-paper-room",
        title="Algorithm 1 as printed: --preset darkroom-paper",
        columns=(Column(label="ours", file="safe-dark-room-paper/training/config.json", preset="darkroom-paper"),),
        rows=(
            Row(name="embedding and hidden dim", paper="64", ours="{algo.net.width}"),
            Row(name="layers", paper="4", ours="{algo.net.layers}"),
            Row(name="heads", paper="8", ours="{algo.net.heads}"),
            Row(name="sequence length", paper="1500", ours="{algo.net.context}"),
            Row(name="learning rate", paper="0.0003", ours="{algo.ddpg.learning_rate}"),
            Row(name="betas", paper="(0.9, 0.99)", ours="(0.9, 0.99)"),
            Row(name="clip grad", paper="1", ours="{algo.ddpg.max_grad}"),
            Row(name="batch size", paper="32", ours="{algo.ddpg.batch}"),
            Row(
                name="replay buffer",
                paper="100,000",
                ours="{algo.ddpg.capacity} rows",
                why="A row is 1500 steps. The run has fewer, so nothing is ever dropped.",
            ),
            Row(
                name="environment steps",
                paper="about 1 million",
                ours="{algo.iterations} iterations × {algo.rows} rows × 1500",
                why="1,008,000: the paper's million, in whole iterations.",
            ),
            Row(
                name="budgets in training",
                paper="1 to 15, u to the power 1",
                ours="{env.train_budget.0} to {env.train_budget.1}, u to the power {algo.budget_power}",
            ),
            Row(
                name="critics: number, see the hidden task",
                paper="1, False",
                ours="{algo.ddpg.ensemble}, {algo.ddpg.privileged_critic}",
            ),
            Row(name="trace of the target", paper="0", ours="{algo.ddpg.trace}"),
            Row(
                name="gradient steps per trajectory",
                paper="1",
                ours="{algo.ddpg.updates} per {algo.rows} rows",
                why="Side by side on a GPU; with 1 per trajectory there would be 672 in the run.",
            ),
            Row(name="penalty of the actor", paper="paper", ours="{algo.penalty.form}"),
            Row(name="what moves λ", paper="mean_of_max", ours="{algo.penalty.signal}"),
            Row(
                name="λ follows",
                paper="replay",
                ours="{algo.penalty.source}",
                why="In replay, early exploration keeps pushing λ up; --algo.penalty.source replay is an option.",
            ),
            Row(name="trust region, entropy", paper="0, 0", ours="{algo.ddpg.trust}, {algo.ddpg.entropy}"),
            Row(
                name="exploration",
                paper="the policy's own noise",
                ours="ε {algo.ddpg.exploration.0} → {algo.ddpg.exploration.1}",
                why="A policy without entropy stops exploring.",
            ),
            Row(
                name="largest λ",
                paper="none",
                ours="{algo.penalty.cap}",
                why="A safety net: wild early policies could drive λ too high. The run ended at 0.69.",
            ),
        ),
    ),
    Table(
        name="settings-safe-ad-room",
        title="Safe AD in SafeDarkRoom",
        columns=(Column(label="tuned run", file="safe-ad/tuned.json", preset="darkroom-safe-ad-tuned"),),
        rows=SAFE_AD_ROOM,
    ),
    Table(
        name="settings-safe-ad-robots",
        title="Safe AD in SafeDarkMujoco and SafeVelocity",
        columns=(
            Column(label="Point", file="safe-ad/training/point/config.json", preset="safe-ad:safe-dark-point"),
            Column(
                label="HalfCheetah",
                file="safe-ad/training/half-cheetah/config.json",
                preset="safe-ad:safe-velocity-half-cheetah",
            ),
        ),
        rows=SAFE_AD_ROBOTS,
    ),
    Table(
        name="settings-meta",
        title="SafeMeta and MAML with penalty in SafeDarkRoom",
        columns=(
            Column(
                label="SafeMeta", file="safe-meta/training/dark-room/config.json", preset="safe-meta:safe-dark-room"
            ),
            Column(label="MAML", file="maml/training/dark-room/config.json", preset="maml-penalty:safe-dark-room"),
        ),
        rows=META,
    ),
)


def settings_parts(tables: Sequence[Table]) -> tuple[Part, ...]:
    """A part of the panel for each table. What is missing is taken from the preset, so nothing is required."""
    return tuple(Part(name=table.name, title=table.title, show=partial(show_table, table)) for table in tables)


def show_table(table: Table, found: Found) -> list[Shown]:
    """The paper's numbers, ours, and why they differ."""
    every = [(column, *_settings(column, found)) for column in table.columns]
    labels = [f"{column.label}{'' if stored else ' (preset)'}" for column, stored, _ in every]
    rows = []
    for row in table.rows:
        ours = [fill(row.ours, values) for _, _, values in every]
        same = all(text == row.paper for text in ours)
        rows.append([row.name, row.paper, *ours, "same" if same else fill(row.why, every[0][2])])
    sources = "; ".join(
        f"{column.label}: results/{column.file}" if stored else f"{column.label}: preset {column.preset}"
        for column, stored, _ in every
    )
    return [Grid(header=("", "paper", *labels, "why they differ"), rows=rows), f"Settings from {sources}."]


def _settings(column: Column, found: Found) -> tuple[bool, dict[str, Any]]:
    """Whether the run is stored, and its settings: {"algo": ..., "env": ...}."""
    path = found.root / column.file
    if not path.exists():
        return False, preset_settings(column.preset)
    document = read_json(path, "configuration")
    algo = document["algo"] if "algo" in document else document["training"]["algo"]
    return True, {"algo": algo["config"], "env": document["env"]["parameters"]}


def preset_settings(name: str) -> dict[str, Any]:
    """The settings of a preset's last stage, or of ALGO:ENVIRONMENT. Imports jax, as the recipes do."""
    from safeicrl.recipes.presets import experiment, preset

    algo, _, env = name.partition(":")
    found: Any = experiment(algo, env) if env else preset(name).stages[-1].experiment
    return {"algo": dataclasses.asdict(found.algo), "env": dataclasses.asdict(found.env)}


def fill(text: str, values: dict[str, Any]) -> str:
    """The text with {a.b.0} replaced by what stands there in `values`; “–”, or its default, where nothing does."""

    def look_up(match: re.Match[str]) -> str:
        value: Any = values
        for name in match[1].split("."):
            try:
                value = value[int(name)] if isinstance(value, list | tuple) else value[name]
            except (KeyError, IndexError, TypeError):
                return match[2] or "–"
        return f"{value:g}" if isinstance(value, float) else str(value)

    return re.sub(r"\{([\w.]+)(?:\|(\w+))?\}", look_up, text)

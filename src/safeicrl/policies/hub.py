"""A policy as a folder in the layout of model hubs, and its card in Markdown.

README.md               the model card: metadata on top, what the policy does, how it was trained, its limits
model.safetensors       the weights
model.json              the library's own card, from which `load_policy(FOLDER)` builds the policy
config.json             the sizes of the network and the environment, for tools that look there
evaluation.json         the evaluation in the card, if there is one
film.gif                one unseen task being learned (safeicrl export writes it)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safeicrl.errors import UserError
from safeicrl.evaluation.results import in_words
from safeicrl.files import atomic_write, make_folder, write_json
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import HUB
from safeicrl.policies.export import export_policy

FILM = "film.gif"


def export_hub(name_or_path: str | Path, folder: str | Path, *, overwrite: bool = False, **options: Any) -> Path:
    """Write a policy as a folder for a model hub; `options` are those of `export_policy`. Returns the folder."""
    target = Path(folder)
    if target.is_file():
        raise UserError(f"--hub must name a folder, {target} is a file")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UserError(f"{target} is not empty: choose another --hub, or --overwrite")
    make_folder(target)
    weights = export_policy(name_or_path, target / HUB, overwrite=overwrite, **options)
    card = read_card(weights)
    told = ("kind", "net", "hidden", "env", "temperature", "risk", "reserve", "brake", "settle_after")
    parts = {name: card[name] for name in told if name in card}
    write_json(target / "config.json", {"library_name": "safeicrl", **parts})
    if "evaluation" in card:
        write_json(target / "evaluation.json", card["evaluation"])
    write_card(target, card)
    return target


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """Write README.md; it shows the film if there is one, and takes the folder's name for a policy without one."""
    text = model_card({"name": folder.name, **card}, film=(folder / FILM).exists())
    atomic_write(folder / "README.md", [text.encode()])


def model_card(card: Mapping[str, Any], *, film: bool = False) -> str:
    """A policy's card in Markdown, with the metadata that hubs read on top."""
    name, world = str(card.get("name") or card["env"]["name"]), card["env"]["name"]
    evaluation = card.get("evaluation", {})
    sections = [
        _metadata(card, name, world),
        f"# {name}\n\n{card.get('description') or f'A frozen policy for {world}.'}",
        "It meets a task that it has never seen and learns it from its own history alone. Its weights never "
        "change. You set a budget for the cost of each episode.",
        *([f"![One unseen task being learned]({FILM})"] if film else []),
        "## Use\n\n```python\nimport safeicrl\n\npolicy = safeicrl.load_policy(FOLDER)  # this folder\n"
        "policy.start(budget=3)\naction = policy.act(observation)\n"
        "action = policy.act(observation, reward, cost, terminated, truncated)\n```",
        *([_evaluation(evaluation)] if "summary" in evaluation else []),
        _training(card.get("training", {}), card),
        "## Limits\n\n" + "\n".join(f"* {limit}" for limit in card.get("limits", ["None are known."])),
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(card: Mapping[str, Any], name: str, world: str) -> str:
    lines = [
        "---", "library_name: safeicrl", "license: mit", "pipeline_tag: reinforcement-learning", "tags:",
        "- reinforcement-learning", "- safe-reinforcement-learning", "- in-context-reinforcement-learning",
        f"- {_quoted(world)}",
    ]  # fmt: skip
    summary = card.get("evaluation", {}).get("summary")
    if summary:
        lines += ["model-index:", f"- name: {_quoted(name)}", "  results:", "  - task:"]
        lines += ["      type: reinforcement-learning", "    dataset:", f"      name: {_quoted(world)}"]
        lines += [f"      type: {_quoted(world)}", "    metrics:"]
        for kind, words, key in (
            ("mean_reward", "return of a trial", "total_return"),
            ("over_budget", "share of episodes over budget", "over_budget"),
        ):
            lines += [f"    - type: {kind}", f"      name: {words}", f"      value: {summary[key]:.6g}"]
    return "\n".join([*lines, "---"])


def _quoted(text: str) -> str:
    """A YAML string, whatever is in it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    summary = evaluation["summary"]
    low, high = evaluation.get("budget_range", (float("nan"),) * 2)
    last = f"last {summary['last']} episodes" if summary["last"] > 1 else "last episode"
    rows = {
        f"return of a trial of {summary['episodes']} episodes": (
            f"{summary['total_return']:.2f} ± {summary['total_return_error']:.2f}"
        ),
        f"return per episode, {last}": f"{summary['last_return']:.3f}",
        "cost per episode": f"{summary['cost']:.2f}",
        "episodes over budget": f"{summary['over_budget']:.2%}",
        f"episodes over budget, {last}": f"{summary['over_budget_last']:.2%}",
        "trials ever over budget": f"{summary['trials_over']:.1%}",
    }
    by_bin = [
        f"| {name} | {total:.1f} | {summary['over_by_budget'][name]:.2%} |"
        for name, total in summary["by_budget"].items()
        if total is not None and summary["over_by_budget"].get(name) is not None
    ]
    return "\n".join(
        [
            f"## Evaluation\n\n{summary['tasks']} unseen tasks, budgets {low:g}–{high:g}, "
            f"{', '.join(in_words({'actions': 'as trained', **evaluation}))}, ± one standard error over tasks.\n",
            "| | |\n|---|---:|",
            *(f"| {what} | {number} |" for what, number in rows.items()),
            "\n| budget | return of a trial | episodes over budget |\n|---|---:|---:|",
            *by_bin,
            *([f"\nCommand: `{evaluation['command']}`"] if evaluation.get("command") else []),
        ]
    )


def _training(training: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    facts = {
        "algorithm": training.get("algo", {}).get("name"),
        "environment steps": f"{training['env_steps']:,}" if training.get("env_steps") else None,
        "iterations": training.get("iteration"),
        "minutes": training.get("minutes"),
        "device": training.get("device"),
        "seed": training.get("seed"),
        "command": f"`{training['command']}`" if training.get("command") else None,
        "version": training.get("safeicrl"),
        "budgets": card["env"]["parameters"].get("train_budget"),
    }
    rows = [f"| {what} | {fact} |" for what, fact in facts.items() if fact is not None]
    return "\n".join(["## Training\n\n| | |\n|---|---|", *rows])

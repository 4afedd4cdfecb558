"""Export a policy, to move it or to ship it: one file and its card."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from safeicrl.agents.api import Agent, with_options
from safeicrl.budgets import Reserve, check_reserve
from safeicrl.envs.api import Env
from safeicrl.envs.registry import env_from_plain, env_to_plain
from safeicrl.errors import UserError
from safeicrl.evaluation.archive import load_results
from safeicrl.evaluation.statistics import Summary, rank, summaries
from safeicrl.files import check_output
from safeicrl.policies.cards import read_card, save_policy
from safeicrl.policies.catalogue import (
    HUB,
    PRETRAINED,
    SEED,
    changed_env,
    find_policy,
    load_agent,
    policy_file,
    run_policies,
    shipped_name,
    trained_env,
)
from safeicrl.provenance import surroundings

MOVED = "trained with other parameters of its environment"  # how that limit of a card begins


def export_policy(
    name_or_path: str | Path,
    out: str | Path,
    *,
    seed: int | None = None,
    average: Sequence[str | Path] = (),
    name: str | None = None,
    description: str | None = None,
    temperature: float | None = None,
    risk: float | None = None,
    reserve: Reserve | None = None,
    brake: float | None = None,
    settle_after: int | None = None,
    env_args: dict[str, Any] | None = None,
    limits: Sequence[str] = (),
    evaluation: str | Path | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a policy and its card, with the changes given here; returns the file's path.

    For a run folder: the best policy of `seed`, by default that of `best_seed`. `average` names other policies, or
    runs (then their policies of the same seed), to average the weights with; see `_average`. `evaluation` is a
    results file of this policy, acting as its card will say. It replaces the evaluation from training. `env_args`
    are the parameters in which the target environment differs from that of training.
    """
    target, source = target_file(Path(out), overwrite), _source(name_or_path, seed)
    check_output(target)
    card = read_card(source)
    own, agent = load_agent(source, card)
    if average:
        agent, card = _average([source, *(_source(other, _seed_like(source, other)) for other in average)])
    env = changed_env(card, env_args or {})
    if env != own:
        _move(card, own, env)
    reserve = None if reserve is None else check_reserve("reserve", reserve)
    given = {
        "name": name, "description": description, "temperature": temperature, "risk": risk, "reserve": reserve,
        "brake": brake, "settle_after": settle_after,
    }  # fmt: skip
    for what, text in (("name", name), ("description", description), *(("limit", limit) for limit in limits)):
        if text is not None and not text.strip():
            raise UserError(f"the {what} of a policy must be words, got {text!r}")
    changes = {key: value for key, value in given.items() if value is not None}
    # what is given comes first: a card opens with its name
    card = {**changes, **{key: value for key, value in card.items() if key not in changes}}
    _, how = with_options(
        env, agent, temperature=card.get("temperature"), risk=risk, reserve=reserve, brake=brake,
        settle_after=settle_after,
    )  # fmt: skip
    if evaluation is not None:
        card["evaluation"] = _evaluation(Path(evaluation), env, card, how)
    elif env != own:
        card.pop("evaluation", None)  # it was in another environment
    card["limits"] = [*card.get("limits", []), *limits]
    where = surroundings()
    origin = source.stem if source.parent == PRETRAINED else str(source)
    card["exported"] = {"from": origin, **{key: where[key] for key in ("command", "date", "safeicrl")}}
    save_policy(target, agent, card)
    return target


def _average(sources: Sequence[Path]) -> tuple[Agent, dict[str, Any]]:
    """The first policy with the mean of all weights. Its card also holds the training of the others.

    Only for related policies: one was trained further from another, or several from one. The return between them is
    about as high as at both ends, and their ways to be safe are mixed. The mean of unrelated policies is useless.
    """
    cards = {path: read_card(path) for path in sources}
    if len(cards) < len(sources):
        raise UserError(f"each policy counts once in an average, got {', '.join(map(str, sources))}")
    agents: list[Any] = [load_agent(path, card)[1] for path, card in cards.items()]
    first, *others = cards
    for path, card in cards.items():
        if card["kind"] != "net":  # other kinds also store the scales of their data
            raise UserError(f"{path} is of kind {card['kind']!r}: only policies of kind 'net' can be averaged")
        if "averaged_with" in card:
            raise UserError(f"{path} is an average already: give its parts instead")
        for what in ("env", "net"):
            if card[what] != cards[first][what]:
                words = _difference(cards[first][what], card[what])
                raise UserError(f"{path} cannot be averaged with {first}, their {what} differs: {words}")
    specs = [agent.net.trunk.spec for agent in agents]
    if any(spec != specs[0] for spec in specs):
        raise UserError(f"{', '.join(map(str, sources))} were trained in environments of different sizes")

    def mean(*arrays: jax.Array) -> jax.Array:
        return jnp.asarray(np.mean([np.asarray(x, np.float64) for x in arrays], axis=0), arrays[0].dtype)

    # the networks alone: their agents may know different numbers of episodes
    weights = jax.tree.map(mean, *(eqx.filter(agent.net, eqx.is_inexact_array) for agent in agents))
    net = eqx.combine(weights, agents[0].net)
    # the evaluation was of the first one alone
    kept = {key: value for key, value in cards[first].items() if key != "evaluation"}
    averaged = [{"from": str(path), "training": cards[path].get("training", {})} for path in others]
    return dataclasses.replace(agents[0], net=net), {**kept, "averaged_with": averaged}


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The first thing in which two descriptions differ, in words."""
    ours, theirs = ({**each, **each.get("parameters", {})} for each in (ours, theirs))
    both = [key for key in {**ours, **theirs} if key != "parameters"]
    which = next(key for key in both if ours.get(key) != theirs.get(key))
    return f"{which} {theirs.get(which)}, not {ours.get(which)}"


def _move(card: dict[str, Any], own: Env, env: Env) -> None:
    """Change a card to one for `env` that says where the policy was trained."""
    trained = trained_env(card, own)  # not `own`, where it was exported for another environment before
    old = [limit.replace(" and these environment parameters only", "") for limit in card.get("limits", [])]
    card["limits"] = [limit for limit in old if not limit.startswith(MOVED)]
    card["trained_in"], card["env"] = env_to_plain(trained), env_to_plain(env)
    if trained == env:  # back at home
        del card["trained_in"]
        return
    before, now = card["trained_in"]["parameters"], card["env"]["parameters"]
    words = ", ".join(f"{name}={before[name]}, here {now[name]}" for name in before if before[name] != now[name])
    card["limits"].insert(0, f"{MOVED}: {words}")


def best_seed(folder: Path) -> int:
    """The seed of a run whose best policy ranks first, by the trainer's rule and the evaluations in the cards."""
    policies = run_policies(folder)
    if len(policies) == 1:
        return next(iter(policies))

    def place(seed: int) -> tuple[bool, float]:
        card = read_card(policies[seed])
        try:
            tolerance = card["training"]["train"]["evaluation"]["tolerance"]
            return rank(Summary(**card["evaluation"]["summary"]), tolerance)
        except (KeyError, TypeError):
            raise UserError(
                f"{policies[seed].with_suffix('.json')} has no evaluation to choose a seed by: choose with --seed"
            ) from None

    return max(policies, key=place)


def _source(name_or_path: str | Path, seed: int | None) -> Path:
    folder = Path(name_or_path)
    if shipped_name(name_or_path) is not None or not folder.is_dir() or (folder / HUB).exists():
        source = find_policy(name_or_path)
        if seed is not None:
            raise UserError(f"{name_or_path} is a single policy: leave out --seed {seed}, which is for run folders")
        return source
    policies = run_policies(folder)
    seed = best_seed(folder) if seed is None else seed
    if seed not in policies:
        raise UserError(f"{folder} has no policy of seed {seed}; it has seeds {', '.join(map(str, policies))}")
    return policies[seed]


def _seed_like(source: Path, other: str | Path) -> int | None:
    """The seed of the policy `source`, to be taken from the run `other` too; None if either is not of a run."""
    seed = SEED.fullmatch(source.stem)
    return int(seed[1]) if seed and Path(other).is_dir() and shipped_name(other) is None else None


def target_file(out: Path, overwrite: bool) -> Path:
    """The file to write, with its extension; refused if it must not be written."""
    if out.is_dir() or out.name in ("", ".."):
        raise UserError(f"--out must name the file to write, got the folder {str(out)!r}")
    path = policy_file(out)
    for file in (path, path.with_suffix(".json")):
        if file.is_dir():
            raise UserError(f"{file} is a folder: choose another --out")
        if file.exists() and not overwrite:
            raise UserError(f"{file} exists: choose another --out, or --overwrite")
    return path


def _evaluation(path: Path, env: Env, card: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """What a card says about a results file; refused unless it is of this policy, acting as by its card."""
    results = load_results(path)
    meta = results.meta
    evaluated, described = meta.get("card"), meta.get("env")
    if evaluated is None and "iteration" in meta:
        raise UserError(f"{path} is an evaluation in training, which the card has already")
    if not isinstance(evaluated, dict) or not isinstance(described, dict):
        who = meta.get("agent", results.label)
        raise UserError(f"{path} must be a result of safeicrl evaluate POLICY, got one of {who}")
    try:
        theirs, trained = env_from_plain(described["name"], described["parameters"]), _training(evaluated)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not say what was evaluated on which environment: {error!r}") from None
    if theirs != env:
        words = _difference(env_to_plain(env), env_to_plain(theirs))
        raise UserError(f"{path} is of another environment than the policy's: {words}")
    if trained != _training(card):
        raise UserError(f"{path} is the evaluation of another policy, {meta.get('agent')}: their training differs")
    if (count := results.returns.shape[1]) != env.spec.episodes:
        raise UserError(f"{path} is of trials of {count} episodes, the environment's have {env.spec.episodes}")
    # a policy that was trained on single episodes was chosen, and is evaluated, with its context wiped
    expected = {"actions": how["actions"], "context": card.get("evaluation", {}).get("context", how["context"])}
    expected |= {option: how.get(option) for option in ("guard", "reserve", "brake", "settle_after")}
    for what, ours in expected.items():
        if meta.get(what) != ours:
            raise UserError(f"{path} is of another way to act: {what} {meta.get(what)}; the policy's: {ours}")
    kept = {key: value for key, value in meta.items() if key != "card"}
    return {**kept, **summaries(results)}


def _training(card: dict[str, Any]) -> dict[str, Any]:
    """What tells policies apart: how, when and for how long each was trained, but not in which folder."""
    trained = {key: value for key, value in card.get("training", {}).items() if key != "command"}
    return {**trained, "averaged_with": [_training(other) for other in card.get("averaged_with", [])]}

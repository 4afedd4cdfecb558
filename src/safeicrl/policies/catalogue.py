"""Finds policies (shipped, in files, in run folders) and builds an agent from a policy's card."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax

from safeicrl.agents.api import Agent
from safeicrl.agents.decision import DecisionAgent
from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.mlp import MlpAgent
from safeicrl.budgets import check_reserve
from safeicrl.config import from_plain
from safeicrl.envs.api import Env, EnvSpec
from safeicrl.envs.registry import env_from_plain
from safeicrl.errors import UserError, check_integer, unknown_name
from safeicrl.files import CHECKPOINT, RECIPE, read_json
from safeicrl.nets.decision_transformer import DecisionConfig, DecisionNet, unit_scales
from safeicrl.nets.feedforward import check_hidden
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.policies import checkpoint
from safeicrl.policies.cards import arrays_file, read_card

HUB = "model.safetensors"  # the weights in a folder as model hubs lay it out (hub.py)
POLICY = "policy.safetensors"  # the policy of a run of several stages
PRETRAINED = Path(__file__).parent / "pretrained"
SEED = re.compile(r"(?:best|policy)-seed(\d+)")  # how a run names the policy of a seed: of one stage, of several


def policy_names() -> list[str]:
    """The policies that ship with the library."""
    return sorted(path.stem for path in PRETRAINED.glob("*.json"))


def shipped_card(name: str) -> dict[str, Any]:
    """The card of a policy that ships."""
    return read_card(PRETRAINED / f"{name}.safetensors")


def penalty_names() -> dict[str, str]:
    """NAME-penalty → NAME, of each policy that ships and learned by the penalty alone, as the paper has it.

    So the paper's method has a name of its own in every world, beside the policies with a guard and those that act
    with more care than they learned to (their cards share another policy's arrays).
    """
    cards = {name: shipped_card(name) for name in policy_names()}
    return {f"{name}-penalty": name for name, card in cards.items() if "risk" not in card and "arrays" not in card}


def shipped_name(name: str | Path) -> str | None:
    """The policy that ships and has this name; None if there is none."""
    text = str(name)
    text = penalty_names().get(text, text) if text.endswith("-penalty") else text
    return text if text in policy_names() else None


def run_policies(folder: Path) -> dict[int, Path]:
    """The best policy of each seed of a run, lowest seed first; after several stages, the exported one."""
    files = [(SEED.fullmatch(path.stem), path) for path in folder.glob("*-seed*.safetensors")]
    found = {int(match[1]): path for match, path in files if match}
    if (folder / RECIPE).exists() and not found:
        if not (only := folder / POLICY).exists():
            raise UserError(
                f"{folder} holds no policy yet; its last stage is ahead: safeicrl train --resume {folder}"
            )
        found = {int(read_card(only).get("training", {}).get("seed", 0)): only}
    if not found and not any((folder / name).exists() for name in ("config.json", CHECKPOINT)):
        raise UserError(f"{folder} is a folder without a policy, and not the folder of a run")
    if not found:
        raise UserError(f"{folder} holds no policy (best-seed*.safetensors); its first evaluation writes one")
    return dict(sorted(found.items()))


def policy_file(path: Path) -> Path:
    """The file of the policy that `path` names: with its extension, its card's, or none."""
    stem = path.with_suffix("") if path.suffix in (".safetensors", ".json") else path
    return stem.with_name(f"{stem.name}.safetensors")


def _shares_arrays(file: Path) -> bool:
    """Whether there is only a card, which names the policy beside it whose arrays it shares."""
    card = file.with_suffix(".json")
    if file.exists() or not card.exists():
        return False
    described = read_json(card, "policy card")
    return isinstance(described, dict) and "arrays" in described


def find_policy(name_or_path: str | Path) -> Path:
    """The file of a policy that is given in any of the ways `load_policy` takes."""
    if not isinstance(name_or_path, str | os.PathLike) or not str(name_or_path):
        raise UserError(f"a policy is the name of one that ships, or a path, got {name_or_path!r}")
    text, path = str(name_or_path), Path(name_or_path)
    if (shipped := shipped_name(text)) is not None:
        return PRETRAINED / f"{shipped}.safetensors"
    if path.is_dir():
        if (path / HUB).exists():
            return path / HUB
        if (path / RECIPE).exists() and (path / POLICY).exists():
            return path / POLICY
        return next(iter(run_policies(path).values()))
    file = policy_file(path)
    if _shares_arrays(file):
        return file
    if not file.exists() and path.suffix not in ("", ".json"):
        file = path  # the user gave it another extension
    if file.exists():
        return file
    if str(file) == f"{text}.safetensors" and len(file.parts) == 1:
        raise unknown_name("policy", text, [*policy_names(), *penalty_names()])
    raise UserError(f"no policy and no run folder at {name_or_path}")


def trained_env(card: dict[str, Any], env: Env) -> Env:
    """The environment that a policy for `env` was trained in: the same one, unless it was exported for another."""
    described = card.get("trained_in")
    return env if described is None else env_from_plain(described["name"], described["parameters"])


def trained_episodes(card: dict[str, Any], spec: EnvSpec) -> int:
    """K of the trials of training: the algorithm's own setting if it has one, else the environment's."""
    episodes = card.get("training", {}).get("algo", {}).get("config", {}).get("episodes")
    return spec.episodes if episodes is None else check_integer("the card's number of episodes", episodes, 1)


def _net(card: dict[str, Any], env: Env) -> Agent:
    net = PolicyNet(from_plain(NetConfig, card["net"], "net"), env.spec, jax.random.key(0))
    known, after = trained_episodes(card, env.spec), card.get("settle_after")
    return InContextAgent(
        net=net,
        risk=card.get("risk"),
        reserve=check_reserve("reserve", card.get("reserve", 0.0)),
        brake=card.get("brake", 1.0),
        trained_episodes=known,
        settle_after=None if after is None else check_integer("the card's settle_after", after, 1, known),
    )


def _decision(card: dict[str, Any], env: Env) -> Agent:
    net = DecisionNet(from_plain(DecisionConfig, card["net"], "net"), env.spec, jax.random.key(0))
    return DecisionAgent(net=net, scales=unit_scales(env.spec), temperature=float(net.samples))


def _mlp(card: dict[str, Any], env: Env) -> Agent:
    return MlpAgent.build(env.spec, check_hidden(card["hidden"]))


# These two import what they need themselves: optax takes time to import, and the other kinds do without it.


def _maml_penalty(card: dict[str, Any], env: Env) -> Agent:
    from safeicrl.algos.maml_penalty import MamlAdapter, MamlPenaltyConfig
    from safeicrl.optimisers.meta import MetaAgent

    config = from_plain(MamlPenaltyConfig, card["settings"], "settings")
    return MetaAgent.build(MamlAdapter(env.spec, config), jax.random.key(0))


def _safe_meta(card: dict[str, Any], env: Env) -> Agent:
    from safeicrl.algos.safe_meta import SafeAdapter, SafeMetaConfig
    from safeicrl.optimisers.meta import MetaAgent

    config = from_plain(SafeMetaConfig, card["settings"], "settings")
    return MetaAgent.build(SafeAdapter(env.spec, config), jax.random.key(0))


# A card's "kind" → a function that builds such an agent; its arrays are then read from the file.
KINDS: dict[str, Callable[[dict[str, Any], Env], Agent]] = {
    "net": _net, "decision": _decision, "mlp": _mlp, "maml-penalty": _maml_penalty, "safe-meta": _safe_meta,
}  # fmt: skip


def changed_env(card: dict[str, Any], changes: dict[str, Any]) -> Env:
    """The environment of a card with some parameters changed; refused if the policy cannot act in it."""
    described = card["env"]
    own, other = (env_from_plain(described["name"], {**described["parameters"], **more}) for more in ({}, changes))
    for what in ("observation", "action"):
        theirs, ours = (getattr(env.spec, what) for env in (own, other))
        if theirs != ours:
            raise UserError(f"the policy's {what} space is {theirs}, this environment's is {ours}")
    return other


def check_card(who: str, card: Any, env: Env, agent: Agent) -> None:
    """Refuse a card that does not rebuild `agent` (its arrays or their shapes): nobody could load its policy.

    `who` made the card.
    """
    if not isinstance(card, dict) or not isinstance(card.get("kind"), str):
        raise UserError(f'{who} must return a dictionary with a "kind", got {card!r:.60}')
    if card["kind"] not in KINDS:
        raise unknown_name(f"kind of policy in {who}", card["kind"], KINDS)
    try:
        form = eqx.filter_eval_shape(lambda: KINDS[card["kind"]](card, env))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{who} is incomplete for the kind {card['kind']!r}: {error!r}") from None
    rebuilt, own = (
        {name: tuple(x.shape) for name, x in checkpoint.named_arrays(tree).items()} for tree in (form, agent)
    )
    for name in {**rebuilt, **own}:
        if rebuilt.get(name) != own.get(name):
            raise UserError(
                f"{who} describes another agent: array {name!r} has shape {rebuilt.get(name)} there, and "
                f"{own.get(name)} in the agent itself"
            )


def load_agent(path: Path, card: dict[str, Any]) -> tuple[Env, Agent]:
    """The environment and the agent that a card describes, with the arrays from `path`."""
    if card["kind"] not in KINDS:
        raise unknown_name("kind of policy", card["kind"], KINDS)
    try:
        env = env_from_plain(card["env"]["name"], card["env"]["parameters"])
        # the network scales its inputs as in training, whatever the environment's numbers are now
        form = eqx.filter_eval_shape(lambda: KINDS[card["kind"]](card, trained_env(card, env)))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path.with_suffix('.json')} is an incomplete policy card: {error!r}") from None
    agent, _ = checkpoint.load(arrays_file(path, card), form, kind="policy")
    return env, agent

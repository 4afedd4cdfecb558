"""A released policy on disk: its arrays, the card that describes it, and the evaluation in the card."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safeicrl.budgets import check_reserve
from safeicrl.envs.api import PyTree
from safeicrl.errors import UserError, check_number, check_risk
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.files import make_folder, plain, read_json, sync_folder, temporary, write_json
from safeicrl.policies.checkpoint import save, stored_digest
from safeicrl.version import VERSION

CARD_FORMAT = 2  # 1: cards without digests, which are still read


def arrays_file(path: Path, card: dict[str, Any]) -> Path:
    """The file of a policy's arrays: its own `path`, or, if its card says so, that of a policy beside it.

    A policy that only acts in another way than one that ships needs no arrays of its own.
    """
    if "arrays" not in card:
        return path
    name = card["arrays"]
    if not isinstance(name, str) or Path(name).name != name:
        raise UserError(f"{path.with_suffix('.json')}: 'arrays' must be the name of a policy, got {name!r:.60}")
    return path.with_name(f"{name}.safetensors")


def save_policy(path: Path, agent: PyTree, card: dict[str, Any], evaluation: Results | None = None) -> None:
    """Release a policy: `<name>.safetensors` with the agent's arrays, `<name>.json` with its card.

    The `evaluation` in the card is also saved beside it as ordinary results, `<name>-evaluation.npz` + `.json`.
    All files are written before the first one is replaced, so a full disk never leaves files of two policies.
    """
    card = {key: value for key, value in card.items() if key != "arrays"}  # it has its own now
    make_folder(path.parent)
    with temporary(path) as folder:
        new = folder / path.name
        try:
            save(new, agent, kind="policy", meta={})
            write_card(new, card)
            files = [new, new.with_suffix(".json")]
            if evaluation is not None:
                files += save_results(evaluation, new.with_name(f"{path.stem}-evaluation"))
        except UserError as error:  # its message names the temporary folder
            raise UserError(str(error).replace(str(new.parent), str(path.parent))) from None
        try:
            for file in files:
                os.replace(file, path.with_name(file.name))
            sync_folder(path.parent)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def write_card(path: Path, card: dict[str, Any]) -> None:
    """Write the card of the policy in the file `path`, with a digest of the card and one of the policy's arrays."""
    card = {**{key: value for key, value in card.items() if key != "digests"}, "format": CARD_FORMAT}
    digests = {"card": _digest(card), "policy": stored_digest(arrays_file(path, card))}
    write_json(path.with_suffix(".json"), {**card, "digests": digests})


def _digest(card: dict[str, Any]) -> str:
    """SHA-256 of everything in a card but its digests, whatever the order and the layout."""
    own = {key: value for key, value in card.items() if key != "digests"}
    return hashlib.sha256(json.dumps(plain(own), sort_keys=True).encode()).hexdigest()


# The fields of a card that are read, if they are there: type, type of the items, and both in words.
FIELDS: dict[str, tuple[type, type, str]] = {
    "kind": (str, str, "a string"),
    "env": (dict, object, "an object"),
    "name": (str, str, "a string"),
    "description": (str, str, "a string"),
    "training": (dict, object, "an object"),
    "averaged_with": (list, dict, "a list of objects"),
    "stages": (list, dict, "a list of objects"),
    "chosen": (list, str, "a list of strings"),
    "evaluation": (dict, object, "an object"),
    "limits": (list, str, "a list of strings"),
}


def read_card(path: Path) -> dict[str, Any]:
    """The card beside a released policy's `path`."""
    file = path.with_suffix(".json")
    if not file.exists():
        raise UserError(f"{path} is not a policy: no policy card at {file}")
    card = read_json(file, "policy card")
    if not isinstance(card, dict) or not {"kind", "env", "format"} <= card.keys():
        raise UserError(f"{file} is not a policy card: it needs 'kind', 'env' and 'format'")
    if card["format"] not in (1, CARD_FORMAT):
        raise UserError(
            f"{file} has format {card['format']!r:.60}, this version of safeicrl ({VERSION}) reads {CARD_FORMAT}"
        )
    if card["format"] == CARD_FORMAT:
        _verify(path, card)
    for field, (own, items, words) in FIELDS.items():
        if field not in card:
            continue
        if not isinstance(card[field], own) or not all(isinstance(item, items) for item in card[field]):
            raise UserError(f"{file}: {field!r} must be {words}, got {card[field]!r:.60}")
    if "risk" in card:
        check_risk(card["risk"])
    if "temperature" in card:
        check_number(f"{file}: 'temperature'", card["temperature"], 0.0)
    if "reserve" in card:
        check_reserve(f"{file}: 'reserve'", card["reserve"])
    if "brake" in card:
        check_number(f"{file}: 'brake'", card["brake"], 1.0)
    return card


def _verify(path: Path, card: dict[str, Any]) -> None:
    """Take the digests from a card; refused if the card was changed, or is of other arrays than those beside it."""
    file, digests = path.with_suffix(".json"), card.pop("digests", None)
    if not isinstance(digests, dict) or digests.get("card") != _digest(card):
        raise UserError(f"{file} is damaged or was edited: its digest differs; safeicrl export writes a new card")
    weights = arrays_file(path.with_suffix(".safetensors") if path.suffix == ".json" else path, card)
    if weights.exists() and digests.get("policy") != stored_digest(weights):
        raise UserError(f"{file} is the card of another policy than the one in {weights.name}")

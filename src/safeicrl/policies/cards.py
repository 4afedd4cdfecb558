"""A released policy on disk: its arrays, the card that describes it, and the evaluation in the card."""

import os
import tempfile
from pathlib import Path
from typing import Any

from safeicrl.envs.api import PyTree
from safeicrl.errors import UserError, check_number, check_risk
from safeicrl.evaluation.archive import save_results
from safeicrl.evaluation.results import Results
from safeicrl.files import make_folder, read_json, write_json
from safeicrl.policies.checkpoint import FORMAT, save
from safeicrl.version import VERSION


def save_policy(path: Path, agent: PyTree, card: dict[str, Any], evaluation: Results | None = None) -> None:
    """Release a policy: `<name>.safetensors` with the agent's arrays, `<name>.json` with its card.

    The `evaluation` in the card is also saved beside it as ordinary results, `<name>-evaluation.npz` + `.json`.
    All files are written before the first one is replaced, so a full disk never leaves files of two policies.
    """
    make_folder(path.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=path.parent) as folder:
            new = Path(folder) / path.name
            try:
                save(new, agent, kind="policy", meta={})
                write_json(new.with_suffix(".json"), {**card, "format": FORMAT})
                files = [new, new.with_suffix(".json")]
                if evaluation is not None:
                    files += save_results(evaluation, new.with_name(f"{path.stem}-evaluation"))
            except UserError as error:  # its message names the temporary folder
                raise UserError(str(error).replace(str(new.parent), str(path.parent))) from None
            for file in files:
                os.replace(file, path.with_name(file.name))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


# The fields of a card that are read, if they are there: type, type of the items, and both in words.
FIELDS: dict[str, tuple[type, type, str]] = {
    "kind": (str, str, "a string"),
    "env": (dict, object, "an object"),
    "name": (str, str, "a string"),
    "description": (str, str, "a string"),
    "training": (dict, object, "an object"),
    "averaged_with": (list, dict, "a list of objects"),
    "stages": (list, dict, "a list of objects"),
    "evaluation": (dict, object, "an object"),
    "limits": (list, str, "a list of strings"),
}


def read_card(path: Path) -> dict[str, Any]:
    """The card beside a released policy's `path`."""
    file = path.with_suffix(".json")
    card = read_json(file, "policy card")
    if not isinstance(card, dict) or not {"kind", "env", "format"} <= card.keys():
        raise UserError(f"{file} is not a policy card: it needs 'kind', 'env' and 'format'")
    if card["format"] != FORMAT:
        raise UserError(
            f"{file} has format {card['format']}, this version of safeicrl ({VERSION}) reads format {FORMAT}"
        )
    for field, (own, items, words) in FIELDS.items():
        if field not in card:
            continue
        if not isinstance(card[field], own) or not all(isinstance(item, items) for item in card[field]):
            raise UserError(f"{file}: {field!r} must be {words}, got {card[field]!r:.60}")
    if "risk" in card:
        check_risk(card["risk"])
    if "temperature" in card:
        check_number(f"{file}: 'temperature'", card["temperature"], 0.0)
    return card

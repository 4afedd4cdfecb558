"""Policies as folders for model hubs: written, described, loaded."""

import json
import re

import numpy as np
import pytest

from safeicrl import cli, load_policy
from safeicrl.errors import UserError
from safeicrl.policies import hub
from safeicrl.policies.cards import read_card
from safeicrl.policies.catalogue import PRETRAINED, policy_names
from safeicrl.policies.contenders import released_seeds
from safeicrl.policies.export import export_policy
from safeicrl.show import demo


def front_matter(text: str) -> str:
    assert text.startswith("---\n")
    return text.split("---\n")[1]


def test_a_folder_holds_all_that_hubs_expect_and_is_loaded_as_a_policy(tmp_path):
    folder = hub.export_hub("safe-dark-room-guard", tmp_path / "guard", limits=["only a test"])
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "evaluation.json", "model.json", "model.safetensors",
    ]  # fmt: skip
    ours, theirs = load_policy(folder), load_policy("safe-dark-room-guard")
    assert (ours.env, ours.agent.risk, ours.card["actions"]) == (theirs.env, 0.03, theirs.card["actions"])
    np.testing.assert_array_equal(ours.agent.net.actor.first.weight, theirs.agent.net.actor.first.weight)
    config = json.loads((folder / "config.json").read_text())
    assert (config["library_name"], config["net"]["guard"], config["env"]["name"]) == (
        "safeicrl",
        3,
        "safe-dark-room",
    )
    assert json.loads((folder / "evaluation.json").read_text())["summary"]["tasks"] == 1000
    assert list(released_seeds(str(folder))) == [str(folder)]
    assert released_seeds(str(folder))[str(folder)].label == "safe-dark-room-guard"
    again = export_policy(folder, tmp_path / "copy")  # a hub folder is a source like any other
    assert read_card(again)["exported"]["from"] == str(folder / "model.safetensors")
    with pytest.raises(UserError, match="is not empty: choose another --hub"):
        hub.export_hub("safe-dark-room", folder)
    assert hub.export_hub("safe-dark-room", folder, overwrite=True) == folder
    assert "safe-dark-room-guard" not in (folder / "README.md").read_text()
    with pytest.raises(UserError, match="must name a folder"):
        hub.export_hub("safe-dark-room", folder / "README.md")


@pytest.mark.parametrize("name", policy_names())
def test_the_model_card_says_what_the_policys_card_says(name):
    card = read_card(PRETRAINED / f"{name}.safetensors")
    text = hub.model_card({"name": name, **card}, film=True)
    summary = card["evaluation"]["summary"]
    top = front_matter(text)
    for line in ("library_name: safeicrl", "license: mit", f'- name: "{card.get("name", name)}"'):
        assert line in top
    values = [float(value) for value in re.findall(r"value: (\S+)", top)]
    assert values == pytest.approx([summary["total_return"], summary["over_budget"]], rel=1e-5)
    assert f"{summary['total_return']:.2f} ± {summary['total_return_error']:.2f}" in text
    assert f"{summary['tasks']} unseen tasks" in text
    assert f"| trials ever over budget | {summary['trials_over']:.1%} |" in text
    assert all(f"* {limit}" in text for limit in card["limits"])
    assert card["training"]["command"] in text
    assert f"]({hub.FILM})" in text
    assert "nan" not in text.lower().replace("nano", "")


def test_a_bare_card_is_enough_and_names_are_quoted():
    card = {"kind": "mlp", "env": {"name": 'a "world"', "parameters": {}}}
    text = hub.model_card(card)
    assert '- "a \\"world\\""' in front_matter(text)
    assert "## Evaluation" not in text
    assert "model-index" not in text


def test_the_command_line_writes_folders_and_graphs(tmp_path, capsys, monkeypatch):
    shot = []

    def film(star, path, **_):
        shot.append((star.label, path.name))
        path.write_bytes(b"GIF")
        return [path]

    monkeypatch.setattr(demo, "film", film)
    assert cli.main(["export", "safe-dark-room", "--hub", str(tmp_path / "hub"), "--name", "mine"]) == 0
    assert "film.gif" in capsys.readouterr().out
    assert shot == [("mine", "film.gif")]
    assert "(film.gif)" in (tmp_path / "hub" / "README.md").read_text()
    assert cli.main(["export", "safe-dark-room", "--hub", str(tmp_path / "quiet"), "--no-film"]) == 0
    assert len(shot) == 1
    pytest.importorskip("onnx")
    command = ["export", "safe-dark-room-guard", "--onnx", str(tmp_path / "guard"), "--temperature", "0"]
    assert cli.main(command) == 0
    assert (tmp_path / "guard.onnx").stat().st_size > 100_000
    assert cli.main(command) == 2
    assert "guard.onnx exists: choose another --onnx" in capsys.readouterr().err

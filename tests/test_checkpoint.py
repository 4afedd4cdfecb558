"""Checkpoints: what goes in comes out, and everything that is not one is refused in one line."""

import errno
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from safeicrl.errors import UserError
from safeicrl.evaluation.results import Results
from safeicrl.policies import cards, checkpoint


def tree():
    return {
        "params": [jnp.arange(6.0).reshape(2, 3), jnp.ones((2,), jnp.bfloat16)],
        "step": jnp.int32(7),
        "flag": jnp.array([True, False]),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "empty": jnp.zeros((0, 3)),
        "activation": jnp.tanh,  # not an array: stays as it is
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "state.safetensors"
    checkpoint.save(path, tree(), kind="checkpoint", meta={"step": 7, "names": ["δ"]})
    return path


def test_round_trip_is_exact(path):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, tree())
    for like in (tree(), shapes):
        loaded, meta = checkpoint.load(path, like, kind="checkpoint")
        assert loaded["activation"] is jnp.tanh
        assert meta["step"] == 7
        assert meta["names"] == ["δ"]
        for name, array in checkpoint.named_arrays(tree()).items():
            found = checkpoint.named_arrays(loaded)[name]
            assert found.dtype == array.dtype, name
            as_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
            np.testing.assert_array_equal(np.asarray(as_data(found)), np.asarray(as_data(array)))
        assert jax.random.uniform(loaded["keys"][1]) == jax.random.uniform(tree()["keys"][1])


def test_arrays_are_named_by_their_path(path):
    assert set(checkpoint.named_arrays(tree())) == {
        "params.0", "params.1", "step", "flag", "key", "keys", "empty",
    }  # fmt: skip


def refused(path, like=None, kind="checkpoint"):
    with pytest.raises(UserError) as error:
        checkpoint.load(path, tree() if like is None else like, kind=kind)
    text = str(error.value)
    assert "\n" not in text
    assert path.name in text
    return text


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_truncated_file(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    assert "truncated" in refused(path)


def test_every_damaged_byte_is_noticed(path):
    data = bytearray(path.read_bytes())
    (header,) = struct.unpack("<Q", data[:8])
    for position in (8 + header, 8 + header + 20, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert "SHA-256" in refused(path)


def test_damaged_metadata_is_noticed(path):
    path.write_bytes(path.read_bytes().replace(b"\\u03b4", b"\\u03b5"))
    refused(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(100), bytes(200)])
def test_not_a_checkpoint(path, content):
    path.write_bytes(content)
    assert "is not a checkpoint" in refused(path)


def test_another_programs_safetensors(path):
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(3)}, path)
    assert "is not a checkpoint" in refused(path)


def test_missing_file(tmp_path):
    assert "no checkpoint at" in refused(tmp_path / "nothing.safetensors")


def test_another_version(path):
    data = path.read_bytes()
    assert b'"format":"1"' in data
    path.write_bytes(data.replace(b'"format":"1"', b'"format":"9"'))
    assert "format 9" in refused(path)


def test_another_kind(path):
    assert "is a checkpoint, not a policy" in refused(path, kind="policy")


def test_another_shape_names_the_array_and_both_shapes(path):
    like = {**tree(), "params": [jnp.zeros((2, 4)), jnp.ones((2,), jnp.bfloat16)]}
    text = refused(path, like)
    assert "'params.0'" in text
    assert "(2, 3)" in text
    assert "(2, 4)" in text


def test_another_type(path):
    assert "int32" in refused(path, {**tree(), "step": jnp.float32(7)})


def test_more_or_fewer_arrays(path):
    assert "no array 'extra'" in refused(path, {**tree(), "extra": jnp.zeros(1)})
    fewer = tree()
    del fewer["step"]
    assert "an array 'step'" in refused(path, fewer)


class FullDisk:
    """An open file that accepts a few bytes and then finds the disk full."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def test_a_full_disk_keeps_the_old_checkpoint(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr("safeicrl.files.open", lambda *a: FullDisk(open(*a)), raising=False)  # noqa: SIM115
    with pytest.raises(UserError, match=r"the disk is full; the previous one is still there") as error:
        checkpoint.save(path, {"x": jnp.zeros(100)}, kind="checkpoint", meta={})
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left


def test_a_crash_while_writing_keeps_the_old_checkpoint(path, monkeypatch):
    before = path.read_bytes()

    def crash(_):
        raise RuntimeError

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(RuntimeError):
        checkpoint.save(path, {"x": jnp.zeros(100)}, kind="checkpoint", meta={})
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        checkpoint.save(tmp_path / "file" / "x.safetensors", {"x": jnp.zeros(1)}, kind="checkpoint", meta={})


def save_policy(path, value: float) -> None:
    """A policy whose four files all carry `value`."""
    numbers = np.full((2, 3), value)
    evaluation = Results(returns=numbers, costs=numbers, lengths=numbers, budgets=numbers[:, 0], meta={"is": value})
    card = {"kind": "net", "env": {}, "is": value}
    cards.save_policy(path, {"x": jnp.full(4, value)}, card, evaluation)


@pytest.mark.parametrize("full_at", ["p.safetensors", "p.json", "p-evaluation.npz", "p-evaluation.json"])
def test_a_disk_that_fills_up_never_leaves_files_of_two_policies(tmp_path, monkeypatch, full_at):
    path = tmp_path / "runs" / "p.safetensors"
    contents = lambda: {file.name: file.read_bytes() for file in path.parent.iterdir()}  # noqa: E731
    save_policy(path, 1.0)
    before = contents()
    assert len(before) == 4
    with monkeypatch.context() as patch:
        opened = lambda name, *a: FullDisk(open(name, *a)) if f".{full_at}." in str(name) else open(name, *a)  # noqa: E731, SIM115
        patch.setattr("safeicrl.files.open", opened, raising=False)
        with pytest.raises(UserError) as error:
            save_policy(path, 2.0)
    assert str(error.value) == f"cannot write {path.parent / full_at}: the disk is full"
    assert contents() == before
    save_policy(path, 2.0)
    after = contents()
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


def test_cards_are_checked(tmp_path):
    path = tmp_path / "p.safetensors"
    cards.save_policy(path, {"x": jnp.zeros(1)}, {"kind": "net", "env": {}})
    assert cards.read_card(path)["kind"] == "net"
    card = path.with_suffix(".json")
    card.write_text(json.dumps({"kind": "net"}))
    with pytest.raises(UserError, match="is not a policy card"):
        cards.read_card(path)
    card.write_text('{"kind": "net", ')
    with pytest.raises(UserError, match="policy card"):
        cards.read_card(path)
    card.write_text(json.dumps({"kind": "net", "env": {}, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        cards.read_card(path)


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("kind", ["mlp"], [None, ["net"]]),
        ("env", [{}], [None, "safe-dark-room"]),
        ("name", ["mine"], [None, 3]),
        ("description", ["δ"], [None, ["δ"]]),
        ("temperature", [0, 0.5], [None, "warm", True, -1.0]),
        ("training", [{}, {"seed": 1}], [None, "long", [], [{}]]),
        ("evaluation", [{}], [None, [], "good" * 99]),
        ("limits", [[], ["few"]], [None, "abc", ["few", None], {"few": 1}]),
    ],
)
def test_a_field_of_a_card_that_is_of_another_type_is_named(tmp_path, field, right, wrong):
    card = {"kind": "net", "env": {}, "format": checkpoint.FORMAT}
    for value in right + wrong:
        (tmp_path / "p.json").write_text(json.dumps({**card, field: value}))
        if value in right:
            assert cards.read_card(tmp_path / "p.safetensors")[field] == value
            continue
        with pytest.raises(UserError, match=f"p.json: '{field}' must be a.*, got ") as error:
            cards.read_card(tmp_path / "p.safetensors")
        assert len(str(error.value)) < len(str(tmp_path)) + 150

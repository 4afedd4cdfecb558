"""Compiled programs are kept where the user keeps such things, and take bounded room."""

import os
import sys

import pytest

from safeicrl.machine.compiled import cache_folder, keep_compiled, trim


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not imported JAX and whose user has told it nothing."""
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "jax"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")  # so that it is put back
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
def test_programs_are_kept_in_the_users_cache_folder(fresh):
    keep_compiled()
    kept = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert kept.startswith(str(fresh / "safeicrl" / "compiled"))
    assert os.path.isdir(kept)
    assert os.stat(kept).st_mode & 0o777 == 0o700


def test_what_the_user_said_comes_first(fresh, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    keep_compiled()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    assert not cache_folder().exists()


def test_a_cache_that_cannot_be_written_is_left_alone(fresh):
    (fresh / "safeicrl").write_text("a file in its place")
    keep_compiled()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_the_oldest_files_go_first(tmp_path):
    for age, name in enumerate(("new", "old", "oldest")):
        path = tmp_path / name / "program"
        path.parent.mkdir()
        path.write_bytes(bytes(10))
        os.utime(path, (1e9 - age, 1e9 - age))
    trim(tmp_path, 25)
    assert sorted(path.parent.name for path in tmp_path.glob("*/program")) == ["new", "old"]

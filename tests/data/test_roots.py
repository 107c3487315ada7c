"""Relative roots of data: the working folder first, then $NDLIGHTNET_DATA."""

from pathlib import Path

import pytest

from ndlightnet.data.roots import VARIABLE, find_root


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with the folder `ett` and the file `text/enwik8.xz`, and an empty working folder."""
    (tmp_path / "store" / "ett").mkdir(parents=True)
    (tmp_path / "store" / "text").mkdir()
    (tmp_path / "store" / "text" / "enwik8.xz").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.mark.parametrize("root", ["ett", "text/enwik8.xz", Path("ett")])
def test_a_relative_root_is_found_in_the_store(store, root):
    assert find_root(root) == store / root


def test_the_working_folder_goes_first(store):
    Path("ett").mkdir()
    assert find_root("ett") == Path("ett")


@pytest.mark.parametrize("root", ["runs/phantoms/data", "/ett"])
def test_what_is_not_there_or_absolute_stays(store, root):
    assert find_root(root) == Path(root)


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_a_root_stays(store, monkeypatch, value):
    monkeypatch.delenv(VARIABLE) if value is None else monkeypatch.setenv(VARIABLE, value)
    assert find_root("ett") == Path("ett")


def test_the_variable_may_begin_with_a_tilde(store, monkeypatch):
    monkeypatch.setenv("HOME", str(store.parent))
    monkeypatch.setenv(VARIABLE, "~/store")
    assert find_root("ett") == store / "ett"

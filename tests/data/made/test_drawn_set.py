"""Drawn sets are complete or absent, and never written over."""

from pathlib import Path

import pytest

from ndlightnet.data.made.drawn_set import draw_once
from ndlightnet.data.made.phantoms import make_phantoms

from ..refusals import refuses


def draw(folder: Path) -> None:
    (folder / "case").write_text("drawn")


def never(_: Path) -> None:
    raise AssertionError("drawn again")


def test_a_set_is_drawn_once(tmp_path: Path) -> None:
    folder = draw_once(tmp_path / "deep" / "set", {"seed": 3}, draw)
    assert draw_once(folder, {"seed": 3}, never) == folder and (folder / "case").read_text() == "drawn"
    refuses(lambda: draw_once(folder, {"seed": 4}, never), folder, "holds a set drawn with other arguments: .*3")
    assert list(folder.parent.iterdir()) == [folder], "a draft was left behind"


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        draw(folder)
        assert not (tmp_path / "set").exists(), "written under its final name before the end"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_once(tmp_path / "set", {}, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_the_quicker_of_two_processes_wins(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        draw(folder)
        draw_once(tmp_path / "set", {}, lambda first: (first / "case").write_text("first"))

    assert (draw_once(tmp_path / "set", {}, slow) / "case").read_text() == "first"


def test_another_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    refuses(lambda: draw_once(tmp_path, {}, never), tmp_path, "holds something else")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    refuses(lambda: draw_once(tmp_path / "thesis.txt" / "set", {}, never), None, "cannot be written")
    with pytest.raises(ValueError, match="training >= 1"):
        make_phantoms(tmp_path / "set", 0, 1, progress=False)

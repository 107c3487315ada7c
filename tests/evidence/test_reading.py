"""The measurement of reading: it makes the videos it names, and measures what it names."""

import json
import sys

import pytest

import reading
from ndlightnet.data.video.video_files import PyAVReader, read_video_folder


def test_videos_under_many_names(tmp_path):
    root = tmp_path / "set"
    reading.make(root, 10, 0.4)
    folder = read_video_folder(root)
    assert (len(folder.train), len(folder.test), folder.classes) == (10, 2, ("a", "b"))
    assert len({sample.path.stat().st_ino for sample in folder.train}) == reading.DRAWN
    video = PyAVReader(folder.train[0].path)
    assert len(video) == 10 and video.fps == 25
    first, last = video.frames([0, 9]).float()
    assert first.shape == (240, 320, 3) and (first - last).abs().max() > 50  # something moves


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_measures(tmp_path, workers):
    root = tmp_path / "set"
    reading.make(root, 16, 0.2)
    row = {
        "videos": "x",
        "root": str(root),
        "reader": "PyAV",
        "workers": workers,
        "cache": 1.0,
        "held": True,
        "seconds": 0.3,
    }
    found = reading.measure(row)
    assert {key: found[key] for key in row} == row
    assert 0 < found["start"] < found["first"] and found["rate"] > 1 and found["memory"] > 0.1


def test_the_command_leaves_a_table(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["reading.py", "--short=16", "--long=0", "--seconds=0.2", f"--out={out}"])
    assert reading.main() == 0
    runs = json.loads((out / "reading.json").read_text())
    assert [run["workers"] for run in runs] == [1, 1, 2, 2, 1, 2]
    lines = (out / "table.md").read_text().splitlines()
    assert len(lines) == 2 + len(runs) and "16 of 2 s, first visit" in lines[2]
    assert "clips/s" in capsys.readouterr().out

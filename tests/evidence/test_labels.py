"""The command `labels`: its rows, what a run is told, its picture, and a wrong checkpoint."""

import json
import sys
from argparse import Namespace

import pytest
from matplotlib.image import imread

import labels

from .test_compare import write_task


def call(monkeypatch, tmp_path, *arguments: str) -> int:
    (tmp_path / "c.yaml").touch()
    given = [write_task(tmp_path), tmp_path / "c.yaml", "--out", tmp_path / "out", *arguments]
    monkeypatch.setattr(sys, "argv", ["labels.py", *map(str, given)])
    return labels.main()


def test_both_starts_with_as_many_labels(monkeypatch, tmp_path, capsys):
    init = tmp_path / "last.ckpt"
    init.touch()
    wanted = ("--init", str(init), "--labels", "3", "30", "--seeds", "4", "--", "--more=5")
    assert call(monkeypatch, tmp_path, *wanted) == 0
    calls = {}
    for file in sorted((tmp_path / "out").glob("*/calls.jsonl")):
        fit, test = map(json.loads, file.read_text().splitlines())
        assert (fit[0], test[0]) == ("fit", "test") and fit[-1] == "--more=5"
        calls[file.parent.name] = [a for a in fit if "init=" in a or "limit=" in a]
    assert calls == {
        f"{name},_{n}_labels-4": [f"--data.init_args.train_limit={n}", *more]
        for name, more in (("from_scratch", []), ("pre-trained", [f"--model.init={init}"]))
        for n in (3, 30)
    }
    assert "| pre-trained, 30 labels  | 0.00 M     | 0.750" in capsys.readouterr().out
    assert imread(tmp_path / "out" / "labels.png").ndim == 3


def test_the_picture_has_the_means_of_both(monkeypatch, tmp_path):
    runs = [
        {"row": f"{name}, {n} labels", "seed": seed, "top1": start + n / 1000 + seed / 100}
        for name, start in (("from scratch", 0.5), ("pre-trained", 0.6))
        for n in (100, 10)
        for seed in (0, 2)
    ]
    drawn = []
    monkeypatch.setattr(labels.plots, "save", lambda picture, _: drawn.append(picture))
    labels.draw(Namespace(labels=[100, 10], out=tmp_path), runs)
    (axes,) = drawn[0].axes
    assert axes.get_title() == "accuracy"
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points == {
        "from scratch": [[10, pytest.approx(0.52)], [100, pytest.approx(0.61)]],
        "pre-trained": [[10, pytest.approx(0.62)], [100, pytest.approx(0.71)]],
    }


def test_a_missing_checkpoint_is_named(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path, "--init", "gone.ckpt", "--labels", "3")
    assert "--init gone.ckpt: no such file" in capsys.readouterr().err

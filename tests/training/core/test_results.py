"""What a run leaves: JSON and pictures, complete or not at all."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.training.classification.answer_figures import save_strips
from ndlightnet.training.report import results
from ndlightnet.training.report.results import check_writable, write_json


def test_json_holds_null_for_what_is_not_a_finite_number(tmp_path):
    content = {
        "nan": float("nan"),
        "list": [1.5, float("inf"), {"deep": -float("inf")}],
        "numpy": np.float64("nan"),
        "kept": (1, True, "nan", None, 0.25),
        3: 0.1234567,
    }
    write_json(tmp_path / "new" / "m.json", content)
    text = (tmp_path / "new" / "m.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}")) == {
        "nan": None,
        "list": [1.5, None, {"deep": None}],
        "numpy": None,
        "kept": [1, True, "nan", None, 0.25],
        "3": 0.123457,
    }
    assert os.listdir(tmp_path / "new") == ["m.json"]


@pytest.mark.parametrize("existing", [None, "before"])
@pytest.mark.parametrize("step", ["content", "write", "replace"])
def test_a_failing_write_leaves_everything_as_it_was(tmp_path, monkeypatch, existing, step):
    path = tmp_path / "metrics.json"
    if existing:
        path.write_text(existing)
    content, error = {"a": 1.0}, DataError
    if step == "content":
        content, error = {"a": object()}, TypeError
    elif step == "write":

        def half(self, text):
            with self.open("w") as file:
                file.write(text[:3])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", half)
    else:

        def refuse(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(results.os, "replace", refuse)
    with pytest.raises(error) as caught:
        write_json(path, content)
    if error is DataError:
        assert str(caught.value).startswith(f"{path}: ")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["metrics.json"] if existing else [])
    assert not existing or path.read_text() == existing


def test_a_failing_picture_leaves_nothing(tmp_path):
    with pytest.raises((ValueError, IndexError)):
        save_strips(tmp_path / "clips.png", [("no frames", None, torch.zeros(0, 4, 4, 3))])
    assert os.listdir(tmp_path) == []


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("here first")
    below = tmp_path / "file" / "folder"
    strip = ("", None, torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
    for write in (
        lambda: check_writable(below),
        lambda: write_json(below / "m.json", {}),
        lambda: save_strips(below / "c.png", [strip]),
    ):
        with pytest.raises(DataError, match=f"^{below}.*: cannot be written .Not a directory.$"):
            write()
    assert (tmp_path / "file").read_text() == "here first"


def test_check_writable_makes_the_folder_and_leaves_nothing_in_it(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path / "a" / "b") == []

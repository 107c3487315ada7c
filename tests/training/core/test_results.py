"""What a run leaves: JSON and pictures, complete or not at all."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.training.classification.answer_figures import save_strips
from ndlightnet.training.report.results import check_writable, write_json, write_metrics


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


def half(self: Path, text: str) -> None:
    with self.open("w") as file:
        file.write(text[:3])
    raise OSError(28, "No space left on device")


def refuse(*_) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("existing", [[], ["metrics.json"]])
@pytest.mark.parametrize(
    "step, failing", [("content", None), ("pathlib.Path.write_text", half), ("os.replace", refuse)]
)
def test_a_failing_write_leaves_everything_as_it_was(tmp_path, monkeypatch, existing, step, failing):
    path = tmp_path / "metrics.json"
    for name in existing:
        (tmp_path / name).write_text("before")
    with monkeypatch.context() as patch:
        if failing is not None:
            patch.setattr(step, failing)
        with pytest.raises(TypeError if failing is None else DataError) as error:
            write_json(path, {"a": object() if failing is None else 1.0})
    assert failing is None or str(error.value).startswith(f"{path}: ")
    with pytest.raises((ValueError, IndexError)):
        save_strips(tmp_path / "clips.png", [("no frames", None, torch.zeros(0, 4, 4, 3))])
    assert os.listdir(tmp_path) == existing
    assert not existing or path.read_text() == "before"


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
    check_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == ["file"]


def test_a_test_and_a_training_write_one_file(tmp_path):
    path, first, second = tmp_path / "metrics.json", {"last": {"epoch": 0}}, {"last": {"epoch": 1}}
    for options, expected in (
        ({"fit": first}, {"fit": first}),
        ({"test": {"top1": 0.5, "only": 1}}, {"top1": 0.5, "only": 1, "fit": first}),
        ({"fit": second}, {"top1": 0.5, "only": 1, "fit": second}),
        ({"test": {"top1": 0.25}}, {"top1": 0.25, "fit": second}),
    ):
        write_metrics(tmp_path, **options)
        assert json.loads(path.read_text()) == expected
    for of_another_program in ("{cut", "[1]"):
        path.write_text(of_another_program)
        write_metrics(tmp_path, {"top1": 1.0})
        assert json.loads(path.read_text()) == {"top1": 1.0}

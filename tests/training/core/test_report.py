"""What a run leaves: JSON and pictures, complete or not at all."""

import json
import os
from datetime import datetime
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.text import Text

from ndlightnet.data.errors import DataError
from ndlightnet.training.classification.pictures import save_confusion, save_gallery, save_strips
from ndlightnet.training.core import report
from ndlightnet.training.core.report import (
    check_writable,
    write_json,
)
from ndlightnet.training.forecasting.pictures import Panel, save_forecasts
from ndlightnet.training.language.curves import draw
from ndlightnet.training.segmentation.figures import save_case


def test_json_holds_null_for_what_is_not_a_finite_number(tmp_path):
    content = {
        "nan": float("nan"), "list": [1.5, float("inf"), {"deep": -float("inf")}],
        "numpy": np.float64("nan"), "kept": (1, True, "nan", None, 0.25), 3: 0.1234567,
    }  # fmt: skip
    write_json(tmp_path / "new" / "m.json", content)
    text = (tmp_path / "new" / "m.json").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}")) == {
        "nan": None, "list": [1.5, None, {"deep": None}],
        "numpy": None, "kept": [1, True, "nan", None, 0.25], "3": 0.123457,
    }  # fmt: skip
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

        monkeypatch.setattr(report.os, "replace", refuse)
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


def pixels(path: Path) -> np.ndarray:
    found = matplotlib.image.imread(path)
    assert os.listdir(path.parent) == [path.name]
    return found[..., :3]


def share(picture: np.ndarray, color: tuple[float, float, float], tolerance: float = 0.02) -> float:
    return float((np.abs(picture - np.array(color)) < tolerance).all(-1).mean())


COUNTS = torch.tensor([[0, 40, 0], [10, 10, 0], [0, 0, 0]])


def test_confusion_is_dark_where_the_row_has_its_share(tmp_path):
    save_confusion(tmp_path / "c.png", COUNTS, ["cat", "dog", "ant"])
    picture = pixels(tmp_path / "c.png")
    assert 200 < picture.shape[0] < 800 and 200 < picture.shape[1] < 800
    dark = (8 / 255, 48 / 255, 107 / 255)  # the end of matplotlib's Blues
    assert 0.02 < share(picture, dark) < 0.12  # one cell of nine, and no division by the empty row
    rows, columns = np.nonzero((np.abs(picture - np.array(dark)) < 0.02).all(-1))
    assert np.ptp(rows) < picture.shape[0] / 3  # truth cat, in the upper part
    assert rows.mean() < 0.4 * picture.shape[0] < columns.mean()


def test_confusion_has_the_counts_in_their_cells(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    save_confusion(tmp_path / "c.png", COUNTS, ["cat", "dog", "ant"])
    axis = figures[0].axes[0]
    found = {text.get_position()[::-1]: text.get_text() for text in axis.texts}
    assert found == {(i, j): str(COUNTS[i, j].item()) for i in range(3) for j in range(3)}
    for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == ["cat", "dog", "ant"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("prediction", "truth")


def test_strips_show_frames_in_order_with_coloured_captions(tmp_path):
    clip = torch.zeros(20, 12, 12, 3, dtype=torch.uint8)
    clip[:, :, :, 2] = torch.linspace(55, 255, 20).to(torch.uint8)[:, None, None]
    for right, color in ((True, (26, 127, 55)), (False, (207, 34, 46)), (None, (0, 0, 0))):
        path = tmp_path / str(right) / "s.png"
        save_strips(path, [("a caption", right, clip)] * 2)
        picture = pixels(path)
        assert 200 < picture.shape[0] < 600 and 700 < picture.shape[1] < 1400
        assert share(picture, tuple(c / 255 for c in color), 0.05) > 1e-4
    blue = (picture[..., :2].max(-1) < 0.02) & (picture[..., 2] > 0.15)
    row = picture[np.argmax(blue.sum(1)), :, 2][blue[np.argmax(blue.sum(1))]]
    assert (np.diff(row) > -0.05).all() and row[0] == pytest.approx(55 / 255, abs=0.02)
    assert row[-1] == pytest.approx(1, abs=0.02)  # from the first frame to the last


@pytest.mark.parametrize("name", [r"b$\frac$", os.fsdecode(b"$\xff")])
def test_names_are_no_formulas(tmp_path, name):
    """TeX that matplotlib cannot set, and what is not UTF-8, in every text of every picture."""
    clip = torch.zeros(4, 12, 12, 3, dtype=torch.uint8)
    save_strips(tmp_path / "s.png", [(name, None, clip)])
    save_confusion(tmp_path / "c.png", COUNTS, [name, "dog", "ant"])
    volume = torch.ones(6, 5, 4)
    save_case(tmp_path / "v.png", name, volume, volume.long(), volume.long(), (1, 1, 1), [name] * 2)
    one = torch.ones(1, 1)
    save_gallery(tmp_path / "i.png", torch.zeros(1, 4, 4), one, one[0].long() - 1, [name])
    now = datetime(2020, 1, 1)
    save_forecasts(tmp_path / "f.png", [Panel(name, now, torch.ones(30), torch.ones(9))])
    metrics = {"bits_per_byte_at": {"8": 1.0}, "bits_per_byte_by_position": {},
               "same_bytes_at_training_length": {}, "train_length": 8}  # fmt: skip
    draw({name: metrics}, tmp_path / "t.png")
    for path in tmp_path.iterdir():
        assert matplotlib.image.imread(path).std() > 0.01
    assert len(os.listdir(tmp_path)) == 6


def test_a_formula_is_drawn_as_it_is_written(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(Text, "draw", lambda text, _: shown.append(text))
    save_confusion(tmp_path / "c.png", COUNTS, ["$x$", "dog", "ant"])
    texts = [text for text in shown if text.get_text()]
    assert {text.get_text() for text in texts} >= {"$x$", "dog", "40", "prediction"}
    assert not any(text.get_parse_math() for text in texts)

"""Confusion matrices and film strips, and names in the pictures of all tasks."""

import os
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.text import Text

from ndlightnet.training.classification import answer_figures
from ndlightnet.training.classification.answer_figures import (
    answer_caption,
    projections,
    save_confusion,
    save_gallery,
    save_strips,
)
from ndlightnet.training.forecasting.forecast_figure import Panel, save_forecasts
from ndlightnet.training.language.curves import draw
from ndlightnet.training.segmentation.case_figure import save_case


def pixels(path: Path) -> np.ndarray:
    assert os.listdir(path.parent) == [path.name]
    return matplotlib.image.imread(path)[..., :3]


COUNTS = torch.tensor([[0, 40, 0], [10, 10, 0], [0, 0, 0]])


def test_confusion_has_the_counts_in_their_cells(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(answer_figures, "save_figure", lambda figure, path: figures.append(figure))
    save_confusion(tmp_path / "c.png", COUNTS, ["cat", "dog", "ant"])
    axis = figures[0].axes[0]
    texts = {text.get_position()[::-1]: text.get_text() for text in axis.texts}
    assert texts == {(i, j): str(COUNTS[i, j].item()) for i in range(3) for j in range(3)}
    for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == ["cat", "dog", "ant"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("prediction", "truth")
    # dark where a row has its share, and no division by the empty row
    assert axis.images[0].get_array().tolist() == [[0, 1, 0], [0.5, 0.5, 0], [0, 0, 0]]


@pytest.mark.slow
def test_a_confusion_of_many_classes_is_no_larger(tmp_path):
    save_confusion(tmp_path / "c.png", torch.eye(200).long(), [str(n) for n in range(200)])
    assert max(pixels(tmp_path / "c.png").shape) < 4000


def test_a_gallery_has_its_colours_and_begins_with_the_worst(tmp_path):
    """Without labels: with the least certain answer."""
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    shades = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    image = torch.tensor(shades, dtype=torch.uint8)[:, :, None, None].expand(3, 3, 6, 6)
    for labels, order in ((torch.tensor([0, 0, 0]), (1, 2, 0)), (None, (2, 1, 0))):
        path = tmp_path / str(labels is None) / "g.png"
        save_gallery(path, image.__getitem__, probabilities, labels, ["a", "b"])
        picture = pixels(path)
        columns = []
        for row in range(3):
            shade = np.array(shades[row]) / 255
            columns.append(np.nonzero((np.abs(picture - shade) < 0.02).all(-1))[1].mean())
        assert tuple(np.argsort(columns)) == order


@pytest.mark.slow
def test_strips_show_frames_in_order_with_coloured_captions(tmp_path):
    clip = torch.zeros(20, 12, 12, 3, dtype=torch.uint8)
    clip[:, :, :, 2] = torch.linspace(55, 255, 20).to(torch.uint8)[:, None, None]
    for right, color in ((True, (26, 127, 55)), (False, (207, 34, 46)), (None, (0, 0, 0))):
        path = tmp_path / str(right) / "s.png"
        save_strips(path, [("a caption", right, clip)] * 2)
        picture = pixels(path)
        assert 200 < picture.shape[0] < 600 and 700 < picture.shape[1] < 1400
        assert (np.abs(picture - np.array(color) / 255) < 0.05).all(-1).mean() > 1e-4
    blue = (picture[..., :2].max(-1) < 0.02) & (picture[..., 2] > 0.15)
    row = picture[np.argmax(blue.sum(1)), :, 2][blue[np.argmax(blue.sum(1))]]
    assert (np.diff(row) > -0.05).all() and row[0] == pytest.approx(55 / 255, abs=0.02)
    assert row[-1] == pytest.approx(1, abs=0.02)  # from the first frame to the last


@pytest.mark.slow
@pytest.mark.parametrize("name", [r"b$\frac$", os.fsdecode(b"$\xff")])
def test_names_are_no_formulas(tmp_path, name):
    """TeX that matplotlib cannot set, and what is not UTF-8, in every text of every picture."""
    clip = torch.zeros(4, 12, 12, 3, dtype=torch.uint8)
    save_strips(tmp_path / "s.png", [(name, None, clip)])
    save_confusion(tmp_path / "c.png", COUNTS, [name, "dog", "ant"])
    volume = torch.ones(6, 5, 4)
    save_case(tmp_path / "v.png", name, volume, volume.long(), volume.long(), (1, 1, 1), [name] * 2)
    one = torch.ones(1, 1)
    save_gallery(tmp_path / "i.png", lambda _: volume[None], one, one[0].long() - 1, [name])
    dates = pd.date_range("2020-01-01", periods=39, freq="h")
    save_forecasts(tmp_path / "f.png", [Panel(name, dates, torch.ones(30), torch.ones(9))])
    metrics = {
        "bits_per_byte_at": {"8": 1.0},
        "bits_per_byte_by_position": {},
        "same_bytes_at_training_length": {},
        "train_length": 8,
    }
    draw({name: metrics}, tmp_path / "t.png")
    for path in tmp_path.iterdir():
        assert matplotlib.image.imread(path).std() > 0.01
    assert len(os.listdir(tmp_path)) == 6


def test_a_formula_is_drawn_as_it_is_written(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Text, "draw", lambda text, _: drawn.append(text))
    save_confusion(tmp_path / "c.png", COUNTS, ["$x$", "dog", "ant"])
    texts = [text for text in drawn if text.get_text()]
    assert {text.get_text() for text in texts} >= {"$x$", "dog", "40", "prediction"}
    assert not any(text.get_parse_math() for text in texts)


@pytest.mark.parametrize("shape", [(1, 20), (3, 5, 5), (1, 5, 5, 5)], ids=["signals", "colours", "volumes"])
def test_a_gallery_of_few_samples(tmp_path, shape):
    samples = torch.randint(256, (2, *shape), dtype=torch.uint8)
    for labels in (torch.tensor([0, 0]), None):
        save_gallery(tmp_path / "g.png", samples.__getitem__, torch.eye(2), labels, "ab")
        assert (tmp_path / "g.png").stat().st_size > 1000


def test_captions_have_the_answer_and_the_truth_if_it_is_another():
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    captions = [answer_caption(row, 0, ["cat", "dog"]) for row in probs]
    assert captions == [("cat 0.90", True), ("dog 0.80, not cat", False)]


def test_projections_of_a_volume():
    volume = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 5), np.uint8))
    picture, column = projections(volume), 0
    for axis, (rows, width) in ((2, (4, 3)), (1, (4, 5)), (0, (3, 5))):
        view = volume.double().numpy().mean(axis)
        assert picture[:rows, column + 1 : column + 1 + width] == pytest.approx(view / view.max())
        column += width + 2
    assert picture.shape == (4, column)
    image = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert projections(image)[:, 1:-1] == pytest.approx(image.numpy() / 5)

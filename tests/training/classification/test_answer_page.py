"""The page of a test: numbers, classes, curves and every sample."""

import csv
import re

import matplotlib.image
import numpy as np
import pytest
import torch

from ndlightnet.training.classification.answer_figures import class_areas, reliability, save_curves
from ndlightnet.training.classification.answer_page import write_page, write_table
from ndlightnet.training.classification.scores import BINS, scores

NAMES = ("a & b", "<c>", "=d")


@pytest.fixture
def answers():
    torch.manual_seed(0)
    return torch.randn(30, 3).softmax(1), torch.arange(30) % 3


def test_areas_by_counting_pairs(answers):
    probs, labels = answers
    for label, area in enumerate(class_areas(probs, labels)):
        members, others = probs[labels == label, label], probs[labels != label, label]
        assert area == pytest.approx((members[:, None] > others).float().mean().item(), abs=1e-6)
    assert scores(probs, labels, NAMES)["auc"] == pytest.approx(np.mean(class_areas(probs, labels)), abs=1e-5)
    assert class_areas(probs, 0 * labels) == [None] * 3
    assert class_areas(probs, labels % 2)[2] is None


def test_reliability_adds_up_to_the_calibration_error(answers):
    probs, labels = answers
    count, mean, right = reliability(probs, labels, BINS)
    assert count.sum() == 30 and len(count) == BINS
    used = count > 0
    gap = (mean[used] - right[used]).abs()
    expected = scores(probs, labels, NAMES)["ece"]
    assert float((gap * count[used]).sum() / 30) == pytest.approx(expected, abs=1e-6)
    assert mean[~used].isnan().all() and ((mean * BINS).ceil() - 1)[used].tolist() == (used.nonzero()[:, 0].tolist())
    sure = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert reliability(sure, torch.tensor([0, 1]), 4)[0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("classes", "members"), [(2, 2), (30, 30), (2, 1)])
def test_the_picture_of_the_curves(tmp_path, classes, members):
    """Also where one class alone occurs, which has no curve."""
    probs, labels = torch.randn(60, classes).softmax(1), torch.arange(60) % members
    save_curves(tmp_path / "c.png", probs, labels, [f"${n}$" for n in range(classes)], 0.1, BINS)
    picture = matplotlib.image.imread(tmp_path / "c.png")
    assert picture.shape[1] > 900 and picture.std() > 0.05


def test_the_page(tmp_path, answers):
    probs, labels = answers
    (tmp_path / "curves.png").write_bytes(b"")
    metrics, page = scores(probs, labels, NAMES), tmp_path / "index.html"
    write_page(page, "Test: <x>", "summary", metrics, probs, labels, NAMES, ["file.png: broken"])
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and "<h1>Test: &lt;x&gt;</h1>" in text
    assert "1 failure" in text and "<li>file.png: broken</li>" in text
    cells = re.findall("<td>(.*?)</td>", text)
    assert cells[cells.index("accuracy") + 1] == f"{metrics['top1']:.3f}"
    assert cells[cells.index("expected calibration error") + 1] == f"{metrics['ece']:.3f}"
    at = cells.index("&lt;c&gt;")
    area = class_areas(probs, labels)[1]
    assert cells[at + 1 : at + 4] == ["10", f"{metrics['recall']['<c>']:.3f}", f"{area:.3f}"]
    assert re.findall('img .*src="(.*?)"', text) == ["curves.png"]  # those that exist


def test_a_class_that_does_not_occur(tmp_path, answers):
    probs, labels = answers[0], answers[1] % 2
    page = tmp_path / "index.html"
    write_page(page, "t", "s", scores(probs, labels, NAMES), probs, labels, NAMES)
    cells = re.findall("<td>(.*?)</td>", page.read_text())
    assert cells[cells.index("=d") + 1 : cells.index("=d") + 4] == ["0", "-", "-"]
    assert cells[cells.index("AUC") + 1] == "-" and "failure" not in page.read_text()


@pytest.mark.parametrize("with_truth", [True, False])
def test_the_table_has_every_sample(tmp_path, answers, with_truth):
    probs, labels = answers
    files = [f"+{n}.png" for n in range(30)]
    write_table(tmp_path / "t.csv", files, probs, labels if with_truth else None, NAMES)
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    names = ["a & b", "<c>", "'=d"]  # a spreadsheet would take the last one for a formula
    assert list(rows[0]) == ["file", *(["truth"] if with_truth else []), "prediction", *names]
    assert [row["file"] for row in rows] == ["'" + file for file in files]
    for row, sample, label in zip(rows, probs, labels, strict=True):
        np.testing.assert_allclose([float(row[name]) for name in names], sample, atol=1e-6)
        assert row["prediction"] == names[int(sample.argmax())]
        assert not with_truth or row["truth"] == names[int(label)]

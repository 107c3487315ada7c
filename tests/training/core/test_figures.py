"""Class and file names in any script, in figures and on their pages."""

import io
import warnings

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from ndlightnet.training.classification.answer_page import write_page
from ndlightnet.training.core.task import Task
from ndlightnet.training.report import figures
from ndlightnet.training.report.figures import characters, figure_names, page_names, plain_text

NAMES = ["cat", "猫", "собака", "قطة", "狗 $x$"]


@pytest.fixture
def installed(monkeypatch):
    """installed("NAME", ...): fonts beside the default one; returns the characters of each."""

    def replace(*names):
        monkeypatch.setattr(figures, "FONTS", names)
        characters.cache_clear()
        return characters()

    yield replace
    characters.cache_clear()


def drawn(text):
    """The texts of a title, a tick and a legend as drawn; any warning of a missing glyph raises."""
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], label=text)
    axis.set_title(text)
    axis.set_xticks([0], [figure_names([text])[0]])
    legend = axis.legend()
    plain_text(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")
    return [one.get_text() for one in (axis.title, axis.get_xticklabels()[0], legend.texts[0])]


def test_a_second_font_has_what_the_first_lacks(installed):
    first, second = installed("STIXGeneral", "no such font").values()
    text = f"a{min(second - first)}é"
    assert drawn(text) == [text] * 3 and figure_names([text]) == [text]
    installed("no such font")
    assert drawn(text) == ["a?é", "#0", "a?é"]


def test_classes_without_a_font_are_numbers_that_page_and_note_explain(installed, tmp_path):
    installed()
    captions = ["cat", "#1", "собака", "قطة", "#4"]
    assert figure_names(NAMES) == captions
    assert page_names(NAMES) == ["cat", "猫 (#1)", "собака", "قطة", "狗 $x$ (#4)"]
    task = Task(nn.Linear(1, 1))
    assert task.figure_names(NAMES) == captions and task.figure_names(["cat"]) == ["cat"]
    (note,) = task.notes
    assert note.endswith("the names of 2 classes, which are shown as numbers: #1 猫, #4 狗 $x$")
    metrics = {"confusion": torch.eye(5).int().tolist(), "recall": dict.fromkeys(NAMES, 1.0)}
    write_page(tmp_path / "p.html", "", "", metrics, torch.eye(5), torch.arange(5), NAMES)
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<td>猫 (#1)</td>" in page and "<td>собака</td>" in page

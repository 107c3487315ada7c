"""The page of a test, and a table of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ndlightnet.training.classification.answer_figures import class_areas
from ndlightnet.training.report.figures import page_names
from ndlightnet.training.report.page import number, write_html
from ndlightnet.training.report.results import write_csv

PICTURES = {
    "confusion.png": "Confusion matrix",
    "curves.png": "ROC curves and calibration",
    "attribution.png": "What decided: covered, red cells take from the answer, blue ones add to it",
    "test_images.png": "Samples, from the worst answer to the best",
    "test_clips.png": "Samples",
    "test_clouds.png": "Samples, truth and answer, from the worst answer to the best",
}
MEASURES = {
    "top1": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "ece": "expected calibration error",
    "top5": "accuracy of five answers",
    "majority_class": "share of the largest class",
}
TEMPLATE = """
{% extends "base" %}
{% block content %}
{{ table(("measure", "value"), measures) }}
{{ table(("class", "samples", "recall", "AUC, against the rest"), classes) }}
<p><a href="test.csv">test.csv</a> has the probabilities of every sample.</p>
{% for picture, title in pictures %}
<h2>{{ title }}</h2>
<img loading="lazy" src="{{ picture }}" alt="{{ title }}">
{% endfor %}
{% endblock %}
"""


def write_page(
    path: Path,
    title: str,
    summary: str,
    metrics: Mapping[str, Any],
    probabilities: Tensor,
    labels: Tensor,
    names: Sequence[str],
    failures: Sequence[str] = (),
) -> None:
    """Write an HTML page of a test: `metrics` of `scores`, each class, and those of PICTURES that lie beside `path`."""
    areas = class_areas(probabilities, labels)
    counts = [sum(row) for row in metrics["confusion"]]
    lines = [
        [caption, count, number(metrics["recall"][name]), number(area)]
        for name, caption, count, area in zip(names, page_names(names), counts, areas, strict=True)
    ]
    measures = [[caption, number(metrics[key])] for key, caption in MEASURES.items() if key in metrics]
    pictures = [item for item in PICTURES.items() if (path.parent / item[0]).is_file()]
    texts = {"title": title, "summary": summary, "failures": failures}
    write_html(path, TEMPLATE, **texts, classes=lines, measures=measures, pictures=pictures)


def write_table(
    path: Path, files: Sequence[str], probabilities: Tensor, labels: Tensor | None, names: Sequence[str]
) -> None:
    """Write CSV, a line for each sample: its file, truth if `labels` are given, prediction and probabilities."""
    columns = {"file": files}
    if labels is not None:
        columns["truth"] = [names[label] for label in labels.tolist()]
    columns["prediction"] = [names[answer] for answer in probabilities.argmax(1).tolist()]
    probs = [[f"{value:.6f}" for value in row] for row in probabilities.tolist()]
    rows = [[*texts, *row] for *texts, row in zip(*columns.values(), probs, strict=True)]
    write_csv(path, [*columns, *names], rows)

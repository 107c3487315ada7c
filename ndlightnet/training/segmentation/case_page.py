"""One HTML page of all cases of a run, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ndlightnet.training.report.figures import page_names
from ndlightnet.training.report.page import number, write_html
from ndlightnet.training.segmentation.metrics import MEASURES, Rows, interval, of_known

SHORT = 8  # a case's table of more classes is collapsed
CLASSES = ("class", "cases", "mean Dice", "SD", "95 % interval", "median HD95 (mm)", "mean surface Dice")
TEMPLATE = """
{% extends "base" %}
{% block failed %}
<p>{{ cases | length | counted("case") }}, {{ failures | length | counted("failure") }}</p>
{% endblock %}
{% block content %}
{% if classes %}
{{ table(heads, classes) }}
{% endif %}
{% for case in cases %}
<h2>{{ case.name }}
{%- if has_truth %} <span class="soft">mean Dice {{ case.dice }}</span>{% endif %}</h2>
<details{% if case.lines | length <= short %} open{% endif %}>
<summary>{{ case.lines | length | counted("class") }}</summary>
{% if case.lines %}{{ table(case_heads, case.lines) }}{% else %}<p>no class</p>{% endif %}
</details>
{% if case.picture %}
<img loading="lazy" src="{{ case.picture | urlencode }}" alt="{{ case.name }}">
{% endif %}
{% endfor %}
{% endblock %}
"""


def write_page(
    path: Path, rows: Rows, names: Sequence[str], title: str, summary: str, failures: Sequence[str] = ()
) -> None:
    """Write an HTML page: summary and failures as given, the classes over all cases, and every case with its table and
    its picture. Cases are sorted by their mean Dice, the worst first, those without a Dice last; if no case has a
    truth, by name, with volumes only.

    A case's picture is the file CASE.png beside `path`, linked if it exists.
    """
    has_truth = any(not np.isnan(m["truth_ml"]) for row in rows.values() for m in row)
    dice = {case: of_known(np.mean, [m["dice"] for m in row]) for case, row in rows.items()}
    # without a truth there is no Dice, and the names alone decide
    order = sorted(rows, key=lambda case: (np.nan_to_num(dice[case], nan=2.0), case))
    measures, names = MEASURES if has_truth else ("volume_ml",), page_names(names)
    cases = [
        {
            "name": case,
            "dice": number(dice[case], 3),
            "lines": [
                [name, *(number(measured[key], MEASURES[key].digits) for key in measures)]
                for name, measured in zip(names[1:], rows[case], strict=True)
                if measured["volume_ml"] > 0 or measured["truth_ml"] > 0
            ],
            "picture": f"{case}.png" if (path.parent / f"{case}.png").is_file() else None,
        }
        for case in order
    ]
    texts = {"title": title, "summary": summary, "failures": failures, "has_truth": has_truth, "short": SHORT}
    heads = ["class", *(MEASURES[key].heading for key in measures)]
    classes = _classes(rows, names) if has_truth else []
    write_html(path, TEMPLATE, **texts, cases=cases, case_heads=heads, heads=CLASSES, classes=classes)


def _classes(rows: Rows, names: Sequence[str]) -> list[list[str]]:
    lines = []
    for k, name in enumerate(names[1:]):
        dice, far, near = (np.array([row[k][key] for row in rows.values()]) for key in ("dice", "hd95_mm", "nsd"))
        low, high = interval(dice[None])
        between = f"{low:.3f} to {high:.3f}" if low == low else number(low, 3)
        count = str(int(np.isfinite(dice).sum()))
        mean, spread = (number(of_known(measure, dice), 3) for measure in (np.mean, np.std))
        median, nsd = number(of_known(np.median, far), 1), number(of_known(np.mean, near), 3)
        lines.append([name, count, mean, spread, between, median, nsd])
    return lines

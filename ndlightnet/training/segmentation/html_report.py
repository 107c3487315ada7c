"""One HTML page to leaf through the cases of a run, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from ndlightnet.data.errors import whole_file
from ndlightnet.training.segmentation.metrics import MEASURES, Rows, interval, of_known

SHORT = 8  # a case's table of more classes is folded away
HEADS = {"dice": "Dice", "hd95_mm": "HD95 (mm)", "nsd": "NSD", "volume_ml": "volume (ml)",
         "truth_ml": "truth (ml)"}  # fmt: skip
DIGITS = {"dice": 3, "hd95_mm": 1, "nsd": 3, "volume_ml": 2, "truth_ml": 2}
STYLE = """
:root { color-scheme: light dark; --line: #d0d0d0; --soft: #666 }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #aaa } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; overflow-wrap: anywhere }
.soft { color: var(--soft); font-weight: normal }
table { border-collapse: collapse; margin: .5rem 0 1rem }
th, td { padding: .15rem .8rem; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child { text-align: left }
td { font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto; border-radius: 6px }
li { overflow-wrap: anywhere }
"""


def write_page(
    path: Path,
    rows: Rows,
    names: Sequence[str],
    title: str,
    summary: str,
    failures: Sequence[str] = (),
) -> None:
    """An HTML page: summary and failures as they are given, the classes over all cases, and every
    case with its table and its picture. The cases come by their mean Dice, the worst first; those
    without a Dice last. If no case has a truth, they come by name, with volumes.

    A case's picture is the file CASE.png beside `path`, linked where it is there.
    """
    known = any(not np.isnan(m["truth_ml"]) for row in rows.values() for m in row)
    dice = {case: of_known(np.mean, [m["dice"] for m in row]) for case, row in rows.items()}
    # without a truth no Dice is known, and the names alone decide
    order = sorted(rows, key=lambda case: (np.nan_to_num(dice[case], nan=2.0), case))
    sections = [_case(path.parent, case, rows[case], names, dice[case], known) for case in order]
    failed = "".join(f"<li>{escape(line)}</li>\n" for line in failures)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(summary)}</p>",
        f"<p>{_count(len(rows), 'case')}, {_count(len(failures), 'failure')}</p>",
        f"<ul>\n{failed}</ul>" if failures else "",
        _classes(rows, names) if known and rows else "",
        *sections,
    ]
    with whole_file(path) as draft:
        draft.write_text(
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(part for part in parts if part)
            + "\n</body>\n</html>\n",
            encoding="utf-8",
            errors="backslashreplace",
        )


def _classes(rows: Rows, names: Sequence[str]) -> str:
    heads = ("class", "cases", "mean Dice", "SD", "95 % interval", "median HD95 (mm)", "mean NSD")
    lines = []
    for k, name in enumerate(names[1:]):
        dice, far, near = (
            np.array([row[k][key] for row in rows.values()]) for key in ("dice", "hd95_mm", "nsd")
        )
        low, high = interval(dice[None])
        between = f"{low:.3f} to {high:.3f}" if low == low else _number(low, 3)
        count = str(int(np.isfinite(dice).sum()))
        mean, spread = (_number(of_known(measure, dice), 3) for measure in (np.mean, np.std))
        median, nsd = _number(of_known(np.median, far), 1), _number(of_known(np.mean, near), 3)
        lines.append([name, count, mean, spread, between, median, nsd])
    return _table(heads, lines)


def _case(
    folder: Path, case: str, row: Sequence[Mapping[str, float]], names: Sequence[str],
    dice: float, known: bool,
) -> str:  # fmt: skip
    shown = MEASURES if known else ("volume_ml",)
    lines = [
        [name, *(_number(measured[key], DIGITS[key]) for key in shown)]
        for name, measured in zip(names[1:], row, strict=True)
        if measured["volume_ml"] > 0 or measured["truth_ml"] > 0
    ]
    score = f' <span class="soft">mean Dice {_number(dice, 3)}</span>' if known else ""
    table = _table(("class", *(HEADS[key] for key in shown)), lines) if lines else "<p>no class</p>"
    fold = "" if len(lines) > SHORT else " open"
    picture = f"{case}.png"
    image = (
        f'<img loading="lazy" src="{escape(quote(picture))}" alt="{escape(case)}">'
        if (folder / picture).is_file()
        else ""
    )
    count = _count(len(lines), "class")
    folded = f"<details{fold}><summary>{count}</summary>\n{table}</details>"
    return f"<h2>{escape(case)}{score}</h2>\n{folded}\n{image}"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    def line_of(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    body = "".join(line_of(line, "td") for line in lines)
    return f"<table>\n{line_of(heads, 'th')}{body}</table>\n"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value == value else "-"


def _count(n: int, what: str) -> str:
    plural = what + ("es" if what.endswith("s") else "s")
    return f"{n} {what if n == 1 else plural}"

"""Bits per byte as a table and as curves, of one run and of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndlightnet.data.errors import DataError
from ndlightnet.training.core.options import WordsParser
from ndlightnet.training.report.figures import COLORS, GREY, panels_of, plain_axes, save_figure
from ndlightnet.training.report.results import write_csv


def write_table(path: Path, metrics: dict[str, Any]) -> None:
    """Write a CSV. Lines of "window" are means over windows of length `end`; lines of "position"
    are means over the positions from start to end in the longest windows."""
    lines = [
        ("window", 0, length, bits, "", metrics["not_measured"].get(length, ""))
        for length, bits in metrics["bits_per_byte_at"].items()
    ]
    for span, bits in metrics["bits_per_byte_by_position"].items():
        trained = metrics["same_bytes_at_training_length"].get(span, "")
        lines.append(("position", *map(int, span.split("-")), bits, trained, ""))
    write_csv(path, ["of", "start", "end", "bits_per_byte", "at_training_length", "note"], lines)


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw `runs`, {name: metrics.json}, in one picture: bits per byte over the length of windows,
    and by position in the longest windows, less those of the same bytes at the training length."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    colors = [color for color in COLORS if color != "#F0E442"]  # yellow does not show on white
    figure, axes = panels_of(1, 2, (11, 4))
    by_length, by_position = axes[0]
    ticks: set[int] = set()
    for number, (name, metrics) in enumerate(runs.items()):
        at = {int(n): bits for n, bits in metrics["bits_per_byte_at"].items() if bits is not None}
        trained = metrics["same_bytes_at_training_length"]
        beyond = {
            int(span.split("-")[1]): bits - trained[span]
            for span, bits in metrics["bits_per_byte_by_position"].items()
            if span in trained
        }
        marker, color = "os^Dv"[number % 5], colors[number % len(colors)]
        line = ("-", "--", ":")[number // len(colors) % 3]
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "linestyle": line, "linewidth": 2}
        by_length.plot(list(at), list(at.values()), label=name, **style)
        by_position.plot(list(beyond), list(beyond.values()), **style)
        ticks |= set(at) | set(beyond)
    for axis in axes[0]:
        for length in {metrics["train_length"] for metrics in runs.values()}:
            axis.axvline(length, color=GREY, linestyle="--", linewidth=1, zorder=0)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: short(int(n))))
        plain_axes(axis)
    by_position.axhline(0, color=GREY, linewidth=1, zorder=0)
    by_length.set(title="windows from an empty context", ylabel="bits per byte")
    by_length.set_xlabel("tokens in a window (dashed: in training)")
    by_position.set(title="the longest windows by position", xlabel="octaves of positions, by their end")
    by_position.set_ylabel("less the same bytes at training length")
    figure.legend(*by_length.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    save_figure(figure, path)


def short(n: int) -> str:
    return f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


def curves(arguments: Sequence[str]) -> int:
    """Draw one picture of several runs. Returns the exit status."""
    parser = WordsParser("text_lm.py curves", description="One picture of all runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a metrics.json of `test`")
    parser.add_argument("--out", type=Path, default=Path("runs/curves.png"))
    options = parser.parse_args(arguments)
    names = [run.name for run in options.runs]
    if len(set(names)) < len(names):
        names = list(map(str, options.runs))
    draw(dict(zip(names, map(read_metrics, options.runs), strict=True)), options.out)
    print(options.out)
    return 0


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read the metrics.json in `folder`. DataError unless it is that of a language model."""
    path = folder / "metrics.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        metrics: dict[str, Any] = json.loads(path.read_text())
        metrics["bits_per_byte_at"], metrics["same_bytes_at_training_length"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what the test of a language model writes") from error
    return metrics

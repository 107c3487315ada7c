"""Functions that draw pictures in one style."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import tensor

from ndlightnet_evidence.tables import Run, of_row, panels

# Okabe and Ito: colours that colour-blind people can also tell apart
BLACK, ORANGE, SKY, BLUE, RED, GREY, GREEN, PINK = COLORS = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#0072B2",
    "#D55E00",
    "#777777",
    "#009E73",
    "#CC79A7",
)
SCANS = {"": BLACK, "raster": SKY, "both": BLUE, "axes": RED}  # how a mixer covers a grid
STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))


def line_style(index: int) -> dict[str, Any]:
    """Return the style of line number `index`; 32 styles differ."""
    marker, line = STYLES[index // 8 % 4]
    return {"color": COLORS[index % 8], "marker": marker, "linestyle": line, "markersize": 4}


def figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def finish(axes: Iterable[Any]) -> None:
    """Draw a light grid, and remove the frame at the top and on the right."""
    for each in axes:
        each.minorticks_off()
        each.grid(color="#DDDDDD", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)


def legend(of: Any, axes: Iterable[Any], names: Sequence[str] | None = None) -> None:
    """Draw a legend to the right of a figure: every label once, or those of `names` that exist."""
    lines = {line.get_label(): line for each in axes for line in each.lines}
    shown = [name for name in names or lines if name in lines]
    of.legend([lines[name] for name in shown], shown, loc="outside right center", frameon=False, fontsize=9)


def save(picture: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=120)


def short(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1 << 10 else str(n)


def curves(runs: Sequence[Run], rows: Sequence[str], path: Path, references: Sequence[str]) -> None:
    """Draw a panel for each of the runs' "curves": accuracy over x of every row, as the mean and
    range of its runs; in grey the `references`, other fields of the curves."""
    of = panels(runs)
    picture = figure(4.4 * len(of) + 2.6, 4.4)
    every = picture.subplots(1, len(of), sharey=True, squeeze=False)[0]
    for axes, (panel, first) in zip(every, of.items(), strict=True):
        x = first["x"]
        for index, row in enumerate(rows):
            mine = [run for run in runs if run["row"] == row and panel in run["curves"]]
            if mine:
                seeds = tensor([run["curves"][panel]["accuracy"] for run in mine])
                axes.fill_between(x, seeds.amin(0), seeds.amax(0), color=line_style(index)["color"], alpha=0.15, lw=0)
                axes.plot(x, seeds.mean(0), label=row, **line_style(index))
        for style, reference in zip((":", "--"), references, strict=False):
            axes.plot(x, first[reference], style, color=GREY, zorder=0, label=reference)
        axes.set_xscale("log", base=2)
        shown = x[:: -(-len(x) // 8)]
        axes.set_xticks(shown, [short(n) for n in shown])
        axes.set(ylim=(0, 1.03), xlabel=first["x_label"], title=panel)
    finish(every)
    every[0].set_ylabel("accuracy")
    legend(picture, every, [*rows, *references])
    save(picture, path)


def lengths(runs: Sequence[Run], rows: Sequence[str], path: Path) -> None:
    """Draw bits per byte over the length of the windows, "bits_N", as the mean of a row's runs."""
    picture = figure(8.6, 3.8)
    axes, ticks = picture.subplots(), set()
    for index, row in enumerate(rows):
        if mine := of_row(runs, row):
            found = set.intersection(*({*run} for run in mine))
            at = sorted(int(key[5:]) for key in found if re.fullmatch(r"bits_\d+", key))
            means = [tensor([run[f"bits_{n}"] for run in mine]).mean() for n in at]
            axes.plot(at, means, label=row, **line_style(index))
            ticks |= {*at}
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [short(n) for n in sorted(ticks)])
    axes.set(xlabel="bytes in a window", ylabel="bits per byte")
    finish([axes])
    legend(picture, [axes], rows)
    save(picture, path)


def times(runs: Sequence[Run], rows: Sequence[str], path: Path) -> None:
    """Draw accuracy over the seconds of training, the runs' "curve": the mean and the range of a
    row's runs, which have equally many points."""
    picture = figure(9, 4.4)
    axes = picture.subplots()
    for index, row in enumerate(rows):
        found = [run["curve"] for run in of_row(runs, row) if "curve" in run]
        if found:
            seconds, accuracy = tensor(found).mean(0)[:, 0], tensor(found)[..., 1]
            axes.fill_between(
                seconds, accuracy.amin(0), accuracy.amax(0), alpha=0.15, lw=0, color=line_style(index)["color"]
            )
            axes.plot(seconds, accuracy.mean(0), label=row, **line_style(index))
    axes.set(xlabel="seconds of training", ylabel="accuracy on held-out training images")
    finish([axes])
    legend(picture, [axes], rows)
    save(picture, path)

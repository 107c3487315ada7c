"""Pictures in one style: lines over x with the range of several runs, in panels side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from ndlightnet.training.report import figures
from ndlightnet_evidence.tables import Run

GREY = figures.GREY
BLACK, _, SKY, _, RED, YELLOW, _, BLUE = figures.COLORS
COLORS = [GREY if color == YELLOW else color for color in figures.COLORS]  # yellow does not show on white
SCANS = {"": BLACK, "raster": SKY, "both": BLUE, "axes": RED}  # how a mixer covers a grid
STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))


@dataclass
class Line:
    """A line of a panel. y: (runs, points) over x; drawn are the mean and the range of the runs.
    reference: of no runs, drawn in grey behind the others."""

    x: Sequence[float]
    y: Tensor
    reference: bool = False

    @classmethod
    def over_fields(cls, runs: Sequence[Run], prefix: str) -> Line:
        """Return the fields `prefix` + NUMBER that all runs have, over the number."""
        common = set.intersection(*({*run} for run in runs))
        x = sorted(int(key.removeprefix(prefix)) for key in common if key.removeprefix(prefix).isdecimal())
        return cls(x, torch.tensor([[run[f"{prefix}{n}"] for n in x] for run in runs]))

    @classmethod
    def over_curves(cls, runs: Sequence[Run]) -> Line:
        """Return the runs' "curve", pairs (x, y), of which all have equally many, over the mean x."""
        points = torch.tensor([run["curve"] for run in runs if "curve" in run])
        return cls(points.mean(0)[:, 0].tolist(), points[..., 1])


@dataclass
class Panel:
    """One pair of axes. base: of a logarithmic x axis; ylog: a logarithmic y axis."""

    xlabel: str
    lines: Mapping[str, Line]
    title: str = ""
    ylabel: str = ""
    base: float | None = None
    ylog: bool = False
    ylim: tuple[float, float] | None = None


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels with one legend, and one scale if their y labels agree. A line of one name has one style."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    columns = 1 + (len(names) - 1) // 20  # of the legend: more names than 20 are higher than the panels
    picture = figure(4.4 * len(panels) + 3 * columns, 4.2)
    one_scale = len({panel.ylabel for panel in panels}) == 1
    every = picture.subplots(1, len(panels), sharey=one_scale, squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        for name, line in panel.lines.items():
            style = line_style(names.index(name))
            if line.reference:
                style = {"color": GREY, "linestyle": STYLES[1 + names.index(name) % 3][1], "zorder": 0}
            elif len(line.y) > 1:
                axes.fill_between(line.x, line.y.amin(0), line.y.amax(0), color=style["color"], alpha=0.15, lw=0)
            axes.plot(line.x, line.y.mean(0), label=name, **style)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
        if panel.base:
            axes.set_xscale("log", base=panel.base)
            axes.xaxis.set_major_formatter(lambda n, _: short(int(n)))
        if panel.ylog:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            low, high = axes.get_ylim()
            if high < 30 * low:  # else no tick, or a single one
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        if panel.ylim:
            axes.set_ylim(panel.ylim)
    finish(every)
    lines = {line.get_label(): line for axes in every for line in axes.lines}
    picture.legend(lines.values(), lines, loc="outside right center", frameon=False, fontsize=9, ncols=columns)
    save(picture, path)


def line_style(index: int) -> dict[str, Any]:
    """Return the style of line number `index`; 32 styles differ."""
    marker, line = STYLES[index // 8 % 4]
    return {"color": COLORS[index % 8], "marker": marker, "linestyle": line, "markersize": 4}


def figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def finish(panels: Iterable[Any]) -> None:
    """Draw a light grid, and remove the frame at the top and on the right."""
    for axes in panels:
        axes.minorticks_off()
        figures.plain_axes(axes)


def save(picture: Figure, path: Path, dpi: int = 120, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=dpi, **options)


def short(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1 << 10 else str(n)

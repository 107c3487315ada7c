"""Draw the two diagrams of the top README: how mixers visit a grid, and one block of the network.

python tasks/evidence/diagrams.py [--out .github]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from ndlightnet_evidence import plots

BLUE, ORANGE, GREY, DARK, LIGHT, SAND = "#3b6fb6", "#d9822b", "#c9ced6", "#24292f", "#c3d5ec", "#e8d7c3"
SIZE, QUERY = 6, (2, 3)  # cells of a side of the grid; row and column of the token that reads
MIXERS = ("LightNet: one scan", "decaying recurrence: a scan each way", "softmax: all pairs")
TABLE = Path(__file__).parents[2] / "kernels" / "README.md"
MAIN, UPPER, LOWER = 1.6, 2.75, 0.45  # heights of the block's lines
BOXES = (
    # left edge, height of the line, width, text, colour
    (0.0, MAIN, 0.75, "tokens", SAND),
    (1.35, MAIN, 0.75, "norm", GREY),
    (2.45, MAIN, 0.85, "$q, k, v, g$", GREY),
    (3.75, UPPER, 1.55, "MD-LRPE\non $q$ and $k$", GREY),
    (5.65, UPPER, 1.75, "$M=$softmax$(k)^{T}v$\nread by SiLU$(q)$", LIGHT),
    (7.75, UPPER, 1.15, "norm · $\\sigma(g)$", GREY),
    (4.6, LOWER, 2.3, "local mixing of $v$,\nSiLU", LIGHT),
    (9.05, MAIN, 0.9, "sum, $W_o$", GREY),
    (11.05, MAIN, 0.75, "norm", GREY),
    (12.15, MAIN, 0.95, "SwiGLU", GREY),
)
FLAT = ((0.8, 1.3), (2.15, 2.4), (9.95, 10.3), (10.6, 11.0), (11.85, 12.1), (13.15, 13.5), (13.8, 14.3))
ARROWS = (
    *(((start, MAIN), (end, MAIN)) for start, end in FLAT),
    ((2.9, 1.95), (3.7, UPPER)),
    ((5.35, UPPER), (5.6, UPPER)),
    ((7.45, UPPER), (7.7, UPPER)),
    ((8.95, UPPER), (9.5, 1.95)),
    ((2.9, 1.25), (4.55, LOWER)),
    ((6.95, LOWER), (9.5, 1.25)),
)
RESIDUALS = ((1.05, 10.45, 3.45), (10.75, 13.65, 2.4))  # start, end, height


def times() -> list[str]:
    """Return the forward milliseconds of MIXERS, of the first row of the table of speeds."""
    (row,) = re.findall(r"^\| \*\*global\*\*, 4 x 16,384 .*$", TABLE.read_text(), re.MULTILINE)
    (ms,) = re.findall(r"heads of 64 \| ([\d.]+) .* two scans \(fla\) ([\d.]+); .* softmax \(SDPA\) ([\d.]+);", row)
    return [f"{float(number):.2f} ms" for number in ms]


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str = DARK, **style: Any) -> None:
    axes.add_patch(FancyArrowPatch(start, end, color=color, arrowstyle="-|>", mutation_scale=9, **style))


def grid(axes: Any, weights: np.ndarray) -> None:
    """Draw the tokens, darker where the query reads more of them."""
    for row, column in np.ndindex(SIZE, SIZE):
        color = to_rgba(BLUE, 0.08 + 0.6 * weights[row, column])
        axes.add_patch(Rectangle((column, SIZE - 1 - row), 0.9, 0.9, facecolor=color, edgecolor="white"))
    axes.add_patch(Rectangle((QUERY[1], SIZE - 1 - QUERY[0]), 0.9, 0.9, fill=False, edgecolor=ORANGE, linewidth=2.2))


def center(row: int, column: int) -> tuple[float, float]:
    return column + 0.45, SIZE - 1 - row + 0.45


def box(axes: Any, x: float, y: float, width: float, height: float, text: str, color: str = GREY) -> None:
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="none", alpha=0.75))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, color=DARK)


def one_scan(axes: Any) -> None:
    grid(axes, np.full((SIZE, SIZE), 0.75))
    box(axes, 7.3, 2.2, 1.9, 1.5, "memory\n$\\Sigma\\,e^{k}v$")
    arrow(axes, (6.05, 2.95), (7.2, 2.95), BLUE, linewidth=1.6)
    arrow(axes, (8.2, 3.85), (4.05, 3.75), ORANGE, linewidth=1.6, connectionstyle="arc3,rad=0.35")


def two_scans(axes: Any) -> None:
    """A row-major scan and its reverse: the weight falls with the distance in the order of the scan."""
    order = np.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    grid(axes, np.exp(-np.abs(order - order[QUERY]) / 5.0))
    for shift, color, step in ((0.16, BLUE, 1), (-0.16, ORANGE, -1)):
        for row in range(SIZE):
            start, end = (center(row, 0), center(row, SIZE - 1))[::step]
            arrow(axes, (start[0] - 0.25 * step, start[1] + shift), (end[0] + 0.3 * step, end[1] + shift), color)


def all_pairs(axes: Any) -> None:
    grid(axes, np.full((SIZE, SIZE), 0.45))
    for row, column in np.ndindex(SIZE, SIZE):
        if (row, column) != QUERY:
            (x, y), (u, v) = center(row, column), center(*QUERY)
            axes.plot([x, u], [y, v], color=ORANGE, linewidth=0.7, alpha=0.8)


def draw_scans(path: Path) -> None:
    figure = plots.figure(10.4, 3.3, layout=None)
    # units of all panels are equal, so that cells are
    panels = figure.subplots(1, 3, width_ratios=(9.6, 6.9, 6.9))
    for axes, draw, title, time in zip(panels, (one_scan, two_scans, all_pairs), MIXERS, times(), strict=True):
        draw(axes)
        axes.set_title(f"{title}\n{time}", fontsize=10, color=DARK)
        axes.set(xlim=(-0.2, 9.4 if draw is one_scan else 6.7), ylim=(-0.2, 6.2), aspect="equal", anchor="S")
        axes.axis("off")
    plots.save(figure, path, dpi=160, bbox_inches="tight")


def draw_block(path: Path) -> None:
    figure = plots.figure(12.4, 3.2, layout=None)
    axes = figure.subplots()
    for x, y, width, text, color in BOXES:
        box(axes, x, y - 0.3, width, 0.6, text, color)
    for start, end in ARROWS:
        arrow(axes, start, end)
    for x, end, top in RESIDUALS:
        axes.text(end, MAIN, "⊕", ha="center", va="center", fontsize=15, color=DARK)
        axes.plot([x, x, end], [MAIN, top, top], color=DARK, linewidth=1)
        arrow(axes, (end, top), (end, MAIN + 0.22))
    axes.set(xlim=(-0.1, 14.4), ylim=(0.1, 3.55), aspect="equal")
    axes.axis("off")
    plots.save(figure, path, dpi=160, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".github"), help="folder of the pictures")
    folder = parser.parse_args(arguments).out
    draw_scans(folder / "one_scan.png")
    draw_block(folder / "block.png")


if __name__ == "__main__":
    main()

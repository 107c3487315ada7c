"""Draw the two diagrams of the top README: how mixers visit a grid, and one block of the network.

python tasks/evidence/diagrams.py [--out .github]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

BLUE, ORANGE, GREY, DARK = "#3b6fb6", "#d9822b", "#c9ced6", "#24292f"
SIZE, QUERY = 6, (2, 3)  # cells of a side of the grid; row and column of the token that reads
# forward, 4 x 16,384 tokens, 12 heads of 64 channels, one H200, bf16 (kernels/README.md)
MIXERS = {
    "LightNet: one scan": "0.12 ms",
    "decaying recurrence: a scan each way": "1.15 ms",
    "softmax: all pairs": "7.13 ms",
}


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str = DARK, **style: Any) -> None:
    axes.add_patch(FancyArrowPatch(start, end, color=color, arrowstyle="-|>", mutation_scale=9, **style))


def grid(axes: Any, weights: np.ndarray) -> None:
    """Draw the tokens, darker where the query reads more of them."""
    for row, column in np.ndindex(SIZE, SIZE):
        color = matplotlib.colors.to_rgba(BLUE, 0.08 + 0.6 * weights[row, column])
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
            left, right = center(row, 0), center(row, SIZE - 1)
            start, end = (left, right)[::step]
            arrow(axes, (start[0] - 0.25 * step, start[1] + shift), (end[0] + 0.3 * step, end[1] + shift), color)


def all_pairs(axes: Any) -> None:
    grid(axes, np.full((SIZE, SIZE), 0.45))
    for row, column in np.ndindex(SIZE, SIZE):
        if (row, column) != QUERY:
            (x, y), (u, v) = center(row, column), center(*QUERY)
            axes.plot([x, u], [y, v], color=ORANGE, linewidth=0.7, alpha=0.8)


def draw_scans(path: Path) -> None:
    widths = {"width_ratios": (9.6, 6.9, 6.9)}  # units of all panels are equal, so that cells are
    figure, panels = plt.subplots(1, 3, figsize=(10.4, 3.3), gridspec_kw=widths, facecolor="white")
    for axes, draw, (title, time) in zip(panels, (one_scan, two_scans, all_pairs), MIXERS.items(), strict=True):
        draw(axes)
        axes.set_title(f"{title}\n{time}", fontsize=10, color=DARK)
        axes.set(xlim=(-0.2, 9.4 if draw is one_scan else 6.7), ylim=(-0.2, 6.2), aspect="equal", anchor="S")
        axes.axis("off")
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


def draw_block(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(12.4, 3.2), facecolor="white")
    main, upper, lower = 1.6, 2.75, 0.45
    box(axes, 0.0, main - 0.3, 0.75, 0.6, "tokens", "#e8d7c3")
    box(axes, 1.35, main - 0.3, 0.75, 0.6, "norm")
    box(axes, 2.45, main - 0.3, 0.85, 0.6, "$q, k, v, g$")
    box(axes, 3.75, upper - 0.3, 1.55, 0.6, "MD-LRPE\non $q$ and $k$")
    box(axes, 5.65, upper - 0.3, 1.75, 0.6, "$M=$softmax$(k)^{T}v$\nread by SiLU$(q)$", "#c3d5ec")
    box(axes, 7.75, upper - 0.3, 1.15, 0.6, "norm · $\\sigma(g)$")
    box(axes, 4.6, lower - 0.3, 2.3, 0.6, "local mixing of $v$,\nSiLU", "#c3d5ec")
    box(axes, 9.05, main - 0.3, 0.9, 0.6, "sum, $W_o$")
    box(axes, 11.05, main - 0.3, 0.75, 0.6, "norm")
    box(axes, 12.15, main - 0.3, 0.95, 0.6, "SwiGLU")
    for x in (10.45, 13.65):
        axes.text(x, main, "⊕", ha="center", va="center", fontsize=15, color=DARK)
    flat = ((0.8, 1.3), (2.15, 2.4), (9.95, 10.3), (10.6, 11.0), (11.85, 12.1), (13.15, 13.5), (13.8, 14.3))
    for start, end in flat:
        arrow(axes, (start, main), (end, main))
    for start, end in (((2.9, 1.95), (3.7, upper)), ((5.35, upper), (5.6, upper)), ((7.45, upper), (7.7, upper))):
        arrow(axes, start, end)
    arrow(axes, (8.95, upper), (9.5, 1.95))
    arrow(axes, (2.9, 1.25), (4.55, lower))
    arrow(axes, (6.95, lower), (9.5, 1.25))
    for start, end in ((1.05, 10.45), (10.75, 13.65)):  # residual connections
        top = 3.45 if start < 5 else 2.4
        axes.plot([start, start, end], [main, top, top], color=DARK, linewidth=1)
        arrow(axes, (end, top), (end, main + 0.22))
    axes.set(xlim=(-0.1, 14.4), ylim=(0.1, 3.55), aspect="equal")
    axes.axis("off")
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".github"), help="folder of the pictures")
    folder = parser.parse_args().out
    draw_scans(folder / "one_scan.png")
    draw_block(folder / "block.png")

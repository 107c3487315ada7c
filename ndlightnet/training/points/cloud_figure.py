"""Clouds of points as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ndlightnet.training.report.figures import panels_of, save_figure

TURN, TILT = math.radians(35), math.radians(25)  # of the view


def save_clouds(path: Path, rows: Sequence[Sequence[tuple[str, Tensor]]]) -> None:
    """Write a picture with a panel for each cloud, (title, points (n, 3)), as seen from above and from a side, near
    points darker. The clouds of a row are drawn to one scale about one centre."""
    turn = torch.tensor([[math.cos(TURN), -math.sin(TURN), 0], [math.sin(TURN), math.cos(TURN), 0], [0, 0, 1]])
    tilt = torch.tensor([[1, 0, 0], [0, math.sin(TILT), math.cos(TILT)], [0, -math.cos(TILT), math.sin(TILT)]])
    columns = max(map(len, rows))
    figure, axes = panels_of(len(rows), columns, (2.3 * columns, 2.4 * len(rows)))
    for line, panels in zip(axes, rows, strict=True):
        views = [points.float().cpu() @ (tilt @ turn).mT for _, points in panels]
        low, high = torch.cat(views).amin(0), torch.cat(views).amax(0)
        half, middle = float((high - low).max()) / 2 * 1.05, (high + low) / 2
        for axis in line:
            axis.set_axis_off()
        for axis, (title, _), view in zip(line, panels, views, strict=False):
            view = view[view[:, 2].argsort()]
            axis.scatter(*view[:, :2].mT.numpy(), c=view[:, 2].numpy(), s=3, cmap="viridis_r", linewidths=0)
            axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
            axis.set_aspect("equal")
            axis.set_title(title, fontsize=8)
    save_figure(figure, path)

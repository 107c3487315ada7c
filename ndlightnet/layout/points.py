"""Layouts of points: tokens at real coordinates, in no order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ndlightnet.layout.grid import Grid
from ndlightnet.layout.ragged import Ragged


@dataclass(frozen=True)
class PointRows(Grid):
    """Rows of as many points each, shape (points,). points: their coordinates, (batch, points, axes) float, which get
    no gradients from position codes."""

    points: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0), compare=False, repr=False)
    ordered = False

    @staticmethod
    def at(points: Tensor) -> PointRows:
        """Return the layout of rows of points at coordinates (batch, points, axes)."""
        return PointRows((points.shape[1],), points=points.detach())

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self.points.shape[2]

    def token_coordinates(self, device: torch.device) -> Tensor:
        return self.points.to(device)


class Points(Ragged):
    """Clouds of any numbers of points, end to end in one row, without padding.

    clouds: coordinates (points, axes) of each, floats. Position codes take them as grids' coordinates, which are whole
    numbers of steps: see `pack_points`. Mixers that read tokens in an order, such as recurrences, windows and local
    mixing, and MD-TPE refuse them.
    """

    ordered = False

    def __init__(self, clouds: Iterable[Tensor]) -> None:
        self.clouds = [cloud.detach() for cloud in clouds]
        for number, cloud in enumerate(self.clouds):
            axes = self.clouds[0].shape[-1]
            if cloud.ndim != 2 or cloud.shape[1] != axes or not (axes and cloud.is_floating_point()):
                raise ValueError(f"clouds[{number}] {tuple(cloud.shape)} {cloud.dtype}: expected floats (points, axes)")
        super().__init__((len(cloud),) for cloud in self.clouds)
        self.ndim = self.clouds[0].shape[1]

    def __repr__(self) -> str:
        return f"Points({[len(cloud) for cloud in self.clouds]}, {self.ndim} axes)"

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return each point's coordinates, (length, ndim)."""
        return torch.cat(self.clouds).to(device)

    def rows_of(self, samples: Sequence[int]) -> PointRows:
        return PointRows.at(torch.stack([self.clouds[sample] for sample in samples]))

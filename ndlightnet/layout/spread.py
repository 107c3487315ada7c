"""Spread layout: a pack, each sample of which is a slab whose others lie on other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ndlightnet.layout.part import Part
from ndlightnet.layout.ragged import Ragged


class Spread(Ragged):
    """Slabs of samples of different shapes, end to end in one row. Layers take one sample after the
    other."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)
        super().__init__(part.shape for part in self.parts)

    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        rows = [[None] * len(self) if x is None else x.split(self.lengths, 1) for x in xs]
        return torch.cat([function(*row) for row in zip(self.parts, *rows, strict=True)], 1)

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        exact = x[0].to(torch.promote_types(x.dtype, torch.float32))
        counts = torch.ones_like(exact[:, :1]) if mask is None else mask[0, :, None].to(exact.dtype)
        exact = exact.masked_fill(counts == 0, 0)
        sums = self.parts[0].total(self._sum(torch.cat([exact, counts], 1)))
        return (sums[:, :-1] / sums[:, -1:].clamp(min=1)).to(x.dtype)

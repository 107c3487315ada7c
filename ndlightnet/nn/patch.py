"""Patchify: blocks of cells to tokens, on any number of axes and any size."""

from __future__ import annotations

import math

from einops import rearrange
from torch import Tensor, nn

from ndlightnet.grid import per_axis


class Patchify(nn.Module):
    """`(batch, channels, *space)` -> tokens `(batch, *grid, dim)` by one linear map of each patch.

    Sizes that the patch does not divide are padded with zeros at the end, so grid = ceil(size /
    patch) and every token holds real cells.
    """

    def __init__(
        self, dims: int, in_chans: int, patch_size: int | tuple[int, ...], dim: int
    ) -> None:
        super().__init__()
        self.patch = per_axis("patch_size", patch_size, dims)
        self.proj = nn.Linear(in_chans * math.prod(self.patch), dim)
        cut = " ".join(f"(n{a} p{a})" for a in range(dims))
        grid, cells = (" ".join(f"{c}{a}" for a in range(dims)) for c in "np")
        self.pattern = f"b c {cut} -> b {grid} ({cells} c)"
        self.sizes = {f"p{a}": size for a, size in enumerate(self.patch)}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(self.cut(x))
        return out

    def cut(self, x: Tensor) -> Tensor:
        """Patches as rows: `(batch, *grid, cells * channels)`."""
        pad = []
        for size, patch in zip(reversed(x.shape[2:]), reversed(self.patch), strict=True):
            pad += [0, -size % patch]
        return rearrange(nn.functional.pad(x, pad), self.pattern, **self.sizes)

    def cut_mask(self, mask: Tensor) -> Tensor:
        """Cells `(batch, *space)` bool -> tokens `(batch, *grid)` bool: any real cell."""
        return self.cut(mask[:, None]).any(dim=-1)

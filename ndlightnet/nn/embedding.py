"""Maps of an input to tokens: of words, and of blocks of cells on any number of axes and any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ndlightnet.layout import cut_patches, per_axis
from ndlightnet.nn.initial import Initialized
from ndlightnet.ops.dtypes import product_dtype


class Embedding(nn.Embedding):
    """nn.Embedding of numbers that a user calls `argument`. On a CPU it raises a ValueError where one is out of range,
    in eager mode; on a GPU, which would have to wait for the numbers, torch's assertion ends the process."""

    def __init__(self, num_embeddings: int, embedding_dim: int, argument: str) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.argument = argument

    def forward(self, input: Tensor) -> Tensor:
        try:
            return super().forward(input)
        except IndexError as error:
            raise ValueError(
                f"{self.argument} {tuple(input.shape)} with numbers from {input.min()} to "
                f"{input.max()}: expected 0 to {self.num_embeddings - 1}"
            ) from error


class PatchEmbed(Initialized):
    """Base class of maps of cells to tokens: of `patch`, the cells of a token along each axis."""

    def __init__(self, dims: int, patch_size: int | Sequence[int]) -> None:
        super().__init__()
        self.patch = per_axis("patch_size", patch_size, dims)


class Patchify(PatchEmbed):
    """Map `(batch, channels, *space)` to tokens `(batch, *grid, dim)`, one linear map per patch.

    Sizes that the patch does not divide are padded with zeros at the end, so grid = ceil(size /
    patch) and every token holds real cells.
    """

    def __init__(self, dims: int, in_chans: int, patch_size: int | Sequence[int], dim: int) -> None:
        super().__init__(dims, patch_size)
        self.proj = nn.Linear(in_chans * math.prod(self.patch), dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(cut_patches(x, self.patch, product_dtype(x)))

    def cut(self, x: Tensor) -> Tensor:
        """Return the patches as rows: `(batch, *grid, cells * channels)`."""
        return cut_patches(x, self.patch)

    def cut_mask(self, mask: Tensor) -> Tensor:
        """Map a cell mask `(batch, *space)` to tokens `(batch, *grid)`: True for any real cell."""
        return self.cut(mask[:, None]).any(dim=-1)

    def resize(self, patch: tuple[int, ...]) -> None:
        """Change the patch, and the weights to those whose tokens of a linearly resized patch are
        closest to the tokens of the patch before: equal if the patch grows."""
        weight = self.proj.weight.double().unflatten(1, (*self.patch, -1))
        for axis, sizes in enumerate(zip(self.patch, patch, strict=True), start=1):
            # (size, new size): the matrix that resizes a row of cells, with averaging where it shrinks
            eye = torch.eye(sizes[0], dtype=torch.float64)[None, None]
            matrix = nn.functional.interpolate(eye, sizes, mode="bilinear", antialias=True)[0, 0]
            inverse = torch.linalg.pinv(matrix).to(weight)
            weight = torch.tensordot(weight, inverse, ([axis], [1])).movedim(-1, axis)
        weight = weight.flatten(1).to(self.proj.weight)
        self.proj.in_features = weight.shape[1]
        self.proj.weight = nn.Parameter(weight, self.proj.weight.requires_grad)
        self.patch = patch

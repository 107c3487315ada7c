"""Grids of different shapes, end to end in one sequence: batches without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.grid import Grid, cut_patches, per_axis


class Lines(NamedTuple):
    """Lines along one axis, of samples of like lengths. table (lines, 3) int32: first token, step
    from token to token, length; `most`: a power of two that no length exceeds."""

    axis: int
    most: int
    table: Tensor


class Ragged:
    """What a Grid is to a batch of samples of one shape: the shapes of samples end to end.

    Tokens are `(length, ...)`; sample i has those from offsets[i] to offsets[i + 1], row-major.
    """

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self.shapes = tuple(tuple(int(n) for n in shape) for shape in shapes)
        if not self.shapes or len({len(shape) for shape in self.shapes}) > 1:
            raise ValueError(
                f"shapes={self.shapes}: expected one or more, with the same number of axes"
            )
        self.ndim = len(self.shapes[0])
        self.lengths = tuple(Grid(shape).length for shape in self.shapes)
        self.offsets = (0, *accumulate(self.lengths))
        self.length = self.offsets[-1]
        self._made: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"Ragged({self.shapes})"

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once: every layer needs the same tables."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def split(self, x: Tensor) -> list[Tensor]:
        """Tokens (length, ...) as samples (1, *shape, ...)."""
        return [
            x[a:b].reshape(1, *shape, *x.shape[1:])
            for (a, b), shape in zip(pairwise(self.offsets), self.shapes, strict=True)
        ]

    def map(self, function: Callable[..., Tensor], *xs: Tensor) -> Tensor:
        """`function` of every sample (1, *shape, ...) by itself, end to end again."""
        samples = zip(*map(self.split, xs), strict=True)
        return torch.cat(
            [function(*one).reshape(n, -1) for one, n in zip(samples, self.lengths, strict=True)]
        )

    def each(
        self, mixer: Callable[..., Tensor], x: Tensor, mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """A mixer's result for tokens (length, dim), one sample after the other."""
        if mask is None:
            return self.map(lambda one: mixer(one, causal=causal), x)
        return self.map(lambda one, keep: mixer(one, mask=keep, causal=causal), x, mask)

    def owners(self, device: torch.device) -> Tensor:
        """The sample of every token, (length,) int64."""

        def make() -> Tensor:
            rows = torch.arange(len(self), device=device)
            return rows.repeat_interleave(self.sizes(device), output_size=self.length)

        made: Tensor = self.once(("owners", device), make)
        return made

    def sizes(self, device: torch.device) -> Tensor:
        """Tokens of every sample, (batch,) int64."""
        made: Tensor = self.once(
            ("sizes", device), lambda: torch.tensor(self.lengths, device=device)
        )
        return made

    def frames(self, device: torch.device) -> tuple[Ragged, Tensor, int]:
        """The frames of all samples (steps of the first axis) as samples of their own; where each
        lies in a padded table of frames, sample * most + frame; and `most`, the most of a sample.
        """

        def make() -> tuple[Ragged, Tensor, int]:
            most = max(shape[0] for shape in self.shapes)
            shapes = [(1, *shape[1:]) for shape in self.shapes for _ in range(shape[0])]
            at = [row * most + i for row, shape in enumerate(self.shapes) for i in range(shape[0])]
            return Ragged(shapes), torch.tensor(at, device=device), most

        made: tuple[Ragged, Tensor, int] = self.once(("frames", device), make)
        return made

    def lines(self, device: torch.device) -> list[Lines]:
        """The lines along every axis, in groups of like lengths (at least 16, twice that, ...)."""
        made: list[Lines] = self.once(("lines", device), lambda: self._lines(device))
        return made

    def _lines(self, device: torch.device) -> list[Lines]:
        groups = []
        for axis in range(self.ndim):
            sizes = [max(16, 1 << (shape[axis] - 1).bit_length()) for shape in self.shapes]
            for most in sorted({n for n, size in zip(sizes, self.lengths, strict=True) if size}):
                tables = []
                for row, shape in enumerate(self.shapes):
                    if sizes[row] == most and self.lengths[row]:
                        step = Grid(shape[axis + 1 :]).length
                        first = torch.arange(self.lengths[row] // shape[axis], dtype=torch.int32)
                        first = first // step * (step * shape[axis]) + first % step
                        table = torch.tensor([0, step, shape[axis]], dtype=torch.int32)
                        table = table.repeat(len(first), 1)
                        table[:, 0] = first + self.offsets[row]
                        tables.append(table)
                groups.append(Lines(axis, most, torch.cat(tables).to(device, non_blocking=True)))
        return groups


@dataclass
class Packed:
    """A batch of samples of different shapes, end to end: what NDLightNet takes instead of a
    padded batch and a mask. values: (length, channels), a row for each token; or numbers of words
    (length,)."""

    values: Tensor
    layout: Ragged

    def __len__(self) -> int:
        return len(self.layout)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packed:
        return Packed(self.values.to(device, non_blocking=non_blocking), self.layout)

    def pin_memory(self) -> Packed:
        return Packed(self.values.pin_memory(), self.layout)

    def unpack(self) -> list[Tensor]:
        """Each sample by itself, (*grid, channels)."""
        return [part[0] for part in self.layout.split(self.values)]


def pack(samples: Iterable[Tensor], patch_size: int | Sequence[int] | None = None) -> Packed:
    """Samples (channels, *space) of any sizes, cut into patches and put end to end.

    patch_size: that of the network. Each sample is padded with zeros to whole patches, as it is
    alone. None: samples are words (length,). A nested tensor is a sequence of samples too.
    """
    samples = list(samples.unbind() if isinstance(samples, Tensor) else samples)
    if not samples:
        raise ValueError("samples=[]: expected one or more")
    if patch_size is None:
        if any(x.ndim != 1 for x in samples):
            raise ValueError("patch_size=None: expected words (length,); cells need a patch_size")
        return Packed(torch.cat(samples), Ragged(x.shape for x in samples))
    dims, channels = samples[0].ndim - 1, samples[0].shape[0]
    for i, x in enumerate(samples):
        if x.ndim != dims + 1 or x.shape[0] != channels or not x.is_floating_point():
            raise ValueError(
                f"samples[{i}] {tuple(x.shape)} {x.dtype}: expected floats (channels={channels}, "
                f"*space) with {dims} axes"
            )
    size = patch_size if isinstance(patch_size, int) else tuple(patch_size)
    patch = per_axis("patch_size", size, dims)
    parts = [cut_patches(x[None], patch)[0] for x in samples]
    layout = Ragged(part.shape[:-1] for part in parts)
    return Packed(torch.cat([part.flatten(0, -2) for part in parts]), layout)

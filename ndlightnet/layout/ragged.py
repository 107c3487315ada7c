"""Ragged layout: samples of different shapes, end to end in one row of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.layout.abstract import Layout
from ndlightnet.layout.grid import Grid


class Lines(NamedTuple):
    """Lines along one axis that have similar lengths. table (lines, 3) int32: first token, step
    from token to token, length; `longest`: a power of two that no length exceeds."""

    axis: int
    longest: int
    table: Tensor


class Ragged(Layout):
    """The shapes of samples that lie end to end in one row: a pack.

    A user's tokens are (length, ...); sample i is tokens offsets[i] to offsets[i + 1] (exclusive),
    row-major. Tables on a device are cached, since every layer needs the same ones.
    """

    packed = True

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self.shapes = tuple(tuple(int(n) for n in shape) for shape in shapes)
        if not self.shapes or len({len(shape) for shape in self.shapes}) > 1:
            raise ValueError(f"shapes={self.shapes}: expected one or more, with the same number of axes")
        self.ndim = len(self.shapes[0])
        self.lengths = tuple(Grid(shape).length for shape in self.shapes)
        self.offsets = (0, *accumulate(self.lengths))
        self.length = self.offsets[-1]
        self._tables: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"Ragged({self.shapes})"

    def table(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._tables:
            with torch.inference_mode(False):  # training may need it later
                self._tables[key] = make()
        return self._tables[key]

    def flatten(self, x: Tensor) -> Tensor:
        return x[None]

    def unflatten(self, x: Tensor) -> Tensor:
        return x[0]

    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        lead = tuple(x.shape[: x.ndim - trailing])
        if lead == (self.length,):
            return self.flatten(x)
        return x if lead == (1, self.length) else None

    def check_flat(self, x: Tensor) -> None:
        super().check_flat(x)
        if x.shape[0] != 1:
            raise ValueError(f"x {tuple(x.shape)}: expected (1, {self.length}, dim) of {self}")

    def _form(self, *trailing: str) -> str:
        return f"({', '.join([str(self.length), *trailing])}{'' if trailing else ','})"

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        return torch.cat([Grid(shape).coordinates(device) for shape in self.shapes])

    def samples(self, batch: int) -> int:
        return len(self)

    def spread_samples(self, values: Tensor) -> Tensor:
        return values[self.sample_of_token(values.device)][None]

    def sums(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(self), x.shape[-1]).index_add(0, self.sample_of_token(x.device), x[0])

    def token_counts(self, device: torch.device) -> Tensor:
        counts: Tensor = self.table(
            ("counts", device), lambda: torch.tensor(self.lengths, device=device).clamp(min=1)[:, None]
        )
        return counts

    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        rows = [None if x is None else x.split(self.lengths, 1) for x in xs]
        outputs = [torch.empty(0)] * len(self)
        for samples in self.alike():
            parts = [[] if row is None else [row[i] for i in samples] for row in rows]
            batch = (torch.cat(part) if part[1:] else next(iter(part), None) for part in parts)  # one is not copied
            y = function(self.rows_of(samples), *batch)
            for i, sample in zip(samples, y.split(1), strict=True):
                outputs[i] = sample
        return torch.cat(outputs, 1)

    def alike(self) -> list[list[int]]:
        """Return the samples in groups, each of which operators may take as a batch: those of one shape."""
        groups: dict[Any, list[int]] = {}
        for i, shape in enumerate(self.shapes):
            groups.setdefault(shape, []).append(i)
        return list(groups.values())

    def rows_of(self, samples: Sequence[int]) -> Grid:
        """Return the layout of samples of one shape as rows of a batch."""
        return Grid(self.shapes[samples[0]])

    def map_lines(self, function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
        # one more row, of zeros, for the positions beyond the end of a line
        source = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])
        total = torch.zeros_like(source)
        for group in self.lines(x.device):
            if group.axis == axis:
                first, step, size = group.table.long()[:, :, None].unbind(1)
                at = torch.arange(group.longest, device=x.device)
                token = torch.where(at < size, first + at * step, self.length).flatten()
                lines = source.index_select(0, token).unflatten(0, (-1, group.longest))
                total = total.index_copy(0, token, function(lines).flatten(0, 1))
        return total[None, :-1]

    def split(self, x: Tensor) -> list[Tensor]:
        """Split tokens (length, ...) into samples (1, *shape, ...)."""
        return [
            x[a:b].reshape(1, *shape, *x.shape[1:])
            for (a, b), shape in zip(pairwise(self.offsets), self.shapes, strict=True)
        ]

    def sample_of_token(self, device: torch.device) -> Tensor:
        """Return the index of each token's sample, (length,) int64."""

        def make() -> Tensor:
            rows = torch.arange(len(self), device=device)
            lengths = torch.tensor(self.lengths, device=device)
            return rows.repeat_interleave(lengths, output_size=self.length)

        table: Tensor = self.table(("sample_of_token", device), make)
        return table

    def token_coordinates(self, device: torch.device) -> Tensor:
        coordinates: Tensor = self.table(("coordinates", device), lambda: self.coordinates().to(device))
        return coordinates

    def frames(self, device: torch.device) -> tuple[Ragged, Tensor, int]:
        """Return a Ragged whose samples are the frames (steps of the first axis) of all samples; the index of each in a
        padded table of frames, sample * longest + frame; and `longest`, the largest number of frames of a sample.
        """

        def make() -> tuple[Ragged, Tensor, int]:
            longest = max(shape[0] for shape in self.shapes)
            shapes = [(1, *shape[1:]) for shape in self.shapes for _ in range(shape[0])]
            frames = [shape[0] for shape in self.shapes]
            at = [row * longest + i for row, n in enumerate(frames) for i in range(n)]
            return Ragged(shapes), torch.tensor(at, device=device), longest

        table: tuple[Ragged, Tensor, int] = self.table(("frames", device), make)
        return table

    def lines(self, device: torch.device) -> list[Lines]:
        """Return the lines along every axis, in groups of lengths up to 16, up to 32, ..."""
        table: list[Lines] = self.table(("lines", device), lambda: self._lines(device))
        return table

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

"""Cut samples into patches and back, and pack samples of any shapes end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ndlightnet.layout.abstract import per_axis
from ndlightnet.layout.points import Points
from ndlightnet.layout.ragged import Ragged

STEPS = 32.0  # by which position codes multiply the coordinates of points


def cut_patches(x: Tensor, patch: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Cut cells `(batch, channels, *space)` into patches, `(batch, *grid, cells * channels)`, of another dtype if one
    is given, in one pass. Sizes that the patch does not divide are padded with zeros at the end."""
    dims = len(patch)
    pad = []
    for size, step in zip(reversed(x.shape[2:]), reversed(patch), strict=True):
        pad += [0, -size % step]
    space = " ".join(f"(n{a} p{a})" for a in range(dims))
    grid, cells = (" ".join(f"{c}{a}" for a in range(dims)) for c in "np")
    sizes = {f"p{a}": size for a, size in enumerate(patch)}
    if torch.compiler.is_compiling() or any(pad):  # a graph takes any size
        x = torch.nn.functional.pad(x, pad)
    if dtype is None or dtype == x.dtype:
        return rearrange(x, f"b c {space} -> b {grid} ({cells} c)", **sizes)
    x = rearrange(x, f"b c {space} -> b {grid} {cells} c", **sizes)
    return x.to(dtype, memory_format=torch.contiguous_format).flatten(1 + dims)


def uncut_patches(x: Tensor, patch: Sequence[int]) -> Tensor:
    """Lay out patches `(batch, *grid, cells * channels)` as cells `(batch, *space, channels)`: the
    inverse of `cut_patches`, with the channels last."""
    axes = range(len(patch))
    grid, cells = (" ".join(f"{c}{a}" for a in axes) for c in "np")
    space = " ".join(f"(n{a} p{a})" for a in axes)
    sizes = {f"p{a}": size for a, size in enumerate(patch)}
    return rearrange(x, f"b {grid} ({cells} c) -> b {space} c", **sizes)


@dataclass
class Packed:
    """A batch of samples of different shapes, end to end: NDLightNet takes it instead of a padded batch and a mask.
    values: (length, channels), a row for each token; or word indices (length,)."""

    values: Tensor
    layout: Ragged

    def __len__(self) -> int:
        return len(self.layout)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packed:
        return Packed(self.values.to(device, non_blocking=non_blocking), self.layout)

    def pin_memory(self) -> Packed:
        return Packed(self.values.pin_memory(), self.layout)

    def unpack(self) -> list[Tensor]:
        """Split into one tensor (*grid, channels) per sample."""
        return [sample[0] for sample in self.layout.split(self.values)]


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Lay sequences (length, ...) of any lengths in rows of a batch (rows, longest, ...), with zeros behind their ends,
    where the mask, bool (rows, longest), is False."""
    x = pad_sequence([*rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=x.device)
    return x, torch.arange(x.shape[1], device=x.device) < lengths[:, None]


def pack(samples: Iterable[Tensor], patch_size: int | Sequence[int] | None = None) -> Packed:
    """Cut samples (channels, *space) of any sizes into patches, and join them end to end.

    patch_size: that of the network. Samples are padded with zeros to whole patches, as the network
    pads a single one. None: samples are word indices (length,). They may be a nested tensor.
    """
    samples = list(samples.unbind() if isinstance(samples, Tensor) else samples)
    if not samples:
        raise ValueError("samples=[]: expected one or more")
    for i, x in enumerate(samples):
        if not isinstance(x, Tensor):
            raise TypeError(f"samples[{i}] of type {type(x).__name__}: expected a torch.Tensor")
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
    patch = per_axis("patch_size", patch_size, dims)
    patches = [cut_patches(x[None], patch)[0] for x in samples]
    layout = Ragged(x.shape[:-1] for x in patches)
    return Packed(torch.cat([x.flatten(0, -2) for x in patches]), layout)


def pack_points(clouds: Iterable[Tensor], axes: int = 3, steps: float = STEPS) -> Packed:
    """Join clouds of points (points, axes + features) of any sizes end to end, floats: coordinates, then features such
    as normals or colours, if there are any. A token's values are all of them.

    steps: by how much position codes multiply coordinates. Clouds from -1 to 1 lie as a grid of 2 `steps` does.
    """
    clouds = [*clouds]
    for number, cloud in enumerate(clouds):
        width = cloud.shape[-1] if cloud.ndim == 2 else 0
        if width < axes or width != clouds[0].shape[1] or not (len(cloud) and cloud.is_floating_point()):
            expected = f"floats (points, {axes} or more), of one width"
            raise ValueError(f"clouds[{number}] {tuple(cloud.shape)} {cloud.dtype}: expected {expected}")
    if not clouds:
        raise ValueError("clouds=[]: expected one or more")
    return Packed(torch.cat(clouds), Points(cloud[:, :axes] * steps for cloud in clouds))

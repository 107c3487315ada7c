"""Logits of an image in tiles: the image at once, or overlapping windows blended one after the
other, each tile complete when it is yielded. MONAI's sliding windows, which have the same
positions and weights, and its mergers hold the logits of the whole image: 54 GB for 100 classes on 512^3 cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import torch
from torch import Tensor, nn

Tile = tuple[tuple[int, ...], Tensor]  # index of the first cell, logits (classes, *cells)
_Box = tuple[tuple[int, int], ...]  # first cell and last + 1 along each axis
HOST = 2**29  # bytes that the sums of windows may take on a CPU, however small the image is


def tiles(
    net: nn.Module,
    image: Tensor,
    window: Sequence[int] | None,
    overlap: float,
    halo: Sequence[int],
    like: Tensor,
    memory: int | None = None,
) -> Iterator[Tile]:
    """Yield complete tiles of an image (channels, *space): the index of the first cell, and logits
    `(classes, *cells)`, float32, on the device of `like`, valid until the next tile is requested.
    Neighbours share `halo` cells along each axis; together the tiles cover the image. Windows take
    the dtype of `like`. Without a window it is one tile, in that dtype."""
    space = image.shape[1:]
    if window is None:
        yield (0,) * len(space), _forward(net, image[None].to(like))[0]
        return
    starts, weight = _windows(space, window, overlap, like.device)
    axis = max(range(len(space)), key=lambda k: len(starts[k]))
    # The first window is computed before the plan: it gives the number of classes.
    logits: Tensor | None = _forward(net, _cut(image, [s[0] for s in starts], window, like))
    assert logits is not None
    thick = min(window[axis] + 1, space[axis])
    if memory is None:
        memory = _allowance(image, like.device)
    channels = logits.shape[1] + 1  # the last one sums the weights
    columns = _columns(space, window, starts, axis, halo, memory // (4 * channels))
    shapes = [[thick if k == axis else b - a for k, (a, b) in enumerate(c)] for c in columns]
    buffer = torch.empty(channels * max(map(math.prod, shapes)), device=like.device)
    faces: dict[tuple[int, _Box], Tensor] = {}  # logits for the next column along an axis
    for column, shape in zip(columns, shapes, strict=True):
        sums = buffer[: channels * math.prod(shape)].view(channels, *shape).zero_()
        first = [a + halo[k] if a else 0 for k, (a, _) in enumerate(column)]  # behind the halo
        shared = [k for k in range(len(space)) if k != axis and halo[k]]
        sides = [(k, (k, (*column[:k], *column[k + 1 :]))) for k in shared]
        before = {k: faces.pop(side) for k, side in sides if column[k][0] > 0}
        after = {k: _face(buffer, channels - 1, column, k) for k in shared if column[k][1] < space[k]}
        low, done = [a for a, _ in column], 0  # first cell of `sums`; end of the complete planes
        for start, stop in pairwise([*starts[axis], space[axis]]):
            touching = [[s for s in starts[k] if s < b and s + window[k] > first[k]] for k, (_, b) in enumerate(column)]
            touching[axis] = [start]
            for corner in product(*touching):
                if logits is None:
                    logits = _forward(net, _cut(image, corner, window, like))
                _add(sums, low, logits[0], corner, weight)
                logits = None  # freed before the next ones
            fresh = sums.narrow(1 + axis, done - low[axis], stop - done)
            fresh[:-1].div_(fresh[-1:])
            for k, face in before.items():
                fresh[:-1].narrow(1 + k, 0, 1).copy_(face.narrow(1 + axis, done, stop - done))
            for k, face in after.items():
                face.narrow(1 + axis, done, stop - done).copy_(fresh[:-1].narrow(1 + k, shape[k] - 1, 1))
            yield tuple(low), sums[:-1].narrow(1 + axis, 0, stop - low[axis])
            shift = stop - halo[axis] - low[axis]
            for planes in sums.movedim(1 + axis, 1):  # class by class, so that the copy is small
                planes[: thick - shift] = planes[shift:].clone()
                planes[thick - shift :] = 0
            low[axis], done = low[axis] + shift, stop
        faces |= {side: after[k] for k, side in sides if k in after}


def _face(like: Tensor, classes: int, column: _Box, k: int) -> Tensor:
    """Return an empty tensor for the logits of a column's last cells along axis k."""
    shape = [1 if j == k else b - a for j, (a, b) in enumerate(column)]
    return like.new_empty(classes, *shape)


def _add(sums: Tensor, low: Sequence[int], logits: Tensor, corner: Sequence[int], weight: Tensor) -> None:
    """Add a window's weighted logits, and its weights, to sums that begin at the cell `low`."""
    inside, at = _shared(corner, weight.shape, low, sums.shape[1:])
    sums[:-1][(slice(None), *at)].addcmul_(logits[(slice(None), *inside)], weight[inside])
    sums[-1][at] += weight[inside]


def _forward(net: nn.Module, x: Tensor) -> Tensor:
    """Return logits `(batch, classes, *space)` of images `(batch, channels, *space)`."""
    out = net(x)
    shape = tuple(getattr(out, "shape", ()))
    if len(shape) != x.ndim or shape[2:] != x.shape[2:]:
        raise ValueError(
            f"network: input of shape {tuple(x.shape)} gave {shape or type(out).__name__}, "
            f"expected ({len(x)}, classes, {', '.join(map(str, x.shape[2:]))})"
        )
    logits: Tensor = out
    return logits


def _windows(
    space: Sequence[int], window: Sequence[int], overlap: float, device: torch.device
) -> tuple[list[list[int]], Tensor]:
    """Return the first cells of the windows along each axis, below zero where the image is smaller
    and is padded on both sides, and the weights `(*window)`: those of MONAI's sliding windows."""
    from monai.data.utils import compute_importance_map, dense_patch_slices

    if len(window) != len(space) or min(window) < 1:
        raise ValueError(f"window={window!r}: expected {len(space)} sizes above 0")
    if not 0 <= overlap < 1:
        raise ValueError(f"overlap={overlap!r}: expected 0 <= overlap < 1")
    starts = []
    for n, w in zip(space, window, strict=True):
        step, padded = max(1, int(w * (1 - overlap))), max(n, w)
        slices = dense_patch_slices([padded], [w], [step])
        starts.append([s.start - (padded - n) // 2 for (s,) in slices])
    return starts, compute_importance_map(tuple(window), mode="gaussian", device=device)


def _shared(
    corner: Sequence[int], window: Sequence[int], low: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the cells that a window and a box share: slices of the window, slices of the box."""
    inside, at = [], []
    for start, w, a, n in zip(corner, window, low, shape, strict=True):
        first, last = max(start, a), min(start + w, a + n)
        inside.append(slice(first - start, last - start))
        at.append(slice(first - a, last - a))
    return tuple(inside), tuple(at)


def _cut(image: Tensor, corner: Sequence[int], window: Sequence[int], like: Tensor) -> Tensor:
    """Return a window `(1, channels, *window)` of an image, zero outside of the image."""
    pin = like.is_cuda and not image.is_cuda  # the host need not wait for the copy
    patch = torch.zeros(1, len(image), *window, dtype=like.dtype, device=image.device, pin_memory=pin)
    inside, at = _shared(corner, window, [0] * len(window), image.shape[1:])
    patch[0][(slice(None), *inside)] = image[(slice(None), *at)]
    return patch.to(like.device, non_blocking=True)


def _allowance(image: Tensor, device: torch.device) -> int:
    """Return the default number of bytes for the sums of windows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + cached) // 2
    return max(HOST, 4 * image.numel())


def _columns(
    space: Sequence[int],
    window: Sequence[int],
    starts: Sequence[Sequence[int]],
    axis: int,
    halo: Sequence[int],
    cells: int,
) -> list[_Box]:
    """Return boxes that cover the image: whole along `axis`, cut across it until the sums and the faces of a column
    have at most `cells` cells, or no column is wider than the window. Cuts lie where windows begin: there the fewest
    windows touch both sides. A column begins `halo` cells before its cut."""
    splits, axes = [1] * len(space), range(len(space))
    while True:
        spans = []
        for k, n in enumerate(space):
            even = (i * n / splits[k] for i in range(1, splits[k]))
            cuts = {min((abs(s - at), s) for s in starts[k])[1] for at in even}
            spans.append([(max(0, a - halo[k]), b) for a, b in pairwise(sorted({0, *cuts, n}))])
        widths = [max(b - a for a, b in span) for span in spans]
        taken = min(window[axis] + 1, space[axis]) * math.prod(widths) // widths[axis]
        for k in axes:  # along later axes the next column comes sooner
            if k != axis and halo[k] and len(spans[k]) > 1:
                taken += math.prod(widths[j] if j < k and j != axis else space[j] for j in axes if j != k)
        wider = [k for k in axes if k != axis and widths[k] > window[k] + halo[k]]
        if taken <= cells or not wider:
            return list(product(*spans))
        splits[max(wider, key=lambda k: widths[k])] += 1

"""Labels of an image, computed tile by tile on any grid along its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.inference.windows import tiles

# For every index of a target axis: the cell of the image below it, int64, and how far it lies
# towards the next cell, float32 in 0..1.
Lookup = tuple[Tensor, Tensor]
CHUNK = 2**24  # bytes of logits that are interpolated at a time


@torch.no_grad()
def predict_labels(
    net: nn.Module,
    image: Tensor,
    window: Sequence[int] | None = None,
    *,
    overlap: float = 0.5,
    onto: tuple[Sequence[int], Any] | None = None,
    memory: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return labels, on the CPU, of an image `(channels, *space)`: the class of the largest logit, uint8, or int16 for
    more than 255 classes. They are computed tile by tile, without logits of the whole target.

    window: as in `predict_volume`, with the same blending. The network computes one window at a time.
    onto: `(shape, matrix)` of another grid for the labels, None: the image's. The matrix `(ndim + 1, ndim + 1)` maps
        its indices to indices of the image, by a scale (negative: a flip) and an offset for each axis. Logits are
        interpolated linearly, outside of the image its border is repeated, and then the largest is taken.
    device: where the network is and where all is computed; None: where its parameters are. The
        image may stay on the CPU. Windows take the dtype of the parameters.
    memory: bytes for the sums of windows on the device. The sums move along the axis with the most windows and take `4
        (classes + 1) (window + 1) area` bytes: the window's size along that axis, the image's area across it. Where
        this is more than `memory` the image is cut into columns, one after the other, and windows on a cut are computed
        once for each side: 100 classes on 512^3 cells in 512 MiB need 1.6 times as many windows of 64^3, in 4 GiB 1.2
        times as many of 96^3. Cutting stops when no column is wider than the window. None: half of the free memory of a
        CUDA device; elsewhere as much as the image takes in float32, but at least 512 MiB.

    Besides these sums and the labels, memory holds the windows in the network with their logits and
    a few times CHUNK bytes; without a window the logits of the image, in the network's dtype.

    Raises ValueError for arguments that do not fit the image, and for logits that are not numbers.
    """
    image = image.as_subclass(Tensor)  # every slice of a MetaTensor would take milliseconds
    space = image.shape[1:]
    like = next(net.parameters(), image)
    like = torch.empty(0, dtype=like.dtype, device=like.device if device is None else device)
    lookups = _lookups(space, onto)
    halo = [int(fraction.any()) for _, fraction in lookups]
    labels: Tensor | None = None
    for corner, logits in tiles(net, image, window, overlap, halo, like, memory):
        if labels is None:
            dtype = torch.uint8 if len(logits) <= 255 else torch.int16
            labels = torch.empty([len(lower) for lower, _ in lookups], dtype=dtype)
        _label(logits, corner, space, lookups, labels)
    assert labels is not None
    return labels


def _lookups(space: Sequence[int], onto: tuple[Sequence[int], Any] | None) -> list[Lookup]:
    ndim = len(space)
    shape, affine = (space, torch.eye(ndim + 1)) if onto is None else onto
    matrix = torch.as_tensor(affine, dtype=torch.float64, device="cpu")
    if len(shape) != ndim or min(shape) < 1 or matrix.shape != (ndim + 1, ndim + 1):
        raise ValueError(
            f"onto: shape {tuple(shape)} and a matrix {tuple(matrix.shape)}, expected {ndim} sizes "
            f"above 0 and a matrix {(ndim + 1, ndim + 1)}"
        )
    scale, offset = matrix.diagonal()[:-1], matrix[:-1, -1]
    # Rounding errors off the diagonal may move no cell by more than a hundredth.
    beside = (matrix[:-1, :-1] - scale.diag()).abs() @ torch.tensor(shape, dtype=torch.float64)
    last_row = bool(((matrix[-1] - torch.eye(ndim + 1)[-1]).abs() < 1e-6).all())
    if not (last_row and matrix.isfinite().all() and scale.all() and (beside < 0.01).all()):
        raise ValueError(f"onto: matrix {matrix.tolist()}, expected one scale and one offset for each axis")
    lookups = []
    for n, size, a, b in zip(space, shape, scale, offset, strict=True):
        places = (a * torch.arange(size) + b).clamp(0, n - 1)
        places = torch.where((places - places.round()).abs() < 1e-4, places.round(), places)  # equal up to rounding
        lower = places.floor()
        lookups.append((lower.long(), (places - lower).float()))
    return lookups


def _label(
    logits: Tensor, corner: Sequence[int], space: Sequence[int], lookups: Sequence[Lookup], labels: Tensor
) -> None:
    """Write the labels of all targets between the cells of one tile, logits `(classes, *cells)`.

    Some classes of some rows of the target are compared at a time with the maximum so far: what is
    interpolated at a time takes CHUNK bytes, unless one row of one class takes more.
    """
    box, steps = [], []
    for start, length, n, (lower, fraction) in zip(corner, logits.shape[1:], space, lookups, strict=True):
        # If interpolated, targets beyond the last cell are the next tile's, which begins with it.
        stop = start + length - int(bool(fraction.any()) and start + length < n)
        targets = ((lower >= start) & (lower < stop)).nonzero()
        if not len(targets):
            return
        box.append(slice(int(targets[0]), int(targets[-1]) + 1))
        low = lower[box[-1]] - start
        steps.append((low.to(logits.device), fraction[box[-1]].to(logits.device), bool(fraction.any())))
    block = torch.zeros_like(labels[tuple(box)], device=logits.device)
    cells = math.prod(map(max, block.shape[1:], logits.shape[2:]))
    rows = max(1, CHUNK // (4 * cells * len(logits)))
    classes = max(1, CHUNK // (4 * cells * rows))
    bad = torch.zeros((), dtype=torch.bool, device=logits.device)
    for row in range(0, len(block), rows):
        label = block[row : row + rows]
        best = torch.full_like(label, -torch.inf, dtype=torch.float32)
        low, fraction, between = steps[0]
        row_steps = [(low[row : row + rows], fraction[row : row + rows], between), *steps[1:]]
        for first in range(0, len(logits), classes):
            values = logits[first : first + classes]
            for low, fraction, between in row_steps:
                values = _at(values, low, fraction if between else None)
            for c, value in enumerate(values, first):
                label.masked_fill_(value > best, c)
                best = torch.maximum(best, value)
        bad |= best.isnan().any()
    if bad:
        raise ValueError("network: its logits are not numbers (NaN)")
    labels[tuple(box)] = block.cpu()


def _at(x: Tensor, low: Tensor, fraction: Tensor | None) -> Tensor:
    """Return values at the cells `low`, or with `fraction` linearly between `low` and `low + 1`, of
    the first axis, which becomes the last: `(classes, a, b, ...)` -> `(classes, b, ..., targets)`.
    After one call for each axis all are in their order again."""
    below = x[:, low]
    if fraction is not None:
        above = x[:, (low + 1).clamp(max=x.shape[1] - 1)]
        fraction = fraction.view(-1, *[1] * (x.ndim - 2))
        below = torch.lerp(below.float(), above.float(), fraction)
    return below.movedim(1, -1)


def keep_largest(labels: Tensor, classes: Sequence[int] | None = None) -> Tensor:
    """Set all but the largest component of every class of `classes` (None: all above 0) to 0 in
    integer labels `(*space)`; cells that touch at a corner are connected. Of two components of the
    same size the first stays. The dtype stays, the result is on the CPU.

    MONAI's transform of this name needs scikit-image, and labels the whole grid for every class."""
    import numpy as np
    from scipy import ndimage

    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels of {labels.dtype}: expected integers")
    if classes is not None and any(c < 1 for c in classes):
        raise ValueError(f"classes={classes!r}: expected labels above 0")
    result = np.array(labels.detach().cpu().numpy())
    for c, box in enumerate(ndimage.find_objects(result), start=1):
        if box is None or (classes is not None and c not in classes):
            continue
        mask = result[box] == c
        components, count = ndimage.label(mask, np.ones([3] * result.ndim))
        if count > 1:
            sizes = np.bincount(components.ravel())
            result[box][mask & (components != 1 + sizes[1:].argmax())] = 0
    return torch.from_numpy(result)

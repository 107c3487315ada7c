"""The Triton form of local mixing: operators with fakes and explicit backwards. The kernels are
imported when they are called, not before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.limits import axes_reason, sizes_reason
from ndlightnet.ops.local_mixing import shifts
from ndlightnet.ops.local_mixing.offsets import Offsets

# shape: a grid; of a pack any of its samples'. table, back_table: of a pack, the boxes of a program
# of the forward and of the backward kernel, whose sizes are `box` and `back_box`.
WHERE = "Tensor? table, Tensor? back_table, SymInt[] shape, SymInt[] box, SymInt[] back_box, int[] offsets"


class Where(NamedTuple):
    table: Tensor | None
    back_table: Tensor | None
    shape: list[int]
    box: list[int]
    back_box: list[int]
    offsets: list[int]


NOWHERE = Where(None, None, [], [], [], [])


def where(layout: Layout, offsets: Offsets, device: torch.device) -> Where:
    """Return the operator's last arguments."""
    from ndlightnet_kernels import local_boxes

    flat = [o for offset in offsets for o in offset]
    shape = [max(sizes) for sizes in zip(*layout.shapes, strict=True)]
    boxes = [local_boxes.box(shape, len(offsets), backward) for backward in (False, True)]

    def make() -> list[Tensor]:
        pack: Any = layout
        return [local_boxes.table(pack.shapes, pack.offsets[:-1], box).to(device) for box in boxes]

    tables = layout.table(("boxes", *boxes, device), make) or (None, None)
    front, back = ([*box.patch, *box.rows] for box in boxes)
    return Where(tables[0], tables[1], shape, front, back, flat)


def _offsets(flat: Sequence[int], axes: int) -> Offsets:
    return tuple(tuple(flat[i : i + axes]) for i in range(0, len(flat), axes))


def forward(x: Tensor, weight: Tensor, mask: Tensor | None, *where: Any) -> Tensor:
    from ndlightnet_kernels import local_mixing as kernels

    at = Where(*where)
    return kernels.mix(x, weight, mask, at.shape, at.table, at.box, _offsets(at.offsets, len(at.shape)))


def lowered(x: Tensor, weight: Tensor, mask: Tensor | None, *where: Any) -> Tensor:
    """The torch form, as AOTInductor cannot write down a plan of lines, a constant of the kernel,
    and fuses these sums itself."""
    at = Where(*where)
    x = x if mask is None else x.masked_fill(~mask[..., None], 0)
    return shifts.on_grid(x, weight, _offsets(at.offsets, len(at.shape)), Grid(tuple(at.shape)))


def backward(
    du: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, *where: Any, dx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight. dx: where that of x is written."""
    from ndlightnet_kernels import local_mixing as kernels

    at = Where(*where)
    taps = _offsets(at.offsets, len(at.shape))
    written, dweight = kernels.backward(du, x, weight, mask, at.shape, at.back_table, at.back_box, taps, dx)
    if written is None:
        written = kernels.mix(du, weight, mask, at.shape, at.table, at.box, taps, transposed=True, out=dx)
    return written, dweight


def flops(x: Sequence[int], weight: Sequence[int], **_: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _limits(x: Tensor, _: Any = None, weight: Tensor | None = None, **__: Any) -> str:
    from ndlightnet_kernels import local_mixing as kernels

    return axes_reason(x.ndim - 2) or sizes_reason(x) or kernels.supported(0 if weight is None else len(weight))


mix = Operator(
    f"local_mixing(Tensor x, Tensor weight, Tensor? mask, {WHERE}) -> Tensor u",
    forward,
    lambda x, *_: x.new_empty(x.shape),
    Gradient(
        f"local_mixing_backward(Tensor du, Tensor x, Tensor weight, Tensor? mask, {WHERE}) "
        "-> (Tensor dx, Tensor dweight)",
        backward,
    ),
    lowered=lowered,
    flops=flops,
    implementations=("torch", "triton", "reference"),
    limits=_limits,
)

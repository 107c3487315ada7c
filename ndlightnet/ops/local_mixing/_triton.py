"""The Triton form of local mixing: operators with fakes and explicit backwards. The kernels are
imported when they are called, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.ops._operator import Operator
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


def _mix(
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    table: Tensor | None,
    back_table: Tensor | None,
    shape: Sequence[int],
    box: Sequence[int],
    back_box: Sequence[int],
    offsets: Sequence[int],
) -> Tensor:
    from ndlightnet_kernels import local_mixing as kernels

    return kernels.mix(x, weight, mask, shape, table, box, _offsets(offsets, len(shape)))


def _mix_lowered(
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    table: Tensor | None,
    back_table: Tensor | None,
    shape: Sequence[int],
    box: Sequence[int],
    back_box: Sequence[int],
    offsets: Sequence[int],
) -> Tensor:
    """The torch form, as AOTInductor cannot write down a plan of lines, a constant of the kernel,
    and fuses these sums itself."""
    x = x if mask is None else x.masked_fill(~mask[..., None], 0)
    return shifts.on_grid(x, weight, _offsets(offsets, len(shape)), Grid(tuple(shape)))


def _mix_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _gradients(
    du: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    table: Tensor | None,
    back_table: Tensor | None,
    shape: Sequence[int],
    box: Sequence[int],
    back_box: Sequence[int],
    offsets: Sequence[int],
) -> Any:
    from ndlightnet_kernels import local_mixing as kernels

    taps = _offsets(offsets, len(shape))
    dx, dweight = kernels.backward(du, x, weight, mask, shape, back_table, back_box, taps)
    if dx is None:
        dx = kernels.mix(du, weight, mask, shape, table, box, taps, transposed=True)
    return dx, dweight


def _gradients_fake(du: Tensor, x: Tensor, weight: Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, mask, table, back_table, *ctx.where = inputs
    ctx.save_for_backward(x, weight, mask, table, back_table)


def _backward(ctx: Any, du: Tensor) -> Any:
    return *_local_mixing_backward(du, *ctx.saved_tensors, *ctx.where), *[None] * 7


_local_mixing_backward = Operator(
    f"local_mixing_backward(Tensor du, Tensor x, Tensor weight, Tensor? mask, {WHERE}) -> (Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
mix = Operator(
    f"local_mixing(Tensor x, Tensor weight, Tensor? mask, {WHERE}) -> Tensor",
    _mix,
    _mix_fake,
    _save,
    _backward,
    lowered=_mix_lowered,
)

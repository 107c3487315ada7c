"""What the planes beside a slab give to the local mixing at its edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.ops._once_differentiable import once_differentiable
from ndlightnet.ops.local_mixing.offsets import Offsets
from ndlightnet.parallel import in_a_row


class Span(NamedTuple):
    """Planes that taps of so many steps along the axis read beside a slab, and those that they give to.

    steps: forwards (> 0) from the planes before the slab, backwards from those behind it. read: the first of the planes
    that are read. at: the first of the slab's that get something. length: the number of both.
    """

    steps: int
    read: int
    at: int
    length: int


def spans(along: Sequence[int], planes: int, size: int, first: bool) -> Iterator[Span]:
    """Yield the spans of the planes before a slab of `size` (first), or of those behind it, the longest first. along:
    the steps of each tap along the axis."""
    for steps in sorted({abs(n) for n in along if (n > 0 if first else n < 0)}, reverse=True):
        start, end = max(0, steps - planes), min(steps, size)  # counted from the edge
        if start < end and first:
            yield Span(steps, planes - steps + start, start, end - start)
        elif start < end:
            yield Span(-steps, steps - end, size - end, end - start)


def are_products(offsets: Offsets, axis: int) -> bool:
    """Return whether each plane gives its product with the weights of one tap, as those of a star do."""
    return all(not any(o[:axis] + o[axis + 1 :]) for o in offsets if o[axis])


def add_products(
    y: Tensor, weight: Tensor, sides: Sequence[Tensor], offsets: Offsets, dim: int, shape: Sequence[int]
) -> Tensor:
    """Add to y, in its place, seen as `shape`, what the planes before and behind it along `dim` give. weight: (taps,
    channels), float32. By kernels."""
    out: Tensor = _AddProducts.apply(y, weight, *sides, offsets, dim, tuple(shape))  # type: ignore[no-untyped-call]
    return out


class _AddProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        first: Tensor,
        last: Tensor,
        offsets: Offsets,
        dim: int,
        shape: tuple[int, ...],
    ) -> Tensor:
        from ndlightnet_kernels import planes as kernels

        ctx.save_for_backward(weight, first, last)
        ctx.mark_dirty(y)
        along = [offset[dim - 1] for offset in offsets]
        ctx.dim, ctx.shape, ctx.products = dim, shape, []  # of each side: the tap, and the span, of a product
        for side, before in ((first, True), (last, False)):
            within = spans(along, side.shape[dim], shape[dim], before) if y.numel() else ()
            ctx.products.append([(along.index(span.steps), span) for span in within])
            for tap, span in ctx.products[-1]:
                read, at = side.narrow(dim, span.read, span.length), y.view(shape).narrow(dim, span.at, span.length)
                kernels.add(kernels.rows(read, dim), kernels.rows(at, dim), weight[tap])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from ndlightnet_kernels import planes as kernels

        weight, *sides = ctx.saved_tensors
        dcells, dim = dy.contiguous().view(ctx.shape), ctx.dim
        dweight, dsides = torch.zeros_like(weight), in_a_row(sides[0], [side.shape for side in sides])
        for side, dside, products in zip(sides, dsides, ctx.products, strict=True):
            covered = bool(products) and products[0][1].length == side.shape[dim]  # by the longest span
            if not covered:
                dside.zero_()
            for i, (tap, span) in enumerate(products):
                dout = kernels.rows(dcells.narrow(dim, span.at, span.length), dim)
                x, dx = (kernels.rows(z.narrow(dim, span.read, span.length), dim) for z in (side, dside))
                dweight[tap] = kernels.gradients(dout, x, weight[tap], dx, more=i > 0 or not covered)[0]
        return dy, dweight, *dsides, None, None, None

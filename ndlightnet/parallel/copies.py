"""Copies and sums of rows that do not follow each other. torch's kernels make them number by number on a GPU: rows of
whole numbers of 16 bytes are copied as such, which are fewer, and a kernel of ours adds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet_kernels import device_reason

DEVICES = ("cuda",)
ADDED = (torch.bfloat16, torch.float16, torch.float32)


def copy(x: Tensor, place: Tensor) -> None:
    """Copy x to `place`."""
    wide, place = _wide(x, place)
    place.copy_(wide)


def add(x: Tensor, place: Tensor, dim: int) -> None:
    """Add x to `place`, a part along `dim` of a larger tensor."""
    if _has_kernel(x, place):
        from ndlightnet_kernels import planes

        try:
            rows = planes.rows(x, dim), planes.rows(place, dim)
        except RuntimeError:  # no rows at one distance
            pass
        else:
            planes.add(*rows)
            return
    place.add_(x)


def _has_kernel(x: Tensor, place: Tensor) -> bool:
    if x.device.type not in DEVICES or x.numel() == 0 or not {x.dtype, place.dtype} <= {*ADDED}:
        return False
    if x.stride(-1) != 1 or place.stride(-1) != 1:
        return False
    return not torch.is_grad_enabled() and not device_reason(x.device)  # autograd does not see a kernel


def cat(parts: Sequence[Sequence[Tensor]], dim: int) -> Tensor:
    """Join tensors along `dim`, and these along the batch: torch.cat([torch.cat(xs, dim) for xs in parts])."""
    if torch.compiler.is_compiling():
        joined = [torch.cat(list(xs), dim) for xs in parts]
        return joined[0] if len(joined) == 1 else torch.cat(joined)
    out: Tensor = _Cat.apply(dim, len(parts), *(x for xs in parts for x in xs))  # type: ignore[no-untyped-call]
    return out


def split(x: Tensor, sizes: Sequence[int], dim: int, batches: Sequence[int]) -> Sequence[Sequence[Tensor]]:
    """Split the batch, and these parts along `dim`: [part.split(sizes, dim) for part in x.split(batches)]."""
    if torch.compiler.is_compiling():
        return [part.split(list(sizes), dim) for part in x.split(list(batches))]
    out: Sequence[Tensor] = _Split.apply(x, sizes, dim, batches)  # type: ignore[no-untyped-call]
    return [out[i : i + len(sizes)] for i in range(0, len(out), len(sizes))]


def _wide(*xs: Tensor) -> Sequence[Tensor]:
    """Return tensors as numbers of 16 bytes, if all of them allow it."""
    if torch.compiler.is_compiling() or not all(map(_whole, xs)):
        return xs
    return [x.view(torch.complex128) for x in xs]


def _whole(x: Tensor) -> bool:
    if x.device.type not in DEVICES or x.ndim == 0 or x.stride(-1) != 1:
        return False
    several = 16 // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.data_ptr() % 16 == 0 and all(step % several == 0 for step in steps)


class _Cat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, parts: int, *xs: Tensor) -> Tensor:
        count, shape = len(xs) // parts, list(xs[0].shape)
        ctx.dim, ctx.sizes, ctx.batches = dim, [x.shape[dim] for x in xs[:count]], [len(x) for x in xs[::count]]
        shape[0], shape[dim] = sum(ctx.batches), sum(ctx.sizes)
        out = xs[0].new_empty(shape)
        *wide, place = _wide(*xs, out)
        for i, rows in enumerate(place.split(ctx.batches)):
            torch.cat(wide[i * count : (i + 1) * count], dim, out=rows)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        grads = split(dout, ctx.sizes, ctx.dim, ctx.batches)
        return None, None, *(grad for part in grads for grad in part)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], dim: int, batches: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.dim, ctx.count = dim, len(sizes)
        return tuple(piece for part in x.split(list(batches)) for piece in part.split(list(sizes), dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts = [grads[i : i + ctx.count] for i in range(0, len(grads), ctx.count)]
        return cat(parts, ctx.dim), None, None, None

"""Copies of rows that do not follow each other. torch's kernels make them number by number on a
GPU: rows of whole numbers of 16 bytes are copied as such, which are fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cuda",)


def copy(x: Tensor, place: Tensor) -> None:
    """Copy x to `place`."""
    wide, place = _wide(x, place)
    place.copy_(wide)


def cat(xs: Sequence[Tensor], dim: int) -> Tensor:
    """Return torch.cat(xs, dim)."""
    if torch.compiler.is_compiling():
        return torch.cat(list(xs), dim)
    out: Tensor = _Cat.apply(dim, *xs)  # type: ignore[no-untyped-call]
    return out


def split(x: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Return x.split(sizes, dim)."""
    if torch.compiler.is_compiling():
        return x.split(list(sizes), dim)
    out: Sequence[Tensor] = _Split.apply(x, sizes, dim)  # type: ignore[no-untyped-call]
    return out


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
    def forward(ctx: Any, dim: int, *xs: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [x.shape[dim] for x in xs]
        wide = _wide(*xs)
        out = torch.cat(list(wide), dim)
        return out if wide is xs else out.view(xs[0].dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return None, *split(dout, ctx.sizes, ctx.dim)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(x.split(list(sizes), dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return cat(grads, ctx.dim), None, None

"""The orthogonal memory of LAVO, made from the mean of a context alone, and means over the past.

B: basis (memories r, dim), one per head, rows orthonormal.  H = B mean(context) in R^r. The memory
is r vectors H_i b_i; a query q attends to them:

    a = B q    w = softmax(scale * a * H)    y = B^T (w * H)

at cost r * dim per query. The r x dim memory itself is never formed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.recurrence.scan import prefix_sum


def _scores(q: Tensor, basis: Tensor, h: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return a, H and w of the queries in the accumulator's dtype, the basis in that of q."""
    acc, b = accumulator(q), basis.to(q.dtype)
    a = torch.einsum("bgmhd,hrd->bgmhr", q, b).to(acc)
    h = h.to(acc)[:, :, None]
    return a, h, (scale * a * h).softmax(-1), b


def _read(q: Tensor, basis: Tensor, h: Tensor, scale: float) -> Tensor:
    with exact(q):
        _, wide, w, b = _scores(q, basis, h, scale)
        return torch.einsum("bgmhr,hrd->bgmhd", (w * wide).to(q.dtype), b)


class _Read(torch.autograd.Function):
    """Autograd function of `memory_read`; saves its inputs and recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, basis: Tensor, h: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, basis, h)
        ctx.scale = scale
        return _read(q, basis, h, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, basis, amount), dy = ctx.saved_tensors, grads[0]
        with exact(q):
            a, h, w, b = _scores(q, basis, amount, ctx.scale)
            g = torch.einsum("bgmhd,hrd->bgmhr", dy, b).to(a.dtype)
            dw = g * h
            dz = ctx.scale * w * (dw - (w * dw).sum(-1, keepdim=True))
            dh = (g * w + dz * a).sum(2)
            da, wh = (dz * h).to(q.dtype), (w * h).to(q.dtype)
            dq = torch.einsum("bgmhr,hrd->bgmhd", da, b)
            dbasis = torch.einsum("bgmhr,bgmhd->hrd", wh, dy)
            dbasis = dbasis + torch.einsum("bgmhr,bgmhd->hrd", da, q)
        return dq, dbasis.to(basis.dtype), dh.to(amount.dtype), None


def amounts(basis: Tensor, mean: Tensor) -> Tensor:
    """Return H = B mean: basis (heads, memories, dim), mean (batch, groups, heads, dim) of contexts
    -> (batch, groups, heads, memories), in float32 at least. Its sum over the heads is the H of a
    basis over the channels of all heads, of which `basis` has those of each head."""
    heads, _, dim = basis.shape
    if mean.ndim != 4 or mean.shape[2:] != (heads, dim):
        raise ValueError(f"mean {tuple(mean.shape)}: expected (batch, groups, {heads}, {dim})")
    with exact(mean):
        acc = accumulator(mean)
        return torch.einsum("bghd,hrd->bghr", mean.to(acc), basis.to(acc))


def memory_read(q: Tensor, basis: Tensor, h: Tensor, scale: float | None = None) -> Tensor:
    """Read orthogonal memories with queries (LAVO, section 3.1).

    q: (batch, length, heads, dim). basis: (heads, memories, dim). h: H of the contexts (batch, groups, heads,
    memories), see `amounts`; groups divides length, and the first length / groups queries read the first memory, the
    next ones the second ... scale: default dim ** -0.5. The result has the shape and dtype of q; an H of 0 (no tokens)
    is read as 0. Raises ValueError where shapes do not fit.
    """
    batch, length, heads, dim = q.shape
    groups = h.shape[1]
    if basis.ndim != 3 or (basis.shape[0], basis.shape[2]) != (heads, dim):
        raise ValueError(f"basis {tuple(basis.shape)}: expected ({heads}, memories, {dim})")
    rows = basis.shape[1]
    if h.shape != (batch, groups, heads, rows) or (length % groups if groups else length):
        raise ValueError(
            f"h {tuple(h.shape)}: expected ({batch}, groups, {heads}, {rows}), with groups that divide length={length}"
        )
    if q.numel() == 0:
        return empty_result(q, basis, h)
    scale = dim**-0.5 if scale is None else scale
    run: Any = _read if plain() else _Read.apply
    y: Tensor = run(q.unflatten(1, (groups, -1)), basis, h, scale)
    return y.flatten(1, 2)


def token_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens: (batch, length, ...) -> (batch, ...) in float32 at least. mask:
    bool (batch, length), False = padding, which does not count; a mean over no tokens is 0."""
    if mask is None:
        return x.sum(1, dtype=accumulator(x)) / max(1, x.shape[1])
    view = (*mask.shape, *[1] * (x.ndim - 2))
    total = x.masked_fill(~mask.reshape(view), 0).sum(1, dtype=accumulator(x))
    return total / mask.reshape(view).sum(1).clamp(min=1)


class WindowSums(NamedTuple):
    """Sums over earlier frames, from which `past_means` continues; all zeros: no frames."""

    done: Tensor  # (batch, heads, dim): sum over the tokens of the complete windows
    pending: Tensor  # (batch, heads, dim): sum over those of the incomplete window
    frames: Tensor  # (batch,) int64: number of frames (-n: the next n frames do not count)


def past_means(
    x: Tensor, window: int | None, *, mask: Tensor | None = None, past: WindowSums | None = None
) -> tuple[Tensor, WindowSums]:
    """Return, for every frame, the mean over all tokens of earlier windows of frames.

    x: (batch, frames, tokens, heads, dim). window: frames in a window; frame f is in window
    f // window and gets the mean over the windows before that one. None: the mean over all frames up to itself. mask:
    bool (batch, frames, tokens), False = padding, which does not count. A mean over no tokens is 0, and leading frames
    of padding are in no window. past: WindowSums of the frames before the first one, which had no padding.

    Returns means (batch, frames, heads, dim) and WindowSums, both in float32 at least.
    """
    batch, frames, tokens, heads, dim = x.shape
    index = torch.arange(frames, device=x.device)
    if mask is not None:
        x = x.masked_fill(~mask[..., None, None], 0)
    sums = x.sum(2, dtype=accumulator(x))
    if past is None:
        nothing, start = sums.new_zeros(batch, heads, dim), index.new_zeros(batch)
        if mask is not None and frames:
            start = -mask.any(2).int().argmax(1)
        past = WindowSums(nothing, nothing, start)
    before = past.frames[:, None]
    size = window or 1

    def until(sums: Tensor, end: Tensor) -> Tensor:
        """Return the sum of the first `end` frames from prefix sums (batch, frames, heads, dim)."""
        at = (end.clamp(min=1) - 1)[..., None, None].expand(-1, -1, *sums.shape[2:])
        return torch.where((end > 0)[..., None, None], sums.gather(1, at), 0)

    def total(sums: Tensor, end: Tensor) -> Tensor:
        open_too = (end >= 0)[..., None, None]  # the incomplete window is complete by then
        inside = torch.where(open_too, past.pending[:, None] + until(sums, end), 0)
        return past.done[:, None] + inside

    # start of each frame's window, counted from the first frame of x; `last`: of the frame after x
    ends = (before + index + (window is None)) // size * size - before
    last = (before + frames) // size * size - before
    if frames == 0:
        return sums, past
    prefix = prefix_sum(sums)
    if mask is None:
        count = (before + ends) * tokens
    else:
        real = mask.sum(2).cumsum(1)[..., None, None]
        count = (before.clamp(min=0) + ends.clamp(max=0)) * tokens + until(real, ends)[..., 0, 0]
    means = total(prefix, ends) / count.clamp(min=1)[..., None, None]
    late = (index >= last)[..., None, None]
    pending = torch.where((last < 0)[..., None], past.pending, 0) + (sums * late).sum(1)
    return means, WindowSums(total(prefix, last)[:, 0], pending, past.frames + frames)

"""Taps of MD-TPE's Toeplitz products, computed from coefficients and decays, and their gradients.

taps[axis, c, span + lag] = sum_t coef[axis, c, t] lambda_t^lag; for lag < 0 with the coefficients
and decays of the reverse direction, and -lag. The reverse direction may belong to the last axes only.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, power_of_2


@triton.jit
def _powers(log_decay, lag, t, states):
    """Return lambda_t^lag as [states, lags]; 0 where lag < 0 or t is beyond the last state."""
    log = tl.load(log_decay + t, mask=t < states, other=0.0)[:, None] * 1.4426950408889634
    # avoids 0 * -inf: a decay of 0 still has lambda^0 = 1
    power = tl.exp2(tl.where(lag[None] > 0, log * lag[None], 0.0))
    return tl.where((lag[None] >= 0) & (t < states)[:, None], power, 0.0)


@triton.jit(do_not_specialize=["span", "states", "skip"])
def _taps_kernel(
    coef,
    log_decay,
    rcoef,
    rlog_decay,
    taps,
    dim,
    states,
    span,
    skip,
    LAGS: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    TWO_WAY: tl.constexpr,
):
    """Compute taps[axis, c, span + lag] for -span <= lag < span. skip: axes without a
    reverse direction."""
    axis = tl.program_id(2)
    c = tl.program_id(1) * C + tl.arange(0, C)
    lag = tl.program_id(0) * LAGS + tl.arange(0, LAGS) - span
    acc = tl.zeros((C, LAGS), tl.float32)
    for start in range(0, states, E):
        t = start + tl.arange(0, E)
        at = (axis * dim + c)[:, None] * states + t[None]
        ok = (c < dim)[:, None] & (t < states)[None]
        power = _powers(log_decay + axis * states, lag, t, states)
        acc = tl.dot(tl.load(coef + at, mask=ok, other=0.0), power, acc, input_precision="ieee")
        if TWO_WAY:  # lag 0 counts once, with the forward weights
            back = tl.where((lag < 0) & (axis >= skip), -lag, -1)
            power = _powers(rlog_decay + tl.maximum(axis - skip, 0) * states, back, t, states)
            at -= skip * dim * states
            weight = tl.load(rcoef + at, mask=ok & (axis >= skip), other=0.0)
            acc = tl.dot(weight, power, acc, input_precision="ieee")
    at = (axis * dim + c)[:, None].to(tl.int64) * (2 * span) + (lag + span)[None]
    tl.store(taps + at, acc.to(taps.dtype.element_ty), mask=(c < dim)[:, None])


@triton.jit(do_not_specialize=["nb", "splits", "span", "least"])
def _fold_kernel(sums, dtaps, dim, nb, splits, span, least, C: tl.constexpr):
    """Add to dtaps[c, span + lag], 16 lags a program, the sum over splits and diagonals of `sums`
    (split, tile d, row l, column m, c), where an entry has lag 16 (d - nb) + l - m."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    b = tl.arange(0, 16)
    m = tl.arange(0, 8)
    lag = (tl.program_id(1) - nb) * 16 + b
    end = m[None] + lag[:, None]
    d = (end >> 4) + nb
    at = (d * 128 + (end & 15) * 8 + m[None])[:, :, None].to(tl.int64) * dim + c
    ok = ((d >= least) & (d < 2 * nb))[:, :, None] & (c < dim)
    total = tl.zeros((16, C), tl.float32)
    for split in tl.range(splits, loop_unroll_factor=4):  # few programs, whose loads are under way together
        page = (split * (2 * nb)).to(tl.int64) * (128 * dim)
        total += tl.sum(tl.load(sums + page + at, mask=ok, other=0.0), 1)
    to = dtaps + c[None] * (2 * span) + span + lag[:, None]
    tl.store(to, total + tl.load(to, mask=(c < dim)[None]), mask=(c < dim)[None])


@triton.jit(do_not_specialize=["states", "span"])
def _weights_grad_kernel(
    dtaps, coef, log_decay, dcoef, dlog, dim, states, span, WAY: tl.constexpr, C: tl.constexpr, E: tl.constexpr
):
    """Compute dcoef and, per block of channels, dlog_decay from dtaps [axis, dim, 2 span]."""
    axis = tl.program_id(1)
    c = tl.program_id(0) * C + tl.arange(0, C)
    t = tl.program_id(2) * E + tl.arange(0, E)
    grad = tl.zeros((C, E), tl.float32)
    slope = tl.zeros((C, E), tl.float32)
    for start in range(0, span, 16):
        reach = start + tl.arange(0, 16)
        at = (axis * dim + c)[:, None] * (2 * span) + span + (-reach if WAY else reach)[None]
        taps = tl.load(dtaps + at, mask=(c < dim)[:, None], other=0.0)
        # lag 0 belongs to the forward direction
        power = _powers(log_decay + axis * states, tl.where(reach < WAY, -1, reach), t, states)
        power = tl.trans(power)
        grad = tl.dot(taps, power, grad, input_precision="ieee")
        slope = tl.dot(taps, power * reach[:, None], slope, input_precision="ieee")
    at = (axis * dim + c)[:, None] * states + t[None]
    ok = (c < dim)[:, None] & (t < states)[None]
    tl.store(dcoef + at, grad, mask=ok)
    slope = tl.sum(slope * tl.load(coef + at, mask=ok, other=0.0), 0)
    tl.store(dlog + (axis * tl.num_programs(0) + tl.program_id(0)) * states + t, slope, mask=t < states)


def taps(x: Tensor, span: int, weights: list[Tensor | None], products: torch.dtype) -> Tensor:
    """Return the taps (axes, dim, 2 span), in the dtype of the products' operands."""
    coef, log_decay, rcoef, rlog_decay = weights
    assert coef is not None
    axes, dim, states = coef.shape
    out = torch.empty(axes, dim, 2 * span, dtype=products, device=x.device)
    skip, grid = axes if rcoef is None else axes - len(rcoef), (2 * span // 32, cdiv(dim, 16), axes)
    sizes = {"dim": dim, "states": states, "span": span, "skip": skip}
    launch = remembered(
        ("taps", x.device, products, grid, dim, states, skip),
        lambda: Launch(_taps_kernel, grid, **sizes, LAGS=32, C=16, E=16, TWO_WAY=skip < axes),
    )
    launch(coef, log_decay, rcoef, rlog_decay, out)
    return out


def fold(sums: Tensor, dtaps: Tensor, span: int, ways: int) -> None:
    """Add to the gradient of an axis' taps (dim, 2 span) what follows from `sums` (splits, 2 nb, 16, 8, dim)."""
    splits, nb, dim = sums.shape[0], sums.shape[1] // 2, sums.shape[-1]
    least = 0 if ways == 2 else nb
    launch = remembered(
        ("fold", sums.device, dim, nb, splits, span, least),
        lambda: Launch(
            _fold_kernel, (cdiv(dim, 32), 2 * nb), dim=dim, nb=nb, splits=splits, span=span, least=least, C=32
        ),
    )
    launch(sums, dtaps)


def weights_grad(dtaps: Tensor, weights: list[Tensor | None], span: int) -> list[Tensor | None]:
    """Return the gradients of the weights from dtaps (axes, dim, 2 span)."""
    grads: list[Tensor | None] = []
    for way in range(2):
        coef, log_decay = weights[2 * way : 2 * way + 2]
        if coef is None or log_decay is None:
            grads += [None, None]
            continue
        axes, dim, states = coef.shape
        each = min(64, max(16, power_of_2(states)))
        dcoef = torch.empty_like(coef)
        dlog = torch.empty(axes, cdiv(dim, 16), states, device=coef.device)
        grid = (dlog.shape[1], axes, cdiv(states, each))
        launch = remembered(
            ("weights", coef.device, grid, dim, states, span, way),
            partial(Launch, _weights_grad_kernel, grid, dim=dim, states=states, span=span, WAY=way, C=16, E=each),
        )
        launch(dtaps[-axes:], coef, log_decay, dcoef, dlog)
        grads += [dcoef, dlog.sum(1)]
    return grads

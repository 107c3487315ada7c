"""MD-TPE on tensor cores: per channel and axis a Toeplitz product with taps made from the states.

y[l] = sum_m T[c, l - m] x[m],   T[c, lag] = sum_t coef[c, t] lambda_t^lag  (reverse: lag < 0)

A line is one dense product, whose cost depends neither on the number of states nor on the
direction; dx is the product with the taps flipped. It is so little work that moving x is what
takes time, so everything here is about that: a program keeps the taps of C channels in registers
and walks over tiles of 8 or 16 lines; a lane loads 16 bytes of neighbouring channels, and channels
become the batch of a tl.dot by 2-byte transposing moves through shared memory (stmatrix, ldmatrix).
"""

# mypy: disable-error-code="assignment, var-annotated"
# (a jit function builds its tuples of tensors piece by piece)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 128  # lines up to here are one dense product
# By blocks of 16 tokens in a line: channels per warp, warps, programs per multiprocessor, registers
# By blocks of 16 tokens in a line: channels per warp, warps, programs per multiprocessor,
# registers (0: as many as it takes), stages of loads in flight
PRODUCT = {1: (4, 8, 3, 0, 3), 2: (4, 8, 2, 128, 3), 4: (2, 16, 1, 0, 3), 8: (2, 16, 1, 0, 2)}
CORRELATE = {1: (4, 8, 2, 0, 3), 2: (4, 8, 1, 0, 3), 4: (2, 8, 1, 0, 3), 8: (2, 8, 1, 0, 2)}
FULL = (2, 8, 1, 0, 1)  # float32
SIZES = ["lines", "n", "inner", "outer"]


@triton.jit
def _along(i: tl.constexpr, size: tl.constexpr):
    """0 .. size - 1 along dimension i of 5: lanes (4, 8), warps, registers (2).

    Triton spreads a loaded tensor over these in this order, and a dot wants pairs of the summed
    index on 4 lanes, rows on 8: what is loaded this way is an operand as it stands.
    """
    v = tl.arange(0, size)
    for _ in tl.static_range(i):
        v = tl.expand_dims(v, 0)
    for _ in tl.static_range(4 - i):
        v = tl.expand_dims(v, -1)
    return v


@triton.jit
def _channels_first(v, VEC: tl.constexpr, W: tl.constexpr):
    """[a, b, channels] -> [channels, a, b]; entry i of a batched dot belongs to warp i % W.

    In this order a warp's channels are neighbours in memory, so that they pass through shared
    memory in wide words.
    """
    v = v.reshape(v.shape[0], v.shape[1], W, VEC).permute(3, 2, 0, 1)
    return v.reshape(VEC * W, v.shape[2], v.shape[3])


@triton.jit
def _first(line, inner, outer):
    """First token of a line."""
    return (line // inner).to(tl.int64) * outer + line % inner


@triton.jit
def _powers(log_decay, lag, t, states):
    """lambda_t^lag, 0 where lag < 0 or there is no such state: [states, lags]."""
    log = tl.load(log_decay + t, mask=t < states, other=0.0)[:, None] * 1.4426950408889634
    # 0 * -inf: a decay of 0 still has lambda^0 = 1
    power = tl.exp2(tl.where(lag[None] > 0, log * lag[None], 0.0))
    return tl.where((lag[None] >= 0) & (t < states)[:, None], power, 0.0)


@triton.jit(do_not_specialize=["span", "states"])
def _taps_kernel(
    coef, log_decay, rcoef, rlog_decay, taps, dim, states, span,
    LAGS: tl.constexpr, C: tl.constexpr, E: tl.constexpr, TWO_WAY: tl.constexpr,
):  # fmt: skip
    """taps[axis, c, span + lag] for -span <= lag < span."""
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
            back = tl.where(lag < 0, -lag, -1)
            power = _powers(rlog_decay + axis * states, back, t, states)
            acc = tl.dot(
                tl.load(rcoef + at, mask=ok, other=0.0), power, acc, input_precision="ieee"
            )
    at = (axis * dim + c)[:, None].to(tl.int64) * (2 * span) + (lag + span)[None]
    tl.store(taps + at, acc.to(taps.dtype.element_ty), mask=(c < dim)[:, None])


@triton.jit(do_not_specialize=["span", "flip", *SIZES])
def _product_kernel(
    x, y, mask, taps, units, span, flip, lines, n, inner, outer,
    NB: tl.constexpr, L: tl.constexpr, VEC: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr,
    WAY: tl.constexpr, ADD: tl.constexpr, RESIDUAL: tl.constexpr,
    MASK_IN: tl.constexpr, MASK_OUT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = (y if ADD) + (x if RESIDUAL) + T along one axis, with flip = -1 its transpose."""
    C: tl.constexpr = VEC * W
    dim = units * UNIT
    blocks = tl.cdiv(dim, C)
    first_channel = tl.program_id(0) % blocks * C
    # A block of 16 x 16 taps is 2 x 2 blocks of 8 x 8, which are shared between distances.
    i4, i8, pair = _along(0, 4), _along(1, 8), _along(3, 2)
    if PRECISION == "tf32":
        lag = (i8 - 2 * i4 - pair) * flip
    else:
        lag = (i8 - i4 - 4 * pair) * flip
    c = first_channel + _along(2, W) * VEC + _along(4, VEC)
    eighths = ()
    for d in tl.static_range(1 - 2 * NB, 2 * NB):
        tap = tl.load(taps + c * (2 * span) + span + lag + 8 * d * flip, mask=c < dim, other=0.0)
        if PRECISION == "tf32":
            tap = tap.permute(4, 2, 1, 0, 3)
        else:
            tap = tap.permute(4, 2, 1, 3, 0)
        eighths += (tap.reshape(C, 1, 8, 1, 8).to(OPERAND),)
    half = tl.arange(0, 2)
    side = (half[:, None] - half[None]).reshape(1, 2, 1, 2, 1)

    r, q = tl.arange(0, 16)[:, None], tl.arange(0, L)[None]
    c = first_channel + tl.arange(0, C)
    for tile in range(tl.program_id(0) // blocks, tl.cdiv(lines, L), tl.num_programs(0) // blocks):
        line = tile * L + q
        first = _first(line, inner, outer)
        xs = ()
        for j in tl.static_range(NB):
            row = 16 * j + r
            ok = (row < n) & (line < lines)
            at = first + row.to(tl.int64) * inner
            if MASK_IN:
                ok = ok & (tl.load(mask + at, mask=ok, other=0) != 0)
            v = tl.load(x + (at[:, :, None] * dim + c), mask=ok[:, :, None] & (c < dim), other=0.0)
            xs += (_channels_first(v, VEC, W).to(OPERAND),)
        ys = ()
        if ADD:  # all at once, before the first is needed
            for i in tl.static_range(NB):
                row = 16 * i + r
                ok = ((row < n) & (line < lines))[:, :, None] & (c < dim)
                at = (first + row.to(tl.int64) * inner)[:, :, None] * dim + c
                ys += (tl.load(y + at, mask=ok, other=0.0),)
        for i in tl.static_range(NB):
            acc = tl.zeros((C, 16, L), tl.float32)
            for j in tl.static_range(NB):
                if WAY == 0 or (i - j) * WAY >= 0:
                    off = tl.where(
                        side > 0, eighths[2 * (i - j + NB)], eighths[2 * (i - j + NB - 1)]
                    )
                    block = tl.where(side == 0, eighths[2 * (i - j + NB) - 1], off)
                    acc = tl.dot(block.reshape(C, 16, 16), xs[j], acc, input_precision=PRECISION)
            # rounded now: 2-byte values change lanes by stmatrix and ldmatrix
            out = acc.to(y.dtype.element_ty).reshape(VEC, W, 16, L).permute(2, 3, 1, 0)
            out = out.reshape(16, L, C).to(tl.float32)
            row = 16 * i + r
            ok = (row < n) & (line < lines)
            at = first + row.to(tl.int64) * inner
            if MASK_OUT:
                out = tl.where((tl.load(mask + at, mask=ok, other=0) != 0)[:, :, None], out, 0.0)
            at, ok = at[:, :, None] * dim + c, ok[:, :, None] & (c < dim)
            if RESIDUAL:
                out += tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
            if ADD:
                out += ys[i].to(tl.float32)
            tl.store(y + at, out.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=SIZES)
def _correlate_kernel(
    dy, x, mask, out, units, lines, n, inner, outer,
    NB: tl.constexpr, VEC: tl.constexpr, W: tl.constexpr, UNIT: tl.constexpr,
    WAY: tl.constexpr, MASK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of the taps: out[part, d, l, m, c] = sum over i - j = d of dy[i, l] x[j, m]."""
    C: tl.constexpr = VEC * W
    dim = units * UNIT
    blocks = tl.cdiv(dim, C)
    part = tl.program_id(0) // blocks
    r, q = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None]
    c = tl.program_id(0) % blocks * C + tl.arange(0, C)
    sums = ()
    for _ in tl.static_range(2 * NB - 1):
        sums += (tl.zeros((C, 16, 16), tl.float32),)
    for tile in range(part, tl.cdiv(lines, 16), tl.num_programs(0) // blocks):
        line = tile * 16 + q
        first = _first(line, inner, outer)
        xs = ()
        for j in tl.static_range(NB):
            row = 16 * j + r
            ok = (row < n) & (line < lines)
            at = first + row.to(tl.int64) * inner
            if MASK:
                ok = ok & (tl.load(mask + at, mask=ok, other=0) != 0)
            v = tl.load(x + (at[:, :, None] * dim + c), mask=ok[:, :, None] & (c < dim), other=0.0)
            xs += (_channels_first(v, VEC, W).permute(0, 2, 1).to(OPERAND),)
        for i in tl.static_range(NB):
            row = 16 * i + r
            ok = ((row < n) & (line < lines))[:, :, None] & (c < dim)
            at = first + row.to(tl.int64) * inner
            g = tl.load(dy + (at[:, :, None] * dim + c), mask=ok, other=0.0)
            g = _channels_first(g, VEC, W).to(OPERAND)
            new = ()
            for d in tl.static_range(1 - NB, NB):
                s = sums[d + NB - 1]
                if i - d >= 0 and i - d < NB and (WAY == 0 or d * WAY >= 0):
                    s = tl.dot(g, xs[i - d], s, input_precision=PRECISION)
                new += (s,)
            sums = new
    at = part.to(tl.int64) * ((2 * NB - 1) * 256 * dim) + (r * 16 + q)[:, :, None] * dim + c
    for d in tl.static_range(2 * NB - 1):
        v = sums[d].reshape(VEC, W, 16, 16).permute(2, 3, 1, 0).reshape(16, 16, C)
        if WAY == 0 or (d - NB + 1) * WAY >= 0:
            tl.store(out + at + d * 256 * dim, v, mask=c < dim)


@triton.jit(do_not_specialize=["nb", "parts", "span", "least"])
def _fold_kernel(sums, dtaps, dim, nb, parts, span, least, C: tl.constexpr):
    """dtaps[c, span + lag], 16 lags a program: the sum over parts and diagonals of `sums`."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    b = tl.arange(0, 16)
    lag = (tl.program_id(1) - nb) * 16 + b
    end = b[None] + lag[:, None]  # = 16 d + l for m = b
    d = (end >> 4) + nb - 1
    at = (d * 256 + (end & 15) * 16 + b[None])[:, :, None].to(tl.int64) * dim + c
    ok = ((d >= least) & (d < 2 * nb - 1))[:, :, None] & (c < dim)
    total = tl.zeros((16, C), tl.float32)
    for part in range(parts):
        page = (part * (2 * nb - 1)).to(tl.int64) * (256 * dim)
        total += tl.sum(tl.load(sums + page + at, mask=ok, other=0.0), 1)
    at = c[None] * (2 * span) + span + lag[:, None]
    tl.store(dtaps + at, total, mask=(c < dim)[None])


@triton.jit(do_not_specialize=["states", "span"])
def _weights_grad_kernel(
    dtaps, coef, log_decay, dcoef, dlog, dim, states, span, WAY: tl.constexpr,
    C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """From dtaps [axis, dim, 2 span] to dcoef and, per block of channels, dlog_decay."""
    axis = tl.program_id(1)
    c = tl.program_id(0) * C + tl.arange(0, C)
    t = tl.program_id(2) * E + tl.arange(0, E)
    grad = tl.zeros((C, E), tl.float32)
    slope = tl.zeros((C, E), tl.float32)
    for start in range(0, span, 16):
        reach = start + tl.arange(0, 16)
        at = (axis * dim + c)[:, None] * (2 * span) + span + (-reach if WAY else reach)[None]
        taps = tl.load(dtaps + at, mask=(c < dim)[:, None], other=0.0)
        # lag 0 belongs to the forward way
        power = _powers(log_decay + axis * states, tl.where(reach < WAY, -1, reach), t, states)
        power = tl.trans(power)
        grad = tl.dot(taps, power, grad, input_precision="ieee")
        slope = tl.dot(taps, power * reach[:, None], slope, input_precision="ieee")
    at = (axis * dim + c)[:, None] * states + t[None]
    ok = (c < dim)[:, None] & (t < states)[None]
    tl.store(dcoef + at, grad, mask=ok)
    slope = tl.sum(slope * tl.load(coef + at, mask=ok, other=0.0), 0)
    tl.store(
        dlog + (axis * tl.num_programs(0) + tl.program_id(0)) * states + t, slope, mask=t < states
    )


class _Walk(NamedTuple):
    """How programs walk over the lines of one axis: runtime sizes and compile-time ones."""

    sizes: tuple[int, ...]
    constants: dict[str, Any]
    grid: tuple[int]
    parts: int


def _longest(x: Tensor) -> int:
    return LONGEST if x.element_size() == 2 else LONGEST // 2


def _blocks(x: Tensor, axis: int) -> int:
    """Blocks of 16 tokens in a line: a power of two, so that few kernels serve all lengths."""
    return triton.next_power_of_2(triton.cdiv(x.shape[1 + axis], 16))


def _span(x: Tensor) -> int:
    return 16 * max(_blocks(x, a) for a in range(x.ndim - 2))


def _walk(x: Tensor, axis: int, width: int, config: tuple[int, ...]) -> _Walk:
    """A program takes `width` lines at a time."""
    shape, nb = x.shape[:-1], _blocks(x, axis)
    vec, warps, per_sm, registers, stages = config
    n, inner = shape[1 + axis], shape[2 + axis :].numel()
    lines = shape.numel() // n
    channels = triton.cdiv(x.shape[-1], vec * warps)
    parts = min(triton.cdiv(lines, width), max(1, per_sm * _processors(x) // channels))
    unit = next(u for u in (8, 4, 2, 1) if x.shape[-1] % u == 0)
    constants = {
        "NB": nb, "VEC": vec, "W": warps, "UNIT": unit, "num_warps": warps, "num_stages": stages,
        **_operand(x), **({"maxnreg": registers} if registers else {}),
    }  # fmt: skip
    sizes = (x.shape[-1] // unit, lines, n, inner, n * inner)
    return _Walk(sizes, constants, (channels * parts,), parts)


def _processors(x: Tensor) -> int:
    if not x.is_cuda:
        return 2
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def _operand(x: Tensor) -> dict[str, Any]:
    """What tensor cores multiply: the type of x. (The interpreter cannot multiply bfloat16.)"""
    if x.dtype == torch.float32 or not x.is_cuda:
        return {"OPERAND": tl.float32, "PRECISION": "tf32x3"}
    bf16 = x.dtype == torch.bfloat16
    return {"OPERAND": tl.bfloat16 if bf16 else tl.float16, "PRECISION": "tf32"}


def _taps(
    x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None, rlog_decay: Tensor | None
) -> Tensor:
    """(axes, dim, 2 span), in the dtype of x: it is what tensor cores multiply."""
    axes, dim, states = coef.shape
    span = _span(x)
    taps = torch.empty(axes, dim, 2 * span, dtype=x.dtype, device=x.device)
    _taps_kernel[(2 * span // 32, triton.cdiv(dim, 16), axes)](
        coef, log_decay, rcoef, rlog_decay, taps, dim, states, span,
        LAGS=32, C=16, E=16, TWO_WAY=rcoef is not None,
    )  # fmt: skip
    return taps


def _product(
    x: Tensor, weights: list[Any], mask: Tensor | None, residual: bool, flip: bool
) -> Tensor:
    """The sum over axes; flip: of the transposed products, which make dx of dy."""
    taps, two_way = _taps(x, *weights), weights[2] is not None
    y = torch.empty_like(x)
    for axis in range(x.ndim - 2):
        config = FULL if x.element_size() == 4 else PRODUCT[_blocks(x, axis)]
        walk = _walk(x, axis, 8, config)
        _product_kernel[walk.grid](
            x, y, mask, taps[axis], walk.sizes[0], taps.shape[-1] // 2, -1 if flip else 1,
            *walk.sizes[1:], **walk.constants, L=8, WAY=0 if two_way else -1 if flip else 1,
            ADD=axis > 0, RESIDUAL=residual and axis == 0,
            MASK_IN=mask is not None and not flip, MASK_OUT=mask is not None and flip,
        )  # fmt: skip
    return y


def supported(x: Tensor) -> str:
    """Why the kernels do not take these tensors; empty if they do."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{x.dtype}: expected float32, bfloat16 or float16"
    if max(x.shape[1:-1]) > _longest(x):
        return f"lines of {max(x.shape[1:-1])} tokens: expected at most {_longest(x)}"
    return ""


def forward(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    rcoef: Tensor | None = None,
    rlog_decay: Tensor | None = None,
    mask: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """x (batch, *grid, dim), coef (axes, dim, states), log_decay (axes, states), mask (batch,
    *grid) bool -> like x: the sum over axes, plus x itself if `residual`."""
    x, mask, weights = _prepare(x, mask, coef, log_decay, rcoef, rlog_decay)
    if x.numel() == 0:
        return torch.empty_like(x)
    return _product(x, weights, mask, residual, flip=False)


def backward(
    dy: Tensor,
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    rcoef: Tensor | None = None,
    rlog_decay: Tensor | None = None,
    mask: Tensor | None = None,
    residual: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, coef, log_decay, rcoef, rlog_decay."""
    x, mask, weights = _prepare(x, mask, coef, log_decay, rcoef, rlog_decay)
    coef, log_decay, rcoef, rlog_decay = weights
    ways = 1 if rcoef is None else 2
    if x.numel() == 0:
        zeros: list[Any] = [None if w is None else torch.zeros_like(w) for w in weights]
        return torch.empty_like(x), zeros[0], zeros[1], zeros[2], zeros[3]
    dy = dy.contiguous()
    dx = _product(dy, weights, mask, residual, flip=True)
    axes, dim, states = coef.shape
    span = _span(x)
    dtaps = torch.zeros(axes, dim, 2 * span, device=x.device)
    for axis in range(axes):
        nb = _blocks(x, axis)
        walk = _walk(x, axis, 16, FULL if x.element_size() == 4 else CORRELATE[nb])
        sums = torch.empty(walk.parts, 2 * nb - 1, 16, 16, dim, device=x.device)
        both = [1, -1] if nb == 8 else [0]  # sums that do not fit into registers together
        for way in both if ways == 2 else [1]:
            _correlate_kernel[walk.grid](
                dy, x, mask, sums, *walk.sizes, **walk.constants, WAY=way, MASK=mask is not None,
            )  # fmt: skip
        least = 0 if ways == 2 else nb - 1
        _fold_kernel[(triton.cdiv(dim, 32), 2 * nb)](
            sums, dtaps[axis], dim, nb, walk.parts, span, least, C=32
        )
    grads: list[Any] = []
    each = min(64, max(16, triton.next_power_of_2(states)))
    for way in range(ways):
        dcoef = torch.empty_like(coef)
        dlog = torch.empty(axes, triton.cdiv(dim, 16), states, device=x.device)
        _weights_grad_kernel[(dlog.shape[1], axes, triton.cdiv(states, each))](
            dtaps, weights[2 * way], weights[2 * way + 1], dcoef, dlog, dim, states, span,
            WAY=way, C=16, E=each,
        )  # fmt: skip
        grads += [dcoef, dlog.sum(1)]
    grads += [None] * (4 - len(grads))
    return dx, grads[0], grads[1], grads[2], grads[3]


def _prepare(
    x: Tensor, mask: Tensor | None, *weights: Tensor | None
) -> tuple[Tensor, Tensor | None, list[Any]]:
    """Kernels walk over contiguous tokens; the weights are small."""
    return (
        x.contiguous(),
        None if mask is None else mask.contiguous().view(torch.uint8),
        [None if w is None else w.float().contiguous() for w in weights],
    )

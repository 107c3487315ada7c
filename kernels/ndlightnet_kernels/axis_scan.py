"""MD-TPE on tensor cores: for each channel and axis a Toeplitz product with taps from the states.

y[l] = sum_m T[c, l - m] x[m],   T[c, lag] = sum_t coef[c, t] lambda_t^lag  (reverse: lag < 0)

A line (the tokens along an axis) is one dense product, whose cost depends neither on the number of
states nor on the direction; dx is the product with the flipped taps. The products cost so little
that moving x takes most of the time, so the kernels minimise that. A tile is read as it lies in
memory, passes through shared memory once, in words of VEC channels of a token, and becomes the
operands of a batch of products, VEC channels to a warp. A Toeplitz matrix stays in registers: its
blocks of 8 x 8, one for each distance.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels import axis_lines, axis_states, axis_taps
from ndlightnet_kernels.axis_lines import Lines, Tables
from ndlightnet_kernels.axis_states import KINDS, States
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, processors

LONGEST = 128  # tokens of the longest line that is one dense product, in 16 bits; half as many in float32
# Plans for 16-bit products of 16-bit tokens and of float32 ones, and for float32 products, by blocks of 16 tokens in a
# line: channels of a warp, warps, programs per multiprocessor, stages of loads in flight. Measured on an H200, but not
# for 1 block.
PRODUCT = {"16": {1: (4, 8, 2, 3), 2: (4, 8, 2, 3), 4: (4, 8, 1, 2), 8: (2, 8, 1, 1)}}
PRODUCT["mixed"] = {**PRODUCT["16"], 8: (1, 8, 2, 2)}
PRODUCT["32"] = {1: (4, 4, 2, 1), 2: (2, 8, 1, 1), 4: (2, 4, 2, 1)}
CORRELATE = {"16": {1: (8, 4, 2, 1), 2: (8, 4, 2, 1), 4: (4, 4, 2, 2), 8: (2, 4, 2, 2)}}
CORRELATE["mixed"] = {**CORRELATE["16"], 8: (1, 4, 3, 2)}
CORRELATE["32"] = {1: (4, 4, 2, 1), 2: (2, 4, 2, 2), 4: (1, 4, 3, 2)}
INTS = ["span", "flip", *axis_lines.INTS]


# Triton spreads the dimensions of a tensor over lanes, warps and registers in turn: up to 3.6 from
# the first dimension, since then from the last. Taps are loaded so that 4 and 8 lanes hold what an
# operand of a product needs there; else a whole Toeplitz matrix would go through shared memory.
LAST = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 7)
LANES4, LANES8 = tl.constexpr(4 if LAST else 0), tl.constexpr(3 if LAST else 1)
PAIR, CHANNEL = tl.constexpr(1 if LAST else 3), tl.constexpr(0 if LAST else 4)


@triton.jit
def _along(i: tl.constexpr, size: tl.constexpr, rank: tl.constexpr):
    """Return 0 .. size - 1 along dimension i of `rank` dimensions."""
    v = tl.arange(0, size)
    for _ in tl.static_range(i):
        v = tl.expand_dims(v, 0)
    for _ in tl.static_range(rank - 1 - i):
        v = tl.expand_dims(v, -1)
    return v


@triton.jit
def _channels_first(v, VEC: tl.constexpr, W: tl.constexpr, OPERAND: tl.constexpr):
    """Move channels first: [a, b, channels] -> [channels, a, b]. Entry i of a batched product
    belongs to warp i % W; in this order a warp's channels are neighbours in memory."""
    v = v.reshape(v.shape[0], v.shape[1], W, VEC).permute(3, 2, 0, 1)
    return v.reshape(VEC * W, v.shape[2], v.shape[3]).to(OPERAND)


@triton.jit
def _toeplitz(taps, span, flip, first_channel, dim, NB, VEC, W, OPERAND):
    """Return T of some channels, [channels, 16 NB, 16 NB]; with flip = -1 its transpose."""
    N: tl.constexpr = 2 * NB
    row, lane, pair = _along(LANES8, 8, 5), _along(LANES4, 4, 5), _along(PAIR, 2, 5)
    if tl.float32 == OPERAND:
        lag = (row - lane - 4 * pair) * flip
    else:
        lag = (row - 2 * lane - pair) * flip
    c = first_channel + _along(2, W, 5) * VEC + _along(CHANNEL, VEC, 5)
    block = tl.arange(0, N)
    distance = (block[:, None] - block[None]).reshape(1, N, 1, N, 1)
    out = tl.zeros((VEC * W, N, 8, N, 8), OPERAND)
    for d in tl.static_range(1 - N, N):
        tap = tl.load(taps + c * (2 * span) + span + lag + 8 * d * flip, mask=c < dim, other=0.0)
        if tl.float32 == OPERAND:
            tap = tap.permute(CHANNEL, 2, LANES8, PAIR, LANES4)
        else:
            tap = tap.permute(CHANNEL, 2, LANES8, LANES4, PAIR)
        # decided at compile time: entries at one distance share their registers
        out = tl.where(distance == d, tap.reshape(VEC * W, 1, 8, 1, 8).to(OPERAND), out)
    return out.reshape(VEC * W, 8 * N, 8 * N)


@triton.jit(do_not_specialize=INTS)
def _product_kernel(
    x,
    y,
    mask,
    table,
    taps,
    units,
    span,
    flip,
    lines,
    n,
    inner,
    outer,
    tiles,
    NB: tl.constexpr,
    VEC: tl.constexpr,
    W: tl.constexpr,
    UNIT: tl.constexpr,
    LONG: tl.constexpr,
    CUT: tl.constexpr,
    ADD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MASK_IN: tl.constexpr,
    MASK_OUT: tl.constexpr,
    ROUND: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = (y if ADD) + (x if RESIDUAL) + T x along one axis, 8 lines at a time."""
    C: tl.constexpr = VEC * W
    dim = units * UNIT
    blocks = tl.cdiv(dim, C)
    first_channel = tl.program_id(0) % blocks * C
    t = _toeplitz(taps, span, flip, first_channel, dim, NB, VEC, W, OPERAND)
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    shape = (lines, n, inner, outer, tiles)
    c = (first_channel + tl.arange(0, C))[None, None]
    r, q = tl.arange(0, 16 * NB)[:, None, None], tl.arange(0, 8)[None, :, None]
    first, step = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    old = tl.zeros((16 * NB, 8, C), y.dtype.element_ty)
    if ADD:
        at, in_range = axis_lines.tokens(table, first * 8 + q, r, shape, INT, CUT)
        old = tl.load(y + at * dim + c, mask=in_range & (c < dim), other=0.0)
    for tile in range(first, tl.cdiv(lines * tiles, 8), step):
        line = tile * 8 + q
        at, inside = axis_lines.tokens(table, line, r, shape, INT, CUT)
        ok = inside & (c < dim)
        tokens = tl.load(x + at * dim + c, mask=ok, other=0.0)
        value = tokens.to(ROUND)
        if MASK_IN:  # padding is left out of the product
            value = tl.where(axis_lines.valid(mask, at, ok, True), value, 0.0)
            if tl.float32 == OPERAND:  # a sum, even of one element, keeps T out of shared memory
                value = tl.sum(value[:, :, :, None], 3)
        before = old
        if ADD:
            if n > 0:  # always true; keeps Triton from prefetching what is prefetched here
                later = line + 8 * step
                to, in_range = axis_lines.tokens(table, later, r, shape, INT, CUT)
                old = tl.load(y + to * dim + c, mask=in_range & (c < dim), other=0.0)
        out = tl.dot(t, _channels_first(value, VEC, W, OPERAND), input_precision=PRECISION)
        # rounded now: half as much passes through shared memory
        out = out.to(ROUND).reshape(VEC, W, 16 * NB, 8).permute(2, 3, 1, 0)
        out = out.reshape(16 * NB, 8, C).to(tl.float32)
        if MASK_OUT:
            out = tl.where(axis_lines.valid(mask, at, ok, True), out, 0.0)
        if RESIDUAL:
            out += tokens.to(tl.float32)
        if ADD:
            out += before.to(tl.float32)
        tl.store(y + at * dim + c, out.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=INTS)
def _correlate_kernel(
    dy,
    x,
    mask,
    table,
    out,
    units,
    lines,
    n,
    inner,
    outer,
    tiles,
    NB: tl.constexpr,
    VEC: tl.constexpr,
    W: tl.constexpr,
    UNIT: tl.constexpr,
    LONG: tl.constexpr,
    CUT: tl.constexpr,
    WAYS: tl.constexpr,
    MASK: tl.constexpr,
    ROUND: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute gradients of the taps: out[split, d, l, m, c] is the sum, over lines and over pairs of
    blocks of 8 tokens, of dy[8 i + l] x[8 j + m], where l < 16 and 2 (d - NB) = i - j."""
    C: tl.constexpr = VEC * W
    dim = units * UNIT
    blocks = tl.cdiv(dim, C)
    first_channel = tl.program_id(0) % blocks * C
    split = tl.program_id(0) // blocks
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    shape = (lines, n, inner, outer, tiles)
    c = (first_channel + tl.arange(0, C))[None, None]
    r, q = tl.arange(0, 8)[:, None, None], tl.arange(0, 16)[None, :, None]
    side = tl.arange(0, 2).reshape(1, 2, 1, 1)
    nothing = tl.zeros((C, 1, 8, 16), OPERAND)
    sums = ()
    for _ in tl.static_range(2 * NB):
        sums += (tl.zeros((C, 16, 8), tl.float32),)
    for tile in range(split, tl.cdiv(lines * tiles, 16), tl.num_programs(0) // blocks):
        line = tile * 16 + q
        gs, vs = (nothing,), ()
        for i in tl.static_range(2 * NB):
            at, inside = axis_lines.tokens(table, line, r + 8 * i, shape, INT, CUT)
            ok = inside & (c < dim)
            g = tl.load(dy + at * dim + c, mask=ok, other=0.0)
            gs += (_channels_first(g.to(ROUND), VEC, W, OPERAND).reshape(C, 1, 8, 16),)
            v = tl.load(x + at * dim + c, mask=axis_lines.valid(mask, at, ok, MASK), other=0.0)
            vs += (_channels_first(v.to(ROUND), VEC, W, OPERAND).permute(0, 2, 1),)
        gs += (nothing,)
        for j in tl.static_range(2 * NB):
            new = ()
            for d in tl.static_range(2 * NB):
                s = sums[d]
                # rows 0 to 7 from block i = j + 2 (d - NB), 8 to 15 from the next; gs starts at -1
                if 2 * (NB - d) - 1 <= j and j < 4 * NB - 2 * d and (WAYS == 2 or d >= NB):
                    low, high = gs[j + 2 * (d - NB) + 1], gs[j + 2 * (d - NB) + 2]
                    g = tl.where(side == 0, low, high).reshape(C, 16, 16)
                    s = tl.dot(g, vs[j], s, input_precision=PRECISION)
                new += (s,)
            sums = new
    row, column = _along(1, 8, 6) + 8 * _along(3, 2, 6), _along(4, 2, 6) + 2 * _along(0, 4, 6)
    c = first_channel + _along(2, W, 6) * VEC + _along(5, VEC, 6)
    at = split.to(tl.int64) * (2 * NB * 128 * dim) + (row * 8 + column) * dim + c
    for d in tl.static_range(2 * NB):
        if WAYS == 2 or d >= NB:
            v = sums[d].reshape(VEC, W, 2, 8, 4, 2).permute(4, 3, 1, 2, 5, 0)
            tl.store(out + at + d * 128 * dim, v, mask=c < dim)


# ------------------------------------------------------------------------------------ launches
def _longest(products: torch.dtype) -> int:
    return LONGEST if products.itemsize == 2 else LONGEST // 2


def _launch(
    x: Tensor, lines: Lines, products: torch.dtype, width: int, plans: dict[str, dict[int, tuple[int, int, int, int]]]
) -> tuple[int, int, dict[str, Any]]:
    """Return, for programs that take `width` tiles at a time, how many share a block of channels,
    how many there are, and their constants. (The interpreter cannot multiply bfloat16.)"""
    types = "32" if products.itemsize == 4 else "mixed" if x.dtype == torch.float32 else "16"
    vec, warps, each, stages = plans[types][lines.blocks]
    dim = x.shape[-1]
    unit = next(u for u in (8, 4, 2, 1) if dim % u == 0)
    channels = cdiv(dim, vec * warps)
    splits = min(cdiv(lines.lines * lines.tiles, width), max(1, each * processors(x) // channels))
    constants = {
        **lines.sizes,
        "units": dim // unit,
        "NB": lines.blocks,
        "VEC": vec,
        "W": warps,
        "UNIT": unit,
        "LONG": x.numel() >= 2**31,
        "CUT": lines.cut,
        "ROUND": KINDS[products],
        "OPERAND": KINDS[products] if x.is_cuda else tl.float32,
        "PRECISION": "tf32x3" if products == torch.float32 or not x.is_cuda else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }
    return splits, splits * channels, constants


def _product_plan(
    x: Tensor, masked: bool, residual: bool, flip: bool, parts: list[Lines], span: int, products: torch.dtype
) -> list[Launch]:
    launches = []
    for lines in parts:
        _, programs, constants = _launch(x, lines, products, 8, PRODUCT)
        constants |= {"ADD": lines.axis > 0, "RESIDUAL": residual and lines.axis == 0, "flip": -1 if flip else 1}
        constants |= {"MASK_IN": masked and not flip, "MASK_OUT": masked and flip, "span": span}
        launches.append(Launch(_product_kernel, (programs,), **constants))
    return launches


def _product(
    x: Tensor,
    weights: list[Any],
    mask: Tensor | None,
    residual: bool,
    flip: bool,
    walk: list[Lines],
    products: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum of products over axes, and the states that enter the tiles of the lines of each axis that has
    several; flip: of transposed products, which give dx from dy."""
    span, y = 16 * max(lines.blocks for lines in walk), torch.empty_like(x, dtype=dtype)
    taps = axis_taps.taps(x, span, weights, products)
    key = (x.device, x.dtype, x.shape, mask is None, axis_lines.key(walk), residual, flip, products, dtype)
    parts = axis_lines.parts(walk)
    launches = remembered(
        ("product", *key), lambda: _product_plan(x, mask is not None, residual, flip, parts, span, products)
    )
    for part, launch in zip(parts, launches, strict=True):
        launch(*part.tokens(x, y, mask), part.table, taps[part.axis])
    entering: list[Tensor | None] = []
    for lines in walk:
        if lines.tiles == 1:
            entering.append(None)
            continue
        states = States.of(_ways(weights, lines.axis))
        weighed = axis_states.entering(x, None if flip else mask, lines, states, products, flip, weigh=True)
        axis_states.read(y, mask if flip else None, lines, states, weighed, products, flip)
        entering.append(weighed)
    return y, entering


def _ways(weights: list[Any], axis: int) -> list[tuple[Tensor, Tensor]]:
    """Return the coefficients and log decays of the ways in which an axis is scanned."""
    last = axis - len(weights[0])  # those of the reverse direction belong to the last axes
    pairs = [(weights[0][axis], weights[1][axis])]
    return pairs if weights[2] is None or -last > len(weights[2]) else [*pairs, (weights[2][last], weights[3][last])]


def supported(x: Tensor) -> str:
    """Return why the kernels do not support x; empty if they do."""
    return "" if x.dtype in KINDS else f"{x.dtype}: expected float32, bfloat16 or float16"


def forward(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    rcoef: Tensor | None = None,
    rlog_decay: Tensor | None = None,
    mask: Tensor | None = None,
    residual: bool = False,
    products: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    tables: Tables | None = None,
) -> Tensor:
    """Return the sum of products over axes, plus x itself if `residual`, in the shape of x (batch, *grid, dim). coef
    (axes, dim, states), log_decay (axes, states); rcoef, rlog_decay: the same of the reverse direction, for the last of
    the axes; mask (batch, *grid) bool. products: the dtype of the products' operands; dtype: that of the result; by
    default both are that of x. tables: the lines of samples that lie end to end; then x is (length, dim)."""
    x, mask, weights = _prepare(x, mask, coef, log_decay, rcoef, rlog_decay)
    dtype, products = dtype or x.dtype, products or x.dtype
    if x.numel() == 0:
        return torch.empty_like(x, dtype=dtype)
    walk = axis_lines.walk(x, tables, _longest(products))
    return _product(x, weights, mask, residual, False, walk, products, dtype)[0]


def _correlate_plan(
    x: Tensor, masked: bool, ways: list[int], parts: list[Lines], products: torch.dtype
) -> list[tuple[int, Launch]]:
    """Return the number of splits and the launch for each part of the lines."""
    launches = []
    for lines in parts:
        splits, programs, constants = _launch(x, lines, products, 16, CORRELATE)
        launch = Launch(_correlate_kernel, (programs,), WAYS=ways[lines.axis], MASK=masked, **constants)
        launches.append((splits, launch))
    return launches


def backward(
    dy: Tensor,
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    rcoef: Tensor | None = None,
    rlog_decay: Tensor | None = None,
    mask: Tensor | None = None,
    residual: bool = False,
    products: torch.dtype | None = None,
    tables: Tables | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, coef, log_decay, rcoef, rlog_decay."""
    x, mask, weights = _prepare(x, mask, coef, log_decay, rcoef, rlog_decay)
    if x.numel() == 0:
        zeros: list[Any] = [None if w is None else torch.zeros_like(w) for w in weights]
        return torch.empty_like(x), zeros[0], zeros[1], zeros[2], zeros[3]
    dy, products = dy.contiguous(), products or x.dtype
    walk = axis_lines.walk(x, tables, _longest(products))
    dx, adjoints = _product(dy, weights, mask, residual, True, walk, products, x.dtype)
    span, (axes, dim, _) = 16 * max(lines.blocks for lines in walk), coef.shape
    dtaps = torch.zeros(axes, dim, 2 * span, device=x.device)
    ways = [len(_ways(weights, axis)) for axis in range(axes)]
    key = (x.device, x.dtype, x.shape, mask is None, axis_lines.key(walk), dy.dtype, tuple(ways), products)
    parts = axis_lines.parts(walk)
    launches = remembered(("correlate", *key), lambda: _correlate_plan(x, mask is not None, ways, parts, products))
    for part, (splits, launch) in zip(parts, launches, strict=True):
        sums = torch.empty(splits, 2 * part.blocks, 16, 8, dim, device=x.device)
        launch(*part.tokens(dy, x, mask), part.table, sums)
        axis_taps.fold(sums, dtaps[part.axis], span, ways[part.axis])
    grads: list[Any] = axis_taps.weights_grad(dtaps, weights, span)
    for lines, leaving in zip(walk, adjoints, strict=True):
        if leaving is not None:
            states = States.of(_ways(weights, lines.axis))
            more = axis_states.weights_grad(dy, x, mask, lines, states, leaving, products)
            for grad, added in zip(_ways(grads, lines.axis), more, strict=True):
                grad[0].add_(added[0])
                grad[1].add_(added[1])
    return dx, grads[0], grads[1], grads[2], grads[3]


def _prepare(x: Tensor, mask: Tensor | None, *weights: Tensor | None) -> tuple[Tensor, Tensor | None, list[Any]]:
    """Make tokens and mask contiguous, as kernels need, and the small weights float32."""
    return (
        x.contiguous(),
        None if mask is None else mask.contiguous().view(torch.uint8),
        [None if w is None else w.float().contiguous() for w in weights],
    )

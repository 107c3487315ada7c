"""States that MD-TPE carries between the tiles of long lines, as products of matrices.

Within a tile a line is a dense product (`axis_scan`). What earlier tiles add is a sum over states,
which all channels share but for their coefficients: for token l of a tile

y[l] += sum_t coef[c, t] lambda_t^(l + 1) h[t, c],   h <- lambda_t^tile h + sum_r lambda_t^(tile - 1 - r) x[r, c]

(reverse: the same from the tile's other end). So a tile's sums are a product with the matrix of
powers, states go from tile to tile element by element, and reading them is a product again. States
of a line: [tile, way and state, channel], of all tiles at once.

The gradient of coef sums, over tiles, h times the sums of dy that h is read by; that of log_decay
weighs every pair of tokens with its distance: the part in the earlier tile, in the later one, and
one tile for each tile between them, which are products of h and of its adjoint.
"""

# mypy: disable-error-code="assignment, var-annotated"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels import axis_lines
from ndlightnet_kernels.axis_lines import Lines
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, power_of_2, processors

INTS = ["states", "rows", *axis_lines.INTS]
GROUP = 16  # tiles whose sums are loaded before the first is added
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _power(rates, k, rows, exponent):
    """Return lambda_k^exponent, for rows k of the matrix; 0 beyond the last row."""
    log = tl.load(rates + k, mask=k < rows, other=0.0)[:, None] * 1.4426950408889634
    # avoids 0 * -inf: a decay of 0 still has lambda^0 = 1
    power = tl.exp2(tl.where(exponent > 0, log * exponent, 0.0))
    return tl.where((k < rows)[:, None], power, 0.0)


@triton.jit
def _distances(k, states, i, TILE: tl.constexpr, FLIP: tl.constexpr):
    """Return how far token i of a tile lies from the tile's end, for rows whose states go forward, or
    from its start, [rows, tokens]."""
    forward = (k < states) != FLIP
    return tl.where(forward[:, None], TILE - 1 - i[None], i[None])


@triton.jit(do_not_specialize=INTS)
def _sums_kernel(
    x,
    mask,
    table,
    rates,
    sums,
    units,
    states,
    rows,
    lines,
    n,
    inner,
    outer,
    tiles,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    FLIP: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    ROUND: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the sums of tiles: sums[tile, k, c] = sum_r lambda_k^distance(r) x[r, c]."""
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    dim, shape = units * UNIT, (lines, n, inner, outer, tiles)
    k = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * C + tl.arange(0, C)
    r = tl.arange(0, TILE)
    power = _power(rates, k, rows, _distances(k, states, r, TILE, FLIP)).to(OPERAND)
    for tile in range(tl.program_id(1), lines * tiles, tl.num_programs(1)):
        at, ok = axis_lines.tokens(table, tile, r, shape, INT, TILE)
        ok = axis_lines.valid(mask, at, ok, MASK)
        value = tl.load(x + at[:, None] * dim + c[None], mask=ok[:, None] & (c < dim)[None], other=0.0)
        out = tl.dot(power, value.to(ROUND).to(OPERAND), input_precision=PRECISION)
        to = (tl.cast(tile, tl.int64) * rows + k)[:, None] * dim + c[None]
        tl.store(sums + to, out.to(sums.dtype.element_ty), mask=(k < rows)[:, None] & (c < dim)[None])


@triton.jit(do_not_specialize=["dim", "states", "rows", "inner", "tiles"])
def _carry_kernel(
    sums,
    rates,
    coef,
    dim,
    states,
    rows,
    inner,
    tiles,
    TILE: tl.constexpr,
    FLIP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Replace the sums of each tile by the states that enter it, times coef (rows, dim) if given."""
    blocks, ways = tl.cdiv(states * dim, BLOCK), rows // states
    line, block = tl.program_id(0) // (ways * blocks), tl.program_id(0) % (ways * blocks)
    way = block // blocks
    i = block % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = i < states * dim
    i += way * states * dim
    log = tl.load(rates + i // dim, mask=inside, other=0.0)
    decay = tl.exp2(log * (1.4426950408889634 * TILE))
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    if coef is not None:
        scale = tl.load(coef + i, mask=inside, other=0.0)
    page = tl.cast(rows * dim, tl.int64)
    base = sums + ((line // inner).to(tl.int64) * tiles * inner + line % inner) * page + i
    forward = (way == 0) != FLIP
    state = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, GROUP):
        added = ()
        for j in tl.static_range(GROUP):
            tile = tl.where(forward, start + j, tiles - 1 - start - j)
            added += (tl.load(base + tile * inner * page, mask=inside & (start + j < tiles), other=0.0),)
        for j in tl.static_range(GROUP):
            tile = tl.where(forward, start + j, tiles - 1 - start - j)
            value = (state * scale).to(sums.dtype.element_ty)
            tl.store(base + tile * inner * page, value, mask=inside & (start + j < tiles))
            state = state * decay + added[j].to(tl.float32)


@triton.jit(do_not_specialize=INTS)
def _read_kernel(
    y,
    mask,
    table,
    rates,
    entering,
    units,
    states,
    rows,
    lines,
    n,
    inner,
    outer,
    tiles,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    FLIP: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to y what the states that enter a tile, times their coefficients, give its tokens."""
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    dim, shape = units * UNIT, (lines, n, inner, outer, tiles)
    c = tl.program_id(0) * C + tl.arange(0, C)
    r = tl.arange(0, TILE)
    powers = ()
    for block in tl.static_range(BLOCKS):
        k = block * ROWS + tl.arange(0, ROWS)
        # as far from the end that the states enter at as r is from the other, and one token
        distance = TILE - _distances(k, states, r, TILE, FLIP)
        powers += (tl.trans(_power(rates, k, rows, distance).to(OPERAND)),)
    for tile in range(tl.program_id(1), lines * tiles, tl.num_programs(1)):
        out = tl.zeros((TILE, C), tl.float32)
        for block in tl.static_range(BLOCKS):
            k = block * ROWS + tl.arange(0, ROWS)
            at = (tl.cast(tile, tl.int64) * rows + k)[:, None] * dim + c[None]
            value = tl.load(entering + at, mask=(k < rows)[:, None] & (c < dim)[None], other=0.0)
            out = tl.dot(powers[block], value.to(OPERAND), out, input_precision=PRECISION)
        at, ok = axis_lines.tokens(table, tile, r, shape, INT, TILE)
        ok = axis_lines.valid(mask, at, ok, MASK)[:, None] & (c < dim)[None]
        to = y + at[:, None] * dim + c[None]
        out += tl.load(to, mask=ok, other=0.0).to(tl.float32)
        tl.store(to, out.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=INTS)
def _grad_kernel(
    dy,
    x,
    mask,
    table,
    rates,
    coef,
    entering,
    leaving,
    out,
    units,
    states,
    rows,
    lines,
    n,
    inner,
    outer,
    tiles,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    ROUND: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute gradients of the part of y that comes from other tiles: out[split, 0, k, c] is that of
    coef, out[split, 1, k, c] summed over c that of log_decay. entering: states of x that enter a
    tile; leaving: their adjoints after the tile, times coef."""
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    dim, shape = units * UNIT, (lines, n, inner, outer, tiles)
    k = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * C + tl.arange(0, C)
    r = tl.arange(0, TILE)
    far = _distances(k, states, r, TILE, False)
    # an adjoint state is that of the next tile's first token: one decay less than at the token before
    x_slope = (_power(rates, k, rows, far + 1) * far).to(OPERAND)
    since = TILE - far
    power = _power(rates, k, rows, since)
    y_power, y_slope = power.to(OPERAND), (power * since).to(OPERAND)
    log = tl.load(rates + k, mask=k < rows, other=0.0)
    between = tl.exp2(log * (1.4426950408889634 * (TILE + 1)))[:, None] * TILE
    inside = (k < rows)[:, None] & (c < dim)[None]
    weight = tl.load(coef + k[:, None] * dim + c[None], mask=inside, other=0.0)
    grad = tl.zeros((ROWS, C), tl.float32)
    slope = tl.zeros((ROWS, C), tl.float32)
    for tile in range(tl.program_id(1), lines * tiles, tl.num_programs(1)):
        at, ok = axis_lines.tokens(table, tile, r, shape, INT, TILE)
        to = at[:, None] * dim + c[None]
        g = tl.load(dy + to, mask=ok[:, None] & (c < dim)[None], other=0.0).to(ROUND).to(OPERAND)
        ok = axis_lines.valid(mask, at, ok, MASK)
        v = tl.load(x + to, mask=ok[:, None] & (c < dim)[None], other=0.0).to(ROUND).to(OPERAND)
        page = (tl.cast(tile, tl.int64) * rows + k)[:, None] * dim + c[None]
        h = tl.load(entering + page, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(leaving + page, mask=inside, other=0.0).to(tl.float32)
        grad += tl.dot(y_power, g, input_precision=PRECISION) * h
        slope += tl.dot(y_slope, g, input_precision=PRECISION) * (h * weight)
        slope += tl.dot(x_slope, v, input_precision=PRECISION) * a
        slope += between * h * a
    at = (tl.program_id(1).to(tl.int64) * 2 * rows + k)[:, None] * dim + c[None]
    tl.store(out + at, grad, mask=inside)
    tl.store(out + at + tl.cast(rows, tl.int64) * dim, slope, mask=inside)


# ------------------------------------------------------------------------------------ launches
class States(NamedTuple):
    """The states of an axis: log decays (ways * states,) and coefficients (ways * states, dim), float32."""

    rates: Tensor
    coef: Tensor
    ways: int

    @classmethod
    def of(cls, weights: list[tuple[Tensor, Tensor]]) -> States:
        """Join the coefficients (dim, states) and log decays (states,) of the ways of an axis."""
        coef = torch.cat([c for c, _ in weights], 1).t().contiguous()
        return cls(torch.cat([decay for _, decay in weights]), coef, len(weights))


def _constants(x: Tensor, states: States, lines: Lines, products: torch.dtype) -> dict[str, Any]:
    """Return the arguments that kernels share. States are in 16 bits only as bfloat16, whose range
    holds the sum of any line. (The interpreter cannot multiply bfloat16.)"""
    dim, rows = x.shape[-1], len(states.rates)
    unit = next(u for u in (8, 4, 2, 1) if dim % u == 0)
    wide = products != torch.bfloat16
    return {
        **lines.sizes,
        "units": dim // unit,
        "UNIT": unit,
        "states": rows // states.ways,
        "rows": rows,
        "TILE": lines.tile,
        "LONG": x.numel() >= 2**31,
        "OPERAND": tl.float32 if wide or not x.is_cuda else tl.bfloat16,
        "PRECISION": "tf32x3" if products == torch.float32 or not x.is_cuda else "tf32",
    }


def _splits(x: Tensor, lines: Lines, programs: int, each: int) -> int:
    return min(lines.lines * lines.tiles, max(1, each * processors(x) // programs))


def entering(
    x: Tensor, mask: Tensor | None, lines: Lines, states: States, products: torch.dtype, flip: bool, weigh: bool
) -> Tensor:
    """Return the states that enter each tile of lines (tiles, rows, dim). flip: those of the adjoint,
    which go the other way. weigh: times their coefficients."""
    dim, rows = x.shape[-1], len(states.rates)
    dtype = torch.bfloat16 if products == torch.bfloat16 else torch.float32
    sums = torch.empty(lines.lines * lines.tiles, rows, dim, dtype=dtype, device=x.device)

    def make() -> tuple[Launch, Launch]:
        constants = _constants(x, states, lines, products)
        each, c = min(128 if dtype == torch.bfloat16 else 64, max(16, power_of_2(rows))), 64
        blocks = cdiv(dim, c), cdiv(rows, each)
        grid = (blocks[0], _splits(x, lines, blocks[0] * blocks[1], 4), blocks[1])
        options = {"ROWS": each, "C": c, "FLIP": flip, "MASK": mask is not None, "ROUND": KINDS[products]}
        first = Launch(_sums_kernel, grid, num_warps=4, num_stages=3, **constants, **options)
        block, per_way = 256, rows // states.ways
        numbers = {name: constants[name] for name in ("states", "rows", "inner", "tiles", "TILE")}
        grid = (lines.lines * states.ways * cdiv(per_way * dim, block),)
        second = Launch(
            _carry_kernel, grid, num_warps=4, dim=dim, FLIP=flip, BLOCK=block, GROUP=min(GROUP, lines.tiles), **numbers
        )
        return first, second

    key = ("entering", x.device, x.dtype, x.shape, mask is None, axis_lines.key([lines]), rows, states.ways, products)
    sum_up, carry = remembered((*key, flip, weigh), make)
    sum_up(x, mask, lines.table, states.rates, sums)
    carry(sums, states.rates, states.coef if weigh else None)
    return sums


def read(
    y: Tensor, mask: Tensor | None, lines: Lines, states: States, weighed: Tensor, products: torch.dtype, flip: bool
) -> None:
    """Add to y what the states that enter its tiles, times their coefficients, give its tokens."""
    dim, rows = y.shape[-1], len(states.rates)

    def make() -> Launch:
        constants = _constants(y, states, lines, products)
        each, c = min(128 if products == torch.bfloat16 else 64, max(16, power_of_2(rows))), 64
        grid = (cdiv(dim, c), _splits(y, lines, cdiv(dim, c), 4), 1)
        options = {"ROWS": each, "BLOCKS": cdiv(rows, each), "C": c, "FLIP": flip, "MASK": mask is not None}
        return Launch(_read_kernel, grid, num_warps=4, num_stages=3, **constants, **options)

    key = ("read", y.device, y.dtype, y.shape, mask is None, axis_lines.key([lines]), rows, states.ways, products, flip)
    remembered(key, make)(y, mask, lines.table, states.rates, weighed)


def weights_grad(
    dy: Tensor, x: Tensor, mask: Tensor | None, lines: Lines, states: States, adjoints: Tensor, products: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return what other tiles add to the gradients of coef (dim, states) and log_decay (states,), for each way.
    adjoints: `entering` of dy, with flip and weigh."""
    dim, rows = x.shape[-1], len(states.rates)
    states_of_x = entering(x, mask, lines, states, products, flip=False, weigh=False)

    def make() -> tuple[int, Launch]:
        each, c = min(64, max(16, power_of_2(rows))), 64
        blocks = cdiv(dim, c), cdiv(rows, each)
        splits = _splits(x, lines, blocks[0] * blocks[1], 2)
        options = {"ROWS": each, "C": c, "MASK": mask is not None, "ROUND": KINDS[products]}
        grid, constants = (blocks[0], splits, blocks[1]), _constants(x, states, lines, products)
        return splits, Launch(_grad_kernel, grid, num_warps=8, num_stages=2, **constants, **options)

    key = ("grad", x.device, x.dtype, dy.dtype, x.shape, mask is None, axis_lines.key([lines]), rows, states.ways)
    splits, launch = remembered((*key, products), make)
    out = torch.empty(splits, 2, rows, dim, device=x.device)
    launch(dy, x, mask, lines.table, states.rates, states.coef, states_of_x, adjoints, out)
    coef, slope = out.sum(0)
    each = rows // states.ways
    return list(zip(coef.t().split(each, 1), slope.sum(1).split(each), strict=True))

"""States that MD-TPE carries between the tiles of long lines, as products of matrices.

Within a tile a line is a dense product (`axis_scan`). What earlier tiles add is a sum over states,
which all channels share but for their coefficients: for token l of a tile

y[l] += sum_t coef[c, t] lambda_t^(l + 1) h[t, c],   h <- lambda_t^tile h + sum_r lambda_t^(tile - 1 - r) x[r, c]

(reverse: the same from the tile's other end). So a tile's sums are a product with the matrix of
powers, states go from tile to tile element by element, and reading them is a product again.

A line is one run of tiles, or several where there are few lines: a program takes the tiles of a run
in their order and writes what enters each from the tiles of the run before it. What leaves a run
enters the next one, and goes from run to run; who reads a state adds it, decayed by the tiles since.

States: [page, channel, way and state]; pages: one for each tile, in its line's order, then, if there
are several, one for each run. Nothing enters a run's first tile from its own tiles, nor a line's
first run (reverse: its last); nothing is written or read there.

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
from ndlightnet_kernels.tiles import cdiv, hint, power_of_2, processors

KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Plans for bfloat16 states and for float32 ones: channels of a program, states of a product at a
# time, warps, stages of loads in flight, programs per multiprocessor
SUMS = {2: (64, 64, 4, 3, 2), 4: (64, 64, 4, 3, 2)}
READ = {2: (64, 64, 8, 3, 2), 4: (32, 64, 4, 3, 2)}
GRAD = {2: (64, 64, 8, 3, 1), 4: (64, 32, 4, 1, 2)}
INTS = [*axis_lines.INTS, "run"]  # run: tiles of a run
PROGRAMS, NUMBERS = 2, 64 * 64  # programs per multiprocessor that share runs, and a program's states
BLOCKS = 4  # blocks of states that a program reads


@triton.jit
def _block(block, STATES: tl.constexpr, ROWS: tl.constexpr):
    """Return a block of states, which are all of one way, as columns; which exist; and the way."""
    blocks: tl.constexpr = (STATES + ROWS - 1) // ROWS
    t = block % blocks * ROWS + tl.arange(0, ROWS)
    way = block // blocks
    return way * STATES + t, t < STATES, way


@triton.jit
def _power(rates, k, ok, exponent):
    """Return lambda_k^exponent for columns k, of exponents [tokens, columns] or of one number."""
    log = tl.load(rates + k, mask=ok, other=0.0)[None] * 1.4426950408889634
    # avoids 0 * -inf: a decay of 0 still has lambda^0 = 1
    power = tl.exp2(tl.where(exponent > 0, log * exponent, 0.0))
    return tl.where(ok[None], power, 0.0)


@triton.jit
def _from_end(i, forward, TILE: tl.constexpr):
    """Return how far tokens i of a tile lie from the end where their sums leave it, [tokens, 1]."""
    return tl.where(forward, TILE - 1 - i, i)[:, None]


@triton.jit
def _address(page, c, k, dim, rows):
    return (tl.cast(page, tl.int64) * dim + c)[:, None] * rows + k[None]


@triton.jit
def _entering(states, rates, tile, forward, c, k, ok, dim, rows, shape, run, TILE: tl.constexpr, RUNS: tl.constexpr):
    """Return the states of a way that enter a tile: those from its run and, if a line has several RUNS, from the
    runs before."""
    lines, inner, tiles = shape[0], shape[2], shape[4]
    j = tile // inner % tiles
    order = tl.where(forward, j, tiles - 1 - j)
    inside, step = (c < dim)[:, None] & ok[None], order
    if RUNS:
        step = order % run
    value = tl.load(states + _address(tile, c, k, dim, rows), mask=inside & (step > 0), other=0.0)
    if RUNS:
        i = tile // (inner * tiles) * tl.cdiv(tiles, run) + order // run
        at = _address(lines * tiles + i * inner + tile % inner, c, k, dim, rows)
        before = tl.load(states + at, mask=inside & (order >= run), other=0.0).to(tl.float32)
        value = value.to(tl.float32) + before * _power(rates, k, ok, step * TILE)
    return value


@triton.jit
def _place(i, steps, forward, shape, run):
    """Return, for step i of a program that takes runs in turn, a run, the step in it, and the tile and its order in its
    line; beyond the line, its last tile."""
    inner, tiles = shape[2], shape[4]
    j, step, runs = tl.program_id(1) + i // steps * tl.num_programs(1), i % steps, tl.cdiv(tiles, run)
    order = j // inner % runs * run + step
    place = tl.minimum(order, tiles - 1)
    place = tl.where(forward, place, tiles - 1 - place)
    tile = (j // (inner * runs) * tiles + place) * inner + j % inner
    return j, step, tile, order


@triton.jit(do_not_specialize=INTS)
def _sums_kernel(
    x,
    mask,
    table,
    rates,
    coef,
    states,
    units,
    lines,
    n,
    inner,
    outer,
    tiles,
    run,
    UNIT: tl.constexpr,
    STATES: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    C: tl.constexpr,
    FLIP: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    ROUND: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute what enters tiles from their run, and the next run from a run, times coef; without coef, only the
    latter."""
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    rows: tl.constexpr = STATES * WAYS
    dim, shape = units * UNIT, (lines, n, inner, outer, tiles)
    k, ok_k, way = _block(tl.program_id(2), STATES, ROWS)
    forward = (way == 0) != FLIP
    c = tl.program_id(0) * C + tl.arange(0, C)
    inside = (c < dim)[:, None] & ok_k[None]
    r = tl.arange(0, TILE)
    power = _power(rates, k, ok_k, _from_end(r, forward, TILE)).to(OPERAND)
    decay = _power(rates, k, ok_k, TILE)
    weight, pages = tl.full((C, ROWS), 1.0, tl.float32), 0
    if coef is not None:
        pages = lines * tiles
        weight = tl.load(coef + c[:, None] * rows + k[None], mask=inside, other=0.0)
    state = tl.zeros((C, ROWS), tl.float32)
    steps = tl.minimum(run, tiles - 1)  # nothing reads what leaves a line
    items = tl.cdiv(lines * tl.cdiv(tiles, run) - tl.program_id(1), tl.num_programs(1))
    # one loop over runs and their tiles: loads of the next run are in flight while one ends
    for i in range(items * steps):
        j, step, tile, order = _place(i, steps, forward, shape, run)
        read = order < tiles - 1
        at, ok = axis_lines.tokens(table, tile, r, shape, INT, TILE)
        ok = axis_lines.valid(mask, at, ok & read, MASK)
        value = tl.load(x + at[:, None] * dim + c[None], mask=ok[:, None] & (c < dim)[None], other=0.0)
        value = tl.trans(value.to(ROUND).to(OPERAND))
        state = tl.where(step == 0, 0.0, state * decay)
        state = tl.dot(value, power, state, input_precision=PRECISION)
        page = tile + tl.where(forward, inner, -inner)
        if RUNS:
            leaves = step + 1 == run
            page = tl.where(leaves, pages + j + inner, page)
            if coef is None:
                read = read & leaves
        out = (state * weight).to(states.dtype.element_ty)
        tl.store(states + _address(page, c, k, dim, rows), out, mask=inside & read)


@triton.jit(do_not_specialize=["dim", "inner", "runs", "length"])
def _carry_kernel(
    states,
    rates,
    dim,
    inner,
    runs,
    length,
    STATES: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add to what enters each run from the one before what all others before it add. length: tokens of a run."""
    blocks = tl.cdiv(STATES * dim, BLOCK)
    line, block = tl.program_id(0) // (WAYS * blocks), tl.program_id(0) % (WAYS * blocks)
    way = block // blocks
    i = block % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = i < STATES * dim
    t = way * STATES + i % STATES
    decay = tl.exp2(tl.load(rates + t, mask=inside, other=0.0) * (1.4426950408889634 * length))
    page = tl.cast(WAYS * STATES * dim, tl.int64)
    base = states + ((line // inner).to(tl.int64) * runs * inner + line % inner) * page
    base += i // STATES * (WAYS * STATES) + t
    state = tl.zeros((BLOCK,), tl.float32)
    for start in range(1, runs, GROUP):
        added = ()
        for j in tl.static_range(GROUP):
            at = base + (start + j) * inner * page
            added += (tl.load(at, mask=inside & (start + j < runs), other=0.0),)
        for j in tl.static_range(GROUP):
            state = state * decay + added[j].to(tl.float32)
            at = base + (start + j) * inner * page
            tl.store(at, state.to(states.dtype.element_ty), mask=inside & (start + j < runs))


@triton.jit(do_not_specialize=INTS)
def _read_kernel(
    y,
    mask,
    table,
    rates,
    states,
    units,
    lines,
    n,
    inner,
    outer,
    tiles,
    run,
    UNIT: tl.constexpr,
    STATES: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    C: tl.constexpr,
    FLIP: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to y what the states that enter a tile, times their coefficients, give its tokens: those of
    some blocks, whose powers stay in shared memory."""
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    rows: tl.constexpr = STATES * WAYS
    dim, shape = units * UNIT, (lines, n, inner, outer, tiles)
    c = tl.program_id(0) * C + tl.arange(0, C)
    r = tl.arange(0, TILE)
    powers = ()
    for block in tl.static_range(FIRST, LAST):
        k, ok_k, way = _block(block, STATES, ROWS)
        # the states are those of the token before the first that reads them
        since = TILE - _from_end(r, (way == 0) != FLIP, TILE)
        powers += (_power(rates, k, ok_k, since).to(OPERAND),)
    for tile in range(tl.program_id(1), lines * tiles, tl.num_programs(1)):
        out = tl.zeros((TILE, C), tl.float32)
        for block in tl.static_range(FIRST, LAST):
            k, ok_k, way = _block(block, STATES, ROWS)
            forward = (way == 0) != FLIP
            value = _entering(states, rates, tile, forward, c, k, ok_k, dim, rows, shape, run, TILE, RUNS)
            out = tl.dot(powers[block - FIRST], tl.trans(value.to(OPERAND)), out, input_precision=PRECISION)
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
    states,
    adjoints,
    out,
    units,
    lines,
    n,
    inner,
    outer,
    tiles,
    run,
    UNIT: tl.constexpr,
    STATES: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    C: tl.constexpr,
    LONG: tl.constexpr,
    MASK: tl.constexpr,
    ROUND: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute gradients of the part of y that comes from other tiles: out[split, 0, c, k] is that of
    coef, out[split, 1, c, k] summed over c that of log_decay. states: of x; adjoints: those of dy,
    which go the other way, times coef. A run's states stay in registers; states: what enters a run,
    if there are several."""
    INT: tl.constexpr = tl.int64 if LONG else tl.int32
    rows: tl.constexpr = STATES * WAYS
    dim, shape = units * UNIT, (lines, n, inner, outer, tiles)
    k, ok_k, way = _block(tl.program_id(2), STATES, ROWS)
    forward = way == 0
    c = tl.program_id(0) * C + tl.arange(0, C)
    inside = (c < dim)[:, None] & ok_k[None]
    r = tl.arange(0, TILE)
    far = _from_end(r, forward, TILE)
    # an adjoint is that of the next tile's first token: one decay less than at the token before
    power = tl.join(_power(rates, k, ok_k, far), _power(rates, k, ok_k, far + 1) * far)
    x_powers = power.reshape(TILE, 2 * ROWS).to(OPERAND)
    since = TILE - far
    power = _power(rates, k, ok_k, since)
    y_powers = tl.join(power, power * since).reshape(TILE, 2 * ROWS).to(OPERAND)
    decay, between = _power(rates, k, ok_k, TILE), _power(rates, k, ok_k, TILE + 1) * TILE
    weight = tl.load(coef + c[:, None] * rows + k[None], mask=inside, other=0.0)
    grad = tl.zeros((C, ROWS), tl.float32)
    slope = tl.zeros((C, ROWS), tl.float32)
    h = tl.zeros((C, ROWS), tl.float32)
    items = tl.cdiv(lines * tl.cdiv(tiles, run) - tl.program_id(1), tl.num_programs(1))
    for i in range(items * run):
        j, step, tile, order = _place(i, run, forward, shape, run)
        at, ok = axis_lines.tokens(table, tile, r, shape, INT, TILE)
        to = at[:, None] * dim + c[None]
        # nothing enters a line's first tile, and nothing reads what leaves its last one
        read = (ok & (order > 0) & (order < tiles))[:, None] & (c < dim)[None]
        g = tl.load(dy + to, mask=read, other=0.0).to(ROUND).to(OPERAND)
        ok = axis_lines.valid(mask, at, ok & (order < tiles - 1), MASK)
        v = tl.load(x + to, mask=ok[:, None] & (c < dim)[None], other=0.0).to(ROUND).to(OPERAND)
        ok_a = ok_k & (order < tiles)
        a = _entering(adjoints, rates, tile, not forward, c, k, ok_a, dim, rows, shape, run, TILE, RUNS).to(tl.float32)
        h = tl.where(step == 0, 0.0, h)
        if states is not None:
            first = states + _address(j, c, k, dim, rows)
            h += tl.load(first, mask=inside & (step == 0) & (order >= run), other=0.0).to(tl.float32)
        # neighbouring columns, which a thread has of a product
        both = tl.dot(tl.trans(g), y_powers, input_precision=PRECISION).reshape(C, ROWS, 2)
        y_sum, y_slope = tl.split(both)
        grad += y_sum * h
        slope += y_slope * (h * weight)
        both = tl.dot(tl.trans(v), x_powers, input_precision=PRECISION).reshape(C, ROWS, 2)
        x_sum, x_slope = tl.split(both)
        slope += (x_slope + between * h) * a
        h = h * decay + x_sum
    at = (tl.program_id(1).to(tl.int64) * 2 * dim + c)[:, None] * rows + k[None]
    tl.store(out + at, grad, mask=inside)
    tl.store(out + at + tl.cast(rows, tl.int64) * dim, slope, mask=inside)


# ------------------------------------------------------------------------------------ launches
class States(NamedTuple):
    """The states of an axis: log decays (ways * states,) and coefficients (dim, ways * states), float32."""

    rates: Tensor
    coef: Tensor
    ways: int

    @classmethod
    def of(cls, weights: list[tuple[Tensor, Tensor]]) -> States:
        """Join the coefficients (dim, states) and log decays (states,) of the ways of an axis."""
        if len(weights) == 1:
            return cls(weights[0][1], weights[0][0], 1)
        return cls(torch.cat([decay for _, decay in weights]), torch.cat([c for c, _ in weights], 1), len(weights))

    @property
    def each(self) -> int:
        """Return the number of states of a way."""
        return len(self.rates) // self.ways


def _dtype(products: torch.dtype) -> torch.dtype:
    """Return the dtype of states: in 16 bits only bfloat16, whose range holds the sum of any line."""
    return torch.bfloat16 if products == torch.bfloat16 else torch.float32


def _plan(
    x: Tensor,
    states: States,
    lines: Lines,
    products: torch.dtype,
    plans: dict[int, tuple[int, int, int, int, int]],
    joint: bool,
) -> tuple[tuple[int, int, int], int, dict[str, Any]]:
    """Return the grid, the blocks of states, and the arguments that kernels share. joint: a program takes all blocks.
    (The interpreter cannot multiply bfloat16.)"""
    dtype = _dtype(products)
    channels, most, warps, stages, each = plans[dtype.itemsize]
    dim, columns = x.shape[-1], min(most, max(16, power_of_2(states.each)))
    blocks, unit = states.ways * cdiv(states.each, columns), next(u for u in (8, 4, 2, 1) if dim % u == 0)
    programs = cdiv(dim, channels) * (1 if joint else blocks)
    splits = min(lines.lines * lines.tiles, max(1, each * processors(x) // programs))
    run = _run(x, lines, states)
    constants = {
        **lines.sizes,
        "run": run,
        "RUNS": run < lines.tiles,
        "units": dim // unit,
        "UNIT": unit,
        "STATES": states.each,
        "WAYS": states.ways,
        "TILE": lines.tile,
        "ROWS": columns,
        "C": channels,
        "LONG": x.numel() >= 2**31,
        "OPERAND": KINDS[dtype] if x.is_cuda else tl.float32,
        "PRECISION": "tf32x3",  # of float32 operands; Triton does not compile all with tf32
        "num_warps": warps,
        "num_stages": stages,
    }
    return (cdiv(dim, channels), splits, 1 if joint else blocks), blocks, constants


def _run(x: Tensor, lines: Lines, states: States) -> int:
    """Return the tiles of a run: a line's, or fewer where programs, which take whole runs, would not share the tiles
    evenly."""
    programs = max(1, PROGRAMS * processors(x) * NUMBERS // (x.shape[-1] * len(states.rates)))
    number, tiles = hint(lines.lines), lines.tiles

    def make() -> int:
        for runs in range(1, tiles):
            run = cdiv(tiles, runs)
            if cdiv(number * cdiv(tiles, run), programs) * run * programs <= 1.1 * number * tiles:
                return run
        return 1

    # of thousands of tiles the search takes milliseconds
    return remembered(("run", programs, number, tiles), make)


def entering(
    x: Tensor, mask: Tensor | None, lines: Lines, states: States, products: torch.dtype, flip: bool, weigh: bool
) -> Tensor:
    """Return the pages of states of lines (pages, dim, ways * states), times their coefficients; if not to `weigh`, the
    pages of runs alone. flip: states of the adjoint, which go the other way."""
    run = _run(x, lines, states)
    runs, first = cdiv(lines.tiles, run), lines.lines * lines.tiles * weigh
    count = first + lines.lines * runs * (runs > 1)
    pages = torch.empty(count, *states.coef.shape, dtype=_dtype(products), device=x.device)

    def make() -> tuple[Launch, Launch]:
        grid, _, constants = _plan(x, states, lines, products, SUMS, joint=False)
        options = {"FLIP": flip, "MASK": mask is not None, "ROUND": KINDS[products]}
        sizes = {"dim": x.shape[-1], "inner": lines.inner, "runs": runs, "length": run * lines.tile}
        sizes |= {"STATES": states.each, "WAYS": states.ways, "BLOCK": 256, "GROUP": 16}
        programs = lines.lines * states.ways * cdiv(states.each * x.shape[-1], 256)
        return Launch(_sums_kernel, grid, **constants, **options), Launch(_carry_kernel, (programs,), **sizes)

    key = (x.device, x.dtype, x.shape, mask is None, axis_lines.key([lines]), states.each, states.ways, products)
    sum_up, carry = remembered(("entering", *key, flip, weigh), make)
    sum_up(x, mask, lines.table, states.rates, states.coef if weigh else None, pages)
    if runs > 2:
        carry(pages[first:], states.rates)
    return pages


def read(
    y: Tensor, mask: Tensor | None, lines: Lines, states: States, weighed: Tensor, products: torch.dtype, flip: bool
) -> None:
    """Add to y what the states that enter its tiles, times their coefficients, give its tokens."""

    def make() -> list[Launch]:
        grid, blocks, constants = _plan(y, states, lines, products, READ, joint=True)
        constants |= {"FLIP": flip, "MASK": mask is not None}
        firsts = range(0, blocks, BLOCKS)
        return [Launch(_read_kernel, grid, FIRST=i, LAST=min(blocks, i + BLOCKS), **constants) for i in firsts]

    key = (y.device, y.dtype, y.shape, mask is None, axis_lines.key([lines]), states.each, states.ways, products, flip)
    for launch in remembered(("read", *key), make):
        launch(y, mask, lines.table, states.rates, weighed)


def weights_grad(
    dy: Tensor, x: Tensor, mask: Tensor | None, lines: Lines, states: States, adjoints: Tensor, products: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Return what other tiles add to the gradients of coef (dim, states) and log_decay (states,), for each way.
    adjoints: `entering` of dy, with flip and weigh."""
    before = None
    if _run(x, lines, states) < lines.tiles:
        before = entering(x, mask, lines, states, products, flip=False, weigh=False)

    def make() -> tuple[int, Launch]:
        grid, _, constants = _plan(x, states, lines, products, GRAD, joint=False)
        return grid[1], Launch(_grad_kernel, grid, **constants, MASK=mask is not None, ROUND=KINDS[products])

    key = (x.device, x.dtype, dy.dtype, x.shape, mask is None, axis_lines.key([lines]), states.each, states.ways)
    splits, launch = remembered(("grad", *key, products), make)
    out = torch.empty(splits, 2, *states.coef.shape, device=x.device)
    launch(dy, x, mask, lines.table, states.rates, states.coef, before, adjoints, out)
    coef, slope = out.sum(0)
    each = states.each
    return list(zip(coef.split(each, 1), slope.sum(0).split(each), strict=True))

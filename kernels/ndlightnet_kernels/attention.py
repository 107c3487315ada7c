"""Global attention: merge a source into its State, and read a State with queries.

Every tensor is read or written once. The length is split over the card; the splits are merged in a
fixed order, so results do not change from run to run. p is exp(k - top); a memory has dim rows, or
2 * dim with MD-LRPE (cos half, sin half); fa, fb: features of a query, see `rope_features`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.phases import slot_frequencies, tile_cos_sin, tile_tokens
from ndlightnet_kernels.plans import operand_bytes, plan, split_count
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.segments import merge_launch, reciprocal_sum
from ndlightnet_kernels.summarize import _summarize
from ndlightnet_kernels.tiles import (
    SIZES,
    arguments,
    cdiv,
    dense,
    dense_rows,
    dot,
    even,
    flags,
    form,
    interleave,
    load,
    pad,
    plan_splits,
    processors,
    rope_features,
    scratch,
    second_channels,
    silu,
    split_bounds,
)


@triton.jit
def _read_memory(total, memory, bh, c, vc, DIM: tl.constexpr, VDIM: tl.constexpr, KIND: tl.constexpr):
    """Load the normalised memory tiles that the features (fa, fb) multiply, float32."""
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    inside = c < WIDTH
    in_tile = inside[:, None] & (vc < VDIM)[None, :]
    inverse = reciprocal_sum(total, bh * DIM + c, inside)[:, None]
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    at = memory + (bh * (HALVES * DIM) + c)[:, None] * VDIM + vc[None, :]
    ma = tl.load(at, mask=in_tile, other=0.0) * inverse
    mb = ma
    if KIND != 0:
        mb = tl.load(at + DIM * VDIM, mask=in_tile, other=0.0) * inverse
    if KIND == 2:
        inverse = reciprocal_sum(total, bh * DIM + WIDTH + c, inside)[:, None]
        at += WIDTH * VDIM
        ma -= tl.load(at + DIM * VDIM, mask=in_tile, other=0.0) * inverse
        mb += tl.load(at, mask=in_tile, other=0.0) * inverse
    return ma, mb


@triton.jit
def _load_query(q_rows, t, c, valid, KIND: tl.constexpr):
    x1 = load(q_rows, t, c, valid).to(tl.float32)
    x2 = x1
    if KIND == 2:
        x2 = load(second_channels(q_rows), t, c, valid).to(tl.float32)
    return x1, x2


@triton.jit(do_not_specialize=SIZES)
def _read(
    q,
    total,
    memory,
    splits,
    shapes,
    theta,
    offset,
    out,
    sqb,
    sqt,
    sqh,
    length,
    span,
    heads,
    per_head,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    prefix,
    each,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    BLOCKS: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the output of a split of the queries, for one block of value channels."""
    KIND: tl.constexpr = ANGLES[0]
    SLOTS: tl.constexpr = ANGLES[2]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, split = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    row, _slot, begin, end, base, state = split_bounds(splits, split, b, bh, h, heads, span, length, prefix)
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    c, vc = tl.arange(0, BK), tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    ma, mb = _read_memory(total, memory, state, c, vc, DIM, VDIM, KIND)
    m = ma.to(OPERAND)
    if KIND != 0:
        m = tl.trans(interleave(tl.trans(m), tl.trans(mb.to(OPERAND)), even(SLOTS, VDIM)))
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, shapes, row, base, c, ANGLES)
    q_rows = (q, b, h, sqb, sqt, sqh, WIDTH, UNIT)
    for first in tl.range(begin, end, BL, num_stages=STAGES):
        t = tile_tokens(first, BL, ROWS)
        valid = t < end
        x1, x2 = _load_query(q_rows, t, c, valid, KIND)
        x1, _ = silu(x1)
        y = tl.zeros((BL, BV), tl.float32)
        if KIND == 0:
            y = dot(x1, m, y, PRODUCT)
        else:
            if KIND == 2:
                x2, _ = silu(x2)
            cos, sin = tile_cos_sin(freqs, first, BL, ROWS, ANGLES)
            fa, fb = rope_features(x1, x2, cos, sin, KIND)
            f = interleave(fa.to(OPERAND), fb.to(OPERAND), SLOTS)
            y = dot(f, m, y, PRODUCT)
        to = out + dense(b, h, t, vc, length, heads, VDIM)
        tl.store(to, y.to(out.dtype.element_ty), valid[:, None] & (vc < VDIM)[None, :])


# ------------------------------------------------------------------------------------ launches
Sizes = tuple[int, ...]


def _summarize_plan(
    k: Tensor, v: Tensor, position: FlatPosition, segments: tuple[int, int] | None
) -> tuple[Launch, Sizes, Sizes]:
    """Return the launch, and sizes of sums and of memories."""
    (batch, length, heads, dim), vdim = k.shape, v.shape[-1]
    bv, width = pad(vdim), position.width(dim)
    chosen = plan("summarize", pad(width), bv, position.kind, operand_bytes(k))
    block, bk = chosen.block, chosen.keys
    blocks, halves = cdiv(width, bk), position.halves
    rows, at_once, each = batch * heads * blocks, chosen.programs * processors(k), 1
    if position.splits is not None:
        n_splits, span = position.splits.shape[0], block
    elif segments is None:
        n_splits, span = plan_splits(length, rows, block, at_once)
    else:
        n_splits, span = segments
        each = split_count(rows * n_splits, at_once, span // block)
        n_splits *= each
    counts = {"span": span, "n_splits": n_splits, "per_segment": each}
    tile = {"BK": bk, "BV": bv, "BLOCKS": blocks, "ROWS": chosen.rows(k, bk)}
    shared = arguments(position, vdim, k=k, v=v)
    launch = Launch(_summarize, (rows, n_splits), **counts, **tile, **shared, **chosen.options())
    rows = batch * heads
    return launch, (rows, n_splits, dim), (rows, n_splits, halves * dim, vdim)


def splits_of_segments(k: Tensor, v: Tensor, position: FlatPosition, segments: tuple[int, int]) -> int:
    """Return how many splits `summarize_splits` makes of `segments`, (number, tokens) of segments."""
    return _summarize_plan(dense_rows(k), dense_rows(v), position, segments)[1][1]


def summarize_splits(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    position: FlatPosition,
    segments: tuple[int, int] | None = None,
    forget: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return States (batch * heads, splits, ...) of as many splits as suit the card; with `segments`,
    (number, tokens) of segments, of as many splits of each segment. forget: decay rate of each head
    for a token, float32; weights are then those at the segment's last token."""
    k, v = dense_rows(k), dense_rows(v)
    launch, sums, memories = remembered(
        ("summarize", form(k, v), position.key, segments), lambda: _summarize_plan(k, v, position, segments)
    )
    top, total, memory = scratch(k, *sums), scratch(k, *sums), scratch(k, *memories)
    tables = position.splits, position.shapes
    launch(k, v, flags(mask), *tables, *position.angles, forget, top, total, memory)
    return top, total, memory


def summarize(k: Tensor, v: Tensor, mask: Tensor | None, position: FlatPosition) -> tuple[Tensor, Tensor, Tensor]:
    """Return the State of k, v (batch, length, heads, dim); mask (batch, length) bool or None."""
    top, total, memory = summarize_splits(k, v, mask, position)
    (batch, _, heads, dim), vdim, n_splits = k.shape, v.shape[-1], top.shape[1]
    batch, halves = position.samples(batch), position.halves
    sums, memories = (batch, heads, dim), (batch, heads, halves * dim, vdim)
    if position.first is None and isinstance(n_splits, int) and n_splits == 1:
        return top.view(sums), total.view(sums), memory.view(memories)
    joined = scratch(k, *sums), scratch(k, *sums), scratch(k, *memories)
    merge = merge_launch(k.device, batch, n_splits, heads, (halves, dim, vdim))
    merge(top, total, memory, position.first, *joined)
    return joined


def _read_plan(q: Tensor, vdim: int, position: FlatPosition) -> Launch:
    batch, length, heads, dim = q.shape
    bk, bv = pad(position.width(dim)), pad(vdim)
    # the features of a query are read whole, so here the cut is along the values
    chosen = plan("read", bv, bk, position.kind, operand_bytes(q))
    block, bv = chosen.block, chosen.keys
    blocks = cdiv(vdim, bv)
    n_splits, span = plan_splits(length, batch * heads * blocks, block, chosen.programs * processors(q))
    if position.splits is not None:
        n_splits = position.splits.shape[0]
    sizes = {"span": span, "BK": bk, "BV": bv, "BLOCKS": blocks, "ROWS": chosen.rows(q, bk)}
    grid = (batch * heads * blocks, n_splits)
    return Launch(_read, grid, **sizes, **arguments(position, vdim, q=q), **chosen.options())


def read(q: Tensor, total: Tensor, memory: Tensor, position: FlatPosition) -> Tensor:
    """Read a State with queries (batch, length, heads, dim); SiLU is applied to q here."""
    q, vdim = dense_rows(q), memory.shape[-1]
    launch = remembered(
        ("read", form(q), vdim, total.dtype, memory.dtype, position.key), lambda: _read_plan(q, vdim, position)
    )
    out = q.new_empty(*q.shape[:3], vdim)
    state = total.contiguous(), memory.contiguous()
    launch(q, *state, position.splits, position.shapes, *position.angles, out)
    return out

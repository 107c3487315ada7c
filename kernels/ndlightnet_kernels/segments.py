"""Merges of States: of the splits of a source, and between the segments of the causal form."""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, later, pad, weight

AT_ONCE = tl.constexpr(8)  # States whose loads are in flight at the same time


@triton.jit
def splits_of_state(first, bh, heads, n_splits):
    """Return the base index of a State's splits, the first one and the one after the last: all
    `n_splits`, or in a pack those from first[row] to first[row + 1]."""
    if first is None:
        return bh * n_splits, n_splits * 0, n_splits
    else:
        row = bh // heads
        return bh % heads * n_splits, tl.load(first + row), tl.load(first + row + 1)


@triton.jit(do_not_specialize=["n_splits", "heads"])
def merge_splits(
    top,
    total,
    memory,
    first,
    top_out,
    total_out,
    memory_out,
    n_splits,
    heads,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BV: tl.constexpr,
    HALVES: tl.constexpr,
    BC: tl.constexpr,
):
    """Merge the splits' States: one program for BC rows of the memory. first: see `splits_of_state`."""
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    row = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = row < HALVES * DIM
    in_tile = inside[:, None] & (vc < VDIM)[None, :]
    base, begin, end = splits_of_state(first, bh, heads, n_splits)
    at = base * DIM + row % DIM
    zero = tl.zeros((BC,), tl.int32)
    best = tl.full((BC,), float("-inf"), tl.float32)
    for some in range(begin, end, 8):
        for i in tl.static_range(8):
            s = zero + some + i
            one = tl.load(top + at + s * DIM, mask=inside & (s < end), other=float("-inf"))
            best = tl.maximum(best, one)
    sm = tl.zeros((BC,), tl.float32)
    acc = tl.zeros((BC, BV), tl.float32)
    for some in range(begin, end, 8):
        for i in tl.static_range(8):  # eight loads in flight at once
            s = zero + some + i
            in_range = inside & (s < end)
            w = weight(tl.load(top + at + s * DIM, mask=in_range, other=float("-inf")), best)
            sm += w * tl.load(total + at + s * DIM, mask=in_range, other=0.0)
            x = memory + ((base + s) * (HALVES * DIM) + row)[:, None] * VDIM + vc[None, :]
            acc += w[:, None] * tl.load(x, mask=in_tile & in_range[:, None], other=0.0)
    tl.store(top_out + bh * DIM + row, best, row < DIM)
    tl.store(total_out + bh * DIM + row, sm, row < DIM)
    tl.store(memory_out + (bh * (HALVES * DIM) + row)[:, None] * VDIM + vc[None, :], acc, in_tile)


Sizes = tuple[int, int, int]  # of a memory: its halves, dim and vdim


def memory_launch(kernel: Any, rows: int, sizes: Sizes, elements: int = 256, **numbers: int) -> Launch:
    """Return the launch of a kernel whose programs take some rows of a memory (halves * dim, vdim)
    of each of `rows` States. elements: of a program."""
    halves, dim, vdim = sizes
    some = max(1, elements // pad(vdim))
    tile = {"DIM": dim, "VDIM": vdim, "BV": pad(vdim), "HALVES": halves, "BC": some}
    return Launch(kernel, (rows, cdiv(halves * dim, some)), **numbers, **tile, num_warps=2)


def merge_launch(device: torch.device, samples: int, n_splits: int, heads: int, sizes: Sizes) -> Launch:
    """Return the launch of `merge_splits`."""

    def make() -> Launch:
        rows, (halves, dim, vdim) = samples * heads, sizes
        # smaller programs where larger ones leave much of the card idle: measured on one H200
        elements = 128 if rows * halves * dim * pad(vdim) < 256 * 1024 else 256
        return memory_launch(merge_splits, rows, sizes, elements, n_splits=n_splits, heads=heads)

    return remembered(("merge", device, samples, n_splits, heads, sizes), make)


@triton.jit
def log2_rate(forget, bh, heads):
    """Return the decay rate of a row's head for a token, in powers of 2."""
    return tl.load(forget + bh % heads) * 1.4426950408889634


@triton.jit
def reciprocal_sum(total, at, inside):
    s = tl.load(total + at, mask=inside, other=0.0)
    return tl.where(s > 0, 1 / tl.where(s > 0, s, 1.0), 0.0)


@triton.jit
def _join_one(total, memory, dtotal, dmemory, bh, j, inside, vc, dcos, dsin, DIM, VDIM, HALVES):
    in_tile = inside[:, None] & (vc < VDIM)[None, :]
    inverse = reciprocal_sum(total, bh * DIM + j, inside)
    at = (bh * (HALVES * DIM) + j)[:, None] * VDIM + vc[None, :]
    product = dcos * tl.load(memory + at, mask=in_tile, other=0.0)
    tl.store(dmemory + at, dcos * inverse[:, None], in_tile)
    if HALVES == 2:
        product += dsin * tl.load(memory + at + DIM * VDIM, mask=in_tile, other=0.0)
        tl.store(dmemory + at + DIM * VDIM, dsin * inverse[:, None], in_tile)
    tl.store(dtotal + bh * DIM + j, -tl.sum(product, 1) * inverse * inverse, inside)


@triton.jit(do_not_specialize=["n_splits", "heads"])
def join_grads(
    dmemories,
    total,
    memory,
    first,
    dtotal,
    dmemory,
    n_splits,
    heads,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BV: tl.constexpr,
    KIND: tl.constexpr,
    BC: tl.constexpr,
):
    """Sum the splits' gradients and propagate them through the normalisation: one program for BC features."""
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < WIDTH
    in_tile = inside[:, None] & (vc < VDIM)[None, :]
    base, begin, end = splits_of_state(first, bh, heads, n_splits)
    zero = tl.zeros((BC,), tl.int32)
    ga = tl.zeros((BC, BV), tl.float32)
    gb = ga
    for some in range(begin, end, 8):
        for i in tl.static_range(8):  # eight loads in flight at once
            s = zero + some + i
            at = dmemories + ((base + s) * (HALVES * WIDTH) + c)[:, None] * VDIM + vc[None, :]
            in_range = in_tile & (s < end)[:, None]
            ga += tl.load(at, mask=in_range, other=0.0)
            if KIND != 0:
                gb += tl.load(at + WIDTH * VDIM, mask=in_range, other=0.0)
    _join_one(total, memory, dtotal, dmemory, bh, c, inside, vc, ga, gb, DIM, VDIM, HALVES)
    if KIND == 2:  # the pair's second channel reads the tiles swapped
        _join_one(total, memory, dtotal, dmemory, bh, c + WIDTH, inside, vc, gb, -ga, DIM, VDIM, HALVES)


@triton.jit(do_not_specialize=["segments", "per_segment", "span", "heads"])
def prefix_states(
    forget,
    top0,
    total0,
    memory0,
    top,
    total,
    memory,
    top_out,
    total_out,
    memory_out,
    segments,
    per_segment,
    span,
    heads,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BV: tl.constexpr,
    HALVES: tl.constexpr,
    BC: tl.constexpr,
):
    """Prefix merge: compute the State before each of `segments` + 1 segments from the States of their
    splits (None: there is only one segment). One program for BC rows of the memory. forget: decay
    rate of each head for a token; then States before segments are those at the token before."""
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    row = tl.program_id(1) * BC + tl.arange(0, BC)
    inside, lead, c = row < HALVES * DIM, row < DIM, row % DIM
    tile, in_tile = row[:, None] * VDIM + vc[None, :], inside[:, None] & (vc < VDIM)[None, :]
    best = tl.full((BC,), float("-inf"), tl.float32)
    sm, m = tl.zeros((BC,), tl.float32), tl.zeros((BC, BV), tl.float32)
    if top0 is not None:
        best = tl.load(top0 + bh * DIM + c, mask=inside, other=float("-inf"))
        sm = tl.load(total0 + bh * DIM + c, mask=inside, other=0.0)
        m = tl.load(memory0 + bh * (HALVES * DIM * VDIM) + tile, mask=in_tile, other=0.0)
    zero, states = tl.zeros((BC,), tl.int32), bh * (segments + 1)
    tl.store(top_out + (states + bh) * DIM + c, best, lead)
    tl.store(total_out + states * DIM + c, sm, lead)
    tl.store(memory_out + states * (HALVES * DIM * VDIM) + tile, m, in_tile)
    if top is not None:
        count = segments * per_segment
        for first in range(0, count, AT_ONCE):
            refs, sums, tiles = (), (), ()
            for i in tl.static_range(AT_ONCE):
                s = zero + first + i
                at, in_range = bh * count + s, inside & (s < count)
                refs += (tl.load(top + at * DIM + c, mask=in_range, other=float("-inf")),)
                sums += (tl.load(total + at * DIM + c, mask=in_range, other=0.0),)
                x = memory + at[:, None] * (HALVES * DIM * VDIM) + tile
                tiles += (tl.load(x, mask=in_tile & in_range[:, None], other=0.0),)
            for i in tl.static_range(AT_ONCE):
                if forget is None:
                    high = tl.maximum(best, refs[i])
                    fall = weight(best, high)
                else:  # splits' States are those at the end of their segment
                    starts = (zero + first + i) % per_segment == 0
                    lag = tl.where(starts, log2_rate(forget, bh, heads) * span, 0.0)
                    high = tl.maximum(later(best, lag)[0], refs[i])
                    fall = weight(best, high, -lag)
                w = weight(refs[i], high)
                best, sm = high, fall * sm + w * sums[i]
                m = fall[:, None] * m + w[:, None] * tiles[i]
                s = zero + first + i + 1
                to, in_range = states + s // per_segment, (s <= count) & (s % per_segment == 0)
                tl.store(top_out + (to + bh) * DIM + c, best, lead & in_range)
                tl.store(total_out + to * DIM + c, sm, lead & in_range)
                x = memory_out + to[:, None] * (HALVES * DIM * VDIM) + tile
                tl.store(x, m, in_tile & in_range[:, None])


@triton.jit(do_not_specialize=["segments", "length", "span", "heads"])
def suffix_grads(
    forget,
    top,
    dsums,
    dmemories,
    dtotal,
    dmemory,
    dtotal0,
    dmemory0,
    dsum_out,
    dmemory_out,
    segments,
    length,
    span,
    heads,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BV: tl.constexpr,
    HALVES: tl.constexpr,
    BC: tl.constexpr,
):
    """Adjoint of `prefix_states`: sum what later segments and the final State add to the gradients
    of the State after each segment. dsums, dmemories: gradients of the State before a segment from
    its queries, in units of that State; None where they are not needed."""
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    row = tl.program_id(1) * BC + tl.arange(0, BC)
    inside, lead, c = row < HALVES * DIM, row < DIM, row % DIM
    tile, in_tile = row[:, None] * VDIM + vc[None, :], inside[:, None] & (vc < VDIM)[None, :]
    states = top + bh * (segments + 1) * DIM + c
    ref_after = tl.load(states + segments * DIM, mask=inside, other=float("-inf"))
    filled = ref_after > float("-inf")  # a channel without any token so far has no memory
    after, m = tl.zeros((BC,), tl.float32), tl.zeros((BC, BV), tl.float32)
    if dtotal is not None:
        after -= tl.where(filled, tl.load(dtotal + bh * DIM + c, mask=inside, other=0.0), 0.0)
    if dmemory is not None:
        m = tl.load(dmemory + bh * (HALVES * DIM * VDIM) + tile, mask=in_tile, other=0.0)
        m = tl.where(filled[:, None], m, 0.0)
    zero, end = tl.zeros((BC,), tl.int32), bh * segments + segments - 1
    tl.store(dsum_out + end * DIM + c, after, lead)
    tl.store(dmemory_out + end * (HALVES * DIM * VDIM) + tile, m, in_tile)
    for back in range(0, segments, AT_ONCE):
        refs, sums, tiles = (), (), ()
        for i in tl.static_range(AT_ONCE):
            s = zero + segments - 1 - back - i
            at, in_range = bh * segments + s, inside & (s >= 0)
            refs += (tl.load(states + s * DIM, mask=in_range, other=float("-inf")),)
            if dsums is None:
                sums += (tl.zeros((BC,), tl.float32),)
                tiles += (tl.zeros((BC, BV), tl.float32),)
            else:
                sums += (tl.load(dsums + at * DIM + c, mask=in_range, other=0.0),)
                x = dmemories + at[:, None] * (HALVES * DIM * VDIM) + tile
                tiles += (tl.load(x, mask=in_tile & in_range[:, None], other=0.0),)
        for i in tl.static_range(AT_ONCE):
            s = zero + segments - 1 - back - i
            ref = tl.where(s >= 0, refs[i], ref_after)
            filled = ref > float("-inf")
            if forget is None:
                fall = weight(ref, ref_after)
            else:
                tokens = tl.where(s == segments - 1, length - (segments - 1) * span, span)
                tokens = tl.where(s >= 0, tokens, 0)
                fall = weight(ref, ref_after, -log2_rate(forget, bh, heads) * tokens)
            after = fall * after + tl.where(filled, sums[i], 0.0)
            m = fall[:, None] * m + tl.where(filled[:, None], tiles[i], 0.0)
            ref_after = ref
            at, in_range = bh * segments + s - 1, s > 0
            tl.store(dsum_out + at * DIM + c, after, lead & in_range)
            x = dmemory_out + at[:, None] * (HALVES * DIM * VDIM) + tile
            tl.store(x, m, in_tile & in_range[:, None])
    if dtotal0 is not None:
        tl.store(dtotal0 + bh * DIM + c, -after, lead)
        tl.store(dmemory0 + bh * (HALVES * DIM * VDIM) + tile, m, in_tile)

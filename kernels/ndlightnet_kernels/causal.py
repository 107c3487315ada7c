"""Causal attention without a decay kernel: the additive decay telescopes.

o_t = sum_(u <= t) (phi_t / s_t . exp(k_u)) v_u is attention without decay on rescaled queries and
exponentiated keys; only the range of exponents needs care. Segments of the length run in parallel
from carried States, and within a segment the chunks run in order. Keys of a segment are
exp(k - anchor) with one anchor; s, which only grows, is in units of exp(anchor). An anchor serves
every query whose s does not vanish; if it serves the segment's first query, it serves all.

Where it does not (logits that climb by more than 60 within a segment, padding in front), the
segment is flagged and computed again by the careful form of the same kernel: an anchor for each
chunk (its largest logit) and, for queries that even this does not serve, further anchors in further
rounds. All exponents are <= 0 there, and nothing overflows whatever the logits.

The State after the last segment is a by-product of its outputs: so nothing of that segment is read
twice, and its anchor is the largest logit of its first chunk. Where the rows (batch x heads) alone
fill the card, a whole row is one segment.

Keys and values of other segments are read twice. One pass was tried, whose programs sum their keys
and values, hand States on in a chain, and read them again from the L2 cache. On an H200 it took
0.206 ms at best for 0.193 (4 x 16,384 tokens of 12 x 64): the outputs alone take 0.141, with memory
58 % busy, tensor cores 32 %, issue slots 36 %. What counts there is how long a program waits for its
products, two programs on a multiprocessor, and the sums add to it.
"""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels import attention
from ndlightnet_kernels.causal_chunks import (
    MIDDLE,
    RANGE,
    STEEP,
    at_level,
    decay_exp_until,
    decay_state,
    decayed,
    gather,
    load_entry,
    next_anchor,
    read_memory,
    rotation,
    scores,
    silu_over,
    to_anchor,
    token_decay_exps,
    unserved,
)
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.phases import pinned, slot_frequencies
from ndlightnet_kernels.plans import CAREFUL, causal, fills, plan_segments
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.segments import log2_rate, memory_launch, prefix_states
from ndlightnet_kernels.tiles import (
    SIZES,
    arguments,
    dense,
    dense_rows,
    dot,
    flags,
    form,
    hide,
    load,
    load_keys,
    pad,
    powers,
    scratch,
    silu,
    slip,
    valid_tokens,
    weight,
)


@triton.jit(do_not_specialize=SIZES)
def _causal(
    q,
    k,
    v,
    mask,
    theta,
    offset,
    forget,
    top,
    total,
    memory,
    flag,
    out,
    top_end,
    total_end,
    memory_end,
    sqb,
    sqt,
    sqh,
    skb,
    skt,
    skh,
    svb,
    svt,
    svh,
    length,
    span,
    segments,
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
    CAREFUL: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute the output of a segment, chunk by chunk, from the State before it; for the last
    segment, which was not summarised before, also the State after it. The last segment is flagged
    too if its logits rise too far above the anchor.

    forget: decay rate of each head for a token; a segment is flagged where sums leave the range of the plain form."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    begin, end = segment * span, min(segment * span + span, length)
    if CAREFUL:
        if tl.load(flag + bh * segments + segment) == 0:
            return
    kc, vc, lane = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BL)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, None, b, prefix, kc, ANGLES)
    q_rows, k_rows = (q, b, h, sqb, sqt, sqh, DIM, UNIT), (k, b, h, skb, skt, skh, DIM, UNIT)
    v_rows = (v, b, h, svb, svt, svh, VDIM, UNIT)
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    mx, sm, m, m_sin = load_entry(top, total, memory, bh, segment, segments, kc, vc, DIM, VDIM, HALVES)
    ones = (lane[:, None] >= lane[None, :]).to(OPERAND)
    run, inside, final = tl.zeros((BL, BK), tl.float32), kc < DIM, segment == segments - 1
    after = top + (bh * (segments + 1) + segment + 1) * DIM + kc
    rate = None if forget is None else log2_rate(forget, bh, heads)
    decay_exp = None if rate is None else token_decay_exps(rate, lane)
    # without a selection for each element, the last token's key stands for those after it
    HIDE: tl.constexpr = CAREFUL or mask is not None or tl.float32 == OPERAND or forget is not None
    if not CAREFUL:
        if final:
            x = load_keys(k_rows, begin + lane, kc, length)
            x = hide(x, valid_tokens(mask, b, begin + lane, length, length))
            anchor = tl.maximum(mx, tl.max(x, 0))
            tl.store(after, anchor, inside)
        else:
            anchor = tl.load(after, mask=inside, other=float("-inf"))
        mx, sm, m, m_sin = to_anchor(anchor, mx, sm, m, m_sin, OPERAND)
        if forget is None:
            lost = unserved(k_rows, mask, begin, length, mx, sm, kc)
        else:
            fall = tl.exp2(rate * -BL)
            enter = tl.exp2(rate * BL - decay_exp_until(rate, begin, None, BL))  # falls once more in a chunk
            sm, m, m_sin = sm * enter, m * enter, m_sin * enter
            worst = run.to(tl.int32)
        run += tl.where(inside, sm, 1.0)[None, :]
    for first in range(begin, end, BL):
        if forget is not None:
            if CAREFUL:
                lag = tl.where(first == begin, decay_exp_until(rate, begin, None, BL), rate * BL)
                mx, sm, m, m_sin = decay_state(lag, mx, sm, m, m_sin)
            else:
                run, m, m_sin = run * fall, m * fall, m_sin * fall
        t = first + lane
        valid = valid_tokens(mask, b, t, length, length)
        x = load_keys(k_rows, t, kc, length)
        if HIDE:
            x = hide(x, valid)
        y = load(v_rows, t, vc, valid)
        x_q = load(q_rows, t, kc, t < length).to(tl.float32)
        _, cos, sin = rotation(freqs, t, kc, ANGLES)
        score = tl.zeros((BL, BL), tl.float32)
        if CAREFUL:
            phi, _ = silu(x_q)
            best = tl.maximum(mx, tl.max(decayed(x, decay_exp), 0))
            todo = (lane >= 0)[:, None] & inside[None, :]
            anchor, from_entry = best, tl.zeros((BL, BK), tl.float32)
            rounds = 0  # each serves at least one row
            while (tl.max(anchor, 0) > float("-inf")) & (rounds < BL):
                rounds += 1
                low, inverse, entered, todo = at_level(x, decay_exp, anchor, mx, sm, todo, ones, PRODUCT)
                f = phi * inverse
                from_entry += f * entered[None, :]
                score = scores(f, low, cos, sin, score, KIND, PRODUCT)
                anchor = next_anchor(x, decay_exp, mx, todo)
            p, carry = weight(x, best[None, :], decay_exp), weight(mx, best)
            sm = sm * carry + tl.sum(p.to(OPERAND).to(tl.float32), 0)
            mx = best
        else:
            p = powers(x, mx, OPERAND, decay_exp)
            p = pinned(p.to(OPERAND) if KIND == 0 else p)
            # a segment with sums below TINY is computed again, so they may be anything here
            s = dot(ones, p, run, PRODUCT)
            from_entry = silu_over(x_q, s)
            if forget is not None:
                worst = tl.maximum(worst, tl.abs(s.to(tl.int32, bitcast=True) - MIDDLE))
            run = dot(tl.full((BL, BL), 1.0, OPERAND), p, run, PRODUCT)
            score = scores(from_entry, p, cos, sin, score, KIND, PRODUCT)
        o = tl.zeros((BL, BV), tl.float32)
        o = read_memory(from_entry, m, m_sin, cos, sin, o, KIND, PRODUCT)
        score = tl.where(lane[:, None] >= lane[None, :], score, 0.0)
        o = dot(score, y, o, PRODUCT)
        if CAREFUL:
            m, m_sin = m * carry[None, :], m_sin * carry[None, :]
        m, m_sin = gather(tl.trans(y), p, cos, sin, m, m_sin, KIND, PRODUCT)
        to = out + dense(b, h, t, vc, length, heads, VDIM)
        tl.store(to, o.to(out.dtype.element_ty), (t < length)[:, None] & (vc < VDIM)[None, :])
    if forget is not None:
        leave = decay_exp_until(rate, begin, end, BL)
        if not CAREFUL:
            lost = tl.max((inside & (tl.max(worst, 0) > RANGE)).to(tl.int32), 0)
            lost = tl.maximum(lost, (rate * BL > STEEP).to(tl.int32))
    if final:
        if CAREFUL:
            if forget is not None:
                mx, sm, m, m_sin = decay_state(leave, mx, sm, m, m_sin)
            tl.store(after, mx, inside)
        else:
            tl.debug_barrier()  # loaded again: a register less in the loop
            mx = tl.load(after, mask=inside, other=0.0)
            sm = tl.max(run, 0)  # all rows are the same
            if not HIDE:
                t = end - 1 + tl.zeros((1,), tl.int32)
                x = load_keys(k_rows, t, kc, length)
                p = powers(x, mx, OPERAND).to(OPERAND).to(tl.float32)
                sm -= tl.max(p, 0) * (tl.cdiv(end - begin, BL) * BL - (end - begin))
            lost = tl.maximum(lost, tl.max((inside & ~(sm < 1e25)).to(tl.int32), 0))
            fix = slip(mx, OPERAND)
            if forget is not None:
                fix *= tl.exp2(-leave)
            sm, m, m_sin = sm * fix, m * fix[None, :], m_sin * fix[None, :]
        tl.store(top_end + bh * DIM + kc, mx, inside)
        tl.store(total_end + bh * DIM + kc, sm, inside)
        to = memory_end + (bh * (HALVES * DIM) + kc)[None, :] * VDIM + vc[:, None]
        in_tile = inside[None, :] & (vc < VDIM)[:, None]
        tl.store(to, m, in_tile)
        if KIND != 0:
            tl.store(to + DIM * VDIM, m_sin, in_tile)
    if not CAREFUL:
        tl.store(flag + bh * segments + segment, lost)


# ------------------------------------------------------------------------------------ launches
class Segments(NamedTuple):
    """Launches of a call: the merge of segments, and the plain and the careful form."""

    segments: int
    summarized: tuple[int, int] | None  # number and tokens of segments; None: rows alone fill the card
    merge: Launch
    forms: tuple[Launch, Launch]


def _plan(q: Tensor, k: Tensor, v: Tensor, position: FlatPosition) -> Segments:
    (batch, _, heads, dim), vdim = k.shape, v.shape[-1]
    segments, span = plan_segments(k, vdim, position.kind)
    rows, summarized, each = batch * heads, None, 1
    if not fills(k, vdim, position.kind):
        summarized = (segments - 1, span)
        each = attention.splits_of_segments(k, v, position, summarized) // max(1, segments - 1)
    counts = {"segments": segments - 1, "per_segment": each, "span": span, "heads": heads}
    merge = memory_launch(prefix_states, rows, (position.halves, dim, vdim), **counts)
    sizes = {"span": span, "segments": segments, "BK": pad(dim), "BV": pad(vdim)}
    sizes |= arguments(position, vdim, k=k, q=q, v=v)
    plain, careful = (
        Launch(_causal, (rows, segments), BL=c.chunk, CAREFUL=c is CAREFUL, **sizes, **c.options())
        for c in (causal(k, vdim, position.kind).forward, CAREFUL)
    )
    return Segments(segments, summarized, merge, (plain, careful))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    state: tuple[Tensor | None, ...],
    position: FlatPosition,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return output (batch, length, heads, value_dim), the final State (max, sum, memory), and for
    the backward the States before each segment (batch * heads, segments, ...), with one more max
    after the last one, and flags. state: (max, sum, memory), or three None for an empty State.
    forget: decay rate of each head for a token, (heads,) float32, or None."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    (batch, _, heads, dim), vdim = k.shape, v.shape[-1]
    halves, rows = position.halves, batch * heads
    dtypes = tuple(x is not None and x.dtype for x in state)
    segments, summarized, merge, forms = remembered(
        ("causal", form(q, k, v), dtypes, position.key), lambda: _plan(q, k, v, position)
    )
    top, total = scratch(k, rows, segments + 1, dim), scratch(k, rows, segments, dim)
    entry = top, total, scratch(k, rows, segments, halves * dim, vdim)
    states: tuple[Tensor | None, ...] = (None, None, None)
    if summarized is not None:
        states = attention.summarize_splits(k, v, mask, position, summarized, forget)
    last = (scratch(k, batch, heads, dim), scratch(k, batch, heads, dim), scratch(k, batch, heads, halves * dim, vdim))
    first = (x if x is None else x.contiguous() for x in state)
    merge(forget, *first, *states, *entry)
    out = q.new_empty(*v.shape)
    flag = q.new_empty(rows, segments, dtype=torch.int32)
    mask_bytes, angles = flags(mask), position.angles
    for launch in forms:
        launch(q, k, v, mask_bytes, *angles, forget, *entry, flag, out, *last)
    return out, last, (*entry, flag)

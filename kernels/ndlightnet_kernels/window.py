"""Causal attention to the last tokens, tile by tile: no State, nothing carried along the length.

A program has a chunk of queries and goes over the keys that they attend to: once for the maximum,
once for the sums, once for the outputs. Keys are exp(k - anchor) with one anchor for the chunk, the
largest logit that any of its queries attends to. Where that leaves a query without a sum, the chunk
is flagged and computed again by the careful form: with further anchors for the queries left, each
the largest logit that these attend to, in further rounds. No exponent is positive.
"""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.causal_chunks import TINY, decayed, reciprocal, rotation, silu_over
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.phases import slot_frequencies
from ndlightnet_kernels.plans import CAREFUL, Chunks, windowed
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.segments import log2_rate
from ndlightnet_kernels.tiles import (
    SIZES,
    arguments,
    cdiv,
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
    valid_tokens,
    weight,
)


@triton.jit
def attended(t, u, window):
    """Return which keys u (columns) queries t (rows) attend to."""
    age = t[:, None] - u[None, :]
    return (age >= 0) & (age < window)


@triton.jit
def attending(u, t, window):
    """Return which queries t (columns) attend to keys u (rows)."""
    age = t[None, :] - u[:, None]
    return (age >= 0) & (age < window)


# What a chunk of queries sees, a tuple `view`: its first token, the first token of the chunk in which its window
# begins, the length of the row, the tokens of a window.
@triton.jit
def window_keys(k_rows, mask, u, view, kc):
    """Return the logits of tokens u, -inf where the chunk from `first` on does not attend to them,
    and to which of them it does."""
    first, _, length, window = view
    valid = valid_tokens(mask, k_rows[1], u, length, length) & (u > first - window)
    return hide(load_keys(k_rows, u, kc, length), valid), valid


@triton.jit
def since(rate, u, first, PLAIN: tl.constexpr):
    """Return the decay of tokens u as seen from the middle of the plain form's chunk of queries that `first` is in."""
    return (rate * (u - first // PLAIN * PLAIN - PLAIN // 2).to(tl.float32))[:, None]


@triton.jit
def capped(x, anchor, decay_exp):
    """Return exp(x - anchor), at most 1: larger ones are of keys that no query left attends to."""
    p = tl.minimum(weight(x, anchor[None, :], decay_exp), 1.0)
    return tl.where((anchor > float("-inf"))[None, :], p, 0.0)


@triton.jit
def products(f, cos_t, sin_t, p, cos, sin, KIND: tl.constexpr, PRODUCT: tl.constexpr):
    """Return the products of features of f (tokens t) and of p, each turned by its own angles."""
    out = tl.zeros((f.shape[0], p.shape[0]), tl.float32)
    if KIND == 0:
        out = dot(f, tl.trans(p), out, PRODUCT)
    else:
        out = dot(f * cos_t, tl.trans(p * cos), out, PRODUCT)
        out = dot(f * sin_t, tl.trans(p * sin), out, PRODUCT)
    return out


@triton.jit
def next_window_anchor(k_rows, mask, todo, t, view, kc, rate, PLAIN, PRODUCT):
    """Return the largest logit that the queries in `todo` attend to, or if None, all of a chunk."""
    BL: tl.constexpr = t.shape[0]
    first, begin, _, window = view
    best = tl.full((BL, kc.shape[0]), float("-inf"), tl.float32)
    for at in range(begin, first + BL, BL):
        u = at + tl.arange(0, BL)
        x = window_keys(k_rows, mask, u, view, kc)[0]
        decay_exp = None if rate is None else since(rate, u, first, PLAIN)
        x = decayed(x, decay_exp)
        if todo is not None:
            count = dot(attending(u, t, window), todo, tl.zeros(todo.shape, tl.float32), PRODUCT)
            x = tl.where(count > 0.5, x, float("-inf"))
        best = tl.maximum(best, x)
    return tl.max(best, 0)


@triton.jit(do_not_specialize=SIZES)
def _window(
    q,
    k,
    v,
    mask,
    theta,
    offset,
    forget,
    top,
    flag,
    out,
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
    window,
    chunks,
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
    PLAIN: tl.constexpr,
    CAREFUL: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute the output of a chunk of queries; also its anchor and whether that failed."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    chunk = bh * chunks + block * BL // PLAIN
    if CAREFUL:
        if tl.load(flag + chunk) == 0:
            return
    first = block * BL
    kc, vc, t = tl.arange(0, BK), tl.arange(0, BV), first + tl.arange(0, BL)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, None, b, prefix, kc, ANGLES)
    q_rows, k_rows = (q, b, h, sqb, sqt, sqh, DIM, UNIT), (k, b, h, skb, skt, skh, DIM, UNIT)
    v_rows = (v, b, h, svb, svt, svh, VDIM, UNIT)
    rate = None if forget is None else log2_rate(forget, bh, heads)
    inside, begin = kc < DIM, tl.maximum(first - window + 1, 0) // BL * BL
    view = (first, begin, length, window)
    x_q = load(q_rows, t, kc, t < length).to(tl.float32)
    _, cos_t, sin_t = rotation(freqs, t, kc, ANGLES)
    todo = (t < length)[:, None] & inside[None, :]
    o = tl.zeros((BL, BV), tl.float32)
    anchor = next_window_anchor(k_rows, mask, None, t, view, kc, rate, PLAIN, PRODUCT)
    if CAREFUL:
        phi, _ = silu(x_q)
        rounds = 0  # each serves at least one query
        while (tl.max(anchor, 0) > float("-inf")) & (rounds < BL):
            rounds += 1
            s = tl.zeros((BL, BK), tl.float32)
            for at in range(begin, first + BL, BL):
                u = at + tl.arange(0, BL)
                x, valid = window_keys(k_rows, mask, u, view, kc)
                decay_exp = None if rate is None else since(rate, u, first, PLAIN)
                p = capped(x, anchor, decay_exp)
                s = dot(attended(t, u, window), p, s, PRODUCT)
            f = phi * tl.where(todo & (s >= TINY), reciprocal(s), 0.0)
            for at in range(begin, first + BL, BL):
                u = at + tl.arange(0, BL)
                x, valid = window_keys(k_rows, mask, u, view, kc)
                decay_exp = None if rate is None else since(rate, u, first, PLAIN)
                p = capped(x, anchor, decay_exp)
                y = load(v_rows, u, vc, valid)
                _u, cos, sin = rotation(freqs, u, kc, ANGLES)
                score = products(f, cos_t, sin_t, p, cos, sin, KIND, PRODUCT)
                score = tl.where(attended(t, u, window), score, 0.0)
                o = dot(score, y, o, PRODUCT)
            todo = todo & (s < TINY)
            anchor = next_window_anchor(k_rows, mask, todo, t, view, kc, rate, PLAIN, PRODUCT)
    else:
        tl.store(top + chunk * DIM + kc, anchor, inside)
        s = tl.zeros((BL, BK), tl.float32)
        for at in range(begin, first + BL, BL):
            u = at + tl.arange(0, BL)
            x, valid = window_keys(k_rows, mask, u, view, kc)
            decay_exp = None if rate is None else since(rate, u, first, PLAIN)
            p = powers(x, anchor, OPERAND, decay_exp)
            s = dot(attended(t, u, window), p, s, PRODUCT)
        tl.store(flag + chunk, tl.max(tl.max((todo & (s < TINY)).to(tl.int32), 0), 0))
        f = silu_over(x_q, s)
        for at in range(begin, first + BL, BL):
            u = at + tl.arange(0, BL)
            x, valid = window_keys(k_rows, mask, u, view, kc)
            decay_exp = None if rate is None else since(rate, u, first, PLAIN)
            p = powers(x, anchor, OPERAND, decay_exp)
            y = load(v_rows, u, vc, valid)
            _u, cos, sin = rotation(freqs, u, kc, ANGLES)
            score = products(f, cos_t, sin_t, p, cos, sin, KIND, PRODUCT)
            score = tl.where(attended(t, u, window), score, 0.0)
            o = dot(score, y, o, PRODUCT)
    to = out + dense(b, h, t, vc, length, heads, VDIM)
    tl.store(to, o.to(out.dtype.element_ty), (t < length)[:, None] & (vc < VDIM)[None, :])


# ------------------------------------------------------------------------------------ launches
def plan(
    kernel: Any, chosen: Chunks, position: FlatPosition, window: int, k: Tensor, v: Tensor, **queries: Tensor
) -> tuple[Launch, Launch]:
    """Return the launches of the plain and of the careful form over chunks. queries: q, and in
    the backward o, dout."""
    (batch, length, heads, dim), vdim = k.shape, v.shape[-1]
    chunks = cdiv(length, chosen.chunk)
    sizes = {"window": window, "chunks": chunks, "BK": pad(dim), "BV": pad(vdim), "PLAIN": chosen.chunk}
    sizes |= arguments(position, vdim, k=k, v=v, **queries)
    plain, careful = (
        Launch(
            kernel,
            (batch * heads, chunks * (chosen.chunk // c.chunk)),
            BL=c.chunk,
            CAREFUL=c is CAREFUL,
            **sizes,
            **c.options(),
        )
        for c in (chosen, CAREFUL)
    )
    return plain, careful


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, forget: Tensor | None, window: int, position: FlatPosition
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (batch, length, heads, value_dim), and for the backward anchors (batch * heads,
    chunks, dim) and flags of chunks. forget: decay rate of each head for a token, float32."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    chosen = windowed(k, v.shape[-1], position.kind).forward
    forms = remembered(
        ("window", form(q, k, v), window, position.key), lambda: plan(_window, chosen, position, window, k, v, q=q)
    )
    rows, chunks = k.shape[0] * k.shape[2], cdiv(k.shape[1], chosen.chunk)
    out, top = q.new_empty(*v.shape), scratch(k, rows, chunks, k.shape[3])
    flag = q.new_empty(rows, chunks, dtype=torch.int32)
    for launch in forms:
        launch(q, k, v, flags(mask), *position.angles, forget, top, flag, out)
    return out, top, flag

"""Chunks of the causal form: what the kernels of its output and of its gradients share."""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

import triton
import triton.language as tl

from ndlightnet_kernels.phases import coordinates, cos_sin
from ndlightnet_kernels.tiles import dot, hide, later, load_keys, slip, valid_tokens, weight

TINY = tl.constexpr(1e-27)  # a query whose sum is below it needs a further anchor
# With decay the plain form's sums may be 2^56 times more or less than 2^-10 (a float32's bits count its logarithm), and
# a chunk's decay 2^80: those in the backward's smaller chunks, at most 2^20 times more or less, are then numbers, too.
MIDDLE, RANGE, STEEP = tl.constexpr(117 << 23), tl.constexpr(56 << 23), tl.constexpr(80.0)


@triton.jit
def reciprocal(s):
    """Return 1 / s for s >= TINY, by rsqrt, which takes fewer instructions."""
    r = tl.rsqrt(tl.maximum(s, TINY))
    return r * r


@triton.jit
def silu_over(x, s):
    """Return silu(x) / s for s > 0, as x / (s + s exp(-x))."""
    r = tl.rsqrt(tl.exp2(x * -1.4426950408889634) * s + s)
    return x * (r * r)


@triton.jit
def silu_and_over(x, s):
    """Return silu(x), its derivative, 1 / s, and silu(x) / s, with one reciprocal for all. All are
    0 where s exp(-x) overflows: every use has silu(x) or its derivative as a factor, tiny there."""
    e = tl.exp2(tl.minimum(x * -1.4426950408889634, 100.0))
    r = tl.rsqrt(e * s + s)
    r = r * r
    y, sigmoid = x * (r * s), r * s
    return y, sigmoid + y * (1.0 - sigmoid), r * e + r, x * r


@triton.jit
def at_level(x, decay_exp, anchor, mx, sm, todo, ones, PRODUCT: tl.constexpr):
    """Return exp(x - anchor), 1 / s of the queries served, exp(mx - anchor), and queries left."""
    used = anchor > float("-inf")
    if decay_exp is None:
        p = weight(tl.minimum(x, anchor[None, :]), anchor[None, :])
    else:
        p = tl.minimum(weight(x, anchor[None, :], decay_exp), 1.0)
    p = tl.where(used[None, :], p, 0.0)
    carry = tl.where(used, weight(mx, anchor), 0.0)
    # sums of the rounded keys: a query's weights then add up to one
    s = dot(ones, p, tl.zeros(p.shape, tl.float32), PRODUCT) + (carry * sm)[None, :]
    inverse = tl.where(todo & (s >= TINY), reciprocal(s), 0.0)
    return p, inverse, carry, todo & (s < TINY)


@triton.jit
def next_anchor(x, decay_exp, mx, todo):
    """Return the largest logit that the queries left attend to; -inf where there is none."""
    return tl.max(tl.where(todo, tl.maximum(decayed(x, decay_exp), mx[None, :]), float("-inf")), 0)


# Decay: the weight of a token relative to its chunk's middle is exp(k) times 2^decay_exp, that of the
# tokens before a chunk falls from middle to middle. No number grows with the length.
@triton.jit
def token_decay_exps(rate, lane):
    """Return what decay adds to the exponents of a chunk's tokens, as powers of 2."""
    return (rate * (lane - lane.shape[0] // 2).to(tl.float32))[:, None]


@triton.jit
def decayed(x, decay_exp):
    """Return logits with their decay, rounded: for maxima."""
    if decay_exp is None:
        return x
    else:
        return x + decay_exp * 0.6931471805599453


@triton.jit
def decay_exp_until(rate, begin, end, BL: tl.constexpr):
    """Return the decay from the token before `begin` to the middle of a chunk, as a power of 2:
    the chunk from `begin` on, or with `end` backward in time, the last chunk, from `end` - 1."""
    if end is None:
        return rate * (BL // 2 + 1)
    else:
        return rate * ((end - 1 - begin) % BL - BL // 2).to(tl.float32)


@triton.jit
def decay_state(lag, mx, sm, m, m_sin):
    """Return a State whose weights fall by 2^-lag."""
    mx, rest = later(mx, lag)
    return mx, sm * rest, m * rest[None, :], m_sin * rest[None, :]


@triton.jit
def load_entry(top, total, memory, bh, segment, segments, kc, vc, DIM, VDIM, HALVES):
    """Load the State before a segment, its memory transposed. (`top` has one more at the end.)"""
    inside, at = kc < DIM, bh * segments + segment
    mx = tl.load(top + (at + bh) * DIM + kc, mask=inside, other=float("-inf"))
    sm = tl.load(total + at * DIM + kc, mask=inside, other=0.0)
    tile = memory + (at * (HALVES * DIM) + kc)[None, :] * VDIM + vc[:, None]
    in_tile = inside[None, :] & (vc < VDIM)[:, None]
    m = tl.load(tile, mask=in_tile, other=0.0)
    m_sin = m
    if HALVES == 2:
        m_sin = tl.load(tile + DIM * VDIM, mask=in_tile, other=0.0)
    return mx, sm, m, m_sin


@triton.jit
def rotation(freqs, t, kc, ANGLES: tl.constexpr):
    """Return coordinates, cos and sin of a chunk; without MD-LRPE zeros, which are not used."""
    if ANGLES[0] == 0:
        none = tl.zeros((t.shape[0], kc.shape[0]), tl.float32)
        return none, none, none
    else:
        at_axis = coordinates(freqs, t, ANGLES)
        cos, sin = cos_sin(freqs, at_axis, ANGLES)
        return at_axis, cos, sin


@triton.jit
def scores(a, b, cos, sin, acc, KIND: tl.constexpr, PRODUCT: tl.constexpr):
    """Return acc + features of a times transposed features of b."""
    if KIND == 0:
        acc = dot(a, tl.trans(b), acc, PRODUCT)
    else:
        acc = dot(a * cos, tl.trans(b * cos), acc, PRODUCT)
        acc = dot(a * sin, tl.trans(b * sin), acc, PRODUCT)
    return acc


@triton.jit
def gather(left, b, cos, sin, acc, acc_sin, KIND: tl.constexpr, PRODUCT: tl.constexpr):
    """Return (acc, acc_sin) + left times the features of b."""
    if KIND == 0:
        acc = dot(left, b, acc, PRODUCT)
    else:
        acc = dot(left, b * cos, acc, PRODUCT)
        acc_sin = dot(left, b * sin, acc_sin, PRODUCT)
    return acc, acc_sin


@triton.jit
def read_memory(f, m, m_sin, cos, sin, acc, KIND: tl.constexpr, PRODUCT: tl.constexpr):
    """Return acc + features of f times a memory that is stored transposed."""
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    if KIND == 0:
        acc = dot(f, tl.trans(m.to(OPERAND)), acc, PRODUCT)
    else:
        acc = dot(f * cos, tl.trans(m.to(OPERAND)), acc, PRODUCT)
        acc = dot(f * sin, tl.trans(m_sin.to(OPERAND)), acc, PRODUCT)
    return acc


@triton.jit
def rope_backward(d, d_sin, cos, sin, KIND: tl.constexpr):
    """Return the gradient of a tile from the gradients of its cos and sin features."""
    if KIND == 0:
        return d
    else:
        return d * cos + d_sin * sin


@triton.jit
def fall_to(mx, anchor, OPERAND: tl.constexpr):
    """Return the factor from units of exp(mx) to the units of the keys that `powers` returns."""
    return weight(mx, anchor) / slip(anchor, OPERAND)


@triton.jit
def to_anchor(anchor, mx, sm, m, m_sin, OPERAND: tl.constexpr):
    fall = fall_to(mx, anchor, OPERAND)
    return anchor, sm * fall, m * fall[None, :], m_sin * fall[None, :]


@triton.jit
def unserved(k_rows, mask, first, length, anchor, sm, kc):
    """Return 1 if `anchor` does not serve a segment's first query, whose sum is least, else 0."""
    t = first + tl.zeros((1,), tl.int32)
    valid = valid_tokens(mask, k_rows[1], t, length, length)
    x = hide(load_keys(k_rows, t, kc, length), valid)
    s = weight(tl.max(x, 0), anchor) + sm
    return tl.max(((kc < k_rows[6]) & (s < TINY)).to(tl.int32), 0)

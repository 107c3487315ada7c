"""LightNet attention in plain torch: one pass for the global form, chunks for the causal one.

Every exponent formed here is a difference of a logit and a maximum that is at least as large, so
nothing overflows. Letters as in reference.py; `rows` are the memory's rows: dim, or 2 * dim with
MD-LRPE (cos half, sin half). `w` holds the MD-LRPE factors of the keys, `(length, heads or 1,
rows)`, with `(batch,)` in front where samples have different offsets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import exporting
from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.dtypes import accumulator, finest
from ndlightnet.ops.lightnet.state import State, decay, tile
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import CHUNK, SEGMENT, Decay, from_chunks, missing, to_chunks
from ndlightnet.ops.recurrence.gated import Chunks
from ndlightnet.ops.recurrence.scan import adjoints, before, memories, prefix_maximum

LEAST = -1e30  # the maximum over no tokens, finite
LEAST_CHUNK = 8  # with fewer tokens the memories of chunks, dim x value_dim, are most of the work


def fold(x: Tensor, dim: int) -> Tensor:
    """Add the sin half of the last axis to the cos half: the adjoint of `tile`."""
    return x if x.shape[-1] == dim else x[..., :dim] + x[..., dim:]


def reduce_to(x: Tensor, like: Tensor) -> Tensor:
    """Sum over the axes along which `like` was broadcast to `x`."""
    return x.sum_to_size(like.shape)


# ------------------------------------------------------------------------------ global (Eq. 6)
class Summarize(torch.autograd.Function):
    """Summarise keys and values (..., length, heads, dim) to a State (..., heads, ·). Saves the
    inputs and the maximum; recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        top, total, memory = _summary(k, v, w)
        ctx.save_for_backward(k, v, w, top)
        ctx.mark_non_differentiable(top)
        return top, total, memory

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k, v, w, top = ctx.saved_tensors
        _, dsum, dmemory = grads
        acc, dim = accumulator(k), k.shape[-1]
        p = decay(k.to(acc), top[..., None, :, :])
        df = torch.einsum("...lhd,...hrd->...lhr", v.to(acc), dmemory)
        dw = None
        if w is None:
            f, dp = p, df
        else:
            tiled = tile(p, w.shape[-1], -1)
            f, dp = tiled * w, fold(df * w, dim)
            if ctx.needs_input_grad[2]:
                dw = reduce_to(tiled * df, w)
        dv = torch.einsum("...lhr,...hrd->...lhd", f, dmemory)
        return (p * (dp + dsum[..., None, :, :])).to(k.dtype), dv.to(v.dtype), dw


def _summary(k: Tensor, v: Tensor, w: Tensor | None) -> State:
    acc = accumulator(k)
    top = k.detach().amax(dim=-3).to(acc)
    p = decay(k.to(acc), top[..., None, :, :])
    f = p if w is None else tile(p, w.shape[-1], -1) * w
    return State(top, p.sum(dim=-3), f.transpose(-3, -2).mT @ v.to(acc).transpose(-3, -2))


def summarize(k: Tensor, v: Tensor, w: Tensor | None) -> State:
    if plain() or not torch.is_grad_enabled():
        return _summary(k, v, w)
    return State(*Summarize.apply(k, v, w))  # type: ignore[no-untyped-call]


def read(f: Tensor, state: State) -> Tensor:
    """Read a State with query features `(..., length, heads, rows)`; zero where it is empty."""
    total = torch.where(state.sum > 0, state.sum, torch.inf)
    memory = state.memory / tile(total, state.memory.shape[-2], -1)[..., None]
    return (f.transpose(-3, -2) @ memory).transpose(-3, -2)


# ------------------------------------------------------------------------------ causal (Eq. 5)
class Causal:
    """Values shared by forward and backward of the causal form over frames of `size` tokens, each of which reads all of
    its frame. It is gated linear attention: a frame scales the rows of the memory by exp(max_(t-1) - max_t), with max
    the cumulative maximum of keys, writes with exp(k_t - max_t), and reads with its features divided by the sum so far.
    Chunks cut frames: a token's reads of later tokens of its frame, which nothing decays, are a sum of their own.

    With decay rates (heads, 1) the keys of frame t are k_t + rate t: the factor exp(-rate t) of all weights at a frame
    cancels. Those keys and their maxima are float64; differences are rounded, not they.

    Without a State (None) there is one chunk, and no memory."""

    def __init__(
        self, f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None, state: State | None, size: int
    ) -> None:
        acc, self.rows, self.size = accumulator(k), f.shape[-1], size
        self.chunk, self.alone = even_chunk(k.shape[1]), state is None
        if state is None:
            self.chunk = 1 << (k.shape[1] - 1).bit_length()
            state = State.empty(k.shape[0], k.shape[2], k.shape[3], 0, dtype=acc, device=k.device)
        self.f, k, v = f.to(acc), self.frames(k.to(acc)), v.to(acc)
        self.w = None if w is None else (w if w.ndim == 4 else w[None]).to(acc)
        first = state.max
        if rates is not None:  # `first` is the maximum at frame -1
            k, first = k + rates * count(k)[:, None, None, None], first - rates
        self.max = torch.maximum(prefix_maximum(k.amax(2).detach()), first[:, None])
        self.fall = decay(before(self.max, first), self.max, acc)
        key = decay(k, self.max[:, :, None], acc)
        self.sum = memories(self.fall, key.sum(2), state.sum)
        filled = self.sum > 0
        self.inverse = torch.where(filled, 1 / torch.where(filled, self.sum, 1), 0)
        self.key = key.flatten(1, 2)
        self.qkv = (self.f * self.upcast(self.tokens(self.inverse)), self.weighted(self.upcast(self.key)), v)
        first, top = (-self.upcast(x.clamp(min=LEAST)) for x in (first[:, None], self.max))
        top = self.tokens(top)
        more = missing(top.shape[1], self.chunk)
        g = self.cut(torch.cat([top, top[:, -1:].expand(-1, more, -1, -1)], 1))
        start = before(g[..., -1:, :], first.transpose(1, 2).flatten(0, 1))
        if rates is not None:
            # relative to the last token's, or where a key is not finite to that of the last before
            last = g.masked_fill(~g.isfinite(), torch.inf).amin(-2, keepdim=True)
            g, start = ((x - last).to(acc) for x in (g, start))
        q, key, v = (self.cut(x) for x in self.qkv)
        self.chunks = Chunks(q, key, v, Decay.of_sums(g, start), state.memory)

    def last(self, rates: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the maximum at the last frame; with decay rates also exp of what rounds off it."""
        top = self.max[:, -1]
        if rates is None:
            return top, None
        high = top - rates * (self.max.shape[1] - 1)
        top = high.to(self.sum.dtype)
        return top, torch.where(top == -torch.inf, 0, high - top).exp().to(top.dtype)

    def outputs(self, m: Tensor | None) -> Tensor:
        """Return (batch, length, heads, value_dim) from the memory after each chunk."""
        c = self.chunks
        if m is None:  # NaN spreads from its token on only, as in Chunks
            return from_chunks(c.d.scores(c.q, c.k) @ c.v.nan_to_num(0, 0, 0) + (c.v - c.v).cumsum(-2), self.f)
        out = from_chunks(c.outputs(m), self.f)
        if self.size > 1:
            q, key, v = self.by_frame()
            out = out + self.flat((q @ key.mT).triu(1) @ v)
        return out

    def scores(self, q: Tensor) -> Tensor:
        """Return the products of q (batch, length, heads, value_dim) with the rows that each token reads: the gradient
        of the query features by that of the output."""
        c, dy = self.chunks, self.cut(q.to(self.f.dtype))
        da, dq, _ = c.read_gradients(c.memories(), dy)
        out = from_chunks(dq + da.diagonal(dim1=-2, dim2=-1)[..., None] * c.k, self.f)
        if self.size > 1:
            _, key, v = self.by_frame()
            out = out + self.flat((self.frames(q.to(v.dtype)).transpose(2, 3) @ v.mT).triu(1) @ key)
        return out * self.upcast(self.tokens(self.inverse))

    def gradients(self, dout: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query features over the sum so far, of keys times factors, of values, and of the
        memory before the first frame."""
        chunks, dy, dfirst = self.chunks, self.cut(dout), dlast
        if self.alone:
            da = dy @ chunks.v.mT
            dq, dk = chunks.d.scores_backward(da, chunks.q, chunks.k)
            dv, diagonal = chunks.d.scores(chunks.q, chunks.k).mT @ dy, da.diagonal(dim1=-2, dim2=-1)[..., None]
        else:
            dq, dk, dv, _, dfirst, diagonal = chunks.gradients(chunks.memories(), dy, dlast)
        dq, dk = dq + diagonal * chunks.k, dk + diagonal * chunks.q
        grads = [from_chunks(x, self.f) for x in (dq, dk, dv)]
        if self.size > 1:
            (q, key, v), dy = self.by_frame(), self.frames(dout).transpose(2, 3)
            scores, dscores = (q @ key.mT).triu(1), (dy @ v.mT).triu(1)
            more = (dscores @ key, dscores.mT @ q, scores.mT @ dy)
            grads = [x + self.flat(y) for x, y in zip(grads, more, strict=True)]
        return *grads, dfirst

    def frames(self, x: Tensor) -> Tensor:
        """Return tokens (batch, length, ...) as (batch, frames, size, ...)."""
        return x.unflatten(1, (-1, self.size)) if self.size > 1 else x[:, :, None]

    def tokens(self, x: Tensor) -> Tensor:
        """Give the tokens of each frame its value (batch, frames, heads, c)."""
        return x.repeat_interleave(self.size, 1) if self.size > 1 else x

    def by_frame(self) -> list[Tensor]:
        """Return queries, keys and values (batch, frames, heads, size, c)."""
        return [self.frames(x).transpose(2, 3) for x in self.qkv]

    def flat(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(1, 2)

    def cut(self, x: Tensor) -> Tensor:
        return to_chunks(x, x.dtype, self.chunk)

    def upcast(self, x: Tensor) -> Tensor:
        return tile(x, self.rows, -1)

    def weighted(self, x: Tensor) -> Tensor:
        return x if self.w is None else x * self.w


def even_chunk(length: int) -> int:
    """Return the tokens of a chunk, a power of two: the largest up to CHUNK that adds at most a quarter to the length,
    but LEAST_CHUNK or all tokens at least."""
    if exporting() or not isinstance(length, int):  # for any length
        return CHUNK
    chunk, least = CHUNK, min(LEAST_CHUNK, 1 << (length - 1).bit_length())
    while chunk > least and 4 * missing(length, chunk) > length:
        chunk //= 2
    return chunk


def count(x: Tensor) -> Tensor:
    """Return 0, 1, 2, ... for tokens (batch, length, ...), float64 where the device has it."""
    return torch.arange(x.shape[1], dtype=finest(x.device), device=x.device)


def causal_form(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None, state: State | None, size: int
) -> tuple[Tensor, State | None]:
    """Return the output for query features f `(batch, length, heads, rows)`, and the State after
    the last frame of `size` tokens. rates: decay rates (heads, 1), float64, or None."""
    c = Causal(f, k, v, w, rates, state, size)
    if state is None:
        return c.outputs(None), None
    m = c.chunks.memories()
    out, (top, rest) = c.outputs(m), c.last(rates)
    total, memory = c.sum[:, -1], m[:, -1].view_as(state.memory)
    if rest is not None:
        total, memory = total * rest, memory * c.upcast(rest)[..., None]
    return out, State(*(x.clone() for x in (top, total, memory)))


def causal_gradients(
    inputs: tuple[Any, ...], size: int, dout: Tensor, dsum: Tensor, dmemory: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of f, k, v, w (empty if None), and the first State's sum and memory, of
    the inputs of `causal_form`."""
    f, k, v, w, rates, state = inputs
    c, dim = Causal(f, k, v, w, rates, state, size), k.shape[-1]
    acc, rest = c.f.dtype, c.last(rates)[1]
    if state is None:
        dsum, dmemory = torch.zeros_like(c.sum[:, 0]), c.sum.new_zeros(0, 0)
    elif rest is not None:
        dsum, dmemory = dsum * rest, dmemory * c.upcast(rest)[..., None]
    dq, dkey, dv, dfirst = c.gradients(dout.to(acc), dmemory.flatten(0, 1).to(acc))
    df = dq * c.upcast(c.tokens(c.inverse))
    dtotal = adjoints(c.fall, -c.frames(fold(c.f * df, dim)).sum(2) * c.inverse, dsum.to(acc))
    dk = c.key * (fold(c.weighted(dkey), dim) + c.tokens(dtotal))
    dw = f.new_zeros(0, dtype=acc) if w is None else reduce_to(dkey * c.upcast(c.key), w)
    df, dk, dv = (x.to(y.dtype) for x, y in ((df, f), (dk, k), (dv, v)))
    return df, dk, dv, dw, c.fall[:, 0] * dtotal[:, 0], dfirst.view_as(dmemory)


# ------------------------------------------------------------------------------------ operator
# One for torch.compile: the number of chunks depends on the length, and the backward is explicit.
# f: query features; w: key factors; size: tokens of a frame
def _forward(*inputs: Any) -> Any:
    f, k, v, w, rates, *state, size = inputs
    out, last = causal_form(f, k, v, w, rates, None if state[0] is None else State(*state), size)
    return out.contiguous(), *(last or [out.new_empty(0) for _ in State._fields])


def _fake(f: Tensor, k: Tensor, v: Tensor, w: Any, rates: Any, *state: Any) -> Any:
    shapes = [(0,) if x is None else x.shape for x in state[:3]]
    return tuple(v.new_empty(shape, dtype=accumulator(k)) for shape in (v.shape, *shapes))


def _backward(*inputs: Any) -> Any:
    forward, state, grads, size = inputs[:5], inputs[5:8], inputs[8:-1], inputs[-1]
    first = None if state[0] is None else State(*state)
    pairs = zip(causal_gradients((*forward, first), size, *grads), (*forward[:4], *state[1:]), strict=True)
    return tuple(None if like is None else x.to(like.dtype).contiguous() for x, like in pairs)


INPUTS = "Tensor f, Tensor k, Tensor v, Tensor? w, Tensor? rates, Tensor? top, Tensor? total, Tensor? memory"
operator = Operator(
    f"causal({INPUTS}, SymInt size) -> (Tensor out, Tensor last_top, Tensor last_total, Tensor last_memory)",
    _forward,
    _fake,
    Gradient(
        f"causal_backward({INPUTS}, Tensor dout, Tensor dlast_total, Tensor dlast_memory, SymInt size) "
        "-> (Tensor df, Tensor dk, Tensor dv, Tensor dw, Tensor dtotal, Tensor dmemory)",
        _backward,
    ),
    flops=lambda f, v, **_: 4 * math.prod(f) * v[-1],  # query features have both halves
)


def causal(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None, state: State, size: int = 1
) -> tuple[Tensor, State]:
    """Return the output for frames of `size` tokens and the last State, from State to State in segments that a CPU's
    cache holds."""
    if plain() or torch.compiler.is_compiling() or not f.is_cpu:  # a graph of one operator is of any length
        out, *last = (_forward if plain() else operator)(f, k, v, w, rates, *state, size)
        return out, State(*last)
    most = SEGMENT * f.shape[1] // max(1, f.numel())
    step = max(1, most // (CHUNK * size)) * CHUNK * size
    parts, outs = [x.split(step, 1) for x in (f, k, v)], []
    factors = [None] * len(parts[0]) if w is None else w.split(step, -3)
    for *qkv, at in zip(*parts, factors, strict=True):
        out, *last = operator(*qkv, at, rates, *state, size)
        state = State(*last)
        outs.append(out)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1)), state


def causal_alone(f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None) -> Tensor:
    """Return the output of sequences from no State to none: those of one chunk need no memory."""
    n = k.shape[1]
    if n > CHUNK // 2 and (n > CHUNK or even_chunk(n) < CHUNK):
        rows = k.shape[0], *k.shape[2:], v.shape[3], w is not None
        return causal(f, k, v, w, rates, State.empty(*rows, dtype=accumulator(k), device=k.device))[0]
    out: Tensor = (_forward if plain() else operator)(f, k, v, w, rates, None, None, None, 1)[0]
    return out

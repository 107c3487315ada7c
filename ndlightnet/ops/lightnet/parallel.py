"""LightNet attention in plain torch: one pass for the global form, chunks for the causal one.

Every exponent formed here is a difference of a logit and a maximum that is at least as large, so
nothing overflows. Letters as in reference.py; `rows` are the memory's rows: dim, or 2 * dim with
MD-LRPE (cos half, sin half). `w` holds the MD-LRPE factors of the keys, `(length, heads or 1,
rows)`, with `(batch,)` in front where samples start at places of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Operator
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet.state import State, decay, tile
from ndlightnet.ops.recurrence.scan import adjoints, before, memories

CHUNK = 64


def fold(x: Tensor, dim: int) -> Tensor:
    """Adjoint of `tile` on the last axis: add the sin half to the cos half."""
    return x if x.shape[-1] == dim else x[..., :dim] + x[..., dim:]


def reduce_to(x: Tensor, like: Tensor) -> Tensor:
    """Sum over the axes along which `like` was broadcast to `x`."""
    return x.sum_to_size(like.shape)


# ------------------------------------------------------------------------------ global (Eq. 6)
class Summarize(torch.autograd.Function):
    """Keys and values (..., length, heads, dim) to a State (..., heads, ·). Saves the inputs and
    the maximum; recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        acc = accumulator(k)
        top = k.amax(dim=-3).to(acc)
        p = decay(k.to(acc), top[..., None, :, :])
        f = p if w is None else tile(p, w.shape[-1], -1) * w
        ctx.save_for_backward(k, v, w, top)
        ctx.mark_non_differentiable(top)
        return top, p.sum(dim=-3), torch.einsum("...lhr,...lhd->...hrd", f, v.to(acc))

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


def summarize(k: Tensor, v: Tensor, w: Tensor | None) -> State:
    return State(*Summarize.apply(k, v, w))  # type: ignore[no-untyped-call]


def read(f: Tensor, state: State) -> Tensor:
    """Query features `(..., length, heads, rows)` on a memory; zero where nothing was seen."""
    seen = state.sum > 0
    inverse = torch.where(seen, 1 / torch.where(seen, state.sum, 1), 0)
    memory = state.memory * tile(inverse, state.memory.shape[-2], -1)[..., None]
    return torch.einsum("...lhr,...hrd->...lhd", f, memory)


# ------------------------------------------------------------------------------ causal (Eq. 5)
def _chunks(x: Tensor, fill: float) -> Tensor:
    """`(batch, length, heads, c)` -> `(batch, heads, chunks, CHUNK, c)`."""
    pad = -x.shape[1] % CHUNK
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad), value=fill)
    return x.unflatten(1, (-1, CHUNK)).movedim(3, 1).contiguous()


def _unchunk(x: Tensor, length: int) -> Tensor:
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def _prefix(state: State, dim: int) -> tuple[State, Tensor]:
    """Inclusive running merge along `dim`, and by how much each step lowers what came before."""
    top, total, memory = (x.flatten(0, dim - 1) for x in state)
    reached = top.cummax(1).values
    fall = decay(before(reached, torch.full_like(top[:, 0], -torch.inf)), reached)
    own, rows = decay(top, reached), memory.shape[-2]
    total = memories(fall, own * total, torch.zeros_like(top[:, 0]))
    if memory.shape[-1]:
        wide_fall, wide_own = (tile(x, rows, -1)[..., None] for x in (fall, own))
        memory = memories(wide_fall, wide_own * memory, torch.zeros_like(memory[:, 0]))
    out = State(*(x.unflatten(0, state.max.shape[:dim]) for x in (reached, total, memory)))
    return out, fall


class _Pass:
    """What the forward and the backward of the causal form both need, for all chunks at once."""

    def __init__(self, f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, state: State) -> None:
        acc = accumulator(k)
        self.length, self.dim, self.rows = k.shape[1], k.shape[-1], f.shape[-1]
        self.f, self.k = _chunks(f.to(acc), 0.0), _chunks(k.to(acc), -torch.inf)
        self.v = _chunks(v.to(acc), 0.0)
        self.w = (
            self.v.new_ones(1, 1)
            if w is None
            else _chunks((w if w.ndim == 4 else w[None]).to(acc), 0.0)
        )
        # running (max, sum) of each token inside its chunk; no memory rides along
        alone = State(self.k, (self.k > -torch.inf).to(acc), self.k.new_zeros(*self.k.shape, 0))
        run, _ = _prefix(alone, 3)
        last = run.max[..., -1:, :]
        memory = self.key(self.k, last).transpose(-1, -2) @ self.v
        chunk = State(last[..., 0, :], run.sum[..., -1, :], memory)
        # States before each chunk, and after the last one
        joined = State(
            *(torch.cat([a[:, :, None], b], 2) for a, b in zip(state, chunk, strict=True))
        )
        self.entries, self.fall = _prefix(joined, 2)
        self.entry = State(*(x[:, :, :-1] for x in self.entries))
        first = self.entry.max[..., None, :]
        self.max = torch.maximum(first, run.max)
        total = decay(first, self.max) * self.entry.sum[..., None, :]
        total = total + decay(run.max, self.max) * run.sum
        self.inverse = torch.where(total > 0, 1 / total, 0)
        self.from_entry = decay(first, self.max)
        self.q = self.f * self.wide(self.inverse)

    def wide(self, x: Tensor) -> Tensor:
        return tile(x, self.rows, -1)

    def key(self, k: Tensor, anchor: Tensor) -> Tensor:
        """Key features exp(k - anchor) * w."""
        return self.wide(decay(k, anchor)) * self.w

    @staticmethod
    def halves(x: Tensor, part: tuple[int, int]) -> Tensor:
        """Side 0 (left) or 1 (right) of all pairs of neighbouring blocks of `size` tokens."""
        size, side = part
        return x if x.shape[-2] == 1 else x.unflatten(-2, (-1, 2, size))[..., side, :, :]

    def levels(self) -> list[int]:
        """Block sizes 1, 2, 4 ...: any two tokens of a chunk meet in exactly one pair of blocks."""
        return [1 << i for i in range(CHUNK.bit_length() - 1)]

    def pair(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For left keys and right queries of block pairs: the keys' exponentials, their w, scaled
        queries, and the queries' own decay. The anchor is the left block's last maximum."""
        left, right = (size, 0), (size, 1)
        anchor = self.halves(self.max, left)[..., -1:, :]
        fall = decay(anchor, self.halves(self.max, right))
        q = self.halves(self.q, right) * self.wide(fall)
        return decay(self.halves(self.k, left), anchor), self.halves(self.w, left), q, fall


def causal_form(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """Query features f `(batch, length, heads, rows)` -> output and the State after the last
    token."""
    c = _Pass(f, k, v, w, state)
    out = (c.q * c.wide(c.from_entry)) @ c.entry.memory
    out += (c.q * c.key(c.k, c.max)).sum(-1, keepdim=True) * c.v
    for size in c.levels():
        p, w_left, q, _ = c.pair(size)
        key = c.wide(p) * w_left
        c.halves(out, (size, 1)).add_((q @ key.transpose(-1, -2)) @ c.halves(c.v, (size, 0)))
    return _unchunk(out, c.length), State(*(x[:, :, -1].clone() for x in c.entries))


def causal_gradients(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, state: State,
    dout: Tensor, dsum: Tensor, dmemory: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of f, k, v, w (zeros without w), and of the first State's sum and memory."""
    c = _Pass(f, k, v, w, state)
    do = _chunks(dout.to(c.v.dtype), 0.0)
    own = (do * c.v).sum(-1, keepdim=True)

    # queries: df = m_t dO_t, and g = the pull on the logarithm of each running sum
    df = (do @ c.entry.memory.transpose(-1, -2)) * c.wide(c.from_entry) + c.key(c.k, c.max) * own
    for size in c.levels():
        p, w_left, _, fall = c.pair(size)
        score = c.halves(do, (size, 1)) @ c.halves(c.v, (size, 0)).transpose(-1, -2)
        c.halves(df, (size, 1)).add_((score @ (c.wide(p) * w_left)) * c.wide(fall))
    df *= c.wide(c.inverse)
    g = fold(c.f * df, c.dim) * c.inverse

    # adjoints of the States, carried from the right: a chunk's keys see all later queries
    first = c.q * c.wide(c.from_entry)
    adj = torch.cat([first.transpose(-1, -2) @ do, dmemory[:, :, None].to(do.dtype)], 2)
    pull = torch.cat([(c.from_entry * g).sum(-2), -dsum[:, :, None].to(do.dtype)], 2)
    adj, pull = adj.flatten(0, 1), pull.flatten(0, 1)
    adj = adjoints(c.wide(c.fall)[..., None], adj, torch.zeros_like(adj[:, 0]))
    pull = adjoints(c.fall, pull, torch.zeros_like(pull[:, 0]))
    adj, pull = (x.unflatten(0, c.k.shape[:2]) for x in (adj, pull))

    # keys and values: from the token itself, from later chunks, from later tokens of the chunk
    dk, dv, dw = torch.zeros_like(c.k), torch.zeros_like(c.v), torch.zeros_like(c.f)

    def add(part: tuple[int, int] | None, p: Tensor, w_part: Tensor, dkey: Tensor,
            pulled: Tensor, dvalue: Tensor) -> None:  # fmt: skip
        values = (p * (fold(dkey * w_part, c.dim) - pulled), dvalue, c.wide(p) * dkey)
        for total, value in zip((dk, dv, dw), values, strict=True):
            (total if part is None else c.halves(total, part)).add_(value)

    p = decay(c.k, c.max)
    add(None, p, c.w, c.q * own, g, (c.q * c.wide(p) * c.w).sum(-1, keepdim=True) * do)
    later, p = adj[:, :, 1:], decay(c.k, c.entries.max[:, :, 1:, None])
    dkey = c.v @ later.transpose(-1, -2)
    add(None, p, c.w, dkey, pull[:, :, 1:, None], (c.wide(p) * c.w) @ later)
    for size in c.levels():
        left, right = (size, 0), (size, 1)
        p, w_left, q, fall = c.pair(size)
        do_right = c.halves(do, right)
        dkey = (c.halves(c.v, left) @ do_right.transpose(-1, -2)) @ q
        pulled = (fall * c.halves(g, right)).sum(-2, keepdim=True)
        dvalue = ((c.wide(p) * w_left) @ q.transpose(-1, -2)) @ do_right
        add(left, p, w_left, dkey, pulled, dvalue)
    dw = dw.new_zeros(0) if w is None else reduce_to(_unchunk(dw, c.length), w)
    df, dk, dv = (_unchunk(x, c.length).to(y.dtype) for x, y in ((df, f), (dk, k), (dv, v)))
    return df, dk, dv, dw, -pull[:, :, 0], adj[:, :, 0].contiguous()


# ------------------------------------------------------------------------------------ operator
# One for torch.compile: the number of chunks depends on the length, the backward is written out.
# f: query features; w: key factors
def _forward(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor
) -> Any:
    out, state = causal_form(f, k, v, w, State(top, total, memory))
    return out.contiguous(), *state


def _fake(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor
) -> Any:
    return tuple(x.new_empty(x.shape, dtype=accumulator(k)) for x in (v, top, total, memory))


def _backward(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor,
    dout: Tensor, dtotal: Tensor, dmemory: Tensor,
) -> Any:  # fmt: skip
    grads = causal_gradients(f, k, v, w, State(top, total, memory), dout, dtotal, dmemory)
    return tuple(x.contiguous() for x in grads)


def _backward_fake(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor,
    *_: Tensor,
) -> Any:  # fmt: skip
    acc = accumulator(k)
    dw = f.new_empty(0, dtype=acc) if w is None else w.new_empty(w.shape, dtype=acc)
    past = (x.new_empty(x.shape, dtype=acc) for x in (total, memory))
    return *(x.new_empty(x.shape) for x in (f, k, v)), dw, *past


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, dout: Tensor, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    saved = ctx.saved_tensors  # once: checkpointing lets them be unpacked a single time
    df, dk, dv, dw, dsum0, dmemory0 = causal_backward(*saved, dout, dtotal, dmemory)
    w = saved[3]
    return df, dk, dv, None if w is None else dw.to(w.dtype), None, dsum0, dmemory0


INPUTS = "Tensor f, Tensor k, Tensor v, Tensor? w, Tensor top, Tensor total, Tensor memory"
causal_backward = Operator(
    f"causal_backward({INPUTS}, Tensor dout, Tensor dtotal, Tensor dmemory) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
causal = Operator(
    f"causal({INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _fake, _save, _grads
)

"""LightNet attention token by token: the specification. Slow, float64-safe.

Glossary, letter here -> the paper:
  k     k_t, both key and additive decay     top, total   z_t = top + log(total): log sum exp(k)
  p     exp(k_t - top)                       memory       S_t = total * kv_t (Eq. 5)
  phi   SiLU(q_t)                            f_q, f_k     MD-LRPE features W_t q, W_t kbar (Eq. 14)
Eq. 5:  s_t = s_(t-1) + exp(k_t),  kv_t = (1 - exp(k_t)/s_t) kv_(t-1) + exp(k_t)/s_t v_t^T,
        o_t = kv_t^T phi(q_t).   Eq. 6 is the same with kv_n, the last one, for every query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet.state import State, decay, decay_rates, merge, reweighted, tile
from ndlightnet.ops.position import Position, key_features, query_features


def update(state: State, k: Tensor, v: Tensor, w: Tensor | None, valid: Tensor | None) -> State:
    """Add a token to a State: k, v (batch, heads, ·), w (heads or 1, rows), valid (batch,) bool."""
    k, v = k.to(state.sum.dtype), v.to(state.sum.dtype)
    if valid is not None:
        hidden = ~valid[:, None, None]
        k, v = k.masked_fill(hidden, -torch.inf), v.masked_fill(hidden, 0)
    top = torch.maximum(state.max, k).detach()
    p, old = decay(k, top), decay(state.max, top)
    rows = state.memory.shape[-2]
    f_k = tile(p, rows, -1) * (1 if w is None else w)
    memory = tile(old, rows, -1)[..., None] * state.memory + f_k[..., None] * v[..., None, :]
    return State(top, old * state.sum + p, memory)


def read_memory(f_q: Tensor, state: State) -> Tensor:
    """Return kv^T f_q for f_q (batch, ..., heads, rows); 0 where the State is empty."""
    rows = state.memory.shape[-2]
    total = tile(state.sum, rows, -1)[..., None]
    kv = torch.where(total > 0, state.memory / torch.where(total > 0, total, 1), 0)
    return torch.einsum("b...hr,bhrd->b...hd", f_q, kv)


def summarize(k: Tensor, v: Tensor, state: State, position: Position | None, mask: Tensor | None) -> State:
    """Return the State of all tokens; k, v (batch, length, heads, ·)."""
    w = None if position is None else key_features(position, k.shape[-1], state.sum.dtype)
    for t in range(k.shape[1]):
        valid = None if mask is None else mask[:, t]
        state = update(state, k[:, t], v[:, t], None if w is None else w[..., t, :, :], valid)
    return state


def frames(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    state: State | None,
    position: Position | None,
    mask: Tensor | None,
    window: int | None,
    forget: float | Tensor,
) -> tuple[Tensor, State]:
    """Compute axis-causal attention frame by frame, each with a merge of the States it reads."""
    phi = torch.nn.functional.silu(q.to(accumulator(q)))
    f_q = phi if position is None else query_features(phi, position)
    w = None if position is None else key_features(position, k.shape[-1], phi.dtype)
    rates = decay_rates(forget, k.device)
    (batch, length, heads, dim), value_dim = k.shape, v.shape[-1]
    empty = State.empty(batch, heads, dim, value_dim, position is not None, dtype=phi.dtype, device=k.device)
    past = [] if state is None else [state]
    if window is not None:
        past = [empty] * (window - 1)
        if state is not None:
            past = [State(*(x[:, i] for x in state)) for i in range(window - 1)]
    outputs = []
    for tokens in torch.arange(length).chunk(n):
        frame_state = empty
        for t in tokens.tolist():
            valid = None if mask is None else mask[:, t]
            factors = None if w is None else w[..., t, :, :]
            frame_state = update(frame_state, k[:, t], v[:, t], factors, valid)
        past = [*(reweighted(s, -rates) for s in past), frame_state]
        if window is not None:
            past = past[-window:]
        merged = past[0]
        for s in past[1:]:
            merged = merge(merged, s)
        outputs += [read_memory(f_q[:, t], merged) for t in tokens.tolist()]
        if window is None:
            past = [merged]
    if window is None:
        return torch.stack(outputs, 1), past[0]
    latest = past[len(past) - (window - 1) :]
    if not latest:
        return torch.stack(outputs, 1), State(*(x[:, None][:, :0] for x in empty))
    return torch.stack(outputs, 1), State(*(torch.stack(xs, 1) for xs in zip(*latest, strict=True)))

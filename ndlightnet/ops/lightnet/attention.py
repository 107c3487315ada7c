"""LightNet attention: one function per form of execution.

q, k `(batch, length, heads, dim)`, v `(batch, length, heads, value_dim)`: any float dtype; statistics, memories and
States in float32 (float64 for float64 inputs); outputs in q's dtype. SiLU is applied to q here. There is no
1/sqrt(dim): the layer normalises the output. k is both key and decay.

  summarize           a source of keys and values -> State
  read                queries read a State (cross attention = summarize + read)
  global_attention    every token attends to every token (Eq. 6)
  causal_attention    token t attends to tokens up to t (Eq. 5), from a State to a State
  axis_causal_attention   causal along the first axis of a grid, free along the others; frames.py
  attention_step      one token, for decoding
  merge               two States -> the State of both sources
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout, Ragged, as_layout
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.lightnet import _triton, _triton_causal, _triton_window, parallel, reference
from ndlightnet.ops.lightnet import window as windowed
from ndlightnet.ops.lightnet.state import MOST_FORGET, State, decay, decay_rates, merge, tile
from ndlightnet.ops.position import (
    Position,
    key_features,
    offset_gradient,
    offset_of,
    query_features,
    relative,
    shape_of,
)
from ndlightnet.ops.recurrence.chunks import exact

__all__ = ["attention_step", "causal_attention", "global_attention", "merge", "read", "summarize"]


def check_inputs(k: Tensor, v: Tensor, mask: Tensor | None, position: Position | None, q: Tensor | None) -> None:
    check_floats(k=k, v=v)
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}: expected (batch, length, heads, dim) and "
            "(batch, length, heads, value_dim)"
        )
    if q is not None:
        check_floats(q=q)
        if q.shape != k.shape:
            raise ValueError(f"q {tuple(q.shape)}: expected the shape of k, {tuple(k.shape)}")
    if mask is not None and (mask.shape != k.shape[:2] or mask.dtype != torch.bool):
        raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {tuple(k.shape[:2])}")
    _check_length(k, position, "k")


def _check_length(x: Tensor, position: Position | None, name: str) -> None:
    if position is None:
        return
    grid = as_layout(position.layout)
    if x.shape[1] != position.prefix + grid.length:
        shapes = grid.shapes if len(grid.shapes) > 1 else grid.shapes[0]
        raise ValueError(f"{name} has {x.shape[1]} tokens, position describes {position.prefix} + a grid {shapes}")


def _check_state(state: State, k: Tensor, v: Tensor, position: Position | None) -> None:
    batch, _, heads, dim = k.shape
    rows = dim if position is None else 2 * dim
    expected = (batch, heads, rows, v.shape[-1])
    if tuple(state.memory.shape) != expected or tuple(state.sum.shape) != (batch, heads, dim):
        raise ValueError(
            f"state.memory {tuple(state.memory.shape)}, state.sum {tuple(state.sum.shape)}: "
            f"expected {expected} and {(batch, heads, dim)}; keys with MD-LRPE need 2 * dim rows"
        )


def check_rates(forget: float | Tensor, heads: int) -> None:
    if isinstance(forget, Tensor):
        if tuple(forget.shape) != (heads,):
            raise ValueError(f"forget {tuple(forget.shape)}: expected (heads,) = {heads}")
    elif not 0 <= forget < float("inf"):
        raise ValueError(f"forget={forget}: expected a finite number, 0 or more")


def check_window(window: int | None) -> None:
    if window is not None and not (isinstance(window, Integral) and window >= 1):
        raise ValueError(f"window={window}: expected an int, 1 or more frames, or None")


def _empty(k: Tensor, v: Tensor, position: Position | None) -> State:
    batch, _, heads, dim = k.shape
    return State.empty(batch, heads, dim, v.shape[-1], position is not None, dtype=accumulator(k), device=k.device)


def mask_inputs(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give padding no weight, so that its values (even NaN) cannot leak."""
    if mask is None:
        return k, v
    hidden = ~mask[..., None, None]
    return k.masked_fill(hidden, -torch.inf), v.masked_fill(hidden, 0)


def _query(q: Tensor, position: Position | None, factors: Tensor | None = None) -> Tensor:
    """Return query features. factors: those of the keys of the same tokens, if they are known."""
    phi = torch.nn.functional.silu(q.to(accumulator(q)))
    return phi if position is None else query_features(phi, position, factors)


def _theta(position: Position | None) -> Tensor | None:
    return None if position is None else position.theta


def _factors(k: Tensor, position: Position | None) -> Tensor | None:
    return None if position is None else key_features(position, k.shape[-1], accumulator(k))


def summarize(
    k: Tensor, v: Tensor, *, mask: Tensor | None = None, position: Position | None = None, impl: Impl = "auto"
) -> State:
    """Return the State of a source, in one pass. mask: (batch, length) bool, False = padding."""
    check_inputs(k, v, mask, position, None)
    chosen = resolve("summarize", impl, k, v, position=position)
    position = relative(position)
    if chosen == "triton":
        state = State(*_triton.summarize(k, v, mask, *_triton.of_grid(position)))
        return offset_gradient(state, position, 1)
    with exact(k):
        state = _empty(k, v, position)
        if k.shape[1] == 0:
            return state._replace(sum=empty_result(state.sum, k, v, _theta(position)))
        if chosen == "reference":
            state = reference.summarize(k, v, state, position, mask)
        else:
            k, v = mask_inputs(k, v, mask)
            state = parallel.summarize(k, v, _factors(k, position))
        return offset_gradient(state, position, 1)


def read(q: Tensor, state: State, *, position: Position | None = None, impl: Impl = "auto") -> Tensor:
    """Read a State with queries (batch, length, heads, dim): (batch, length, heads, value_dim).

    `position`: position of the queries, given if and only if the source had one. The result is zero
    where the State is empty.
    """
    check_floats(q=q)
    rows = state.memory.shape[-2]
    if q.ndim != 4 or rows != q.shape[-1] * (1 if position is None else 2):
        raise ValueError(
            f"q {tuple(q.shape)} with{'out' if position is None else ''} position does not fit a memory "
            f"of {rows} rows: expected (batch, length, heads, dim) and as many, twice with position"
        )
    _check_length(q, position, "q")
    chosen = resolve("read", impl, q, None, *state, position=position)
    position = relative(position)
    state = offset_gradient(state, position, -1)
    if chosen == "triton":
        out: Tensor = _triton.read(q, state.sum, state.memory, *_triton.of_grid(position))
        return out
    with exact(q):
        run = reference.read_memory if chosen == "reference" else parallel.read
        return run(_query(q, position), state).to(q.dtype)


def global_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    position: Position | None = None,
    layout: Layout | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Return softmax(K over tokens)^T V, read by SiLU(q) (Eq. 6). mask: (batch, length) bool, False = padding.

    layout: where the tokens of a sample lie; None: every row is a sample. With a Ragged (batch 1) the
    grid of position may have any shape, without prefix or offset. Where other rows or processes have
    tokens of a sample, its States are merged; position then has the offsets of the layout.
    """
    if layout is not None and layout.shared:
        return _begin_merged(q, k, v, mask, position, layout, impl)()
    # kernels take samples end to end at once, by tables of a Ragged; all else takes those of one shape at a time
    pack = layout if isinstance(layout, Ragged) else None
    position = global_position(q, k, v, mask, position, pack)
    chosen: Any = resolve("global_attention", impl, k, v, position=position)
    if chosen == "triton" and (q.dtype == k.dtype or pack is not None):
        where = _triton.of_layout(position, pack, k, v.shape[-1])
        if q.dtype == k.dtype:
            out: Tensor = _triton.global_attention(q, k, v, mask, *where)[0]
            return out
        _, total, memory = _triton.summarize(k, v, mask, *where)
        out = _triton.read(q, total, memory, *where)
        return out
    if pack is not None:

        def attend(_: Layout, *qkv: Tensor, **options: Any) -> Tensor:
            return global_attention(*qkv, **options, impl=chosen)

        return map_attention(attend, pack, q, k, v, mask, position)
    if chosen == "torch" and k.shape[1]:
        position = relative(position)
        with exact(k):
            k, v = mask_inputs(k, v, mask)
            factors = _factors(k, position)
            return parallel.read(_query(q, position, factors), parallel.summarize(k, v, factors)).to(q.dtype)
    return read(q, summarize(k, v, mask=mask, position=position, impl=impl), position=position, impl=impl)


def global_position(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position: Position | None, pack: Ragged | None
) -> Position | None:
    """Check the inputs of global attention, and return the Position of their tokens. pack: the layout of samples end to
    end, None: of rows that share a grid."""
    if pack is not None:
        position = packed_position(pack, k, position)
    check_inputs(k, v, mask, position, q)
    if position is not None and position.prefix == 0 and offset_of(position) is not None:
        position = position._replace(layout=shape_of(position), offset=None)  # only differences matter
    return position


def begin_global_attention(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None, **options: Any
) -> Callable[[], Tensor]:
    """Return, when called, `global_attention`, where a slab already sends its State."""
    if layout is not None and layout.shared:
        return _begin_merged(q, k, v, layout=layout, **options)
    out = global_attention(q, k, v, layout=layout, **options)
    return lambda: out


def _begin_merged(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position: Position | None, layout: Layout, impl: Impl
) -> Callable[[], Tensor]:
    """Begin global attention where a row has some of a sample's tokens: by the States of all, merged, or where those of
    several rows would be larger than the tokens by the features of all tokens of a sample at once, in torch."""
    if not layout.joint:

        def attend(grid: Layout, *qkv: Tensor, **options: Any) -> Tensor:
            return global_attention(*qkv, **options, layout=grid, impl=impl)

        mapped = map_attention(attend, layout, q, k, v, mask, position)
        return lambda: mapped
    check_inputs(k, v, mask, position, q)
    rows = k.shape[-1] * (1 if position is None else 2)
    if layout.count == 1 or impl in ("triton", "reference") or k.shape[1] >= rows:
        merged = layout.merge(summarize(k, v, mask=mask, position=position, impl=impl))
        return lambda: read(q, merged(), position=position, impl=impl)
    with exact(k):
        keys, values = (layout.join(x) for x in mask_inputs(k, v, mask))
        factors = _factors(k, position)
        queries = _query(q, position, factors)
        if factors is not None:  # (rows or none, tokens, heads or 1, features)
            factors = layout.join(factors.expand(len(k), *factors.shape[-3:]))
        state = parallel.summarize(keys, values, factors)
        out = layout.divide(parallel.read(layout.join(queries), state)).to(q.dtype)
    return lambda: out


def packed_position(layout: Ragged, k: Tensor, position: Position | None) -> Position | None:
    """Check `position` and return it as the Position of samples end to end."""
    if k.ndim != 4 or k.shape[0] != 1 or k.shape[1] != layout.length:
        raise ValueError(
            f"k {tuple(k.shape)}: expected (1, length, heads, dim) with length {layout.length}, that of the layout"
        )
    if position is None:
        return None
    if position.prefix or offset_of(position) is not None:
        raise ValueError(f"position={position}: expected no prefix and no offset with samples end to end")
    return position._replace(layout=layout)


def map_attention(
    attend: Callable[..., Tensor],
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    position: Position | None,
) -> Tensor:
    """Call attend(grid, q, k, v, mask=, position=) on the samples of each shape and join the results."""

    def run(grid: Grid, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(grid, q, k, v, mask=mask, position=position and position._replace(layout=grid))

    return layout.map_samples(run, q, k, v, mask)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    position: Position | None = None,
    state: State | None = None,
    forget: float | Tensor = 0.0,
    impl: Impl = "auto",
) -> tuple[Tensor, State]:
    """Let token t attend to tokens up to t and to `state` (Eq. 5). Returns output and final State.

    forget: decay rate; the weight of a token is multiplied by exp(-forget) with every later token,
    padding too: 0 or more, or (heads,) such numbers (8192 for larger ones); it has no gradient.

    With 16-bit inputs the kernels compute both the sum and the memory of the final State from a
    rounded exp(k - max), so that a query's weights add up to one.

    With kind="rotary" the result is not a function of offsets, because the two channels of a pair
    decay differently: prefer "cosine" here.
    """
    check_inputs(k, v, mask, position, q)
    chosen = resolve("causal_attention", impl, k, v, position=position)
    if state is not None:
        _check_state(state, k, v, position)
    check_rates(forget, k.shape[2])
    if k.shape[1] == 0:
        state = _empty(k, v, position) if state is None else state
        return empty_result(v.to(q.dtype), q, k, _theta(position)), state
    position = relative(position)
    if state is not None:
        state = offset_gradient(state, position, -1)
    with exact(k):
        if chosen == "triton":
            where = _triton.of_grid(position)
            rates = _head_rates(forget, k)
            out, state = _triton_causal.causal(q, k, v, mask, rates, state, where)
            return out, offset_gradient(state, position, 1)
        if chosen == "torch":
            return chunked(q, k, v, mask, position, state, forget)
        state = _empty(k, v, position) if state is None else state
        out, state = reference.frames(q, k, v, k.shape[1], state, position, mask, None, forget)
        return out.to(q.dtype), offset_gradient(state, position, 1)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    position: Position | None,
    state: State | None,
    forget: float | Tensor,
    size: int = 1,
) -> tuple[Tensor, State]:
    """Run causal attention over frames of `size` tokens in chunks, in torch. position, state: relative."""
    k, v = mask_inputs(k, v, mask)
    factors = _factors(k, position)
    inputs = (_query(q, position, factors), k, v, factors, _rates(forget, k))
    out, state = parallel.causal(*inputs, _empty(k, v, position) if state is None else state, size)
    return out.to(q.dtype), offset_gradient(state, position, 1)


def alone(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position: Position | None, forget: float | Tensor
) -> Tensor:
    """Run causal attention over tokens from no State to none, in torch: few of them need no memory."""
    position = relative(position)
    with exact(k):
        k, v = mask_inputs(k, v, mask)
        factors = _factors(k, position)
        return parallel.causal_alone(_query(q, position, factors), k, v, factors, _rates(forget, k)).to(q.dtype)


def _rates(forget: float | Tensor, k: Tensor) -> Tensor | None:
    """Return decay rates () or (heads, 1) for keys k, float64; None where nothing decays."""
    decays = isinstance(forget, Tensor) or forget != 0
    return decay_rates(forget, k.device).detach() if decays else None


def _head_rates(forget: float | Tensor, k: Tensor) -> Tensor | None:
    """Return decay rates (heads,) for kernels, float32; None where nothing decays."""
    if isinstance(forget, Tensor):
        return forget.detach().to(k.device, torch.float32).clamp(max=MOST_FORGET).contiguous()
    rate = min(forget, MOST_FORGET)
    return k.new_full((k.shape[2],), rate, dtype=torch.float32) if rate else None


def token_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    position: Position | None,
    window: int,
    forget: float | Tensor,
    impl: Impl,
) -> Tensor:
    """Let token t attend to the last `window` tokens, itself included; from no State to none."""
    if window >= k.shape[1]:
        return causal_attention(q, k, v, mask=mask, position=position, forget=forget, impl=impl)[0]
    if impl == "triton":
        rates, where = _head_rates(forget, k), _triton.of_grid(position)
        return _triton_window.attention(q, k, v, mask, rates, window, where)
    k, v = mask_inputs(k, v, mask)
    factors = _factors(k, position)
    out = windowed.attention(_query(q, position, factors), k, v, factors, _rates(forget, k), window)
    return out.to(q.dtype)


def attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, position: Position | None = None, impl: Impl = "auto"
) -> tuple[Tensor, State]:
    """Process one token after `state`: q, k (batch, heads, dim), v (batch, heads, value_dim).

    `position` describes this one token: shape (1, ...), `offset` its coordinates.
    """
    q, k, v = q[:, None], k[:, None], v[:, None]
    check_inputs(k, v, None, position, q)
    _check_state(state, k, v, position)
    chosen = resolve("attention_step", impl, k, v, q, *state, position=position)
    position = relative(position)
    if chosen == "triton":
        where = _triton.of_grid(position)
        y, *after = _triton_causal.step(q[:, 0], k[:, 0], v[:, 0], *state, *where)
        return y, State(*after)
    if chosen == "reference":
        y, state = causal_attention(q, k, v, position=position, state=state, impl=impl)
        return y[:, 0], state
    with exact(k):
        logit, value = k[:, 0].to(state.sum.dtype), v[:, 0].to(state.sum.dtype)
        top, w = logit.detach(), _factors(k, position)
        p = decay(logit, top)  # 1, with the gradient of exp(k); 0 for a logit of -inf
        f = p if w is None else tile(p, w.shape[-1], -1) * w[..., 0, :, :]
        token = State(top, p, f[..., None] * value[..., None, :])
        state = merge(offset_gradient(state, position, -1), token)
        y = parallel.read(_query(q, position, w), state).to(q.dtype)
        return y[:, 0], offset_gradient(state, position, 1)

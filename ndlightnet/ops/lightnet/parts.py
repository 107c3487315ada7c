"""LightNet attention on the parts of a grid that several processes hold (layout Part).

A State of each part, which all parts get, is all that they exchange: about 0.1 MB for each sample
in a layer of 12 heads of 32 channels, however many tokens there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Part
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.lightnet.state import State, merge_along
from ndlightnet.ops.position import Position, offset_gradient, offset_of, relative, shape_of
from ndlightnet.ops.recurrence.chunks import exact


def states_of_parts(layout: Part, state: State) -> Any:
    """Return, when called, the States of all parts, (parts, ...)."""
    shapes = [x.shape for x in state]
    flat = torch.cat([state.max.detach().flatten(), state.sum.flatten(), state.memory.flatten()])
    gathered = layout.gather(flat)

    def wait() -> State:
        sizes = [shape.numel() for shape in shapes]
        rows = gathered().split(sizes, 1)
        top, *rest = (x.unflatten(1, shape) for x, shape in zip(rows, shapes, strict=True))
        return State(top.detach(), *rest)

    return wait


def merge_parts(layout: Part, state: State) -> State:
    """Merge the States of all parts, or those of each frame: States of any leading axes."""
    states: State = states_of_parts(layout, state)()
    return merge_along(states, 0)


def before_part(layout: Part, after: State, window: int | None, forget: float | Tensor) -> State:
    """Return the State before the first frame of this part, where the first axis is split. after:
    the State after its frames, from none before them."""
    from ndlightnet.ops.lightnet.frames import aged

    rank, frames = layout.rank, layout.sizes
    states: State = states_of_parts(layout, after)()
    # An empty slice of what all parts sent belongs to the graph of each: else the others would wait
    # for its gradient. A product with 0 would read what lies behind, and 0 * NaN is NaN.
    unused = sum(x[:0].sum() for x in states[1:])
    top, total, memory = (torch.zeros_like(x) for x in after)
    parts = [State(top - torch.inf, total + unused, memory + unused)]
    for i in range(rank):
        part = aged(State(*(x[i] for x in states)), sum(frames[i + 1 : rank]), forget)
        if window is not None:
            most = min(frames[i], window - 1)
            part = State(*(x[:, x.shape[1] - most :] for x in part))
        parts.append(part)
    if window is None:
        return merge_along(State(*(torch.stack(x) for x in zip(*parts, strict=True))), 0)
    joined = [torch.cat(x, 1) for x in zip(*parts, strict=True)]
    return State(*(x[:, x.shape[1] - (window - 1) :] for x in joined))


def axis_causal_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Part,
    mask: Tensor | None,
    position: Position | None,
    state: State | None,
    window: int | None,
    forget: float | Tensor,
    return_state: bool,
    impl: Impl,
) -> tuple[Tensor, Any]:
    """Run axis-causal attention on a part: where the first axis is split, after the State
    of the parts before; where another one is, with the States of frames merged."""
    from ndlightnet.ops.lightnet import frames as whole
    from ndlightnet.ops.lightnet.attention import summarize

    if position is not None:  # the gradient of theta counts from this part's first frame
        position = position._replace(layout=shape_of(position), offset=offset_of(position))
    if layout.axis == 0:
        if state is not None:
            raise ValueError("state: expected None where the first axis is split")
        local = Grid(layout.shape, layout.offset)
        how: Any = {"mask": mask, "position": position, "window": window, "forget": forget, "impl": impl}
        if window == 1:  # no frame sees another
            return whole.axis_causal_attention(q, k, v, local, return_state=False, **how)
        if window is None and not isinstance(forget, Tensor) and forget == 0:
            after = summarize(k, v, mask=mask, position=position, impl=impl)
        else:
            after = whole.axis_causal_attention(q, k, v, local, **how)[1]
        state = before_part(layout, after, window, forget)
        how |= {"state": state, "return_state": False}
        return whole.axis_causal_attention(q, k, v, local, **how)
    chosen: Any = resolve("axis_causal_attention", impl, k, v, position=position)
    if chosen == "reference":
        raise ValueError("impl='reference' within shard_grid: expected 'auto', 'torch' or 'triton'")
    position = relative(position)
    if state is not None:
        state = offset_gradient(state, position, -1)

    def merged(states: State) -> State:
        states = merge_parts(layout, offset_gradient(states, position, 1))
        return offset_gradient(states, position, -1)

    with exact(k):
        tokens = (q, k, v, mask, position, state, layout.frame_count, window, forget, chosen)
        out, state = whole._attend(*tokens, merged)
        return out, offset_gradient(state, position, 1) if return_state else None

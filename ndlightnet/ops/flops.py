"""FLOPs of our operators for torch.utils.flop_counter: `import ndlightnet.ops.flops`, before a
FlopCounterMode is made, lets it count a network whose operators run on kernels.

As torch counts: two for each multiply-add of a product, none for element-wise work (the gate, the
GLU, merges of States), upper bounds for masks. With n tokens of all samples and heads together, key
and value channels d and e (2 d with MD-LRPE, whose memory has two halves), an operator has

    summarize, read            2 n d e      each token's keys and values join a memory, or read it
    attention, a step          4 n d e      both; what chunks cost on top in a kernel is not counted
    attention in a window w    2 n min(w, length) (d + e)    scores and their sums, as in a kernel
    MD-TPE                     4 cells axes ways states      a state of each channel decays, is read
    local mixing               2 cells taps

where cells are tokens times channels. A backward has the gradients of both factors of a product:
twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


def _products(q: Shape, v: Shape, arguments: Sequence[Any]) -> int:
    """Return 2 n d e. q: keys or queries (..., heads, dim); arguments: an operator's, which end
    with the Position's kind and sizes."""
    halves = 1 if arguments[-2] == "none" else 2
    return 2 * math.prod(q) * halves * v[-1]


def _summarize(k: Shape, v: Shape, *rest: Any, out_shape: Any = None) -> int:
    return _products(k, v, rest)


def _read(q: Shape, total: Shape, memory: Shape, *rest: Any, out_shape: Any = None) -> int:
    return _products(q, memory, rest)


def _attention(q: Shape, k: Shape, v: Shape, *rest: Any, out_shape: Any = None) -> int:
    return _products(q, v, rest) + _products(k, v, rest)


def _causal(f: Shape, k: Shape, v: Shape, *rest: Any, out_shape: Any = None) -> int:
    return 4 * math.prod(f) * v[-1]  # query features have both halves


def _windowed(at: int) -> Callable[..., int]:
    """at: index of the window's width in the arguments."""

    def flops(*arguments: Any, out_shape: Any = None) -> int:
        q: Shape = arguments[0]
        v: Shape = arguments[2]
        width: int = arguments[at]
        halves = 1 if arguments[-2] == "none" else 2
        scores = math.prod(q[:-1]) * min(width, q[1])
        return 2 * scores * (halves * q[-1] + v[-1])

    return flops


def _axis_scan(x: Shape, coef: Shape, decay: Shape, back: Shape | None, *_: Any, out_shape: Any = None) -> int:
    axes, states = coef[0], coef[2]
    return 4 * math.prod(x) * axes * states * (1 if back is None else 2)


def _local(x: Shape, weight: Shape, *_: Any, out_shape: Any = None) -> int:
    return 2 * math.prod(x) * weight[0]


def _none(*_: Any, out_shape: Any = None) -> int:
    return 0


def _twice(forward: Callable[..., int], first: int = 0) -> Callable[..., int]:
    """Return the formula of a backward, whose arguments are those of the forward from number
    `first` on."""

    def flops(*arguments: Any, out_shape: Any = None) -> int:
        return 2 * forward(*arguments[first:])

    return flops


# passes over tensors, without products of matrices
PASSES = ("sliding_merge", "norm_gate", "swiglu", "instance_norm_silu")

FORMULAS: dict[str, Callable[..., int]] = {
    "summarize": _summarize,
    "summarize_backward": _twice(_summarize),
    "read": _read,
    "read_backward": _twice(_read),
    "global_attention": _attention,
    "global_attention_backward": _twice(_attention),
    "causal": _causal,
    "causal_backward": _twice(_causal),
    "causal_attention": _attention,
    "causal_attention_backward": _twice(_attention),
    "attention_step": _attention,
    "window_attention": _windowed(5),
    "window_attention_backward": _twice(_windowed(8)),
    "axis_scan": _axis_scan,
    "axis_scan_backward": _twice(_axis_scan, 1),
    "local_mixing": _local,
    "local_mixing_backward": _twice(_local, 1),
    **{name + end: _none for end in ("", "_backward") for name in PASSES},
    "instance_norm_silu_": _none,
}
for _name, _formula in FORMULAS.items():
    register_flop_formula(getattr(torch.ops.ndlightnet, _name))(_formula)

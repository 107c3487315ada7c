"""LightNet attention as a layer (LightNet, Eq. 5 and 6): linear cost on a grid of any number of
axes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.constants import Constants
from ndlightnet.nn.heads import default_heads
from ndlightnet.nn.local import LocalMixing, LocalState, Where
from ndlightnet.nn.mixers.base import StreamingMixer, check_axes, projected_like, zero_padding
from ndlightnet.nn.position import MDLRPE
from ndlightnet.nn.projections import project
from ndlightnet.ops import (
    attention_step,
    axis_causal_attention,
    global_attention,
    norm_gate,
    read,
    summarize,
    supported,
)
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet.attention import check_window
from ndlightnet.ops.lightnet.state import State
from ndlightnet.ops.position import Kind

HEAD_DIM = 32  # of a head by default


class LightNetAttention(Constants, StreamingMixer):
    """LightNet attention: o = o_proj(norm(merge heads SiLU(q) . M) * sigmoid(low-rank gate) +
    SiLU(local v)), M = softmax(k over tokens)^T v, local: a depthwise convolution over neighbours.

    M sees all tokens at once and none in particular; local mixing is the look at the neighbours. It
    is not part of the paper, nor of the cross form. In the cross form the source's grid may have
    another shape but needs, with lrpe, as many axes.

    Args:
        dim: channels of a token.
        heads: default: one per 32 channels. Head dim = dim / heads.
        context_dim: channels of the source in the cross form; default `dim`.
        lrpe: position code of every layer, "cosine", "rotary" (global form only) or None.
        learn_theta: angles are learnt (one factor per head and slot) or fixed.
        gate_rank: rank of the output gate; default the head dim.
        bias: biases in the projections.
        dims: number of axes, for local mixing; networks give it. None: no local mixing.
        causal: whether the causal form is called, for the default of key_scale; networks give it.
        local: what is mixed locally: "values", as above; "input": x + local x enters the layer;
            "both"; None: nothing, the paper's layer.
        radius, dense: how far local mixing reads, and in which shape; see LocalMixing.
        key_scale: factor on the initial weights of k_proj. With larger keys M begins with few
            tokens for each channel rather than with the mean of all. Default: 4, causal 1.
        window: causal form: a frame (a step of the first axis) sees the last `window` frames,
            itself included. Default: all before it.
        forget: causal form: decay rate per frame: a frame t frames back weighs exp(-forget t); a
            number, or one per head.
        impl: "auto", "torch", "triton" or "reference"; see ndlightnet.ops.

    Parameters: 4 dim^2 + 2 gate_rank dim + 3 dim (with learnt cosine angles, without biases), and
    taps dim of each local mixing, 2 radius dims + 1 taps or (2 radius + 1)^dims if dense.
    """

    ragged, mergeable = True, True

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        lrpe: Kind | None = "cosine",
        learn_theta: bool = True,
        gate_rank: int | None = None,
        bias: bool = False,
        dims: int | None = None,
        causal: bool | None = None,
        local: Where | None = "values",
        radius: int = 1,
        dense: bool = False,
        key_scale: float | None = None,
        window: int | None = None,
        forget: float | Sequence[float] = 0.0,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_window(window)
        if local is not None and local not in get_args(Where):
            raise ValueError(f"local={local!r}: expected 'values', 'input', 'both' or None")
        if key_scale is None:
            key_scale = 1.0 if causal else 4.0
        if not 0 < key_scale < float("inf"):
            raise ValueError(f"key_scale={key_scale}: expected a finite number above 0")
        self.window = window
        # whether a checkpoint may bring another number of heads, see _load_from_state_dict
        given = (heads, gate_rank) != (None, None)
        self.heads_given = given or not isinstance(forget, int | float)
        self.heads, self.head_dim = default_heads(dim, heads, HEAD_DIM)
        rates = [forget] * self.heads if isinstance(forget, int | float) else list(forget)
        if len(rates) != self.heads or not all(0 <= rate < float("inf") for rate in rates):
            raise ValueError(
                f"forget={forget}: expected a finite number, 0 or more, or {self.heads} of them, one per head"
            )
        self.decays = any(rates)
        self.forget: float | Tensor
        self.rates = None if isinstance(forget, int | float) else rates
        if isinstance(forget, int | float):
            self.forget = float(forget)
        self.register_constants()
        self.impl = impl
        source = context_dim or dim
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(source, dim, bias=bias)
        self.v_proj = nn.Linear(source, dim, bias=bias)
        self._divide(self.heads, gate_rank or self.head_dim, lrpe, learn_theta)
        # float32 statistics and a small eps: the variance of the read falls like 1 / length
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.o_proj = nn.Linear(dim, dim, bias=bias)

        def convolution(*where: Where) -> LocalMixing | None:
            wanted = dims is not None and local in where
            return LocalMixing(dims or 0, dim, radius, dense, impl) if wanted else None

        self.local_values = convolution("values", "both")
        self.local_input = convolution("input", "both")
        self.key_scale = key_scale
        self.reset_own()

    def _divide(self, heads: int, rank: int, lrpe: Kind | None, learn_theta: bool) -> None:
        """Make the modules whose parameters depend on the number of heads."""
        dim, bias = self.q_proj.out_features, self.q_proj.bias is not None
        self.heads, self.head_dim = heads, dim // heads
        # the sigmoid is in norm_gate
        self.gate = nn.Sequential(nn.Linear(dim, rank, bias=bias), nn.Linear(rank, dim, bias=bias))
        self.lrpe = MDLRPE(heads, self.head_dim, lrpe, learn_theta) if lrpe else None

    def scale_weights(self) -> None:
        with torch.no_grad():
            self.k_proj.weight.mul_(self.key_scale)

    def reset_own(self) -> None:
        self.scale_weights()
        self.reset_constants()

    def constants(self) -> dict[str, Tensor]:
        return {} if self.rates is None else {"forget": torch.tensor(self.rates)}

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool, prefix: int = 0) -> Tensor:
        """Map tokens (batch, prefix + length, dim) to the same shape; mask: as many. The `prefix`
        tokens in front of the grid, such as a class token, take part in the attention, at position
        0, and not in local mixing. Prefix tokens need the global form and a Grid."""
        if prefix and (causal or not isinstance(layout, Grid)):  # a pack has nothing in front of its samples
            raise ValueError(f"prefix={prefix}: expected causal=False and a Grid, or no prefix")

        def local(convolution: LocalMixing, x: Tensor) -> Callable[[], Tensor]:
            if not prefix:
                return convolution.begin(x, layout, mask, causal)
            part = None if mask is None else mask[:, prefix:]
            return lambda: pad(convolution(x[:, prefix:], layout, part), (0, 0, prefix, 0))

        if self.local_input is not None:
            (x,) = zero_padding(mask, x)
            x = x + local(self.local_input, x)()
        q, k, v, gate = self._project(x, x)
        near = None if self.local_values is None else local(self.local_values, v.flatten(2))
        if causal:
            y, _ = self._causal(q, k, v, layout, mask)
        else:
            self._refuse_window()
            position = self.lrpe(layout)._replace(prefix=prefix) if self.lrpe else None
            within = None if prefix else layout
            y = global_attention(q, k, v, mask=mask, position=position, layout=within, impl=self.impl)
        return self._output(y, gate, None if near is None else near())

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        self._refuse_window()
        if self.lrpe:
            check_axes(grid, source, "; use lrpe=None")
        q, k, v, gate = self._project(x, context)
        at, of = (self.lrpe(grid), self.lrpe(source)) if self.lrpe else (None, None)
        state = summarize(k, v, mask=mask, position=of, impl=self.impl)
        return self._output(read(q, state, position=at, impl=self.impl), gate)

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v (batch, length, heads, head_dim), and the gate before its sigmoid."""
        down: Any
        up: Any
        (down, up), keys = self.gate, (self.k_proj, self.v_proj)
        if source is x:
            q, k, v, gate = project(x, self.q_proj, *keys, down)
        else:
            (q, gate), (k, v) = project(x, self.q_proj, down), project(source, *keys)
        q, k, v = (y.unflatten(-1, (self.heads, self.head_dim)) for y in (q, k, v))
        return q, k, v, up(gate)

    def _causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        mask: Tensor | None,
        state: State | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        self._refuse_rotary()
        return axis_causal_attention(
            q,
            k,
            v,
            layout,
            mask=mask,
            position=self.lrpe(layout) if self.lrpe else None,
            state=state,
            window=self.window,
            forget=self.forget,
            return_state=return_state,
            impl=self.impl,
        )

    def _refuse_window(self) -> None:
        if self.window is not None or self.decays:
            raise ValueError(
                f"causal=False, and the layer has window={self.window}, "
                f"forget={self.rates or self.forget}, which are about the frames before a frame: "
                "expected causal=True"
            )

    def _refuse_rotary(self) -> None:
        if self.lrpe and self.lrpe.kind == "rotary":
            raise ValueError(
                "causal=True with lrpe='rotary': a pair's channels decay differently, so scores "
                "would depend on absolute position; use 'cosine' or None"
            )

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        if self.impl != "auto":
            return self.impl
        operation = "axis_causal_attention" if causal else "global_attention"
        position = self.lrpe(Grid.of(x)) if self.lrpe else None
        like = projected_like(x, 0, self.heads, self.head_dim)
        support = supported(operation, like, position=position)
        return "triton" if x.is_cuda and support else f"torch ({support.reason})"

    def _output(self, y: Tensor, gate: Tensor, near: Tensor | None = None) -> Tensor:
        norm = self.norm
        y = norm_gate(y.flatten(2), gate, norm.weight, norm.bias, norm.eps, self.impl, near)
        out: Tensor = self.o_proj(y)
        return out

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> State | LocalState:
        dim, dtype = self.head_dim, accumulator(self.q_proj.weight)
        memory = State.empty(batch, self.heads, dim, dim, self.lrpe is not None, dtype=dtype, device=device)
        if self.window is not None:
            frames = self.window - 1
            memory = State(*(torch.stack([x], 1).repeat_interleave(frames, 1) for x in memory))
        local = (self.local_values, self.local_input)
        if local == (None, None):
            return memory
        near = (() if one is None else one.init_state(batch, device, space) for one in local)
        return LocalState(memory, *near)

    def step(self, x: Tensor, grid: Grid, state: State | LocalState) -> tuple[Tensor, State | LocalState]:
        memory: State
        values: Any
        inputs: Any
        memory, values, inputs = (state, (), ()) if isinstance(state, State) else state
        if self.local_input is not None:
            u, inputs = self.local_input.step(x, grid, inputs)
            x = x + u
        q, k, v, gate = self._project(x, x)
        near = None
        if self.local_values is not None:
            near, values = self.local_values.step(v.flatten(2), grid, values)
        if grid.length != 1 or self.window is not None or grid.shared:
            y, memory = self._causal(q, k, v, grid, None, memory, return_state=True)
        else:
            self._refuse_rotary()
            if self.decays:
                memory = memory.decayed(1, self.forget)
            position = self.lrpe(grid) if self.lrpe else None
            y, memory = attention_step(q[:, 0], k[:, 0], v[:, 0], memory, position=position, impl=self.impl)
            y = y[:, None]
        new = memory if isinstance(state, State) else LocalState(memory, values, inputs)
        return self._output(y, gate, near), new

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        # A checkpoint from before local mixing is of the layer without it, which this one becomes;
        # one from before heads of 32 channels, which shows in the rank of its gate, brings its own.
        gate = state_dict.get(prefix + "gate.0.weight")
        if gate is not None:
            for name in ("local_values", "local_input"):
                if getattr(self, name) is not None and f"{prefix}{name}.weight" not in state_dict:
                    setattr(self, name, None)
                    warnings.warn(
                        f"the checkpoint has no {name}: LightNetAttention does without it, as with local=None",
                        stacklevel=2,
                    )
            if not self.heads_given and len(gate) != self.head_dim:
                self._divide_as_before(len(gate))
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _divide_as_before(self, rank: int) -> None:
        """Take heads of 64 channels, if this is the rank of their gate. Do this before an optimizer
        gets the parameters: those of the gate and the angles are new."""
        heads, head_dim = default_heads(self.q_proj.out_features, None)
        if rank != head_dim:
            return
        warnings.warn(
            f"the checkpoint has gates of rank {rank}: LightNetAttention takes {heads} heads of "
            f"{head_dim} channels, the former default; heads= gives another number",
            stacklevel=3,
        )
        code, trained = self.lrpe, next(self.gate.parameters()).requires_grad
        learn = code is not None and code.log_factor.requires_grad
        self._divide(heads, rank, code.kind if code else None, learn)
        self.gate.to(self.q_proj.weight).requires_grad_(trained)
        if self.lrpe:
            self.lrpe.to(self.q_proj.weight)


def published_mixer(dim: int) -> LightNetAttention:
    """Return the paper's layer: heads of 64 channels, without local mixing."""
    return LightNetAttention(dim, default_heads(dim, None)[0], local=None, key_scale=1.0)

"""LightNet attention as a layer (LightNet, Eq. 5 and 6): linear cost on a grid of any number of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.constants import Constants
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import check_axes, default_heads, projected_like
from ndlightnet.nn.mixers.with_local import LocalMixer, LocalState, Where
from ndlightnet.nn.position import MDLRPE
from ndlightnet.nn.projections import divided, joins, joint_linear, norm_linear, project, residual_norm
from ndlightnet.ops import attention_layer, attention_step, axis_causal_attention, norm_gate, read, summarize, supported
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet.attention import begin_global_attention, check_window
from ndlightnet.ops.lightnet.state import State
from ndlightnet.ops.position import Kind

HEAD_DIM = 32  # of a head by default


class LightNetAttention(Constants, LocalMixer):
    """LightNet attention: o = o_proj(norm(merge heads SiLU(q) . M) * sigmoid(gate) + SiLU(local v)), M = softmax(k over
    tokens)^T v, gate: a map of rank head_dim, local: a depthwise convolution over neighbours.

    M sees all tokens at once and none in particular; local mixing is the look at the neighbours. It is not part of the
    paper, nor of the cross form. In the cross form the source's grid may have another shape but needs, with lrpe, as
    many axes.

    Args:
        dim: channels of a token.
        heads: default: one per 32 channels. Head dim = dim / heads.
        context_dim: channels of the source in the cross form; default `dim`.
        lrpe: position code of every layer, "cosine", "rotary" (global form only) or None; its angles are learnt, one
            factor per head and slot.
        bias: biases in the projections.
        dims: number of axes, for local mixing; networks give it. None: no local mixing.
        causal: whether the causal form is called, for the default of key_scale; networks give it.
        local: what is mixed locally: "values", as above; "input": x + local x enters the layer; "both"; None: nothing,
            the paper's layer.
        radius, dense: how far local mixing reads, and in which shape; see LocalMixing.
        key_scale: factor on the initial weights of k_proj. With larger keys M begins with few tokens for each channel
            rather than with the mean of all. Default: 4, causal 1.
        window: causal form: a frame (a step of the first axis) sees the last `window` frames, itself included. Default:
            all before it.
        forget: causal form: decay rate per frame: a frame t frames back weighs exp(-forget t); a number, or one per
            head.
        impl: "auto", "torch", "triton" or "reference"; see ndlightnet.ops.

    Parameters: 4 dim^2 + 2 head_dim dim + 3 dim (with cosine angles, without biases), and taps dim of each local
    mixing, 2 radius dims + 1 taps or (2 radius + 1)^dims if dense.
    """

    ragged, mergeable, norms = True, True, True

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        lrpe: Kind | None = "cosine",
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
        if key_scale is None:
            key_scale = 1.0 if causal else 4.0
        if not 0 < key_scale < float("inf"):
            raise ValueError(f"key_scale={key_scale}: expected a finite number above 0")
        self.window = window
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
        # the sigmoid is in norm_gate
        rank = self.head_dim
        self.gate = nn.Sequential(nn.Linear(dim, rank, bias=bias), nn.Linear(rank, dim, bias=bias))
        self.lrpe = MDLRPE(self.heads, self.head_dim, lrpe) if lrpe else None
        # float32 statistics and a small eps: the variance of the read falls like 1 / length
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.o_proj = nn.Linear(dim, dim, bias=bias)
        self.make_branch(local, dims, (dim, dim), radius, dense, impl)
        self.key_scale = key_scale
        self.reset_own()

    @property
    def order_free(self) -> bool:  # type: ignore[override]
        return self.local_input is None and self.local_values is None

    def scale_weights(self) -> None:
        with torch.no_grad():
            self.k_proj.weight.mul_(self.key_scale)

    def reset_own(self) -> None:
        self.scale_weights()
        self.reset_constants()

    def constants(self) -> dict[str, Tensor]:
        return {} if self.rates is None else {"forget": torch.tensor(self.rates)}

    def mix(
        self,
        x: Tensor,
        layout: Layout,
        mask: Tensor | None,
        causal: bool,
        prefix: int = 0,
        norm: nn.Module | None = None,
        branch: Tensor | None = None,
    ) -> Any:
        """Map tokens (batch, prefix + length, dim) to the same shape; mask: as many. The `prefix`
        tokens in front of the grid, such as a class token, take part in the attention, at position
        0, and not in local mixing. Prefix tokens need the global form and a Grid. norm: x + branch goes through it
        first, and is returned beside the result."""
        # a pack has nothing in front of its samples, and boxes and slabs would each have a prefix of their own
        if prefix and (causal or layout.packed or layout.shared):
            raise ValueError(f"prefix={prefix}: expected causal=False and a Grid of whole samples, or no prefix")
        layers, stream = self._layers, x
        joint = None
        if norm is not None and self.local_input is None and joins(x, *layers):
            stream, joint = norm_linear(x, branch, norm, *layers)
        elif norm is not None:
            stream, x = residual_norm(x, branch, norm)
        if joint is None:
            x = self.add_local(x, layout, mask, causal, prefix)
            joint = joint_linear(x, *layers) if joins(x, *layers) else None
        y = self._attend(x, joint, layout, mask, causal, prefix)
        return y if norm is None else (stream, y)

    @property
    def _layers(self) -> tuple[nn.Linear, ...]:
        """The maps of a token to its query, key, value, and gate before its map to all channels and its sigmoid."""
        down: Any = self.gate[0]
        return self.q_proj, self.k_proj, self.v_proj, down

    def _attend(
        self, x: Tensor, joint: Tensor | None, layout: Layout, mask: Tensor | None, causal: bool, prefix: int
    ) -> Tensor:
        """joint: the joint map of x, None: it has none."""
        position = self.lrpe(layout)._replace(prefix=prefix) if self.lrpe and not causal else None
        if not causal:
            self._refuse_window()
        norm, (_, up), proj, local = self.norm, self.gate, self.o_proj, self.local_values
        if joint is not None and not (causal or prefix) and joins(x, up, proj) and proj.bias is None:
            taps = () if local is None else local.taps(layout, False)
            options: Any = {"layout": layout, "mask": mask, "position": position, "impl": self.impl}
            maps: Any = (up.weight, proj.weight)
            return attention_layer(joint, self.heads, norm.weight, norm.bias, norm.eps, *maps, *taps, **options)
        pieces = project(x, *self._layers) if joint is None else divided(joint, *self._layers)
        q, k, v, gate = self._heads(*pieces)
        near = self.begin_local_values(v.flatten(2), layout, mask, causal, prefix)
        if causal:
            y, _ = self._causal((q, k, v), layout, mask)
            return self._output(y, gate, near())
        within = None if prefix else layout
        attention = begin_global_attention(q, k, v, mask=mask, position=position, layout=within, impl=self.impl)
        beside = near()  # while the States of slabs are under way
        return self._output(attention(), gate, beside)

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        return self.read_source(x, grid, self.summarize_source(context, source, mask), source)

    def summarize_source(self, context: Tensor, source: Grid, mask: Tensor | None) -> State:
        self._refuse_window()
        k, v = (y.unflatten(-1, (self.heads, -1)) for y in project(context, self.k_proj, self.v_proj))
        return summarize(k, v, mask=mask, position=self.lrpe(source) if self.lrpe else None, impl=self.impl)

    def read_source(self, x: Tensor, grid: Grid, summary: Any, source: Grid) -> Tensor:
        if self.lrpe:
            check_axes(grid, source, "; use lrpe=None")
        queries, gate = project(x, self.q_proj, self.gate[0])  # type: ignore[arg-type]
        q = queries.unflatten(-1, (self.heads, self.head_dim))
        at = self.lrpe(grid) if self.lrpe else None
        return self._output(read(q, summary, position=at, impl=self.impl), gate)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v as (batch, length, heads, head_dim)."""
        q, k, v = (y.unflatten(-1, (self.heads, self.head_dim)) for y in (q, k, v))
        return q, k, v, gate

    def _causal(
        self, qkv: tuple[Tensor, Tensor, Tensor], layout: Layout, mask: Tensor | None, state: State | None = None
    ) -> tuple[Tensor, Any]:
        """Return what tokens read, and with a state the next one."""
        self._refuse_rotary()
        options: Any = {"window": self.window, "forget": self.forget, "impl": self.impl, "mask": mask}
        position = self.lrpe(layout) if self.lrpe else None
        return axis_causal_attention(
            *qkv, layout, position=position, state=state, return_state=state is not None, **options
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
        norm, proj, (_, up) = self.norm, self.o_proj, self.gate
        inputs = (norm.weight, norm.bias, norm.eps, self.impl, near)
        if joins(y, up, proj) and proj.bias is None:
            return norm_gate(y.flatten(2), gate, *inputs, up.weight, proj.weight)  # type: ignore[arg-type]
        return proj(norm_gate(y.flatten(2), up(gate), *inputs))

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> State | LocalState:
        dim, dtype = self.head_dim, accumulator(self.q_proj.weight)
        memory = State.empty(batch, self.heads, dim, dim, self.lrpe is not None, dtype=dtype, device=device)
        if self.window is not None:
            frames = self.window - 1
            memory = State(*(torch.stack([x], 1).repeat_interleave(frames, 1) for x in memory))
        if self.local_values is None and self.local_input is None:
            return memory
        return self.branch_state(batch, memory, device, space)

    def step(self, x: Tensor, grid: Grid, state: State | LocalState) -> tuple[Tensor, State | LocalState]:
        memory, values, inputs = LocalState(state, (), ()) if isinstance(state, State) else state
        x, inputs = self.step_input(x, grid, inputs)
        q, k, v, gate = self._heads(*project(x, *self._layers))
        near, values = self.step_values(v.flatten(2), grid, values)
        if grid.length != 1 or self.window is not None or grid.shared:
            y, memory = self._causal((q, k, v), grid, None, memory)
        else:
            self._refuse_rotary()
            if self.decays:
                memory = memory.decayed(1, self.forget)
            position = self.lrpe(grid) if self.lrpe else None
            y, memory = attention_step(q[:, 0], k[:, 0], v[:, 0], memory, position=position, impl=self.impl)
            y = y[:, None]
        new = memory if isinstance(state, State) else LocalState(memory, values, inputs)
        return self._output(y, gate, near), new


def published_mixer(dim: int) -> LightNetAttention:
    """Return the paper's layer: heads of 64 channels, without local mixing."""
    return LightNetAttention(dim, default_heads(dim, None)[0], local=None, key_scale=1.0)

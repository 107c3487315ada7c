"""Base class of recurrent mixers with queries, keys, values: TNL, GLA, HGRN2, the delta rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers.base import default_heads, projected_like
from ndlightnet.nn.mixers.recurrent import Recurrent, Scan, exclude_self
from ndlightnet.ops import fla
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.recurrence.delta import gated_delta_rule
from ndlightnet.ops.recurrence.gated import gated_linear_attention


class Inputs(NamedTuple):
    """Inputs of the recurrence, (batch, length, heads, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    gate: Any = None  # gate of the output (batch, length, heads, value_dim)


class Keyed(Recurrent):
    """A mixer with a memory of keys and values (heads, key_dim, value_dim) that queries read. With
    `context` the queries of x read the memory after the whole source."""

    operation = "gated_linear_attention"
    activation: Any = staticmethod(nn.functional.silu)  # of the output's gate
    in_proj: nn.Linear
    norm: nn.Module

    def __init__(
        self, dim: int, heads: int | None, scan: Scan, impl: Impl, key_ratio: float = 1.0, decays: int | None = None
    ) -> None:
        """decays: number per head; default: one for each key channel."""
        super().__init__(scan)
        self.heads, self.value_dim = default_heads(dim, heads)
        self.key_dim = max(1, int(self.value_dim * key_ratio))
        self.dim, self.impl = dim, impl
        self.decays = self.key_dim if decays is None else decays
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        if self.impl != "auto":
            return self.impl
        k, v, decay = (projected_like(x, 0, self.heads, n) for n in (self.key_dim, self.value_dim, self.decays))
        support = fla.supports(self.operation, k, v, decay if self.decays else None)
        return "fla" if support else f"torch ({support.reason})"

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x)

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        acc = accumulator(self.o_proj.weight)
        return torch.zeros(batch, self.heads, self.key_dim, self.value_dim, dtype=acc, device=device)

    def recur(self, inputs: Inputs, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta, _ = inputs
        if beta is None:
            y, memory = gated_linear_attention(q, k, v, decay, memory, impl=self.impl)
        else:
            y, memory = gated_delta_rule(q, k, v, beta, decay, memory, impl=self.impl)
            k = k * beta[..., None]

        def self_read(n: slice) -> Tensor:
            return (q[n] * k[n]).sum(-1, keepdim=True) * v[n]

        return exclude_self(y, inclusive, self_read), memory

    def values(self, x: Tensor) -> Tensor:
        # in_proj maps to queries, keys (or their decays) and values, in this order
        first = 2 * self.heads * self.key_dim
        return nn.functional.linear(x, self.in_proj.weight[first : first + self.dim])

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        y = self.norm(y)
        return self.o_proj((y if inputs.gate is None else y * self.activation(inputs.gate)).flatten(2))

    def split(self, x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """Split (..., sum of heads * size) into (..., heads, size) for each size."""
        channels = x.split([self.heads * size for size in sizes], -1)
        return tuple(y.unflatten(-1, (self.heads, -1)) for y in channels)

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        """Let queries read the memory after the whole source, summed over the orders of a scan."""
        memory = self.read_orders(context, source, mask, False)[2].sum(0)[..., : self.value_dim]
        z = self.place(self.project(x), grid)
        inputs = self.inputs(nn.functional.pad(z, (0, 0, self.lookback, 0)), None)
        with exact(memory):
            y = torch.einsum("blhk,bhkd->blhd", inputs.q.to(memory.dtype), memory)
        return self.output(inputs, y.to(inputs.v.dtype))

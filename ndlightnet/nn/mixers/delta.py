"""The delta rule as layers: DeltaNet (Yang et al., 2024, arXiv 2406.06484), gated DeltaNet (Yang et
al., 2025, arXiv 2412.06464) and Kimi Delta Attention (Kimi Team, 2025, arXiv 2510.26692)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.nn.mixers.base import zero_padding
from ndlightnet.nn.mixers.keyed import Inputs, Keyed
from ndlightnet.nn.mixers.recurrent import Scan, init_dt_bias, short_conv
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator

TAPS = 4  # kernel size of the short convolution


class _Delta(Keyed):
    """Base class of DeltaNet and its relatives; their constructors end with `reset_own`."""

    operation = "gated_delta_rule"
    lookback = TAPS - 1

    def __init__(self, dim: int, heads: int | None, scan: Scan, negative: bool, impl: Impl) -> None:
        super().__init__(dim, heads, scan, impl, decays=0)
        self.negative = negative
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = nn.Parameter(torch.empty(3 * dim, TAPS))
        self.beta_proj = nn.Linear(dim, self.heads, bias=False)
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-5)
        self.width = 3 * dim + self.heads

    @torch.no_grad()
    def reset_own(self) -> None:
        self.conv.uniform_(-1, 1).div_(math.sqrt(TAPS))

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([self.in_proj(x), self.beta_proj(x)], -1)

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        dim = self.value_dim
        first, rest = z.split([3 * self.dim, z.shape[-1] - 3 * self.dim], -1)
        q, k, v = self.split(F.silu(short_conv(first, self.conv)), dim, dim, dim)
        beta, rest = rest[:, self.lookback :].split([self.heads, rest.shape[-1] - self.heads], -1)
        beta = torch.sigmoid(beta.to(accumulator(beta))) * (2 if self.negative else 1)
        decay, gate = self.decay_and_gate(rest)
        q, k = unit(q) * dim**-0.5, unit(k)
        k, v, beta = zero_padding(mask, k, v, beta)
        if decay is not None:
            (decay,) = zero_padding(mask, decay)
        return Inputs(q, k, v, decay, beta, gate)

    def decay_and_gate(self, rest: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return log decay (batch, length, heads, ·) and gate from the other projected channels."""
        return None, None


class DeltaNet(_Delta):
    """DeltaNet: o_proj(norm(m_t^T q_t)), m_t = (I - beta_t k_t k_t^T) m_(t-1) + beta_t k_t v_t^T;
    q, k and v after a causal convolution over 4 tokens and SiLU, q and k scaled to length 1 (q
    then divided by sqrt(head_dim)), beta = sigmoid(.).

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        scan: how a grid is covered; see Recurrent.
        negative: beta up to 2, so that a memory can also change its sign (arXiv 2411.12537).
        impl: "auto", "torch", "fla" or "reference"; see ndlightnet.ops.recurrence.delta.

    Parameters: 4 dim^2 + 12 dim + heads dim + dim / heads.
    """

    def __init__(
        self, dim: int, heads: int | None = None, *, scan: Scan = "both", negative: bool = False, impl: Impl = "auto"
    ) -> None:
        super().__init__(dim, heads, scan, negative, impl)
        self.reset_own()


def unit(x: Tensor) -> Tensor:
    """Normalise vectors to length 1 along the last axis, computed in float32."""
    exact = x.to(accumulator(x))
    return (exact * (exact.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class GatedDeltaNet(_Delta):
    """DeltaNet with a decay for each head, before the delta rule, and a gate:
    o_proj(norm(m_t^T q_t) * SiLU(gate)), m_t = alpha_t (I - beta_t k_t k_t^T) m_(t-1) + beta_t k_t v_t^T, alpha_t =
    exp(-exp(A_log) softplus(. + dt_bias)).

    Args: as in DeltaNet; dt_min, dt_max: range of the initial steps softplus(dt_bias). A head's initial exp(A_log) is
    up to 16: with the defaults, which are the original's, most heads begin with a memory of less than 30 tokens.
    Parameters: 5 dim^2 + 12 dim + 2 heads dim + dim / heads + 2 heads.

    Values have as many channels as keys; in the original they have twice as many.
    """

    undecayed = ("A_log",)
    slowest = 1e-3  # least initial exp(A_log), originally 0

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        scan: Scan = "both",
        negative: bool = False,
        impl: Impl = "auto",
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
    ) -> None:
        super().__init__(dim, heads, scan, negative, impl)
        self.steps = dt_min, dt_max
        self.decay_proj, self.gate_proj, self.decays = self.make_projections()
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(self.heads * self.decays))
        self.width += self.heads * self.decays + dim
        self.reset_own()

    def make_projections(self) -> tuple[nn.Module, nn.Module, int]:
        """Return the maps of tokens to decays and to the gate, and the number of decays per head."""
        return nn.Linear(self.dim, self.heads, bias=False), nn.Linear(self.dim, self.dim, bias=False), 1

    @torch.no_grad()
    def reset_own(self) -> None:
        super().reset_own()
        self.A_log.uniform_(self.slowest, 16).log_()
        init_dt_bias(self.dt_bias, *self.steps)

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([super().project(x), self.decay_proj(x), self.gate_proj(x)], -1)

    def decay_and_gate(self, rest: Tensor) -> tuple[Tensor | None, Tensor | None]:
        logits, gate = rest.split([rest.shape[-1] - self.dim, self.dim], -1)
        acc = accumulator(logits)
        step = F.softplus(logits.to(acc) + self.dt_bias.to(acc)).unflatten(-1, (self.heads, -1))
        return -self.A_log.to(acc).exp()[:, None] * step, gate.unflatten(-1, (self.heads, -1))


class KimiDeltaAttention(GatedDeltaNet):
    """DeltaNet with a decay for each key channel and a gate, both of low rank (the head dim):
    o_proj(norm(m_t^T q_t) * sigmoid(gate)), m_t = (I - beta_t k_t k_t^T) Diag(alpha_t) m_(t-1) +
    beta_t k_t v_t^T, alpha_t = exp(-exp(A_log) softplus(. + dt_bias)).

    Args: as in GatedDeltaNet.
    Parameters: 4 dim^2 + 14 dim + heads dim + 4 dim^2 / heads + dim / heads + heads.
    """

    slowest = 1
    activation = staticmethod(torch.sigmoid)

    def make_projections(self) -> tuple[nn.Module, nn.Module, int]:
        dim, rank = self.dim, self.value_dim

        def low_rank(bias: bool) -> nn.Sequential:
            return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=bias))

        return low_rank(False), low_rank(True), rank

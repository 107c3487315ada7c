"""Position codes: MD-TPE once after the embedding, MD-LRPE in every layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ndlightnet.ops import Lrpe, axis_scan, frequencies, line_step
from ndlightnet.ops._registry import Impl
from ndlightnet.ops.lrpe import Kind, slots_of

# The parameters of position codes: decays, angles and their coefficients, which weight decay would
# pull towards a meaning of their own. By name, since a network holds them anywhere.
CODES = ("log_factor", "logit", "coef")


class MDLRPE(nn.Module):
    """Angles of one layer for a grid of any number of axes.

    The usual bank of frequencies, the same for every axis, times a learnt positive factor per head
    and slot. (A factor, because frequencies span four decades: a step that suits the fast ones
    would wreck the slow ones.) Parameters: heads * slots, frozen if not learnt; slots = head_dim,
    half for "rotary".
    """

    def __init__(self, heads: int, head_dim: int, kind: Kind, learn: bool = True) -> None:
        super().__init__()
        self.kind, self.slots = kind, slots_of(head_dim, kind)
        self.log_factor = nn.Parameter(torch.zeros(heads, self.slots), requires_grad=learn)

    def forward(
        self, shape: tuple[int, ...], start: tuple[int | Tensor, ...] | None = None
    ) -> Lrpe:
        """Where the tokens of a grid of this shape lie, for the functions of ndlightnet.ops."""
        if len(shape) > self.slots:
            raise ValueError(
                f"grid {shape}: {len(shape)} axes need as many angles, the head has {self.slots}"
            )
        bank = frequencies(self.slots, len(shape), device=self.log_factor.device)
        return Lrpe(bank * self.log_factor.float().exp(), shape, self.kind, start=start)


class MDTPE(nn.Module):
    """x + sum over axes of a learnt exponential Toeplitz product along the axis (LightNet, Eq. 9).

    The paper's form goes one way and replaces x; this one adds to it and, where the network is not
    causal, goes both ways with half the states each, so that the number of parameters stays the
    paper's: states * (dim + 1) per axis.
    """

    def __init__(
        self,
        dims: int,
        dim: int,
        states: int = 128,
        bidirectional: bool = True,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.impl = impl
        ways = 2 if bidirectional else 1
        if states < ways or states % ways:
            raise ValueError(f"states={states}: expected a positive multiple of {ways}")
        each = states // ways
        self.coef = nn.Parameter(torch.randn(ways, dims, dim, each) / math.sqrt(each))
        # decays with reaches of 1 to 256 tokens, log-spaced
        reach = torch.logspace(0, 8, each, base=2).expand(ways, dims, each)
        self.logit = nn.Parameter(-torch.log(torch.expm1(1 / reach)))

    def weights(self) -> tuple[Tensor, Tensor]:
        """Coefficients (ways, dims, dim, states) and log decays (ways, dims, states), float32.

        c is scaled by 1 - lambda, so that a slow state weighs no more than a fast one.
        """
        logit = self.logit.float()
        log_decay = torch.nn.functional.logsigmoid(logit)
        return self.coef.float() * torch.sigmoid(-logit)[:, :, None], log_decay

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (batch, *grid, dim), mask (batch, *grid) bool -> same shape."""
        with torch.autocast(x.device.type, enabled=False):
            coef, log_decay = self.weights()
            reverse = (coef[1], log_decay[1]) if coef.shape[0] == 2 else None
            return axis_scan(x, coef[0], log_decay[0], reverse, mask, residual=True, impl=self.impl)

    def init_state(self, batch: int, device: torch.device | str | None = None) -> Tensor:
        """State before the first token of a sequence: (batch, dim, states)."""
        return torch.zeros(batch, *self.coef.shape[2:], device=device)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token (batch, dim) of a sequence (one axis, one way)."""
        if self.coef.shape[:2] != (1, 1):
            raise ValueError("step: expected one axis and bidirectional=False")
        with torch.autocast(x.device.type, enabled=False):
            coef, log_decay = self.weights()
            y, state = line_step(x, coef[0, 0], log_decay[0, 0], state)
        return x + y, state

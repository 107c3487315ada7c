"""Position codes: MD-TPE once after the embedding, MD-LRPE in every layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Ragged
from ndlightnet.ops import (
    Position,
    axis_scan,
    frequencies,
    line_scan,
    line_state,
    line_step,
)
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.position import Kind, slots_of
from ndlightnet.ops.recurrence.chunks import exact

# Decays, angles, orthogonal vectors: weight decay would pull them towards a meaning of its own. By
# name, since a network holds them anywhere.
NO_WEIGHT_DECAY = (
    "log_factor", "logit", "coef", "basis", "mirror", "log_rate", "turn", "A_log",
)  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    """float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    ) -> Position:
        """Where the tokens of a grid of this shape lie, for the functions of ndlightnet.ops."""
        if len(shape) > self.slots:
            raise ValueError(
                f"grid {shape}: {len(shape)} axes need as many angles, the head has {self.slots}"
            )
        bank = frequencies(self.slots, len(shape), device=self.log_factor.device)
        return Position(bank * _wide(self.log_factor).exp(), shape, self.kind, offset=start)


class MDTPE(nn.Module):
    """x + sum over axes of a learnt exponential Toeplitz product along the axis (LightNet, Eq. 9).

    The paper's form goes one way and replaces x; this one adds to it and goes both ways with half
    the states each, so that the number of parameters stays the paper's: states * (dim + 1) per
    axis. causal: along the first axis one way only, with half the states if other axes go both
    ways.
    """

    def __init__(
        self,
        dims: int,
        dim: int,
        states: int = 128,
        bidirectional: bool = True,
        causal: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.impl, self.dims = impl, dims
        back = dims - causal if bidirectional else 0  # axes that are also gone back
        ways = 2 if back else 1
        if states < ways or states % ways:
            raise ValueError(f"states={states}: expected a positive multiple of {ways}")
        each = states // ways
        # first every axis forth, then the last ones back
        self.coef = nn.Parameter(torch.randn(dims + back, dim, each) / math.sqrt(each))
        # decays with reaches of 1 to 256 tokens, log-spaced
        reach = torch.logspace(0, 8, each, base=2).expand(dims + back, each)
        self.logit = nn.Parameter(-torch.log(torch.expm1(1 / reach)))

    def weights(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """Forth and back: coefficients (dims, dim, states) and log decays (dims, states), float32
        (float64 of a float64 network).

        c is scaled by 1 - lambda, so that a slow state weighs no more than a fast one.
        """
        logit = _wide(self.logit)
        log_decay = torch.nn.functional.logsigmoid(logit)
        coef = _wide(self.coef) * torch.sigmoid(-logit)[:, None]
        forth = coef[: self.dims], log_decay[: self.dims]
        back = coef[self.dims :], log_decay[self.dims :]
        if len(back[0]) == 0:
            return forth, None
        if len(back[0]) < self.dims:  # along the first axis nothing comes back
            zeros = (torch.zeros_like(x[:1]) for x in forth)
            back = tuple(torch.cat(pair) for pair in zip(zeros, back, strict=True))  # type: ignore
        return forth, back

    def forward(
        self, x: Tensor, mask: Tensor | None = None, layout: Ragged | None = None
    ) -> Tensor:
        """Tokens (batch, *grid, dim), mask (batch, *grid) bool -> same shape. layout: of samples
        end to end; then tokens are (length, dim)."""
        with exact(x):
            (coef, log_decay), back = self.weights()
            if layout is not None:
                keep = None if mask is None else mask[None]
                how: Any = {"residual": True, "impl": self.impl}
                return axis_scan(x[None], coef, log_decay, back, keep, layout=layout, **how)[0]
            return axis_scan(x, coef, log_decay, back, mask, residual=True, impl=self.impl)

    def init_state(
        self, batch: int, space: tuple[int, ...] = (), device: torch.device | str | None = None
    ) -> Tensor:
        """State along the first axis before the first frame: (batch, *space, dim, states)."""
        dtype = torch.promote_types(self.coef.dtype, torch.float32)
        return torch.zeros(batch, *space, *self.coef.shape[1:], dtype=dtype, device=device)

    def advance(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next frames (batch, frames, *space, dim) and the State before them."""
        if len(self.coef) == 2 * self.dims:
            raise ValueError("advance: expected an MDTPE(causal=True) or bidirectional=False")
        grid, before = Grid.of(x), state.flatten(0, -3)
        with exact(x):
            (coef, log_decay), back = self.weights()
            lines = grid.lines(x, 0)
            if grid.shape[0] == 1:
                y, after = line_step(lines[:, 0], coef[0], log_decay[0], before)
                y = y[:, None]
            else:
                y = line_scan(lines, coef[0], log_decay[0], before)
                after = line_state(lines, log_decay[0], before)
            out = x + grid.unlines(y, 0)
            if grid.ndim > 1:
                rest = None if back is None else (back[0][1:], back[1][1:])
                single = x.flatten(0, 1)
                across = axis_scan(single, coef[1:], log_decay[1:], rest, impl=self.impl)
                out = out + across.view_as(x)
        return out, after.view_as(state)

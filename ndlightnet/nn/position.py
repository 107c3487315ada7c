"""Position codes: MD-TPE after the embedding, MD-LRPE in every layer."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout, as_layout
from ndlightnet.nn.initial import Device, Initialized, Space, assign
from ndlightnet.ops import Position, axis_scan, frequencies, line_scan, line_state, line_step, rotate, tables
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import product_dtype
from ndlightnet.ops.position import Kind, slots_of
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.parallel import layout_of_tokens


def _at_least_float32(x: Tensor) -> Tensor:
    """Cast to float32, unless the dtype of x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


TPE = bool | Literal["published"]


class MDLRPE(Initialized):
    """Position angles of one layer, on a grid of any number of axes.

    A bank of frequencies, the same for every axis, times a learnt positive factor per head and slot. (A factor, because
    frequencies span up to eight decades: an additive update that suits the high ones is far too large for the low
    ones.) Parameters: heads * slots, frozen if not learnt; slots = head_dim, half of it for "rotary".
    """

    undecayed = ("log_factor",)

    def __init__(self, heads: int, head_dim: int, kind: Kind, learn: bool = True) -> None:
        super().__init__()
        self.kind, self.slots = kind, slots_of(head_dim, kind)
        self.log_factor = nn.Parameter(torch.empty(heads, self.slots), requires_grad=learn)
        self.reset_own()

    def reset_own(self) -> None:
        nn.init.zeros_(self.log_factor)

    def forward(self, layout: Layout | tuple[int, ...]) -> Position:
        """Return the Position of the tokens of a layout, or of a grid of this shape, for the
        functions of ndlightnet.ops."""
        grid = as_layout(layout)
        if grid.ndim > self.slots:
            raise ValueError(f"grid {grid.shapes[0]}: {grid.ndim} axes need as many angles, the head has {self.slots}")
        bank = frequencies(self.slots, grid.ndim, device=self.log_factor.device)
        theta = bank * _at_least_float32(self.log_factor).exp()
        return Position(theta, grid, self.kind)

    def rotate(self, layout: Layout, *xs: Tensor) -> list[Tensor]:
        """Return each x (batch, length, heads, head_dim), turned by its tokens' angles; of kind "rotary"."""
        code = tables(self(layout), xs[0].shape[-1], xs[0].dtype)
        return [rotate(x, *code) for x in xs]


class MDTPE(Initialized):
    """MD-TPE: x + the sum over axes of a learnt exponential Toeplitz product (LightNet, arXiv 2405.21022, Eq. 9).

    Scanned forward and backward with half the states each, so that the number of parameters stays the paper's: states *
    (dim + 1) per axis. causal: the first axis is scanned forward only, with half the states if other axes are scanned
    both forward and backward. published: the paper's form, the sum in place of x, every axis scanned forward only:
    y_n = sum over axes a of sum_(m <= n_a) sum_t c_(a, t) lambda_(a, t)^(n_a - m) x_(n_1, ..., m, ..., n_D).
    """

    undecayed = ("coef", "logit")

    def __init__(
        self,
        dims: int,
        dim: int,
        states: int = 128,
        *,
        published: bool = False,
        causal: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.impl, self.dims, self.published = impl, dims, published
        backward = 0 if published else dims - causal  # axes with a backward scan
        directions = 2 if backward else 1
        if states < directions or states % directions:
            raise ValueError(f"states={states}: expected a positive multiple of {directions}")
        each = states // directions
        # rows: every axis forward, then the last axes backward
        self.coef = nn.Parameter(torch.empty(dims + backward, dim, each))
        self.logit = nn.Parameter(torch.empty(dims + backward, each))
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        axes, _, each = self.coef.shape
        self.coef.normal_().div_(math.sqrt(each))
        # decays with time constants of 1 to 256 tokens, log-spaced
        time = torch.logspace(0, 8, each, base=2, device=self.logit.device).expand(axes, each)
        assign(self.logit, -torch.log(torch.expm1(1 / time)))

    def weights(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """Return the forward and, if any, backward weights: coefficients (axes, dim, states) and log decays (axes,
        states), float32 (float64 for a float64 network), of all axes and of the last ones.

        Coefficients are scaled by 1 - decay, so that a slow state weighs no more than a fast one.
        """
        logit = _at_least_float32(self.logit)
        log_decay = torch.nn.functional.logsigmoid(logit)
        coef = _at_least_float32(self.coef) * torch.sigmoid(-logit)[:, None]
        forward, backward = ((coef[rows], log_decay[rows]) for rows in (slice(self.dims), slice(self.dims, None)))
        return forward, backward if len(backward[0]) else None

    def forward(
        self, x: Tensor, mask: Tensor | None = None, layout: Layout | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Map tokens (batch, *grid, dim) to the same shape. mask: bool (batch, *grid). With a layout tokens may also be
        (batch, length, dim), and a pack is (length, dim). dtype: of the result, by default that of x. Under autocast
        tokens and sums are rounded to its dtype, x itself is not."""
        grid, products = layout or layout_of_tokens(x), product_dtype(x)
        if not grid.ordered:
            raise ValueError(f"layout={grid}: points lie on no lines that MD-TPE could scan, expected tpe=False")
        with exact(x):
            (coef, log_decay), reverse = self.weights()
            y = axis_scan(
                grid.tokens(x),
                coef,
                log_decay,
                reverse,
                grid.flatten_mask(mask),
                layout=grid,
                residual=not self.published,
                products=products,
                dtype=dtype,
                impl=self.impl,
            )
        return y.reshape(x.shape)

    def init_state(self, batch: int, space: Space = (), device: Device = None) -> Tensor:
        """Return the state along axis 0 before the first frame: (batch, *space, dim, states)."""
        dtype = torch.promote_types(self.coef.dtype, torch.float32)
        return torch.zeros(batch, *space, *self.coef.shape[1:], dtype=dtype, device=device)

    def advance(self, x: Tensor, state: Tensor, layout: Grid | None = None) -> tuple[Tensor, Tensor]:
        """Encode the next frames (batch, frames, *space, dim); return them and the next state."""
        if len(self.coef) == 2 * self.dims:
            raise ValueError("advance: expected an MDTPE(causal=True) or published=True")
        grid, before, products = layout or layout_of_tokens(x), state.flatten(0, -3), product_dtype(x)
        with exact(x):
            (coef, log_decay), reverse = self.weights()
            lines = grid.lines(x, 0)
            if grid.frame_count == 1:
                y, after = line_step(lines[:, 0], coef[0], log_decay[0], before)
                y = y[:, None]
            else:
                y = line_scan(lines, coef[0], log_decay[0], before)
                after = line_state(lines, log_decay[0], before)
            out = grid.unlines(y, 0) if self.published else x + grid.unlines(y, 0)
            if grid.ndim > 1:
                frame, within = x.flatten(0, 1), grid.frame()
                options: Any = {"layout": within, "products": products, "impl": self.impl}
                y = axis_scan(within.flatten(frame), coef[1:], log_decay[1:], reverse, **options)
                out = out + y.view_as(x)
        return out, after.view_as(state)


def build_tpe(tpe: TPE, dims: int, dim: int, states: int = 128, *, causal: bool = False) -> MDTPE | None:
    """Return what a network's argument `tpe` says: MD-TPE, in the paper's form for "published", or None for False.
    ValueError for anything else."""
    if tpe not in (True, False, "published"):
        raise ValueError(f"tpe={tpe!r}: expected True, False or 'published'")
    return MDTPE(dims, dim, states, published=tpe == "published", causal=causal) if tpe else None

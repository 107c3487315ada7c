"""MD-TPE's sum over axes, for samples of one grid and for samples end to end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.ops.axis_scan import _triton, reference
from ndlightnet.ops.axis_scan.lines import line_scan
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence.chunks import exact

Way = tuple[Tensor, Tensor]


def axis_scan(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    reverse: Way | None = None,
    mask: Tensor | None = None,
    *,
    layout: Layout | None = None,
    residual: bool = False,
    dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sum the recurrences along all axes of a grid: (batch, *grid, dim) -> same shape.

    layout: if given, x is (batch, length, dim) and mask (batch, length); with a Ragged no line leaves its sample; lines
    go through all slabs of a grid, each of which scans some channels. residual: x itself is added, without another pass
    over memory. dtype: what x is converted to first, by default its own; slabs exchange it before.

    coef: (axes, dim, states); log_decay: (axes, states) <= 0. `reverse`: the same pair for the
    reverse direction (bidirectional; a token itself counts once, with the forward weights). mask:
    (batch, *grid), False where a token is padding and adds nothing.
    """
    check_floats(x=x)
    grid = Grid.of(x) if layout is None else layout
    expected = (grid.ndim, x.shape[-1])
    for name, c, decay in (("", coef, log_decay), ("reverse ", *(reverse or (coef, log_decay)))):
        if c.ndim != 3 or tuple(c.shape[:2]) != expected or decay.shape != (grid.ndim, c.shape[2]):
            raise ValueError(
                f"{name}coef {tuple(c.shape)} and log_decay {tuple(decay.shape)}: expected "
                f"{(*expected, 'states')} and {(grid.ndim, 'states')} for x {tuple(x.shape)} of "
                f"{grid.ndim} axes"
            )
    if layout is None:
        options: Any = {"residual": residual, "dtype": dtype, "impl": impl}
        flat, tokens_mask = grid.flatten(x), grid.flatten_mask(mask)
        return grid.unflatten(axis_scan(flat, coef, log_decay, reverse, tokens_mask, layout=grid, **options))
    grid.check_flat(x)

    def scan(grid: Any, channels: slice | None, x: Tensor, mask: Tensor | None) -> Tensor:
        weights = coef, log_decay, reverse
        if channels is not None:
            back = None if reverse is None else (reverse[0][:, channels], reverse[1])
            weights = coef[:, channels], log_decay, back
        return _scan(grid, x if dtype is None else x.to(dtype), *weights, mask, residual, impl)

    return grid.map_channels(scan, x, mask)


def _scan(
    grid: Any,
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    reverse: Way | None,
    mask: Tensor | None,
    residual: bool,
    impl: Impl,
) -> Tensor:
    """Scan whole lines of tokens (batch, length, dim) along all axes."""
    if x.numel() == 0:
        resolve("axis_scan", impl, x)
        return empty_result(x, coef, log_decay, *(reverse or ()))
    table, groups = _triton.of_samples(grid, x.device) or _triton.of_grid()
    if table is None:
        cells = longest = grid.unflatten(x)
    else:
        filled = zip(grid.shapes, grid.lengths, strict=True)
        cells, longest = x, x[:, : max(max(shape) for shape, n in filled if n)]
    chosen = resolve("axis_scan", impl, longest)
    if chosen == "triton":
        back = (None, None) if reverse is None else tuple(w.float() for w in reverse)
        weights = (coef.float(), log_decay.float(), *back)
        tokens_mask = mask if mask is None or cells is x else grid.unflatten(mask)
        out: Tensor = _triton.scan(cells, *weights, tokens_mask, residual, table, groups)
        return grid.flatten(out) if cells is not x else out
    # even NaN in the padding cannot leak
    source = x if mask is None else x.masked_fill(~mask[..., None], 0)
    run = _scan_reference if chosen == "reference" else line_scan
    with exact(x):
        total = x if residual else torch.zeros_like(x)
        for axis in range(grid.ndim):
            along = partial(_both_ways, run=run, axis=axis, coef=coef, log_decay=log_decay, reverse=reverse)
            total = total + grid.map_lines(along, source, axis)
        return total


def _both_ways(
    lines: Tensor, run: Callable[..., Tensor], axis: int, coef: Tensor, log_decay: Tensor, reverse: Way | None
) -> Tensor:
    """Run the recurrence along lines (lines, n, dim) of an axis both ways; a token counts once."""
    y = run(lines, coef[axis], log_decay[axis])
    if reverse is None:
        return y
    back, decay = reverse[0][axis], reverse[1][axis]
    y = y + run(lines.flip(1), back, decay).flip(1)
    return y - lines * back.sum(-1).to(lines.dtype)


def _scan_reference(x: Tensor, coef: Tensor, log_decay: Tensor) -> Tensor:
    acc = accumulator(x)
    empty = torch.zeros(x.shape[0], *coef.shape, dtype=acc, device=x.device)
    decay = log_decay.to(acc).exp()
    return reference.line_scan(x.to(acc), coef.to(acc), decay, empty)[0].to(x.dtype)

"""MD-TPE's sum over axes, for samples of one grid and for samples end to end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout, Part, Ragged, Spread
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

    layout: if given, x is (batch, length, dim) and mask (batch, length); with a Ragged no line
    leaves its sample; with a Part lines go through all parts, each of which scans some channels.
    residual: x itself is added, without another pass over memory. dtype: what x is converted to
    first, by default its own; parts exchange it before.

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
    how: Any = {"residual": residual, "dtype": dtype, "impl": impl}
    if layout is None:
        flat, tokens_mask = grid.flatten(x), grid.flatten_mask(mask)
        y = axis_scan(flat, coef, log_decay, reverse, tokens_mask, layout=grid, **how)
        return grid.unflatten(y)
    ragged = isinstance(grid, Ragged)
    if x.ndim != 3 or x.shape[1] != grid.length or (ragged and x.shape[0] != 1):
        raise ValueError(f"x {tuple(x.shape)}: expected (batch, {grid.length}, dim) of {grid}")
    if isinstance(grid, Spread):

        def scan(part: Part, x: Tensor, mask: Tensor | None) -> Tensor:
            return axis_scan(x, coef, log_decay, reverse, mask, layout=part, **how)

        return grid.map_samples(scan, x, mask)
    if isinstance(grid, Part):
        return _on_part(x, coef, log_decay, reverse, mask, layout=grid, **how)
    x = x if dtype is None else x.to(dtype)
    if x.numel() == 0:
        resolve("axis_scan", impl, x)
        return empty_result(x, coef, log_decay, *(reverse or ()))
    tables: tuple[Tensor | None, list[int]]
    if isinstance(grid, Ragged):
        cells, tables = x, _triton.of_samples(grid, x.device)
        filled = zip(grid.shapes, grid.lengths, strict=True)
        longest = x[:, : max(max(shape) for shape, n in filled if n)]
    else:
        cells, tables = grid.unflatten(x), _triton.of_grid()
        longest = cells
    chosen = resolve("axis_scan", impl, longest)
    if chosen == "triton":
        back = (None, None) if reverse is None else tuple(w.float() for w in reverse)
        weights = (coef.float(), log_decay.float(), *back)
        tokens_mask = mask if mask is None or cells is x else grid.unflatten(mask)
        out: Tensor = _triton.scan(cells, *weights, tokens_mask, residual, *tables)
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


def _on_part(
    x: Tensor, coef: Tensor, log_decay: Tensor, reverse: Way | None, mask: Tensor | None, *, layout: Part, **how: Any
) -> Tensor:
    """Scan whole lines of some channels, which no other channel needs: two exchanges of the tokens.
    The states of all lines at a cut would have to go from part to part, one after the other."""
    lines = layout.to_channels(x)
    shapes = [(len(x), n) for n in layout.lengths]
    masks = None if mask is None else layout.exchange.swap([mask] * len(shapes), shapes)
    own = layout.channels(x.shape[-1])
    back = None if reverse is None else (reverse[0][:, own], reverse[1])
    whole_mask = None if masks is None else layout.joined(masks())
    y = axis_scan(lines(), coef[:, own], log_decay, back, whole_mask, layout=layout.whole, **how)
    return layout.to_slabs(y, x.shape[-1])()


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

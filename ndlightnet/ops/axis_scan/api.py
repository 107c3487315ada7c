"""MD-TPE's sum over axes, for samples of one grid and for samples end to end."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.ops.axis_scan import _triton, reference
from ndlightnet.ops.axis_scan.lines import Way, both_ways, line_scan
from ndlightnet.ops.dispatch import DTYPES, Impl, resolve
from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence.chunks import exact


def axis_scan(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    reverse: Way | None = None,
    mask: Tensor | None = None,
    *,
    layout: Layout | None = None,
    residual: bool = False,
    products: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sum the recurrences along all axes of a grid: (batch, *grid, dim) -> same shape.

    layout: if given, x is (batch, length, dim) and mask (batch, length); with a Ragged no line leaves its sample; lines
    go through all slabs of a grid, each of which scans some channels. residual: x itself is added, without another pass
    over memory. products: the dtype to which tokens, and the sum along an axis, are rounded; by default that of x.
    dtype: that of the result, to which x is not rounded; by default that of x.

    coef: (axes, dim, states); log_decay: (axes, states) <= 0. `reverse`: the same pair for the reverse direction of the
    last axes, or of all (a token itself counts once, with the forward weights). mask: (batch, *grid), False where a
    token is padding and adds nothing.
    """
    check_floats(x=x)
    grid = Grid.of(x) if layout is None else layout
    _check_weights(grid.ndim, x, "", coef, log_decay)
    if reverse is not None:
        _check_weights(min(len(reverse[0]), grid.ndim), x, "reverse ", *reverse, coef.shape[2])
    if products not in (None, x.dtype, *DTYPES):
        raise ValueError(f"products={products}: expected bfloat16, float16, float32 or that of x, {x.dtype}")
    if layout is None:
        options: Any = {"residual": residual, "products": products, "dtype": dtype, "impl": impl}
        flat, tokens_mask = grid.flatten(x), grid.flatten_mask(mask)
        return grid.unflatten(axis_scan(flat, coef, log_decay, reverse, tokens_mask, layout=grid, **options))
    grid.check_flat(x)

    products, dtype = products or x.dtype, dtype or x.dtype
    cut = grid.shared and grid.count == 1  # into slabs, which exchange only what is scanned
    within = partial(_scan, residual=residual and not cut, products=products, dtype=products if cut else dtype)

    def scan(grid: Any, channels: slice | None, x: Tensor, mask: Tensor | None) -> Tensor:
        weights = coef, log_decay, reverse
        if channels is not None:
            back = None if reverse is None else (reverse[0][:, channels], reverse[1])
            weights = coef[:, channels], log_decay, back
        return within(grid, x, *weights, mask, impl=impl)

    if not cut:
        return grid.map_channels(scan, x, mask)
    y = grid.map_channels(scan, x.to(products), mask)
    # a sum of two 16-bit tensors would be rounded before it is cast to a wider dtype
    return ((x.to(torch.promote_types(x.dtype, dtype)) + y) if residual else y).to(dtype)


def _check_weights(
    axes: int, x: Tensor, name: str, coef: Tensor, log_decay: Tensor, states: int | str = "states"
) -> None:
    expected = (axes, x.shape[-1])
    wrong = coef.ndim != 3 or tuple(coef.shape[:2]) != expected or log_decay.shape != (axes, coef.shape[2])
    if wrong or states not in ("states", coef.shape[2]):
        raise ValueError(
            f"{name}coef {tuple(coef.shape)} and log_decay {tuple(log_decay.shape)}: expected "
            f"{(*expected, states)} and {(axes, states)} for x {tuple(x.shape)} of {axes} axes"
        )


def _scan(
    grid: Any,
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    reverse: Way | None,
    mask: Tensor | None,
    residual: bool,
    products: torch.dtype,
    dtype: torch.dtype,
    impl: Impl,
) -> Tensor:
    """Scan whole lines of tokens (batch, length, dim) along all axes."""
    if x.numel() == 0:
        resolve("axis_scan", impl, x)
        return empty_result(x, coef, log_decay, *(reverse or ())).to(dtype)
    table, groups = _triton.of_samples(grid, x.device) or _triton.of_grid()
    cells = grid.unflatten(x) if table is None else x
    chosen = resolve("axis_scan", impl, cells)
    if chosen == "triton":
        back = (None, None) if reverse is None else tuple(w.float() for w in reverse)
        weights = (coef.float(), log_decay.float(), *back)
        tokens_mask = mask if mask is None or cells is x else grid.unflatten(mask)
        out: Tensor = _triton.scan(cells, *weights, tokens_mask, residual, products, dtype, table, groups)
        return grid.flatten(out) if cells is not x else out
    # even NaN in the padding cannot leak
    source = (x if mask is None else x.masked_fill(~mask[..., None], 0)).to(products)
    one_way, two_ways = (_scan_reference, _both_ways) if chosen == "reference" else (line_scan, both_ways)
    with exact(x):
        total: Any = 0
        for axis in range(grid.ndim):
            way, last = (coef[axis], log_decay[axis]), axis - grid.ndim
            if reverse is not None and -last <= len(reverse[0]):
                run = partial(two_ways, way=way, reverse=(reverse[0][last], reverse[1][last]))
            else:
                run = partial(one_way, coef=way[0], log_decay=way[1])
            total = total + grid.map_lines(run, source, axis).to(dtype)
        return (x + total).to(dtype) if residual else total


def _both_ways(x: Tensor, way: Way, reverse: Way) -> Tensor:
    """Run the recurrence along lines (lines, n, dim) of an axis both ways; a token counts once. Rounded once."""
    u = x.to(accumulator(x))
    y = _scan_reference(u, *way) + _scan_reference(u.flip(1), *reverse).flip(1)
    return (y - u * reverse[0].sum(-1).to(u.dtype)).to(x.dtype)


def _scan_reference(x: Tensor, coef: Tensor, log_decay: Tensor) -> Tensor:
    acc = accumulator(x)
    empty = torch.zeros(x.shape[0], *coef.shape, dtype=acc, device=x.device)
    decay = log_decay.to(acc).exp()
    return reference.line_scan(x.to(acc), coef.to(acc), decay, empty)[0].to(x.dtype)

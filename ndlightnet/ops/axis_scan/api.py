"""The sum over axes: for samples of one grid and for samples end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ndlightnet.grid import Grid
from ndlightnet.ops.axis_scan import _triton, reference
from ndlightnet.ops.axis_scan.lines import line_scan
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ragged import Ragged

Way = tuple[Tensor, Tensor]


def axis_scan(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    reverse: Way | None = None,
    mask: Tensor | None = None,
    *,
    layout: Grid | Ragged | None = None,
    residual: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Sum over the axes of the recurrence along each: (batch, *grid, dim) -> same shape.

    layout: then x is (batch, length, dim) and mask (batch, length); with a Ragged batch is 1 and no
    line leaves its sample. residual: x itself is added, without another pass over memory.

    coef: (axes, dim, states); log_decay: (axes, states) <= 0. `reverse`: the same pair for the way
    back (bidirectional; a token itself counts once, with the forward weights). mask: (batch,
    *grid), False where a token is padding and adds nothing.
    """
    if isinstance(layout, Grid):
        how: Any = {"residual": residual, "impl": impl}
        seen = None if mask is None else layout.unflatten(mask)
        return layout.flatten(axis_scan(layout.unflatten(x), coef, log_decay, reverse, seen, **how))
    if layout is not None and (x.ndim != 3 or x.shape[0] != 1 or x.shape[1] != layout.length):
        raise ValueError(
            f"x {tuple(x.shape)}: expected (1, length, dim) with {layout.length} tokens, those of "
            "the layout"
        )
    axes = Grid.of(x).ndim if layout is None else layout.ndim
    expected = (axes, x.shape[-1])
    for name, c, decay in (("", coef, log_decay), ("reverse ", *(reverse or (coef, log_decay)))):
        if c.ndim != 3 or tuple(c.shape[:2]) != expected or decay.shape != (axes, c.shape[2]):
            raise ValueError(
                f"{name}coef {tuple(c.shape)} and log_decay {tuple(decay.shape)}: expected "
                f"{(*expected, 'states')} and {(axes, 'states')}, as x {tuple(x.shape)} has {axes} "
                "axes"
            )
    groups = None if layout is None or x.numel() == 0 else layout.lines(x.device)
    longest = x if groups is None else x[:, : max(group.most for group in groups)]
    chosen = resolve("axis_scan", impl, longest)
    if x.numel() == 0:
        return x
    if chosen == "triton":
        back = (None, None) if reverse is None else tuple(w.float() for w in reverse)
        tables: Any = _triton.of_grid() if layout is None else _triton.of_samples(layout, x.device)
        weights = (coef.float(), log_decay.float(), *back)
        out: Tensor = _triton.scan(x, *weights, mask, residual, *tables)
        return out
    # even NaN in the padding cannot leak
    seen = x if mask is None else x.masked_fill(~mask[..., None], 0)
    run = _scan_reference if chosen == "reference" else line_scan
    with exact(x):
        total = x if residual else torch.zeros_like(x)
        for axis, lines, back_to_tokens in _lines(seen, layout):
            y = _both_ways(run, lines, axis, coef, log_decay, reverse)
            total = total + back_to_tokens(y)
        return total


Lines = Iterator[tuple[int, Tensor, Callable[[Tensor], Tensor]]]


def _lines(x: Tensor, layout: Ragged | None) -> Lines:
    """Axis, lines of tokens (lines, n, dim) along it, and the way back to tokens like x."""
    if layout is None:
        grid = Grid.of(x)
        for axis in range(grid.ndim):
            yield axis, grid.lines(x, axis), lambda y, axis=axis: grid.unlines(y, axis)  # type: ignore
        return
    # a row more, for what lies beyond the ends of lines
    source = torch.cat([x[0], x.new_zeros(1, x.shape[-1])])
    for axis, longest, table in layout.lines(x.device):
        first, step, count = table.long()[:, :, None].unbind(1)
        r = torch.arange(longest, device=x.device)
        at = torch.where(r < count, first + r * step, x.shape[1])

        def tokens(y: Tensor, at: Tensor = at) -> Tensor:
            y = torch.zeros_like(source).index_copy(0, at.flatten(), y.flatten(0, 1))
            return y[None, :-1]

        yield axis, source.index_select(0, at.flatten()).unflatten(0, at.shape), tokens


def _both_ways(
    run: Callable[..., Tensor], lines: Tensor, axis: int, coef: Tensor, log_decay: Tensor,
    reverse: Way | None,
) -> Tensor:  # fmt: skip
    """The recurrence along lines (lines, n, dim) of one axis, and back; a token counts once."""
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

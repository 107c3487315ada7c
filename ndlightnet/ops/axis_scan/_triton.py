"""The Triton form of MD-TPE: operators with fakes and explicit backwards. The kernels are imported
when they are called, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Operator

# The last arguments: for samples end to end the table of their lines (lines, 3), and for each group
# of lines its axis, a length that none exceeds, and the number of lines
LINES = "Tensor? table, SymInt[] groups"


def of_grid() -> tuple[None, list[int]]:
    return None, []


def of_samples(layout: Any, device: torch.device) -> tuple[Tensor, list[int]] | None:
    """Return the last arguments for samples end to end; None where all rows share a grid."""

    def make() -> tuple[Tensor, list[int]]:
        groups = layout.lines(device)
        sizes = [n for axis, longest, table in groups for n in (axis, longest, len(table))]
        return torch.cat([group.table for group in groups]), sizes

    made: tuple[Tensor, list[int]] | None = layout.table(("all lines", device), make)
    return made


def _tables(table: Tensor | None, groups: Sequence[int]) -> list[tuple[int, int, Tensor]] | None:
    if table is None:
        return None
    parts = table.split(list(groups[2::3]))
    return list(zip(groups[0::3], groups[1::3], parts, strict=True))


def _scan(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    rcoef: Tensor | None,
    rlog_decay: Tensor | None,
    mask: Tensor | None,
    residual: bool,
    table: Tensor | None,
    groups: Sequence[int],
) -> Tensor:
    from ndlightnet_kernels import axis_scan

    tables = _tables(table, groups)
    return axis_scan.forward(x, coef, log_decay, rcoef, rlog_decay, mask, residual, tables)


def _scan_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _scan_backward(
    dy: Tensor,
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    rcoef: Tensor | None,
    rlog_decay: Tensor | None,
    mask: Tensor | None,
    residual: bool,
    table: Tensor | None,
    groups: Sequence[int],
) -> Any:
    """Return gradients; those of the reverse direction are empty where there is none."""
    from ndlightnet_kernels import axis_scan

    tables = _tables(table, groups)
    grads = axis_scan.backward(dy, x, coef, log_decay, rcoef, rlog_decay, mask, residual, tables)
    return tuple(coef.new_empty(0) if g is None else g for g in grads)


def _scan_backward_fake(dy: Tensor, x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None, *_: Any) -> Any:
    forth = [y.new_empty(y.shape) for y in (x, coef, log_decay)]
    back = [y.new_empty(y.shape if rcoef is not None else 0) for y in (coef, log_decay)]
    return *forth, *back


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.residual, table, ctx.groups = inputs
    ctx.save_for_backward(*tensors, table)


def _grads(ctx: Any, dy: Tensor) -> Any:
    *tensors, table = ctx.saved_tensors
    dx, dcoef, dlog, *back = scan_backward(dy, *tensors, ctx.residual, table, ctx.groups)
    back = back if tensors[3] is not None else [None, None]
    return dx, dcoef, dlog, *back, None, None, None, None


scan_backward = Operator(
    "axis_scan_backward(Tensor dy, Tensor x, Tensor coef, Tensor log_decay, Tensor? rcoef, "
    f"Tensor? rlog_decay, Tensor? mask, bool residual, {LINES}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _scan_backward,
    _scan_backward_fake,
)
scan = Operator(
    "axis_scan(Tensor x, Tensor coef, Tensor log_decay, Tensor? rcoef, Tensor? rlog_decay, "
    f"Tensor? mask, bool residual, {LINES}) -> Tensor",
    _scan,
    _scan_fake,
    _save,
    _grads,
)

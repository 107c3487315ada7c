"""The Triton form of MD-TPE: operators with fakes and explicit backwards. The kernels are imported
when they are called, not before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.limits import axes_reason, sizes_reason

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
    return list(zip(groups[0::3], groups[1::3], table.split(list(groups[2::3])), strict=True))


def _forward(*inputs: Any) -> Tensor:
    from ndlightnet_kernels import axis_scan

    arguments = (*inputs[:-2], _tables(*inputs[-2:]))
    return axis_scan.forward(*arguments)


def _backward(*inputs: Any) -> Any:
    from ndlightnet_kernels import axis_scan

    arguments = (*inputs[:-2], _tables(*inputs[-2:]))
    return axis_scan.backward(*arguments)


def _limits(x: Tensor, *_: Any, **__: Any) -> str:
    from ndlightnet_kernels import axis_scan

    return axes_reason(x.ndim - 2) or sizes_reason(x) or axis_scan.supported(x)


def _flops(x: Sequence[int], coef: Sequence[int], rcoef: Sequence[int] | None, **_: Any) -> int:
    """A state of each channel decays and is read, along each axis and way."""
    return 4 * math.prod(x) * coef[2] * (coef[0] + (0 if rcoef is None else rcoef[0]))


INPUTS = (
    "Tensor x, Tensor coef, Tensor log_decay, Tensor? rcoef, Tensor? rlog_decay, Tensor? mask, bool residual, "
    "ScalarType products"
)
scan = Operator(
    f"axis_scan({INPUTS}, ScalarType dtype, {LINES}) -> Tensor y",
    _forward,
    lambda x, *rest: x.new_empty(x.shape, dtype=rest[-3]),
    Gradient(
        f"axis_scan_backward(Tensor dy, {INPUTS}, {LINES}) "
        "-> (Tensor dx, Tensor dcoef, Tensor dlog_decay, Tensor drcoef, Tensor drlog_decay)",
        _backward,
    ),
    flops=_flops,
    implementations=("torch", "triton", "reference"),
    limits=_limits,
)

"""How the parts of a grid that lie on several processes meet: every part gives each part a tensor.

That one collective, an all-to-all, is enough: what all parts have is a copy for each, neighbours
are all but two empty, and its gradient is another one. The parts of a grid may also be computed one
after the other on one device, see ndlightnet.models.large.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Pending = Callable[[], list[Tensor]]  # returns what was received, and waits for it if necessary


class Exchange(ABC):
    """rank: which of the `count` parts this is, along the axis that is split."""

    rank: int
    count: int

    @abstractmethod
    def swap(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending:
        """Give part i the tensor given[i], and receive from part i one of shapes[i]. All parts call
        this equally often, in one order, with tensors of one dtype. The gradients of what is
        received go back; those that other parts send are zero where they did not use theirs."""


class Processes(Exchange):
    """Parts on the processes of a torch.distributed group, in the order of their ranks there."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.count = group.rank(), group.size()

    def swap(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending:
        sent, received = [x.numel() for x in given], [math.prod(shape) for shape in shapes]
        flat: Any = torch.cat([x.reshape(-1) for x in given])
        if flat.requires_grad and torch.is_grad_enabled():
            flat = _Swap.apply(flat, received, sent, self)  # type: ignore[no-untyped-call]
        else:
            flat = self.all_to_all(flat, received, sent)

        def wait() -> list[Tensor]:
            return [
                x.view(tuple(shape)) for x, shape in zip(flat.split(received), shapes, strict=True)
            ]

        return wait

    def all_to_all(self, flat: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return what all processes send to this one, one after the other. On a GPU only its stream
        waits."""
        import torch.distributed._functional_collectives as collectives

        try:
            out = collectives.all_to_all_single(flat, received, sent, self.group)
            return collectives.wait_tensor(out)
        except RuntimeError as error:  # torch.distributed's, of any backend
            raise RuntimeError(
                f"shard_grid: process {self.rank} of {self.count} heard nothing from another one; "
                f"it ended, or waited for longer than the group's timeout: {error}"
            ) from error


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, received: list[int], sent: list[int], processes: Processes
    ) -> Tensor:
        ctx.sizes, ctx.processes = (sent, received), processes
        return processes.all_to_all(flat, received, sent)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # all processes take the nodes of a graph in the reverse of the order they were made in
        dflat: Tensor = _Swap.apply(dout.contiguous(), *ctx.sizes, ctx.processes)  # type: ignore
        return dflat, None, None, None

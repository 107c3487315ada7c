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

    def for_all(self, x: Tensor) -> Pending:
        """Give all parts x, and receive one of the same shape from each."""
        # torch.compile does not take the same tensor several times
        return self.swap(x.expand(self.count, *x.shape).unbind(), [x.shape] * self.count)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over all parts, with its gradient."""
        return torch.stack(self.for_all(x)()).sum(0)


class Processes(Exchange):
    """Parts on the processes of a torch.distributed group, in the order of their ranks there."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.count = group.rank(), group.size()

    def swap(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending:
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            received: Any = _Swap.apply(self, shapes, *given)  # type: ignore[no-untyped-call]
        else:
            received = self.sent(given, shapes)
        return lambda: list(received)

    def sent(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send all but the own part's tensor, and return what all processes sent to this one."""
        others = [x if i != self.rank else x.new_empty(0) for i, x in enumerate(given)]
        sizes = [x.numel() for x in others]
        flat = given[0].new_empty(sum(sizes))
        for x, place in zip(others, flat.split(sizes), strict=True):
            copy(x, place.view(x.shape))
        counts = [math.prod(shape) for shape in shapes]
        counts[self.rank] = 0
        found = list(self.all_to_all(flat, counts, sizes).split(counts))
        found[self.rank] = given[self.rank]
        return [x.view(tuple(shape)) for x, shape in zip(found, shapes, strict=True)]

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


def copy(x: Tensor, place: Tensor) -> None:
    """Copy x to `place`. A GPU copies rows that do not follow each other number by number, and 16
    bytes in the time of 2: so they are copied as such numbers where rows allow it."""
    if x.is_cuda and not torch.compiler.is_compiling() and all(map(_wide, (x, place))):
        x, place = x.view(torch.complex128), place.view(torch.complex128)
    place.copy_(x)


def _wide(x: Tensor) -> bool:
    """Return whether all rows of x consist of whole numbers of 16 bytes."""
    if x.ndim == 0 or x.stride(-1) != 1:
        return False
    several = 16 // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(step % several == 0 for step in steps)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, processes: Processes, shapes: Sequence[Sequence[int]], *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.processes, ctx.shapes = processes, [x.shape for x in given]
        return tuple(processes.sent(given, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # all processes take the nodes of a graph in the reverse of the order they were made in
        own = ctx.processes.swap(grads, ctx.shapes)()
        return None, None, *own

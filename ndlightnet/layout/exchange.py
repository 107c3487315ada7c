"""How the parts of a grid that lie on several processes meet: every part gives each part a tensor.

That one collective, an all-to-all, is enough: what all parts have is a copy for each, neighbours
are all but two empty, and its gradient is another one. The parts of a grid may also be computed one
after the other on one device, see ndlightnet.models.large.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
            received = self.begin(given, shapes)
            return lambda: self.arrived(received)
        given = _WaitBackward.apply(self, *given)  # type: ignore[no-untyped-call]
        pending: Any = _Swap.apply(self, shapes, *given)  # type: ignore[no-untyped-call]
        return lambda: list(_Wait.apply(self, *pending))  # type: ignore[no-untyped-call]

    def begin(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send all but the own part's tensor, and return where what all processes send to this one
        will be, see `arrived`."""
        if self.count == 1:
            return list(given)
        others = [x for i, x in enumerate(given) if i != self.rank and x.numel()]
        sizes = [0 if i == self.rank else x.numel() for i, x in enumerate(given)]
        if len(others) == 1 and others[0].is_contiguous():
            flat = others[0].view(-1)
        else:
            flat = given[0].new_empty(sum(sizes))
            for x, place in zip(others, flat.split([x.numel() for x in others]), strict=True):
                copy(x, place.view(x.shape))
        counts = [math.prod(shape) for shape in shapes]
        counts[self.rank] = 0
        with self._told():
            found = list(self.all_to_all(flat, counts, sizes).split(counts))
        found[self.rank] = given[self.rank]
        return [x.view(tuple(shape)) for x, shape in zip(found, shapes, strict=True)]

    def all_to_all(self, flat: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return where what all processes send to this one will be, one after the other."""
        import torch.distributed._functional_collectives as collectives

        out = collectives.all_to_all_single(flat, received, sent, self.group)
        # one graph waits at once; else it would wait at the first use, which may be a mere view
        return out.elem if isinstance(out, collectives.AsyncCollectiveTensor) else out

    def arrived(self, received: list[Tensor]) -> list[Tensor]:
        """Wait for what `begin` returned; on a GPU only its stream waits."""
        import torch.distributed._functional_collectives as collectives

        if not torch.compiler.is_compiling():
            with self._told(), torch.no_grad():  # one tensor's storage is that of all
                collectives.wait_tensor(received[self.rank - 1])
        return received

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
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


# The three nodes of an exchange. Each direction waits in a node of its own, which runs when what
# arrives is needed: until then the GPU goes on.
class _WaitBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.processes = processes
        return tuple(x.view_as(x) for x in given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.processes.arrived(list(grads))


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, processes: Processes, shapes: Sequence[Sequence[int]], *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.processes, ctx.shapes = processes, [x.shape for x in given]
        return tuple(processes.begin(given, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # all processes take the nodes of a graph in the reverse of the order they were made in
        if torch.is_grad_enabled():  # for a second derivative
            return None, None, *ctx.processes.swap(grads, ctx.shapes)()
        return None, None, *ctx.processes.begin(grads, ctx.shapes)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, *received: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in processes.arrived(list(received)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *grads

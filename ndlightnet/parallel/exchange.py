"""Differentiable all-to-all between the slabs of a sharded grid.

That one collective is enough: an all-gather sends the same tensor to all, to all but two neighbours a slab sends empty
tensors, and the gradient of an all-to-all is another one. Slabs may also be computed in turn on one device, see
ndlightnet.parallel.turns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import Future
from ndlightnet.parallel.copies import copy


class Exchange(ABC):
    """rank: which of the `count` slabs this is, along the axis that is split."""

    rank: int
    count: int

    @abstractmethod
    def all_to_all(self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Future:
        """Send slab i the tensor sends[i], and receive from slab i one of shapes[i]. All slabs call this equally often,
        in one order, with tensors of one dtype. The gradients of what is received go back, so all slabs use something
        of it or none does; the gradient of what a slab does not use is zero."""

    def all_gather(self, x: Tensor) -> Future:
        """Send x to all slabs, and receive one of the same shape from each."""
        # torch.compile does not take the same tensor several times
        return self.all_to_all(x.expand(self.count, *x.shape).unbind(), [x.shape] * self.count)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over all slabs, with its gradient."""
        return torch.stack(self.all_gather(x)()).sum(0)


@dataclass
class _Transfer:
    """received: where what all processes send to this one will be. sent: kept until then. work: the collective."""

    processes: Processes
    received: list[Tensor]
    sent: Tensor
    work: Any

    def wait(self) -> list[Tensor]:
        """Return what was received. On a GPU only its stream waits."""
        with self.processes.explained():
            self.work.wait()
        return self.received


class Processes(Exchange):
    """Slabs on the processes of a torch.distributed group, in the order of their ranks there."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.count = group.rank(), group.size()

    def all_to_all(self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Future:
        if self.count == 1:
            return lambda: list(sends)
        if torch.compiler.is_compiling():
            received = self._in_graph(sends, shapes)
            return lambda: received
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in sends)):
            return self.begin(sends, shapes).wait
        route = _Route()
        sends = _Begin.apply(self, shapes, route, *sends)  # type: ignore[no-untyped-call]
        return lambda: list(_Arrive.apply(self, route, *sends))  # type: ignore[no-untyped-call]

    def begin(self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> _Transfer:
        """Send all but the own slab's tensor."""
        flat = _joined([x for i, x in enumerate(sends) if i != self.rank and x.numel()] or [sends[0].flatten()[:0]])
        sizes = self._numbers(shapes), self._numbers([x.shape for x in sends])
        with self.explained():
            out, work = self.all_to_all_single(flat, *sizes)
        return _Transfer(self, self._received(out, sends, shapes), flat, work)

    def all_to_all_single(self, flat: Tensor, received: list[int], sent: list[int]) -> tuple[Tensor, Any]:
        """Return where what all processes send to this one will be, one after the other, and what waits for it."""
        import torch.distributed as dist

        out = flat.new_empty(sum(received))
        return out, dist.all_to_all_single(out, flat, received, sent, group=self.group, async_op=True)

    def _in_graph(self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Exchange in a graph that is compiled, which differentiates torch's own collective."""
        import torch.distributed._functional_collectives as collectives

        flat = torch.cat([x.flatten() for i, x in enumerate(sends) if i != self.rank])
        sizes = self._numbers(shapes), self._numbers([x.shape for x in sends])
        out = collectives.all_to_all_single_autograd(flat, *sizes, self.group)
        return self._received(out, sends, shapes)

    def _numbers(self, shapes: Sequence[Sequence[int]]) -> list[int]:
        return [0 if i == self.rank else math.prod(shape) for i, shape in enumerate(shapes)]

    def _received(self, out: Tensor, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        received = list(out.split(self._numbers(shapes)))
        received[self.rank] = sends[self.rank]
        return [x.view(tuple(shape)) for x, shape in zip(received, shapes, strict=True)]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say in one error what it means that a collective fails."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch.distributed's, of any backend
            raise RuntimeError(
                f"shard_grid: process {self.rank} of {self.count} heard nothing from another one; "
                f"it ended, or waited for longer than the group's timeout: {error}"
            ) from error


def in_a_row(like: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return uninitialised tensors one after the other, which are sent without a copy."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = like.new_empty(sum(sizes)).split(sizes)
    return [x.view(tuple(shape)) for x, shape in zip(parts, shapes, strict=True)]


def _joined(xs: Sequence[Tensor]) -> Tensor:
    """Return the numbers of tensors one after the other: where they lie so, as those of `in_a_row`, a view."""
    if all(x.is_contiguous() for x in xs):
        ends = [(x.untyped_storage().data_ptr(), x.storage_offset() + x.numel()) for x in xs[:-1]]
        if ends == [(x.untyped_storage().data_ptr(), x.storage_offset()) for x in xs[1:]]:
            return xs[0].as_strided((sum(x.numel() for x in xs),), (1,))
        return torch.cat([x.view(-1) for x in xs])
    flat = xs[0].new_empty(sum(x.numel() for x in xs))
    for x, place in zip(xs, flat.split([x.numel() for x in xs]), strict=True):
        copy(x, place.view(x.shape))
    return flat


class _Route:
    """What the two nodes of an exchange share: transfers that are under way, there and back."""

    forth: _Transfer | None = None
    back: _Transfer | None = None


# An exchange is two nodes: one begins it, the other one, which is made when what arrives is needed,
# waits. In the backward the second begins and the first waits. In between the GPU goes on. All
# processes take the nodes of a graph in the reverse of the order in which they were made.
class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, processes: Processes, shapes: Sequence[Sequence[int]], route: _Route, *sends: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route, route.forth = route, processes.begin(sends, shapes)
        return tuple(x.view_as(x) for x in sends)  # the gradients of `_Arrive` have their shapes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back, ctx.route.back = ctx.route.back, None
        if back is not None:
            back.wait()
        return None, None, None, *grads


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, processes: Processes, route: _Route, *sends: Tensor) -> tuple[Tensor, ...]:
        ctx.processes, ctx.route, ctx.shapes = processes, route, [x.shape for x in sends]
        transfer, route.forth = route.forth, None
        assert transfer is not None
        return tuple(x.view_as(x) for x in transfer.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # for a second derivative; or each node's gradients are searched for NaN
        if torch.is_grad_enabled() or torch.is_anomaly_enabled():
            return None, None, *ctx.processes.all_to_all(grads, ctx.shapes)()
        ctx.route.back = ctx.processes.begin(grads, ctx.shapes)
        return None, None, *ctx.route.back.received

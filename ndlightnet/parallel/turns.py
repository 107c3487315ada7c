"""Slabs of a grid that are computed in turn on one device, whose features lie on the host.

Each layer goes over them slab by slab, by the same code as on several processes (`shard_grid`): a slab stops where
it needs what the others have not sent yet, and starts again once all have. A LightNet block so takes two sweeps: one
until the States of all slabs are there, one to read their sum. Features of the first level of a U-Net, by far the
largest, are not stored: where they are read they are computed again from the volume.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import Future
from ndlightnet.parallel.exchange import Exchange
from ndlightnet.parallel.slab import Slab

Layer = Callable[..., Tensor]  # of an Exchange and the tensors of a slab


class _Wait(Exception):
    """A slab needs what other slabs have not sent yet."""


class Turns(Exchange):
    """Slabs that are computed in turn, in sweeps over all of them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device, self.rank = count, device, 0
        self.sent: list[list[list[Tensor]]] = []  # for each exchange and slab: what it sends
        self.complete = 0  # exchanges that all slabs have reached
        self.next = 0

    def begin(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def all_to_all(self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Future:
        at, self.next = self.next, self.next + 1
        if at >= self.complete:
            if at == len(self.sent):
                self.sent.append([])
            keys = [(x.data_ptr(), x.shape) for x in sends]
            once = {key: x.cpu() for key, x in zip(keys, sends, strict=True)}  # views for all
            self.sent[at].append([once[key] for key in keys])

        def wait() -> list[Tensor]:
            if at >= self.complete:
                raise _Wait
            return [one[self.rank].to(self.device) for one in self.sent[at]]

        return wait


class Recomputed:
    """Features that are not stored: each slab is computed again, with what all slabs sent."""

    def __init__(self, layer: Layer, inputs: Sequence[list[Any]], turns: Turns) -> None:
        self.layer, self.inputs, self.turns = layer, inputs, turns


# one tensor on the host for each slab, None where it is no longer needed; or features to compute
Slabs = list[Any] | Recomputed


class Sweeper:
    """Applies layers to features on the host, slab by slab along one axis.

    dims: number of axes. sizes: cells of the input in each slab along the axis. folder: features
    are files there, mapped into memory; None: they are in the host's memory. then: a function of
    the network's result. report: is called with what is being computed.
    """

    def __init__(
        self,
        device: torch.device,
        dims: int,
        axis: int,
        sizes: Sequence[int],
        folder: Path | None,
        then: Callable[[Tensor], Tensor] | None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.device, self.folder = device, folder
        self.dims, self.axis, self.sizes = dims, axis, tuple(sizes)
        self.then, self.report = then or (lambda x: x), report
        self.count, self.files, self.layers = len(sizes), 0, 0
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def slab(self, exchange: Exchange, space: Sequence[int]) -> Slab:
        """Return the layout of a slab of the input, of these cells."""
        return Slab(tuple(space), axis=self.axis, sizes=self.sizes, exchange=exchange)

    def cut(self, volume: Tensor) -> list[Any]:
        """Return the slabs of a volume: copies in pinned memory for a GPU, unless files are used to save memory."""
        slabs = volume.split(self.sizes, 2 + self.axis)
        if self.copies is None or self.folder is not None or volume.device.type != "cpu":
            return list(slabs)
        return [slab.contiguous().pin_memory() for slab in slabs]

    def later(self, layer: Layer, *inputs: list[Any]) -> Recomputed:
        """Return layer(exchange, *inputs) for all slabs as features to compute when needed."""
        turns, waiting = Turns(self.count, self.device), True
        while waiting:
            for rank, tensors in enumerate(self._loaded(inputs)):
                turns.begin(rank)
                try:
                    layer(turns, *tensors)
                except _Wait:
                    continue
                waiting = False  # and no other slab waits
                break
            turns.complete = len(turns.sent)
        return Recomputed(layer, inputs, turns)

    def apply(self, layer: Layer, *inputs: Slabs, drop: bool = False) -> list[Any]:
        """Return layer(exchange, *inputs) for all slabs. drop: the inputs are not needed later."""
        turns = Turns(self.count, self.device)
        out: list[Any] = []
        self.layers += 1
        while len(out) < self.count:
            for rank, tensors in enumerate(self._loaded(inputs)):
                if self.report is not None:
                    self.report(f"layer {self.layers}, slab {rank + 1} of {self.count}")
                turns.begin(rank)
                try:
                    out.append(self._stored(layer(turns, *tensors)))
                except _Wait:
                    continue
                for slabs in inputs if drop else ():
                    if isinstance(slabs, list):
                        slabs[rank] = None
            turns.complete = len(turns.sent)
            if self.copies is not None:
                torch.cuda.synchronize(self.device)
        return out

    def joined(self, slabs: list[Any]) -> Tensor:
        """Join slabs (..., *space), and free each."""
        dim = slabs[0].ndim - self.dims + self.axis
        lengths = [x.shape[dim] for x in slabs]
        shape = list(slabs[0].shape)
        shape[dim] = sum(lengths)
        volume = torch.empty(shape, dtype=slabs[0].dtype)
        for rank, target in enumerate(volume.split(lengths, dim)):
            target.copy_(slabs[rank])
            slabs[rank] = None
        return volume

    def _loaded(self, inputs: Sequence[Slabs]) -> Iterator[list[Tensor]]:
        """Yield the inputs of each slab on the device; what the next slab needs is copied meanwhile."""
        ahead = self._copied(inputs, 0)
        for rank in range(self.count):
            tensors, copied = ahead
            if rank + 1 < self.count:
                ahead = self._copied(inputs, rank + 1)
            if self.copies is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(copied)
                for x in itertools.chain(*tensors):
                    x.record_stream(current)
            yield [self._input(slabs, loaded, rank) for slabs, loaded in zip(inputs, tensors, strict=True)]

    def _copied(self, inputs: Sequence[Slabs], rank: int) -> tuple[list[list[Tensor]], Any]:
        """Copy what a slab needs of each of the inputs; return it, and an event."""
        with torch.cuda.stream(self.copies) if self.copies is not None else nullcontext():
            tensors = [
                [
                    one[rank].to(self.device, non_blocking=True)
                    for one in (slabs.inputs if isinstance(slabs, Recomputed) else [slabs])
                ]
                for slabs in inputs
            ]
            return tensors, None if self.copies is None else self.copies.record_event()

    def _input(self, slabs: Slabs, tensors: list[Tensor], rank: int) -> Tensor:
        if not isinstance(slabs, Recomputed):
            return tensors[0]
        slabs.turns.begin(rank)
        return slabs.layer(slabs.turns, *tensors)

    def _stored(self, x: Tensor) -> Tensor:
        """Return x on the host; copied when the device has reached this point."""
        if self.folder is not None:
            self.files += 1
            path = str(self.folder / f"{self.files}.bin")
            host = torch.from_file(path, shared=True, size=x.numel(), dtype=x.dtype)
            return host.view(x.shape).copy_(x)
        if self.copies is None:
            return x
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.copies)
        return host

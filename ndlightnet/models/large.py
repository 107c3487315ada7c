"""Prediction on a volume whose features do not fit into the memory of a device.

Features lie on the host as slabs of the grid. Each layer goes over them slab by slab, by the same
code as on several processes (`shard_grid`): there parts meet in an exchange, here a slab stops
where it needs what the others have not given yet, and starts again once all have. A LightNet block
so takes two sweeps: one until the States of all slabs are there, one to read their sum. Features of
the first level of a U-Net, by far the largest, are not stored: where they are read they are
computed again from the volume.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Exchange, Part, split_sizes
from ndlightnet.layout.base import check_not_empty
from ndlightnet.layout.exchange import Pending

Layer = Callable[..., Tensor]  # of an Exchange and the tensors of a slab
LEAST = 8  # slabs: while one is computed the next one is copied


class _Wait(Exception):
    """A slab needs what other slabs have not given yet."""


class Turns(Exchange):
    """Parts of a grid that are computed in turn, in sweeps over all of them."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device, self.rank = count, device, 0
        self.given: list[list[list[Tensor]]] = []  # for each exchange and part: what it gave
        self.complete = 0  # exchanges that all parts have reached
        self.next = 0

    def begin(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def swap(self, given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending:
        at, self.next = self.next, self.next + 1
        if at >= self.complete:
            if at == len(self.given):
                self.given.append([])
            keys = [(x.data_ptr(), x.shape) for x in given]
            once = {key: x.cpu() for key, x in zip(keys, given, strict=True)}  # views for all
            self.given[at].append([once[key] for key in keys])

        def wait() -> list[Tensor]:
            if at >= self.complete:
                raise _Wait
            return [one[self.rank].to(self.device) for one in self.given[at]]

        return wait


class Again:
    """Features that are not stored: each slab is computed again, with what all slabs gave."""

    def __init__(self, layer: Layer, inputs: Sequence[list[Any]], turns: Turns) -> None:
        self.layer, self.inputs, self.turns = layer, inputs, turns


# one tensor on the host for each slab, None where it is no longer needed; or features to compute
Slabs = list[Any] | Again


class Sweeper:
    """Applies layers to features on the host, slab by slab along one axis.

    dims: number of axes. sizes: cells of the input in each slab along the axis. folder: features
    are files there, mapped into memory; None: they are in the host's memory. then: a function of
    the network's result. log: is called with what is being computed.
    """

    def __init__(
        self,
        device: torch.device,
        dims: int,
        axis: int,
        sizes: Sequence[int],
        folder: Path | None,
        then: Callable[[Tensor], Tensor] | None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.device, self.folder = device, folder
        self.dims, self.axis, self.sizes = dims, axis, tuple(sizes)
        self.then, self.log = then or (lambda x: x), log
        self.count, self.files, self.layers = len(sizes), 0, 0
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def part(self, exchange: Exchange, space: Sequence[int]) -> Part:
        """Return the layout of a slab of the input, of these cells."""
        return Part(tuple(space), axis=self.axis, sizes=self.sizes, exchange=exchange)

    def cut(self, volume: Tensor) -> list[Any]:
        """Return the slabs of a volume: copies in pinned memory for a GPU, unless files are used to
        save memory."""
        slabs = volume.split(self.sizes, 2 + self.axis)
        if self.copies is None or self.folder is not None or volume.device.type != "cpu":
            return list(slabs)
        return [slab.contiguous().pin_memory() for slab in slabs]

    def later(self, layer: Layer, *inputs: list[Any]) -> Again:
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
            turns.complete = len(turns.given)
        return Again(layer, inputs, turns)

    def apply(self, layer: Layer, *inputs: Slabs, drop: bool = False) -> list[Any]:
        """Return layer(exchange, *inputs) for all slabs. drop: the inputs are not needed later."""
        turns = Turns(self.count, self.device)
        out: list[Any] = []
        self.layers += 1
        while len(out) < self.count:
            for rank, tensors in enumerate(self._loaded(inputs)):
                if self.log is not None:
                    self.log(f"layer {self.layers}, slab {rank + 1} of {self.count}")
                turns.begin(rank)
                try:
                    out.append(self._stored(layer(turns, *tensors)))
                except _Wait:
                    continue
                for slabs in inputs if drop else ():
                    if isinstance(slabs, list):
                        slabs[rank] = None
            turns.complete = len(turns.given)
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
        """Yield the inputs of each slab on the device; what the next slab needs is copied
        meanwhile."""
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
            yield [self._computed(slabs, loaded, rank) for slabs, loaded in zip(inputs, tensors, strict=True)]

    def _copied(self, inputs: Sequence[Slabs], rank: int) -> tuple[list[list[Tensor]], Any]:
        """Copy what a slab needs of each of the inputs; return it, and an event."""
        with torch.cuda.stream(self.copies) if self.copies is not None else nullcontext():
            tensors = [
                [
                    one[rank].to(self.device, non_blocking=True)
                    for one in (slabs.inputs if isinstance(slabs, Again) else [slabs])
                ]
                for slabs in inputs
            ]
            return tensors, None if self.copies is None else self.copies.record_event()

    def _computed(self, slabs: Slabs, tensors: list[Tensor], rank: int) -> Tensor:
        if not isinstance(slabs, Again):
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


class Large:
    """Base class of networks that predict on volumes larger than their device."""

    dims: int
    slab_multiples: tuple[int, ...]  # cells along each axis that no cut may divide
    bytes_per_cell: float  # memory on the device for each cell of a slab, roughly

    def sweep(self, sweeper: Sweeper, volume: list[Any]) -> Tensor:
        """Return the network's result for the slabs of a volume."""
        raise NotImplementedError

    def predict_large(
        self,
        volume: Tensor,
        slabs: int | None = None,
        *,
        folder: str | Path | None = None,
        then: Callable[[Tensor], Tensor] | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Return what the network returns for a volume (batch, channels, *space) on the host, whose
        features are larger than the device's memory. The result is on the host, too.

        Args:
            slabs: into how many the longest axis is cut; default: so many that one fits.
            folder: where features are written, to files mapped into memory that are removed
                afterwards; default: they are in the host's memory.
            then: applied to the result, that of a U-Net slab by slab on the device, such as
                `lambda logits: logits.argmax(1)`; the axes of space stay the last ones.
            progress: show which layer and slab is computed. Needs rich.

        Equal to the result for the whole up to rounding. Under torch.autocast features have its
        dtype. For a network in evaluation mode.
        """
        net: Any = self
        if net.training:
            raise ValueError("a network in training mode: expected eval(), this is prediction only")
        net._check(volume)
        if volume.ndim != self.dims + 2:
            raise ValueError("a network of token numbers: expected one of cells")
        check_not_empty(volume.shape[2:], volume)
        device, space = next(net.parameters()).device, volume.shape[2:]
        units = [-(-n // by) for n, by in zip(space, self.slab_multiples, strict=True)]
        axis = max(range(self.dims), key=lambda i: units[i])
        count = self._usual_slabs(volume, device) if slabs is None else slabs
        if count < 1:
            raise ValueError(f"slabs={slabs}: expected 1 or more")
        while True:
            count = min(count, units[axis])
            sizes = split_sizes(space[axis], count, self.slab_multiples[axis])
            try:
                with ExitStack() as stack, torch.no_grad():
                    log = stack.enter_context(_progress()) if progress else None
                    files = None
                    if folder is not None:
                        files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
                    sweeper = Sweeper(device, self.dims, axis, sizes, files, then, log)
                    return self.sweep(sweeper, sweeper.cut(volume))
            except torch.OutOfMemoryError:
                if slabs is not None or count == units[axis]:
                    raise
            count *= 2

    def _usual_slabs(self, volume: Tensor, device: torch.device) -> int:
        if device.type != "cuda":
            return LEAST
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        cells = len(volume) * math.prod(volume.shape[2:])
        return max(LEAST, math.ceil(self.bytes_per_cell * cells / (0.8 * (free + unused))))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the last text that the function was called with, and the time since the first."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        job = progress.add_task("reading the volume", total=None)
        yield lambda text: progress.update(job, description=text)

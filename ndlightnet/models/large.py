"""Prediction on a volume whose features do not fit into the memory of a device: see ndlightnet.parallel.turns."""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import check_not_empty
from ndlightnet.parallel import split_sizes
from ndlightnet.parallel.turns import Sweeper

LEAST = 8  # slabs: while one is computed the next one is copied


class Large(ABC):
    """Base class of networks that predict on volumes larger than their device."""

    dims: int
    slab_multiples: tuple[int, ...]  # cells along each axis that no cut may divide
    bytes_per_cell: float  # memory on the device for each cell of a slab, roughly

    @abstractmethod
    def sweep(self, sweeper: Sweeper, volume: list[Any]) -> Tensor:
        """Return the network's result for the slabs of a volume."""

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
                    report = stack.enter_context(_progress()) if progress else None
                    files = None
                    if folder is not None:
                        files = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
                    sweeper = Sweeper(device, self.dims, axis, sizes, files, then, report)
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

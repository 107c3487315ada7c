"""FrameCache holds decoded videos for all processes of a loader, in one file of bounded size."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor


class FrameCache:
    """Videos (frames, height, width, 3) uint8 by number, which the processes of a loader put and get, started after it.

    They lie in a file of the folder for temporary files, at most `limit` bytes: the operating
    system keeps in memory what is used, as far as there is room. What does not fit, also for lack
    of disk space, is not held. The file is removed with the cache of the process that made it.

    Args:
        count: numbers go from 0 to count - 1.
        limit: of the file (bytes).
    """

    def __init__(self, count: int, limit: int) -> None:
        # shared by all processes: where each tensor begins (-1: not held), its shape, bytes in use
        self.starts = torch.full((count,), -1).share_memory_()
        self.shapes = torch.zeros(count, 4, dtype=torch.int64).share_memory_()
        self.used = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.limit, self.lock = limit, torch.multiprocessing.get_context("spawn").Lock()
        handle, name = tempfile.mkstemp(prefix="ndlightnet-frames-")
        os.close(handle)
        self.path = Path(name)
        self._file: mmap.mmap | None = None
        self._owner = finalize(self, _remove, self.path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None, "_owner": None}

    def get(self, number: int) -> Tensor | None:
        """Return a tensor that reads the file, or None. It must not be written."""
        start = int(self.starts[number])
        if start < 0:
            return None
        shape = self.shapes[number].tolist()
        end = start + int(np.prod(shape))
        if self._file is None or len(self._file) < end:
            with self.path.open("r+b") as file:
                self._file = mmap.mmap(file.fileno(), 0)
        return torch.frombuffer(self._file, dtype=torch.uint8, count=end - start, offset=start).view(shape)

    def fits(self, size: int) -> bool:
        """Return whether there is room for a tensor of `size` bytes."""
        return int(self.used) + size <= self.limit

    def put(self, number: int, value: Tensor) -> None:
        """Hold a tensor, if there is room and it is not held yet."""
        with self.lock:
            start = int(self.used)
            if int(self.starts[number]) >= 0 or not self.fits(value.numel()):
                return
            try:
                with self.path.open("r+b") as file:
                    file.seek(start)
                    file.write(value.contiguous().numpy().data)
            except OSError:  # the disk is full
                self.used.fill_(self.limit)
                return
            self.used.add_(value.numel())
            self.shapes[number] = torch.tensor(value.shape)
            self.starts[number] = start  # last: from now on it is read


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked one
        path.unlink(missing_ok=True)

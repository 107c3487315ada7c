"""Read many files at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# decoding video and inflating gzip release the interpreter lock; each thread needs much memory
THREADS = min(4, os.cpu_count() or 1)


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], title: str, progress: bool = True, workers: int = THREADS
) -> list[Result]:
    """Return `[function(item) for item in items]`, with a progress bar. The first error cancels the rest."""
    from rich.progress import track

    pool = ThreadPoolExecutor(max(1, workers))
    try:
        done = pool.map(function, items)
        return list(track(done, title, total=len(items), disable=not progress))
    finally:
        pool.shutdown(cancel_futures=True)

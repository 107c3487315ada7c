"""Slabs of a grid on threads of this process, without a process group: what one thread sends is a tensor in
another one's graph, so that the gradients of all slabs are those of one graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ndlightnet.layout.abstract import Future
from ndlightnet.parallel import Exchange

SECONDS = 20


class Threads(Exchange):
    """The exchange of one of `count` threads. sent: what each thread has sent, by collective and rank."""

    def __init__(self, rank: int, count: int, sent: dict[tuple[int, int], Sequence[Tensor]], changed: Any) -> None:
        self.rank, self.count, self.sent, self.changed = rank, count, sent, changed
        self.calls = 0
        self.numbers = 0  # that were sent to other slabs

    def all_to_all(self, sends: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Future:
        call, self.calls = self.calls, self.calls + 1
        self.numbers += sum(x.numel() for i, x in enumerate(sends) if i != self.rank)
        ranks = range(self.count)
        with self.changed:
            self.sent[call, self.rank] = list(sends)
            self.changed.notify_all()

        def wait() -> list[Tensor]:
            with self.changed:
                arrived = self.changed.wait_for(lambda: all((call, i) in self.sent for i in ranks), SECONDS)
            assert arrived, f"collective {call}: slabs called {sorted(self.sent)}"
            received = [self.sent[call, i][self.rank] for i in ranks]
            assert [tuple(x.shape) for x in received] == [tuple(shape) for shape in shapes]
            assert len({x.dtype for x in received}) == 1
            return received

        return wait


def on_threads(count: int, function: Callable[[Threads], Any]) -> list[Any]:
    """Return function(exchange) of so many threads, of which one runs at a time; raise what one of them raises."""
    sent: dict[tuple[int, int], Sequence[Tensor]] = {}
    changed = threading.Condition()
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with changed:  # one at a time, until it waits: Triton's interpreter is not for several
                results[rank] = function(Threads(rank, count, sent, changed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

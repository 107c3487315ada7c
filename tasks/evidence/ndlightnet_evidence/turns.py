"""Several runs on one card at once: generators that take turns in one thread.

A small network leaves most of a card idle. Each run here has a CUDA stream and a random state of
its own, so that the card works for several at once and a run draws what it would draw alone. There
is one thread, so nothing of another run happens between two `yield`s.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ndlightnet_evidence import runner
from ndlightnet_evidence.runner import Run

# A run yields how many of its pieces of work the card may still have to do when it goes on.
Work = Generator[int, None, Any]
AHEAD = 32  # so many steps keep the card busy while another run is prepared
DONE = 0


def wait() -> None:
    """Wait until the card has done the work of all runs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes while the card does nothing else."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def finish(work: Work) -> Any:
    """Do a run alone, without turns, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def run_all(
    wanted: Sequence[Run], one: Callable[[Run], Work], done: Callable[[Run], None], *, jobs: int, minutes: float
) -> None:
    """Do the `wanted` runs, generators one(who), up to `jobs` of them in turns, and call `done`
    with each run as it ends. After `minutes` no run is begun."""
    over = time.monotonic() + 60 * minutes
    left, lanes = deque(wanted), [Lane() for _ in range(min(jobs, len(wanted)))]
    wait()  # for the data, which all streams read
    gc.freeze()  # or the collections before captures would look at all of torch
    while left or any(lane.work for lane in lanes):
        idle = True
        for lane in lanes:
            if lane.work is None and left:
                who = left.popleft()
                if time.monotonic() >= over:
                    done({**who, "missing": True})
                    continue
                lane.begin(who, one)
            if lane.work is not None and lane.ready():
                idle = False
                if found := lane.resume():
                    done(found)
        if idle:
            time.sleep(1e-4)
    gc.unfreeze()


class Lane:
    """A CUDA stream and the run on it.

    A lane keeps its stream: cuBLAS has a workspace for each stream, and graphs that run at the same
    time must not share one.
    """

    def __init__(self) -> None:
        self.work: Work | None = None
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def begin(self, who: Run, one: Callable[[Run], Work]) -> None:
        self.who, self.work, self.begun = who, one(who), time.monotonic()
        self.events: deque[torch.cuda.Event] = deque()
        self.allowed = AHEAD
        self.state = torch.get_rng_state()
        self.draws = torch.Generator("cuda" if self.stream else "cpu")

    def ready(self) -> bool:
        while self.events and self.events[0].query():
            self.events.popleft()
        return len(self.events) <= self.allowed

    def resume(self) -> Run | None:
        """Go on to the run's next `yield`; return the run if it has ended."""
        assert self.work is not None
        try:
            with self._own():
                self.allowed = next(self.work)
                if self.stream:
                    event = torch.cuda.Event()
                    event.record()
                    self.events.append(event)
            return None
        except StopIteration as end:
            found = {**end.value, "device": runner.device_name()}
        except Exception as error:  # a run that fails does not end the others
            found = runner.failure(error)
        self.work = None
        return {**self.who, "run_seconds": time.monotonic() - self.begun, **found}

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Make this lane's stream the current one, and its random states the default ones."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            if self.stream is None:
                yield
                return
            # A graph takes the random state that it was captured with, also in its replays.
            default = torch.cuda.default_generators[self.stream.device_index]
            kept = default.graphsafe_get_state()
            default.graphsafe_set_state(self.draws)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                default.graphsafe_set_state(kept)
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)

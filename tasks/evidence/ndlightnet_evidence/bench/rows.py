"""Cases and contenders of the benchmark, and the class that times them and keeps their cells."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ndlightnet_evidence.bench.timing import CALLS, Absent, Call, Timing, copy_rate, reason, time_calls
from ndlightnet_evidence.tables import Run

PASSES = {"fwd": "forward", "fwd+bwd": "forward + backward"}
MAX_SETS = 16
Shape = TypeVar("Shape")


class Case(NamedTuple):
    """One shape of one row. dim: channels of a head. size: what a sweep varies."""

    row: str
    batch: int
    length: int
    heads: int
    dim: int
    size: int = 0

    def numel(self) -> int:
        return self.batch * self.length * self.heads * self.dim


class Contender(NamedTuple):
    """One implementation. run: input tensors -> output; its errors only leave its cell empty. Of several by name, the
    fastest has the cell."""

    who: str
    run: Any
    graph: bool = True


@dataclass
class Bench:
    """Timer of all rows, which stores their cells.

    impl: `impl` of ndlightnet's functions. quick: fewer shapes and repetitions. minutes: after so
    many, peers whose first call compiles and tunes are left out. save: called after each row.
    cells: lines of the CSV. "over_floor" is ms / the floor's ms; "note" also says why there is no time.
    """

    device: torch.device
    impl: Any
    quick: bool = False
    minutes: float = 1e9
    save: Callable[[Bench], None] = lambda bench: None
    group: str = ""
    cells: list[Run] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # device type -> bytes a second
    start: float = field(default_factory=time.monotonic)

    @property
    def laps(self) -> int:
        return 3 if self.quick else 7

    def some(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return shapes[:1] if self.quick else shapes

    def rate(self) -> float:
        """Return the speed of a copy on the device, measured once in a run."""
        kind = self.device.type
        if kind not in self.rates:
            self.rates[kind] = copy_rate(self.device, self.laps)
        return self.rates[kind]

    def compare(
        self,
        case: Case,
        direction: str,
        contenders: Iterable[Contender],
        inputs: Callable[[], tuple[Tensor, ...]],
        floor_bytes: float,
    ) -> dict[str, float | None]:
        """Time all contenders of a row on the same inputs; return milliseconds by contender.

        inputs: makes one set of tensors; so many sets are made that the cache cannot hold them.
        floor_bytes: the bytes that have to be read and written at least.
        """
        sets = [inputs()]
        floor = 1e3 * floor_bytes / self.rate()
        self._keep(case, direction, "floor", Timing(floor, "", f"{floor_bytes / 1e6:.1f} MB"), floor)
        sets += [inputs() for _ in range(cold_sets(sets[0]) - 1)]

        def prepare(run: Callable[..., Any]) -> list[Call]:
            return [CALLS[direction](run, tensors) for tensors in sets]

        times: dict[str, float | None] = {}
        for who, run, graph in contenders:
            runs = run if isinstance(run, Mapping) else {"": run}
            prepares = {name: partial(prepare, run) for name, run in runs.items()}
            times.setdefault(who, self.fastest(case, direction, who, prepares, floor, graph))
        self.save(self)
        return times

    def fastest(
        self,
        case: Case,
        direction: str,
        who: str,
        prepares: Mapping[str, Callable[[], list[Call]]],
        floor: float | None = None,
        graph: bool = True,
    ) -> float | None:
        """Time several ways to do one thing, and keep the cell of the fastest, whose note begins with its name."""
        before = len(self.cells)
        for name, prepare in prepares.items():
            self.measure(case, direction, who, prepare, floor, graph)
            self.cells[-1]["note"] = ", ".join(filter(None, (name, self.cells[-1]["note"])))
        self.cells[before:] = [min(self.cells[before:], key=lambda cell: cell["ms"] or math.inf)]
        ms: float | None = self.cells[-1]["ms"]
        return ms

    def measure(
        self,
        case: Case,
        direction: str,
        who: str,
        prepare: Callable[[], list[Call]],
        floor: float | None = None,
        graph: bool = True,
    ) -> float | None:
        """Time one cell. prepare: returns the calls to time; it may raise, and so may the calls."""
        minutes = (time.monotonic() - self.start) / 60
        shape = f"{case.batch} x {case.length}, {case.heads} x {case.dim}"
        line = f"[{60 * minutes:5.0f} s] {self.group}: {case.row}, {shape}, {direction}, {who}"
        print(line, file=sys.stderr, flush=True)
        try:
            if minutes > self.minutes and who not in ("ours", "sdpa"):
                raise Absent(f"left out after {self.minutes:g} minutes (--minutes)")
            timing = time_calls(prepare(), self.device, graph, self.laps)
        except Exception as error:  # an error of a peer does not end the other cells
            timing = Timing(None, "", reason(error))
        if self.device.type == "cuda":
            if timing.ms is None:
                gc.collect()  # tensors that a traceback held
            torch.cuda.empty_cache()
        self._keep(case, direction, who, timing, floor)
        return timing.ms

    def _keep(self, case: Case, direction: str, who: str, timing: Timing, floor: float | None) -> None:
        over = timing.ms / floor if timing.ms is not None and floor else None
        times = {"ms": timing.ms, "over_floor": over, "mode": timing.mode, "note": timing.note}
        self.cells.append({"group": self.group, **case._asdict(), "pass": direction, "who": who, **times})


def cold_sets(tensors: tuple[Tensor, ...]) -> int:
    """Return how many sets of inputs fill four times the cache of the card."""
    if tensors[0].device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(tensors[0].device).L2_cache_size
    size = sum({x.data_ptr(): x.nbytes for x in tensors}.values())
    return max(1, min(MAX_SETS, -(-4 * cache // size)))

"""Times and memory over the length of a sequence: of a layer's training, forward and backward at one number of tokens,
and of decoding, a step of several sequences after so many tokens. In bf16; on a CPU smaller, in float32."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ndlightnet.layout import Grid
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.base import StreamingMixer, build_mixer
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench import operator_rows, rival_kernels
from ndlightnet_evidence.bench.network_rows import Within, peak_bytes
from ndlightnet_evidence.bench.rows import Bench, Case, cold_sets
from ndlightnet_evidence.bench.timing import CALLS, LEFT_OUT, Call
from ndlightnet_evidence.tables import Run, of_records

TOKENS = {"cuda": 131072, "cpu": 4096}
SIZES = {"cuda": (512, 8), "cpu": (64, 2)}  # width and heads
LENGTHS = [2**n for n in range(10, 18)]
WINDOWS = (16, 32, 64, 128)
SEQUENCES = 16  # that take a step of decoding together
# Seconds: of a call, from which on longer ones are left out; of a row after its first length, which may compile for
# minutes, from which on no length is begun. A call takes at most about twice the time of that at half the length.
SLOW, ROW = 0.3, 15
FIRST = ("LightNetAttention", "SoftmaxAttention")  # in the figure also in the causal form
MEASURES = (
    ("a layer, forward and backward", "fwd+bwd", "ms", "ms"),
    ("peak memory of a layer", "fwd+bwd", "mb", "MB"),
    (f"decoding, {SEQUENCES} sequences", "fwd", "ms", "ms a step"),
    ("state of a sequence", "fwd", "mb", "MB"),
)


class Row(NamedTuple):
    name: str
    kind: type[nn.Module]
    causal: bool
    window: int | None = None

    def build(self, bench: Bench) -> Any:
        dim, heads = SIZES[bench.device.type]
        options = {} if self.window is None else {"window": self.window}
        if "heads" in inspect.signature(self.kind).parameters:
            options["heads"] = heads
        net = build_mixer(partial(self.kind, **options), dim, dims=1, layer=0, causal=self.causal)
        return net.to(bench.device, torch.bfloat16 if bench.device.type == "cuda" else torch.float32)


# Makes the calls and notes megabytes: (row, bench, length, megabytes by the kernel's name, that name, within).
Prepare = Callable[[Row, Bench, int, dict[str, float], str, Within], list[Call]]


def lengths(bench: Bench) -> None:
    end = time.monotonic() + 60 * bench.minutes
    for row in _rows(bench):
        _over_lengths(bench, row, "fwd+bwd", _layer, end)
        if row.causal:
            _over_lengths(bench, row, "fwd", _step, end)
        bench.save(bench)


def _rows(bench: Bench) -> Iterator[Row]:
    """Return all rows, in an order that gives the same color to LAVO and window attention of one window."""
    windows = {
        kind: [Row(f"{kind.__name__}, window {window}", kind, False, window) for window in bench.some(WINDOWS)]
        for kind in (mixers.LAVO, mixers.WindowAttention)
    }
    yield from windows[mixers.LAVO]
    for name, causal in product(FIRST, (False, True)):
        yield Row(f"{name}, {'causal' if causal else 'global'}", getattr(mixers, name), causal)
    yield from windows[mixers.WindowAttention]
    kinds = [getattr(mixers, name) for name in mixers.__all__ if name not in (*FIRST, "Identity")]  # it does nothing
    streaming = [kind for kind in kinds if issubclass(kind, StreamingMixer)]
    for kind in streaming[:2] if bench.quick else streaming:
        yield Row(f"{kind.__name__}, causal", kind, True)


def _over_lengths(bench: Bench, row: Row, direction: str, prepare: Prepare, end: float) -> None:
    """Time one row, until a length is left out, whose cell says why."""
    softmax, total = row.kind is mixers.SoftmaxAttention, TOKENS[bench.device.type]
    dim, heads = SIZES[bench.device.type]
    stop, until = "", end
    for length in [n for n in LENGTHS if n <= total][: 3 if bench.quick else None]:
        if time.monotonic() > until:
            stop = f"late: begun no more after {ROW} s of a row or {bench.minutes:g} minutes of all"
        batch = total // length if direction == "fwd+bwd" else SEQUENCES
        case = Case(row.name, batch, length, heads, dim // heads)
        megabytes: dict[str, float] = {}
        backends = rival_kernels.backends(bench.device.type == "cuda" and softmax)
        prepares: dict[str, Any] = {
            name: partial(prepare, row, bench, length, megabytes, name, within) for name, within in backends.items()
        }
        absent = {"": rival_kernels.absent(stop)}
        ms = bench.fastest(case, direction, "sdpa" if softmax else "ours", absent if stop else prepares)
        cell = bench.cells[-1]
        cell["mb"] = next((mb for name, mb in megabytes.items() if ms and cell["note"].startswith(name)), None)
        if ms is None:
            stop = stop or "out of memory" * ("OutOfMemoryError" in cell["note"])
            if stop:
                cell.update(mode=LEFT_OUT, note=stop)
            return
        if length == LENGTHS[0]:
            until = min(end, time.monotonic() + ROW)
        stop = f"slow: over {SLOW} s at a shorter length" if ms > 1e3 * SLOW else ""


def _layer(row: Row, bench: Bench, length: int, megabytes: dict[str, float], name: str, within: Within) -> list[Call]:
    net = row.build(bench)
    weights = list(net.parameters())
    shape = (TOKENS[bench.device.type] // length, length, SIZES[bench.device.type][0])
    (x,) = operator_rows.leaves(_random(bench, *shape))
    # weights are inputs, too, so that they have gradients
    call = within(CALLS["fwd+bwd"](lambda x, *_: net(x, causal=row.causal), (x, *weights)))
    if bench.device.type == "cuda":
        megabytes[name] = peak_bytes(call) / 1e6
    return [call]


@torch.no_grad()
def _step(row: Row, bench: Bench, length: int, megabytes: dict[str, float], name: str, within: Within) -> list[Call]:
    """Return steps after a prefill of `length` tokens; softmax attention reads a cache of as many, whose last ones are
    those of the step."""
    net = row.build(bench).eval()
    grid, last = Grid((length,)), Grid((1,)).after(length - 1)
    x = _random(bench, 1, length, SIZES[bench.device.type][0])
    if row.kind is mixers.SoftmaxAttention:
        state = net.summarize_source(x, grid, None)[:2]
    else:
        _, state = net.advance(x, net.init_state(1, bench.device), 0)
    leaves, spec = tree_flatten(state)
    megabytes[name] = sum(z.nbytes for z in leaves) / 1e6

    def run(x: Tensor, *leaves: Tensor) -> Any:
        if row.kind is not mixers.SoftmaxAttention:
            return net.advance(x, tree_unflatten(leaves, spec), length)
        for cache, new in zip(leaves, net.summarize_source(x, last, None)[:2], strict=True):
            cache[:, -1:] = new
        return net.read_source(x, last, (*leaves, None), grid)

    def inputs() -> tuple[Tensor, ...]:
        return x[:, -1:].repeat(SEQUENCES, 1, 1), *(z.repeat_interleave(SEQUENCES, 0) for z in leaves)

    tensors = [inputs()]
    tensors += [inputs() for _ in range(cold_sets(tensors[0]) - 1)]
    return [within(CALLS["fwd"](run, one)) for one in tensors]


def _random(bench: Bench, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    return operator_rows.random(bench, *shape, dtype=dtype)


def table(cells: Sequence[Run]) -> str:
    """Return a Markdown table: a line for each measure and row, a column for each length, in the first of which that is
    left out stands why."""
    lines: dict[tuple[str, str], Run] = {}
    for title, direction, key, unit in MEASURES:
        for cell in cells:
            if cell["pass"] == direction and (cell[key] is not None or key == "ms"):
                head = {"measure": f"{title}, {unit}", "row": cell["row"]}
                line = lines.setdefault((head["measure"], cell["row"]), head)
                line[plots.short(cell["length"])] = cell["note"].partition(":")[0] if cell[key] is None else cell[key]
    return of_records([*lines.values()])


def draw(cells: Sequence[Run], path: Path) -> None:
    """Draw time and memory of a layer and time of decoding over length, on logarithmic axes. Without a CUDA device the
    peak memory is not measured, and has no panel."""
    drawn = [cell for cell in cells if not cell["row"].endswith("causal") or cell["row"].startswith(FIRST)]
    panels = []
    for title, direction, key, unit in MEASURES[:3]:
        points: dict[str, dict[int, float]] = {}
        for cell in cells if direction == "fwd" else drawn:
            if cell["pass"] == direction and cell[key] is not None:
                points.setdefault(cell["row"], {})[cell["length"]] = cell[key]
        lines = {name: plots.Line([*line], torch.tensor([[*line.values()]])) for name, line in points.items()}
        if lines:
            panels.append(plots.Panel("tokens in a sequence", lines, title, unit, base=2, ylog=True))
    if panels:
        plots.draw(path, panels)

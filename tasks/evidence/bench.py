"""Time the library: python tasks/evidence/bench.py [GROUP ...] [--out DIR] [--quick]

Prints a table per group and writes bench.csv, bench.json, scans.png (group `figure`) and stream.png
(group `stream`). Without a CUDA device only the groups `cpu`, `sweep` and `lengths` run. The last two run only when
they are named. `sweep`: time a token over sizes, beside that of the size before; --figure FILE draws it. `lengths`:
time and memory of a layer's training and of decoding over lengths, also in lengths.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ndlightnet_evidence.bench import (
    attention_rows,
    length_rows,
    network_rows,
    operator_rows,
    output,
    rival_kernels,
    size_rows,
)
from ndlightnet_evidence.bench.rows import Bench
from ndlightnet_evidence.bench.timing import LEFT_OUT


def packs(bench: Bench) -> None:
    for name, shapes in (("large", attention_rows.LARGE), ("small", attention_rows.SMALL)):
        attention_rows.packs(bench, name, shapes)


# run in this order: peers are left out of the last groups if the time is up
GROUPS: dict[str, Callable[[Bench], None]] = {
    "attention": attention_rows.attention,
    "tpe": operator_rows.tpe,
    "local": operator_rows.local,
    "norm": operator_rows.norm,
    "step": network_rows.step,
    "text": network_rows.text,
    "generation": network_rows.generation,
    "decode": operator_rows.decode,
    "figure": attention_rows.figure,
    "frames": attention_rows.frames,
    "packs": packs,
    "stream": network_rows.stream,
    "cpu": attention_rows.cpu,
    "sweep": size_rows.sweep,
    "lengths": length_rows.lengths,
}
NAMED = ("sweep", "lengths")  # run only when they are named
ON_CPU = ("cpu", *NAMED)
TABLES = {"sweep": output.neighbours, "lengths": length_rows.table}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tasks/evidence/bench.py", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"default: all but {' and '.join(NAMED)} of {', '.join(GROUPS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="picture of time over size, of the group sweep")
    parser.add_argument("--quick", action="store_true", help="first shapes only, fewer repetitions")
    parser.add_argument(
        "--minutes",
        type=float,
        default=3.5,
        help="peers that compile or tune, and rows of lengths, are left out after so many (default: %(default)s)",
    )
    parser.add_argument(
        "--full-search",
        action="store_true",
        help="let flash-linear-attention try all its kernel configurations: 10 minutes more at the first run",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(GROUPS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the groups; return 1 if a row of ndlightnet has no time and is not left out, else 0."""
    options = parse(arguments)
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    names = [name for name in GROUPS if name in (options.groups or GROUPS.keys() - NAMED)]
    if skipped := [name for name in names if not cuda and name not in ON_CPU]:
        print(f"no CUDA device: {', '.join(skipped)} left out\n")
        names = [name for name in names if name in ON_CPU]
    save = partial(output.write, folder=options.out)
    bench = Bench(device, "triton" if cuda else "torch", options.quick, options.minutes, save)
    torch.manual_seed(0)
    if cuda and not options.full_search:
        rival_kernels.shorten_search()
    for name in names:
        start, bench.group = time.monotonic(), name
        GROUPS[name](bench)
        cells = [cell for cell in bench.cells if cell["group"] == name]
        rate = bench.rates.get("cpu" if name == "cpu" else device.type, 0)
        print(f"\n## {name}: {time.monotonic() - start:.0f} s, copy at {rate / 1e12:.3g} TB/s\n")
        print("\n".join([TABLES.get(name, output.table)(cells), *output.remarks(cells)]), flush=True)
        bench.save(bench)
        if name == "figure":
            output.draw(cells, options.out / "scans.png")
        if name == "sweep" and options.figure:
            output.draw(cells, options.figure)
        if name == "lengths":
            length_rows.draw(cells, options.out / "lengths.png")
        if name == "stream":
            network_rows.draw_stream(bench.facts, options.out / "stream.png")
    for fact, value in bench.facts.items():
        print(f"{fact}: {value:.4g}")
    print(f"\nwritten to {options.out}")
    ours = [cell for cell in bench.cells if cell["who"] == "ours" and cell["mode"] != LEFT_OUT]
    return int(any(cell["ms"] is None for cell in ours))


if __name__ == "__main__":
    raise SystemExit(main())

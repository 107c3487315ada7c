"""Output of a run: tables on the screen, bench.csv, bench.json, and a plot of times over tokens."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ndlightnet_evidence import plots, runner
from ndlightnet_evidence.bench.rows import PASSES, Bench
from ndlightnet_evidence.tables import Run, of_records

PACKAGES = ("torch", "triton", "ndlightnet", "fla-core", "flash-linear-attention")
STEP = 1.5
LINES = {
    "sdpa": "softmax attention (SDPA)",
    "fla two scans": "two scans (fla lightning attention)",
    "ours": "one scan (ndlightnet)",
    "floor": "floor (speed of a copy)",
}


def table(cells: Sequence[Run]) -> str:
    """Return a Markdown table: a line for each row, shape and pass; a column for each contender, in
    multiples of the floor."""
    lines: dict[tuple[str, ...], Run] = {}
    for cell in cells:
        key = (cell["row"], f"{cell['batch']} x {cell['length']}", f"{cell['heads']} x {cell['dim']}", cell["pass"])
        head = dict(zip(("row", "batch x length", "heads x dim", "pass"), key, strict=True))
        line = lines.setdefault(key, head)
        # a second column where "ours" was also timed without a graph
        line[f"{cell['who']} eager" if cell["who"] in line else cell["who"]] = _text(cell)
    return of_records([*lines.values()])


def _text(cell: Run) -> str:
    if cell["ms"] is None:
        return "-"
    backend = f" ({cell['note'].partition(',')[0]})" if cell["who"] in ("sdpa", "softmax") and cell["note"] else ""
    ms = f"{cell['ms']:.3g} ms" if cell["ms"] < 1000 else f"{cell['ms']:.0f} ms"
    if cell["over_floor"] is None or cell["who"] == "floor":
        return ms + backend
    ratio = f"{cell['over_floor']:.2f}x" if cell["over_floor"] < 10 else f"{cell['over_floor']:.0f}x"
    return f"{ms}, {ratio}" if cell["who"] == "ours" else ratio + backend


def neighbours(cells: Sequence[Run]) -> str:
    """Return a Markdown table of a sweep: the time a token of each size and its ratio to that of the size before, with
    a mark where they differ by more than STEP."""
    lines: list[Run] = []
    for cell in cells:
        if cell["who"] != "ours":
            continue
        each = None if cell["ms"] is None else 1e6 * cell["ms"] / (cell["batch"] * cell["length"])
        line = {"row": cell["row"], "pass": cell["pass"], "size": cell["size"], "time": _text(cell), "ns a token": each}
        before = lines[-1] if lines else {}
        if each and before.get("ns a token") and all(before[key] == line[key] for key in ("row", "pass")):
            line["ratio"] = ratio = each / before["ns a token"]
            line["step"] = "<--" if max(ratio, 1 / ratio) > STEP else ""
        lines.append(line)
    return of_records(lines)


def remarks(cells: Sequence[Run]) -> list[str]:
    """Return the notes of all cells, each once; they also say why cells are empty."""
    noted = [cell for cell in cells if cell["note"] and cell["who"] != "floor"]
    return list(dict.fromkeys(f"{cell['who']}: {cell['note']}" for cell in noted))


def versions() -> dict[str, str | None]:
    numbers: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        numbers[package] = None
        with suppress(PackageNotFoundError):
            numbers[package] = version(package)
    return numbers


def write(bench: Bench, folder: Path) -> None:
    """Write bench.csv and bench.json: the same cells; the JSON also says where and when."""
    folder.mkdir(parents=True, exist_ok=True)
    runner.write_csv(folder / "bench.csv", bench.cells)
    content: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": runner.commit(),
        "device": runner.device_name(),
        "command": " ".join(["python", *sys.argv]),
        "impl": bench.impl,
        "copy_bytes_per_second": bench.rates,
        "versions": versions(),
        "seconds": time.monotonic() - bench.start,
        "facts": bench.facts,
        "cells": bench.cells,
    }
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")


def draw(cells: Sequence[Run], path: Path) -> None:
    """Draw milliseconds over length, or nanoseconds a token over the size of a sweep, both on logarithmic axes, with a
    panel for each pass."""
    sweep = any(cell["size"] for cell in cells)
    key, x, labels = ("row", "size", {c["row"]: c["row"] for c in cells}) if sweep else ("who", "length", LINES)
    panels = []
    for direction, title in PASSES.items():
        lines = {}
        timed = [c for c in cells if c["pass"] == direction and c["ms"] is not None]
        for name, label in labels.items():
            of_name = [c for c in timed if c[key] == name and (c["who"] == "ours" or not sweep)]
            if points := sorted((c[x], 1e6 * c["ms"] / c["length"] if sweep else c["ms"]) for c in of_name):
                lines[label] = plots.Line([n for n, _ in points], torch.tensor([[y for _, y in points]]))
        xlabel, ylabel = ("size", "ns a token") if sweep else ("tokens", "ms")
        panels.append(plots.Panel(xlabel, lines, title, ylabel, base=2, ylog=True))
    plots.draw(path, panels)

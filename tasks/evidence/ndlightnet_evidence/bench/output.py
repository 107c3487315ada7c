"""What a run leaves: tables on the screen, bench.csv, bench.json and the figure."""

from __future__ import annotations

import csv
import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ndlightnet_evidence.bench.rows import Bench, Cell

PACKAGES = ("torch", "triton", "ndlightnet", "fla-core", "flash-linear-attention")
# Okabe and Ito: told apart also by people who see fewer colours
LINES = {
    "sdpa": ("softmax attention (SDPA)", "#009E73", "^", "-"),
    "fla two scans": ("two scans (fla lightning attention)", "#D55E00", "s", "-"),
    "ours": ("one scan (ndlightnet)", "#0072B2", "o", "-"),
    "floor": ("floor (speed of a copy)", "#777777", None, "--"),
}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: one line a row, shape and pass; one column a contender, as multiples of the
    floor."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for cell in cells:
        shape = (f"{cell.batch} x {cell.length}", f"{cell.heads} x {cell.dim}")
        line = lines.setdefault((cell.row, *shape, cell.direction), {})
        # a second column where ours was also timed without a graph
        who = f"{cell.who} eager" if cell.who in line else cell.who
        columns[who] = None
        line[who] = _text(cell, who)
    head = ["row", "batch x length", "heads x dim", "pass", *columns]
    return markdown(
        head, [[*key, *(line.get(who, "") for who in columns)] for key, line in lines.items()]
    )


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in (head, rule, *body)
    )


def _text(cell: Cell, who: str) -> str:
    if cell.ms is None:
        return "-"
    ms = f"{cell.ms:.3g} ms" if cell.ms < 1000 else f"{cell.ms:.0f} ms"
    if cell.over_floor is None or who == "floor":
        return ms
    ratio = f"{cell.over_floor:.2f}x" if cell.over_floor < 10 else f"{cell.over_floor:.0f}x"
    return f"{ms}, {ratio}" if cell.who == "ours" else ratio


def remarks(cells: Sequence[Cell]) -> list[str]:
    """What the notes say, each once: also why cells are empty."""
    noted = [cell for cell in cells if cell.note and cell.who != "floor"]
    return list(dict.fromkeys(f"{cell.who}: {cell.note}" for cell in noted))


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def write(bench: Bench, folder: Path) -> None:
    """bench.csv and bench.json: the same cells; the JSON says also where and when."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [cell.record() for cell in bench.cells]
    with open(folder / "bench.csv", "w", newline="") as file:
        names = [("pass" if name == "direction" else name) for name in Cell._fields]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    content: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(bench.device),
        "command": " ".join(["python tasks/evidence/bench.py", *sys.argv[1:]]),
        "impl": bench.impl,
        "copy_bytes_per_second": bench.rates,
        "versions": versions(),
        "seconds": time.monotonic() - bench.start,
        "facts": bench.facts,
        "cells": records,
    }
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Milliseconds over length, both on logarithmic axes, one panel a pass."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    titles = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    for axes, (direction, title) in zip((left, right), titles.items(), strict=True):
        lengths: set[int] = set()
        for who, (label, color, marker, style) in LINES.items():
            points = sorted(
                (cell.length, cell.ms)
                for cell in cells
                if cell.direction == direction and cell.who == who and cell.ms is not None
            )
            lengths |= {length for length, _ in points}
            axes.plot(*zip(*points, strict=True) if points else ((), ()), label=label, color=color,
                      marker=marker, linestyle=style, linewidth=2, markersize=5)  # fmt: skip
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens")
        axes.xaxis.set_major_locator(FixedLocator(sorted(lengths)[::2]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: tokens(int(n))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("ms")
    left.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def tokens(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1 << 10 else str(n)

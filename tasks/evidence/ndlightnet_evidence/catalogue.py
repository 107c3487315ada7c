"""Rows of a comparison: what each row changes in a network, as arguments of a task."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ndlightnet.nn import mixers

NET = "--model.net.init_args"
SCANS = ("raster", "both", "axes")


def mixer(name: str, **init_args: Any) -> str:
    """Return the argument that replaces the config's mixer by one of the catalogue."""
    value = {"class_path": f"{mixers.__name__}.{name}", "init_args": init_args}
    return f"{NET}.mixer={json.dumps(value)}"


ROWS: dict[str, list[str]] = {
    "LightNet": [],
    "softmax attention": [mixer("SoftmaxAttention")],
    "identity mixer": [mixer("Identity")],
    "LAVO, window 64": [mixer("LAVO", window=64)],
    "without MD-TPE": [f"{NET}.tpe=false"],
    "without MD-LRPE": [mixer("LightNetAttention", lrpe=None)],
    "axis-causal": ["--model.causal=true"],
    "axis-causal, window 4": ["--model.causal=true", mixer("LightNetAttention", window=4)],
    "single frame": ["--data.init_args.frames=1"],
    "padded": ["--data.init_args.batching=padded"],
}


def scans(name: str) -> tuple[str, ...]:
    """Return the scans by which this mixer can cover a grid; () if it reads all of it at once."""
    takes = inspect.signature(getattr(mixers, name)).parameters
    return SCANS if "scan" in takes else ()


def family() -> list[str]:
    """Return a row for every mixer of the catalogue and each of its scans."""
    first = ["Identity", "SoftmaxAttention"]
    rest = [name for name in mixers.__all__ if name not in first]
    ways = [f"{name} {scan}" for name in rest for scan in scans(name)]
    return [*first, *(name for name in rest if not scans(name)), *ways]


def parse(row: str) -> tuple[str, dict[str, str]]:
    """Split `NAME` or `NAME scan` into the mixer's name and options. ValueError if unknown."""
    name, *way = row.split(" ")
    known = name in mixers.__all__
    if not known or len(way) > 1 or any(scan not in scans(name) for scan in way):
        here = [name, *(f"{name} {scan}" for scan in scans(name))] if known else []
        raise ValueError(f"row {row!r}: expected {', '.join(here or [*ROWS, *mixers.__all__])}")
    return name, {"scan": way[0]} if way else {}


def factory(row: str) -> Callable[[int], nn.Module]:
    """Return the function from dim to the mixer of a row `NAME` or `NAME scan`."""
    name, options = parse(row)
    return partial(getattr(mixers, name), **options)


def overrides(row: str) -> list[str]:
    """Return the arguments that a row adds. ValueError if there is no such row."""
    if row in ROWS:
        return ROWS[row]
    if row.endswith(".yaml"):
        if not Path(row).is_file():
            raise ValueError(f"row {row!r}: no such file")
        return ["--config", row]
    name, options = parse(row)
    return [mixer(name, **options)]


def named(rows: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each row by its name; the name of a file is its stem. ValueError for
    an unknown row, and for two rows of the same name."""
    found: dict[str, str] = {}
    for row in rows:
        name = Path(row).stem if row.endswith(".yaml") else row
        if found.setdefault(name, row) != row:
            raise ValueError(f"rows {found[name]!r} and {row!r}: expected different names")
    return {name: overrides(row) for name, row in found.items()}

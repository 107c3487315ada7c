"""Rows of a comparison: what each row changes in a network, as arguments of a task."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from ndlightnet.nn import mixers

NET = "--model.net.init_args"
SCANS = ("raster", "both", "axes")


def mixer(name: str, **init_args: Any) -> str:
    """Return the argument that replaces the config's mixer by one of the catalogue."""
    value = {"class_path": f"{mixers.__name__}.{name}", "init_args": init_args}
    return f"{NET}.mixer={json.dumps(value)}"


ROWS: dict[str, list[str]] = {
    "LightNet": [mixer("LightNetAttention")],
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


def changes(file: Path | None, rows: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return what each row changes among the arguments of a network, by its name.

    A row is an entry of a YAML file (those that begin with a point are parts of others), or a mixer
    of the catalogue. Default: all entries, or without a file the whole catalogue. ValueError for an
    unknown row, or a class that does not exist.
    """
    entries = yaml.safe_load(file.read_text()) if file else {}
    names = rows or [name for name in entries if not name.startswith(".")] or family()
    found = {row: entries[row] if row in entries else {"mixer": factory(row)} for row in names}
    for row in found.values():
        made(row)
    return found


def network(net: dict[str, Any], row: dict[str, Any]) -> nn.Module:
    """Build the network of a config, {"class_path", "init_args"}, with a row's changes, or the
    network that the row names, {"net": {"class_path", "init_args"}}."""
    if "net" in row:
        whole: nn.Module = made(row["net"])()
        return whole
    given = {**net["init_args"], **{key: row[key] for key in row if key != "lr"}}
    built: nn.Module = made({**net, "init_args": given})()
    return built


def made(value: Any, key: str = "") -> Any:
    """Replace the classes that a value from YAML names, at `class_path` and `mixer`, by functions
    that build them. A name without a module is that of a mixer."""
    if isinstance(value, list):
        return [made(each, key) for each in value]
    if isinstance(value, str) and key in ("class_path", "mixer"):
        module, _, name = value.rpartition(".")
        try:
            return getattr(import_module(module or mixers.__name__), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{value}: no such class") from error
    if not isinstance(value, dict):
        return value
    plain = {key: made(each, key) for key, each in value.items()}
    if "class_path" not in plain:
        return plain
    return partial(plain["class_path"], **plain.get("init_args", {}))

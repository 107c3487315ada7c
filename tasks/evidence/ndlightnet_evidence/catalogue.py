"""Rows of a comparison: what each row changes in a network."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from ndlightnet.nn import mixers

NET = "--model.net.init_args"
SCANS = ("raster", "both", "axes")


def mixer(name: str, **init_args: Any) -> dict[str, Any]:
    """Return a mixer of the catalogue as a config names it."""
    return {"class_path": f"{mixers.__name__}.{name}", "init_args": init_args}


def option(mixer: dict[str, Any]) -> str:
    """Return the argument of a task that replaces the config's mixer."""
    return f"{NET}.mixer={json.dumps(mixer)}"


ROWS: dict[str, list[str]] = {
    "LightNet": [option(mixer("LightNetAttention"))],
    "softmax attention": [option(mixer("SoftmaxAttention"))],
    "identity mixer": [option(mixer("Identity"))],
    "without MD-TPE": [f"{NET}.tpe=false"],
    "without MD-LRPE": [option(mixer("LightNetAttention", lrpe=None))],
    "axis-causal": ["--model.causal=true"],
    "padded": ["--data.init_args.batching=padded"],
}


def scans(name: str) -> tuple[str, ...]:
    """Return the scans by which this mixer can cover a grid; () if it reads all of it at once."""
    return SCANS if "scan" in inspect.signature(getattr(mixers, name)).parameters else ()


def family() -> list[str]:
    """Return a row for every mixer of the catalogue and each of its scans."""
    return [row for name in mixers.__all__ for row in ([f"{name} {scan}" for scan in scans(name)] or [name])]


def named_mixer(row: str) -> dict[str, Any]:
    """Return the mixer of a row `NAME` or `NAME scan`. ValueError if there is none."""
    name, *scan = row.split(" ")
    in_catalogue = name in mixers.__all__
    if not in_catalogue or len(scan) > 1 or any(s not in scans(name) for s in scan):
        expected = [name, *(f"{name} {s}" for s in scans(name))] if in_catalogue else [*ROWS, *mixers.__all__]
        raise ValueError(f"row {row!r}: expected {', '.join(expected)}")
    return mixer(name, **({"scan": scan[0]} if scan else {}))


def overrides(row: str) -> list[str]:
    """Return the arguments of a task that a row adds. ValueError if there is no such row."""
    if row.endswith(".yaml"):
        if not Path(row).is_file():
            raise ValueError(f"row {row!r}: no such file")
        return ["--config", row]
    return ROWS.get(row) or [option(named_mixer(row))]


def named(rows: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of each row by its name; the name of a file is its stem. ValueError for
    an unknown row, and for two rows of the same name."""
    by_name: dict[str, str] = {}
    for row in rows:
        name = Path(row).stem if row.endswith(".yaml") else row
        if by_name.setdefault(name, row) != row:
            raise ValueError(f"rows {by_name[name]!r} and {row!r}: expected different names")
    return {name: overrides(row) for name, row in by_name.items()}


def changes(file: Path | None, rows: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return what each row changes among the arguments of a network, by its name.

    A row is an entry of a YAML file (those that begin with a point are shared by others), or a
    mixer of the catalogue. Default: all entries, or without a file the whole catalogue. ValueError
    for an unknown row, or a class that does not exist.
    """
    entries = yaml.safe_load(file.read_text()) if file else {}
    names = rows or [name for name in entries if not name.startswith(".")] or family()
    selected = {row: entries[row] if row in entries else {"mixer": named_mixer(row)} for row in names}
    for change in selected.values():
        resolve(change)
    return selected


def network(net: dict[str, Any], row: dict[str, Any]) -> nn.Module:
    """Build the network of a config, {"class_path", "init_args"}, with a row's changes, or the
    network that the row names, {"net": {"class_path", "init_args"}}."""
    change = {key: value for key, value in row.items() if key != "lr"}
    config = row["net"] if "net" in row else {**net, "init_args": {**net["init_args"], **change}}
    built: nn.Module = resolve(config)()
    return built


def resolve(value: Any, key: str = "") -> Any:
    """Replace the classes that a value from YAML names, at `class_path` and `mixer`, by functions
    that build them. A name without a module is that of a mixer."""
    if isinstance(value, list):
        return [resolve(item, key) for item in value]
    if isinstance(value, str) and key in ("class_path", "mixer"):
        module, _, name = value.rpartition(".")
        try:
            return getattr(import_module(module or mixers.__name__), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{value}: no such class") from error
    if not isinstance(value, dict):
        return value
    resolved = {key: resolve(item, key) for key, item in value.items()}
    if "class_path" not in resolved:
        return resolved
    return partial(resolved["class_path"], **resolved.get("init_args", {}))

"""Checkpoints that are written complete or not at all, and checked before they are used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, atomic_write
from ndlightnet.models.hub import CLASS, VERSION, Pretrained
from ndlightnet.models.weights import no_checkpoint, read_checkpoint
from ndlightnet.nn.mixers.names import customs

NAMES = ("names",)
# arguments of networks, ours and those of other libraries, that change no result of a trained one
FREE = re.compile("drop|pretrained|weights|checkpoint|cache_dir|progress|scriptable|exportable|no_jit|flash")


class AtomicCheckpoints(TorchCheckpointIO):
    """TorchCheckpointIO that writes a file beside its target and renames it. Lightning's writes in
    TMPDIR and moves: across file systems this is a copy, which a kill or a full disk cuts off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint. DataError if that fails; an older checkpoint at `path` then stays."""
        with atomic_write(Path(path)) as draft, draft.open("wb") as file:
            torch.save(checkpoint, file)


def check_checkpoint(path: str, model: L.LightningModule, data: Any, entries: Sequence[str] = NAMES) -> None:
    """Raise DataError if the file is missing, is no checkpoint or is one of another task or network, or if
    it has no weights, lacks one of the `entries` or lacks a name that `data` need."""
    if not Path(path).is_file():
        raise DataError(no_checkpoint(path))
    try:
        saved = torch.load(path, map_location="meta", weights_only=True)
        task = saved.get("task")
    except Exception as error:  # its class depends on what is in the file
        raise DataError(f"{path}: not a checkpoint of ours ({type(error).__name__})") from error
    if problem := next(_problems(saved, model, data, entries), ""):
        if task not in (None, expected := type(model).__name__):
            problem = f"the checkpoint of another task, {task}, expected {expected} ({problem})"
        raise DataError(f"{path}: {problem}")


def _problems(saved: dict[str, Any], model: Any, data: Any, entries: Sequence[str]) -> Iterator[str]:
    """Yield why a checkpoint does not fit, the plainest reason first; those after it expect that it fits so far."""
    expected = "expected one that `fit` has left"
    if lost := [key for key in ("state_dict", *entries) if key not in saved]:
        yield f"the checkpoint lacks {', '.join(lost)}, {expected}"
    weights, names = saved["state_dict"], saved["names"]
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        yield f"state_dict holds no weights, {expected}"
    saved_names = names if isinstance(names, dict) else {}
    if lost := [key for key in data.names() if not isinstance(saved_names.get(key), list)]:
        yield f"names has no list {', '.join(lost)}, {expected}"
    if saved.get("causal") not in (None, getattr(model, "causal", None)):
        what = "causal, go on" if saved["causal"] else "not causal, train one"
        yield f"its network is {what} with --model.causal true"
    if difference := network_difference(model.net, saved.get("network"), model.net_config):
        yield difference
    current, loaded = ({k: tuple(x.shape) for k, x in d.items()} for d in (model.state_dict(), weights))
    for name in [*current, *loaded]:
        shape, saved_shape = current.get(name, "none"), loaded.get(name, "none")
        if shape != saved_shape:
            yield f"the checkpoint of another network: {name} is {saved_shape} there, {shape} here"


def describe(net: nn.Module, config: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return class and arguments of a network as a checkpoint holds them; None where nothing describes it. config:
    those of a command line, for a network that does not know its own."""
    if not isinstance(net, Pretrained):
        return config
    with suppress(ValueError):  # changed to what no arguments describe
        return net.description()
    return None


def network_difference(net: nn.Module, saved: dict[str, Any] | None, config: dict[str, Any] | None = None) -> str:
    """Return which argument of a network, or its class, has another value in a checkpoint, "" if none has. Weights may
    fit all the same: those behind a stem fit a patch of [2, 8, 8] and of [4, 8, 8].

    saved, config: see `describe`. Rates of dropout, and where other libraries begin and store, may differ.
    """
    current = describe(net, config) or {}
    for name, value in current.items():  # the class is the first
        before = (saved or {}).get(name, value)
        if before == value or name == VERSION or FREE.search(name) or _same(net, {name: before}):
            continue
        label = "class" if name == CLASS else name
        return f"the checkpoint of another network: {label} is {before} there, {value} here"
    return ""


def _same(net: nn.Module, change: dict[str, Any]) -> bool:
    """Return whether a network of ours computes the same with another value of an argument, such as its default or one
    number for all axes."""
    if not isinstance(net, Pretrained) or CLASS in change:
        return False
    config = {name: nn.Identity if customs(value) else value for name, value in net.config.items()}  # mixers of a user
    try:
        with torch.device("meta"):
            current, changed = (_structure(type(net)(**{**config, **new})) for new in ({}, change))
    except Exception:  # of any constructor, such as for a mixer that no name describes
        return False
    return current == changed


def _structure(net: nn.Module) -> str:
    """Return what a network is made of, module by module. Any `impl` of a mixer computes the same."""
    plain = (bool, int, float, str, tuple, list)
    modules = [
        (type(m), {k: v for k, v in vars(m).items() if k != "impl" and isinstance(v, plain)}) for m in net.modules()
    ]
    return str((modules, {key: x.shape for key, x in net.state_dict().items()}))


def load_initial(path: str, net: nn.Module) -> str:
    """Load the weights of a checkpoint's network that `net` has in the same shape, and return a
    line that names the others. DataError if there is none."""
    try:
        _, weights = read_checkpoint(path)
    except (ValueError, FileNotFoundError) as error:
        raise DataError(f"model.init: {error}") from error
    current = net.state_dict()
    fits = {key: x for key, x in weights.items() if key in current and current[key].shape == x.shape}
    if not fits:
        raise DataError(f"model.init: {path}: has no weight of this {type(net).__name__}")
    net.load_state_dict({**current, **fits})
    missing, surplus = [sorted(set(some) - set(fits)) for some in (current, weights)]
    return (
        f"{path}: {len(fits)} of {len(current)} weights of the network; as drawn: {some_of(missing)}; "
        f"not used: {some_of(surplus)}"
    )


def some_of(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"

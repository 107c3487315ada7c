"""Checkpoints that are written complete or not at all, and checked before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, atomic_write
from ndlightnet.models.weights import no_checkpoint, read_checkpoint

NAMES = ("names",)


class AtomicCheckpoints(TorchCheckpointIO):
    """TorchCheckpointIO that writes a file beside its target and renames it. Lightning's writes in
    TMPDIR and moves: across file systems this is a copy, which a kill or a full disk cuts off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint. DataError if that fails; an older checkpoint at `path` then stays."""
        with atomic_write(Path(path)) as draft, draft.open("wb") as file:
            torch.save(checkpoint, file)


def check_checkpoint(path: str, model: L.LightningModule, data: Any, entries: Sequence[str] = NAMES) -> None:
    """Raise DataError if the file is missing, is no checkpoint or is one of another network, or if
    it has no weights, lacks one of the `entries` or lacks a name that `data` need."""
    if not Path(path).is_file():
        raise DataError(no_checkpoint(path))
    try:
        saved = torch.load(path, map_location="meta", weights_only=True)
        keys, expected = saved.keys(), "one that `fit` has left"
    except Exception as error:  # its class depends on what is in the file
        raise DataError(f"{path}: not a checkpoint of ours ({type(error).__name__})") from error
    if lost := [key for key in ("state_dict", *entries) if key not in keys]:
        raise DataError(f"{path}: the checkpoint lacks {', '.join(lost)}, expected {expected}")
    weights, names = saved["state_dict"], saved["names"]
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise DataError(f"{path}: state_dict holds no weights, expected {expected}")
    saved_names = names if isinstance(names, dict) else {}
    if lost := [key for key in data.names() if not isinstance(saved_names.get(key), list)]:
        raise DataError(f"{path}: names has no list {', '.join(lost)}, expected {expected}")
    if saved.get("causal") not in (None, getattr(model, "causal", None)):
        what = "causal, go on" if saved["causal"] else "not causal, train one"
        raise DataError(f"{path}: its network is {what} with --model.causal true")
    current, loaded = ({k: tuple(x.shape) for k, x in d.items()} for d in (model.state_dict(), weights))
    for name in [*current, *loaded]:
        shape, saved_shape = current.get(name, "none"), loaded.get(name, "none")
        if shape != saved_shape:
            raise DataError(f"{path}: the checkpoint of another network: {name} is {saved_shape} there, {shape} here")


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

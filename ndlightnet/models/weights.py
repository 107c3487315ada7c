"""Weights that fit a network, or one line that names what does not; checkpoints of trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 5  # names of a kind in a message


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], source: object, fresh: Sequence[str] = ()) -> None:
    """Load a state dict into a network, strictly.

    fresh: beginnings of names that keep the network's own values. Weights of tied parameters may
    be in the state dict once. Raises ValueError, one line: what is missing, what is unexpected,
    and which shapes are others. source: what the message begins with.
    """
    found = {key: x for key, x in weights.items() if not key.startswith(tuple(fresh))}
    try:
        missing, unexpected = net.load_state_dict(found, strict=False)
        shapes: list[str] = []
    except RuntimeError as error:  # shapes; what else there is shows without them
        own = net.state_dict()
        wrong = [key for key in found if key in own and own[key].shape != found[key].shape]
        shapes = [f"{key} (found {tuple(found[key].shape)}, expected {tuple(own[key].shape)})" for key in wrong]
        if not shapes:
            raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
        rest = {key: x for key, x in found.items() if key not in wrong}
        missing, unexpected = net.load_state_dict(rest, strict=False)
        missing = [key for key in missing if key not in wrong]
    present = net.state_dict(keep_vars=True)
    ours = {id(present[key]) for key in found if key in present}  # a tied weight has two names
    missing = [key for key in missing if id(present[key]) not in ours and not key.startswith(tuple(fresh))]
    parts = (("missing", missing), ("unexpected", unexpected), ("other shapes", shapes))
    if problems := [f"{what}: {_some(names)}" for what, names in parts if names]:
        raise ValueError(f"{source}: weights of another network; {'; '.join(problems)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def no_checkpoint(path: str | Path) -> str:
    """Return a line on a path that is no file: the checkpoints in the folder, also of a run, that
    it is, or beside it."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    near = sorted(str(file) for form in ("", "checkpoints/") for file in folder.glob(f"{form}*.ckpt"))
    what = "a folder" if folder == Path(path) else "no such checkpoint"
    return f"{path}: {what}, expected {' or '.join(near) or 'a checkpoint that `fit` has left'}"


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the description of the network in a checkpoint of a training (None before it had
    one), and the network's weights: the averaged ones, if the training averaged.

    Raises FileNotFoundError, or ValueError for a file that is not such a checkpoint. Nothing in
    the file is run (`weights_only`).
    """
    if not Path(path).is_file():
        raise FileNotFoundError(no_checkpoint(path))
    try:
        saved: Any = torch.load(path, map_location="cpu", weights_only=True)
        state = saved["state_dict"]
        weights = {k.removeprefix("net."): x for k, x in state.items() if k.startswith("net.")}
    except Exception as error:  # its class depends on what is in the file
        raise ValueError(f"{path}: not a checkpoint of `ndlightnet ... fit` ({type(error).__name__})") from error
    if not weights:
        raise ValueError(f"{path}: state_dict holds no weights of a network, names of net.*")
    return saved.get("network"), weights

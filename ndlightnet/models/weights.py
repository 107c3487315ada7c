"""Weights that fit a network, or one line that names what does not; checkpoints of trainings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 5  # names of a kind in a message
# layers that take the channels of the input, of NDLightNet and of both kinds of NDLightUNet
FIRST = ("embed.proj", "embed.first.0", "down.0.proj", "convs.0.0.conv1", "convs.0.0.skip")


def load_weights(net: nn.Module, weights: Mapping[str, Tensor], source: object, fresh: Sequence[str] = ()) -> None:
    """Load a state dict into a network, strictly.

    fresh: beginnings of names that keep the network's own values. Weights of tied parameters may
    be in the state dict once. Raises ValueError, one line: what is missing, what is unexpected,
    and which shapes are others. source: what the message begins with.
    """
    loaded = {key: x for key, x in weights.items() if not key.startswith(tuple(fresh))}
    try:
        missing, unexpected = net.load_state_dict(loaded, strict=False)
        shapes: list[str] = []
    except RuntimeError as error:  # shapes; what else there is shows without them
        expected = net.state_dict()
        wrong = [key for key in loaded if key in expected and expected[key].shape != loaded[key].shape]
        shapes = [f"{key} (found {tuple(loaded[key].shape)}, expected {tuple(expected[key].shape)})" for key in wrong]
        if not shapes:
            raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
        rest = {key: x for key, x in loaded.items() if key not in wrong}
        missing, unexpected = net.load_state_dict(rest, strict=False)
        missing = [key for key in missing if key not in wrong]
    present = net.state_dict(keep_vars=True)
    ours = {id(present[key]) for key in loaded if key in present}  # a tied weight has two names
    missing = [key for key in missing if id(present[key]) not in ours and not key.startswith(tuple(fresh))]
    kinds = (("missing", missing), ("unexpected", unexpected), ("other shapes", shapes))
    if problems := [f"{kind}: {_some(names)}" for kind, names in kinds if names]:
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
    """Return the description of the network in a checkpoint of a training (None where no arguments
    describe it), and the network's weights: the averaged ones, if the training averaged.

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


def adapt_in_chans(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Return a state dict of NDLightNet or NDLightUNet with its first layer changed to the number
    of input channels of `net`, for `load_state_dict`. One channel: the sum over the old ones;
    more or fewer: the old ones repeated, or the first of them, times old / new, as in timm."""
    adapted = dict(state)
    for layer in FIRST:
        name = f"{layer}.weight"
        weight = net.state_dict().get(name)
        if weight is None or name not in state or state[name].shape == weight.shape:
            continue
        parent = net.get_submodule(layer.rpartition(".")[0])
        cells = math.prod(getattr(parent, "patch", ()))
        old = state[name]
        if old.ndim != weight.ndim or len(old) != len(weight) or old.shape[1] % cells:
            continue  # another network: `load_state_dict` names what does not fit
        # (outputs, cells, channels, kernel): the channels of a linear map of patches come last
        old = old.reshape(len(old), cells, -1, *old.shape[2:])
        before, after = old.shape[2], weight.shape[1] // cells
        if after == 1:
            new = old.sum(2, keepdim=True)
        else:
            index = torch.arange(after, device=old.device) % before
            new = old.index_select(2, index) * (before / after)
        adapted[name] = new.reshape(len(old), cells * after, *old.shape[3:])
    return adapted

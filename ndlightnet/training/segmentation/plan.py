"""Plan a training from the data: spacing, patch, batch, strides and intensities as a config.

The rules are mainly nnU-Net's (Isensee et al., Nature Methods 2021). The result is a YAML file to read and to change,
not a rule that is applied unseen.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any, Literal

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ndlightnet.data.errors import DataError, atomic_write, one_line
from ndlightnet.data.volume.datasets import read_dataset
from ndlightnet.data.volume.fingerprint import Fingerprint, fingerprint
from ndlightnet.data.volume.formats import PICTURES, open_file
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import check_writable, log_rank_zero

COARSE = 3.0  # factor by which an axis is coarser and shorter than the others, see target_spacing
SMALLEST = 4  # cells along an axis of the coarsest level, at least
LEVELS = 6
SIDE = 192  # cells along the cube in space that a patch is, unless data or memory are smaller
BATCH_SHARE = 0.05  # fraction of all voxels of the training set that a batch has, at most
# Memory of a step relative to the tensors saved for backward as counted on the CPU: gradients and
# workspaces, and what autocast saves in float32 on a GPU. A cautious guess, not measured.
OVERHEAD = 1.7
# shape of the counted crop: networks may pad to multiples of 32; frames of a series, if any
COUNTED, COUNTED_FRAMES = (64, 32, 32), 2
STATE = 16  # bytes per parameter: itself, its gradient and AdamW's two means, in float32
USABLE = 0.85  # fraction of a GPU's memory
SIDED = re.compile(r"(?i)(?<![a-z])(left|right)(?![a-z])")  # labels that mirroring would swap
QUANTITIES = ("CT", "PET", "PT", "SUV")  # channels whose values mean the same in every scan


def plan(
    root: str,
    out: str | None = None,
    net: str = "ndlightnet.NDLightUNet",
    size: Literal["hybrid", "S", "M", "L"] | None = None,
    memory: float | None = None,
    epochs: int = 200,
    workers: int = 4,
    frames: int | None = None,
) -> None:
    """Measure a folder of labelled volumes, and write and print a config to train with.

    Args:
        root: the folder, in the layout of the Medical Segmentation Decathlon or of nnU-Net.
        out: folder of the results; default: runs/ and the name of `root`.
        net: class of the network. size: size of NDLightUNet; default: the network's own.
        memory: of the GPU, in GB; default: 85 % of that of this machine's first one, or 11.
        epochs: number of epochs, of 250 batches each.
        workers: processes that cut crops.
        frames: the cases are series of volumes over time, and a patch has so many frames.

    Raises DataError for data that cannot be read, and for arguments that are not valid.
    """
    for name, value in (("epochs", epochs), ("frames", frames)):
        check(name, value, value is None or value >= 1, "1 or more")
    check("memory", memory, memory is None or memory > 0, "GB above 0")
    _network(net)
    notes: list[str] = []
    folder = read_dataset(root, notes)
    out_folder = Path(out or Path("runs") / Path(root).resolve().name)
    log_rank_zero(notes)
    check_writable(out_folder)  # before all volumes are read
    cases = [case.as_series(frames is not None) for case in folder.training]
    if not cases:
        raise DataError(f"{root}: no training case with a label")
    if cases[0].images[0].name.lower().endswith(PICTURES):
        raise DataError(f"{root}: holds pictures, expected volumes; tasks/README.md has a config for pictures")
    # a file without frames would count as a series of one
    if frames is not None and all(open_file(case.images[0], case.slices)[0].shape[3] == 1 for case in cases):
        raise DataError(f"{root}: frames={frames}, no file has a fourth axis of time; expected series, or no --frames")
    measured = fingerprint(cases, len(folder.labels), len(folder.channels))
    if memory is not None:
        available = memory * 1e9
    elif torch.cuda.is_available():
        available = USABLE * torch.cuda.get_device_properties(0).total_memory
    else:
        available = 11e9
    model, data = config_of(measured, folder.labels, folder.channels, net, size, available, frames)
    trainer = {
        "default_root_dir": str(out_folder),
        "precision": "bf16-mixed",
        "max_epochs": epochs,
        "gradient_clip_val": 1.0,
        "check_val_every_n_epoch": max(1, epochs // 40),
    }
    volumes = {"class_path": "ndlightnet.training.VolumeData", "init_args": {"root": root, **data, "workers": workers}}
    config = {"seed_everything": 0, "trainer": trainer, "model": model, "data": volumes}
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=100)
    with atomic_write(out_folder / "plan.yaml") as draft:
        draft.write_text(f"# {len(cases)} training cases of {root}, {available / 1e9:.0f} GB\n{text}")
    print(text)
    for name, voxels in zip(folder.labels, measured.voxels, strict=True):
        if voxels == 0:
            print(f"note: no training case has a voxel of {name!r}")
    print(f"wrote {out_folder / 'plan.yaml'}; train with: fit --config {out_folder / 'plan.yaml'}")


def config_of(
    measured: Fingerprint,
    labels: Sequence[str],
    channels: Sequence[str],
    net: str,
    size: str | None,
    memory: float,
    frames: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the model, and the arguments of VolumeData that follow from the data. memory: in bytes;
    DataError if it is too little."""
    spacing = target_spacing(measured.spacings, measured.shapes)
    shape = np.median(measured.shapes * measured.spacings / spacing, axis=0)
    time = [] if frames is None else [frames]
    make = _network(net)
    facts: dict[str, Any] = {"dims": len(time) + 3, "in_channels": len(channels), "out_channels": len(labels)}
    facts |= {"size": size, "deep_supervision": True, "drop_path_rate": 0.1}

    def arguments(strides: list[list[int]]) -> dict[str, Any]:
        # along time all levels have all frames, as a causal network needs it
        values = {**facts, "strides": [[1] * len(time) + step for step in strides]}
        parameters = inspect.signature(make).parameters
        return {key: value for key, value in values.items() if key in parameters and value is not None}

    def crops(patch: list[int], strides: list[list[int]]) -> float:
        """Return how many crops the memory holds."""
        try:
            network = make(**arguments(strides))
        except (TypeError, ValueError) as error:
            raise DataError(f"net: {net}, patch {patch}: {one_line(error)}") from error
        state = STATE * sum(p.numel() for p in network.parameters())
        return (memory - state) / step_bytes(network, len(channels), time + patch)

    patch, strides = patch_of(shape, spacing, lambda *tried: crops(*tried) >= 2)
    held = crops(patch, strides)
    if held < 2:
        raise DataError(f"memory: {memory / 1e9:.3g} GB, expected enough for a step of {net} with 2 crops of {patch}")
    voxels = len(measured.shapes) * prod(shape.tolist())
    most = min(held, BATCH_SHARE * voxels / prod(patch))
    mirrored = [1, 2] if any(SIDED.search(label) for label in labels) else [0, 1, 2]
    data = {
        "patch": time + patch,
        "spacing": [round(edge, 4) for edge in spacing.tolist()],
        "intensities": [intensity_of(*channel) for channel in zip(channels, measured.values, strict=True)],
        "batch_size": max(2, int(most)),
        "augment": {"flip_axes": [len(time) + axis for axis in mirrored]},
    }
    return {"window": time + patch, "net": {"class_path": net, "init_args": arguments(strides)}}, data


def target_spacing(spacings: NDArray[np.float64], shapes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return mm per axis: the median, but the tenth percentile for an axis that is much coarser and much shorter
    than the others, so that the detail of fine scans is not lost."""
    target = np.median(spacings, axis=0)
    coarse = int(target.argmax())
    finest = np.delete(target, coarse).max()
    size = np.median(shapes, axis=0)
    if target[coarse] > COARSE * finest and COARSE * size[coarse] < np.delete(size, coarse).min():
        target[coarse] = max(finest, np.percentile(spacings[:, coarse], 10))
    return target


def intensity_of(channel: str, values: NDArray[np.float32]) -> dict[str, float]:
    """Return arguments of Intensity. CT and PET: clip to the percentiles 0.5 and 99.5 of labelled voxels (PET: from
    0), their mean and standard deviation. Others: none, each volume by itself."""
    name = channel.upper()
    if name not in QUANTITIES or not values.size:
        return {}
    low, high = np.percentile(values, (0.5, 99.5)).tolist()
    low = low if name == "CT" else min(0.0, low)
    mean, deviation = float(values.mean()), float(values.std())
    if not low < high or deviation == 0:
        return {}
    numbers = {"low": low, "high": high, "mean": mean, "deviation": deviation}
    return {key: float(f"{value:.5g}") for key, value in numbers.items()}


def strides_of(patch: Sequence[int], spacing: Sequence[float]) -> list[list[int]]:
    """Return the strides of each level after the first. An axis is halved while SMALLEST cells are left, and only
    while its edge is below twice the finest one's, so that cells become cubes."""
    size, edge = np.array(patch, float), np.array(spacing, float)
    strides: list[list[int]] = []
    while len(strides) < LEVELS - 1:
        divisible = size >= 2 * SMALLEST
        if not divisible.any():
            break
        step = np.where(divisible & (edge < 2 * edge[divisible].min()), 2, 1)
        size, edge = np.ceil(size / step), edge * step
        strides.append(step.tolist())
    return strides


def patch_of(
    shape: NDArray[np.float64], spacing: NDArray[np.float64], fits: Callable[[list[int], list[list[int]]], bool]
) -> tuple[list[int], list[list[int]]]:
    """Return (patch, strides): a cube in space of SIDE cells, no larger than the median volume; as long as it does
    not fit, the axis that covers most of the volume is made shorter."""
    mean_edge = float(np.prod(spacing) ** (1 / 3))
    patch = np.minimum(np.round(SIDE * mean_edge / spacing), np.round(shape)).clip(1)
    while True:
        strides = strides_of(patch.astype(int).tolist(), spacing.tolist())
        step = np.prod(np.array(strides or [[1, 1, 1]]), axis=0)
        padded = (np.ceil(patch / step) * step).astype(int).tolist()
        if fits(padded, strides) or max(padded) <= 2 * SMALLEST:
            return padded, strides
        longest = int(np.where(patch > 2 * SMALLEST, patch / shape, 0).argmax())
        patch[longest] = max(2 * SMALLEST, min(patch[longest], padded[longest]) - step[longest])


def step_bytes(net: nn.Module, channels: int, patch: Sequence[int]) -> float:
    """Estimate the bytes of one crop in a training step in bf16, without the weights: the tensors that a
    CPU saves for backward, counted on a smaller crop, times OVERHEAD."""
    most = (COUNTED_FRAMES, *COUNTED)[-len(patch) :]
    small = [min(pair) for pair in zip(patch, most, strict=True)]
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if not _of_weights(x):
            storage = x.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    # shapes alone: a CPU without bf16 units would take minutes for the values
    with FakeTensorMode(allow_non_fake_inputs=True), hooks, torch.autocast("cpu", torch.bfloat16):
        outputs = net.train()(torch.zeros(1, channels, *small))  # held until all is counted
    total = sum(saved.values())
    del outputs
    return OVERHEAD * total * prod(patch) / prod(small)


def _of_weights(x: Tensor) -> bool:
    """Return whether `x` is a parameter, or made of one alone: autocast's copy. Its size does not depend on the
    crop."""
    if x.is_leaf:
        return isinstance(x, nn.Parameter)
    at: Any = x.grad_fn
    while len(at.next_functions) == 1 and at.next_functions[0][0] is not None:
        at = at.next_functions[0][0]
    return hasattr(at, "variable")  # the last node accumulates the gradient of a leaf


def _network(path: str) -> Callable[..., nn.Module]:
    try:
        constructor: Any = locate(path) if "." in path else None
    except ErrorDuringImport as error:
        raise DataError(f"net: {path!r}, cannot be imported ({one_line(error)})") from error
    check("net", repr(path), callable(constructor), "the path of a class, such as ndlightnet.NDLightUNet")
    return constructor

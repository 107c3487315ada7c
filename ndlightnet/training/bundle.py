"""A trained segmentation network as a MONAI bundle: a folder that `python -m monai.bundle` runs.

The network and the scaling of channels are ours; all else in it are MONAI's transforms, inferer and
evaluator, so that who knows MONAI can read it, change it and serve it.
"""

from __future__ import annotations

import json
import os
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import isclass
from pathlib import Path
from pydoc import locate
from typing import Any, get_args, get_origin, get_type_hints

import monai
import nibabel
import numpy as np
import torch
from monai.bundle.config_parser import ConfigParser
from monai.utils.enums import IgniteInfo
from torch import Tensor

import ndlightnet
from ndlightnet.data.errors import DataError, one_line
from ndlightnet.training.cli import TaskCLI, check_checkpoint, task_cli
from ndlightnet.training.segmentation import SegmentationTask
from ndlightnet.training.volumes import VolumeData

SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
    "meta_schema_20240725.json"
)
MIXED = {"16-mixed": "$torch.float16", "bf16-mixed": "$torch.bfloat16"}
STITCHED = 2**31  # bytes: windows are blended on the card up to so many of logits, else on the host
README = """# {name}

{description} {intended_use}

Labels:

{labels}

Install `ndlightnet[tasks]` {ndlightnet} and `monai[fire,ignite]` {monai_version}, or later. Then,
in this folder:

    python -m monai.bundle run --config_file configs/inference.json --dataset_dir SCANS

From elsewhere give `--bundle_root` with this folder, too. Label maps are written to `eval`, or to
`--output_dir`, each on the grid of its scan.

Scans are NIfTI files of: {channels}. Several channels are one file with four axes, or files
CASE_0000, CASE_0001 and so on, of one grid. Voxels must be finite numbers.

Logits of a scan are held as a whole, in float64 where they are resampled. `predict` of ndlightnet
computes them part by part, reads more formats and repairs more files.

Before you share this, fill in authors and copyright in `configs/metadata.json`, and add
`docs/license.txt`: the data that a network has learned from may say what it may be used for.
"""


def bundle(arguments: list[str]) -> None:
    """`--ckpt_path best.ckpt --out bundles/NAME`, and the config of the training with what
    overrides it. The folder `out`, new or empty before, appears complete or not at all.

    Raises DataError for a checkpoint of another network, for a network that MONAI cannot build from
    the config, and where `out` holds something or cannot be written.
    """
    parser = ArgumentParser("ct_segmentation.py bundle", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True)
    parser.add_argument("--out", required=True, type=Path)
    given, rest = parser.parse_known_args(arguments)
    cli = task_cli(SegmentationTask, VolumeData, rest, run=False)
    definition, weights = _network(cli, [given.ckpt_path, *cli.model.ensemble])
    inference = inference_of(definition, cli.model, cli.datamodule, str(cli.trainer.precision))
    metadata = metadata_of(given.out.resolve().name, cli.model, cli.datamodule)
    with _whole_folder(given.out) as draft:
        for name in ("configs", "models", "docs"):
            (draft / name).mkdir(parents=True)
        for name, content in (("inference", inference), ("metadata", metadata)):
            text = json.dumps(content, indent=4, allow_nan=False)
            (draft / "configs" / f"{name}.json").write_text(text + "\n")
        torch.save(weights, draft / "models" / "model.pt")
        formats = metadata["network_data_format"]
        labels = formats["outputs"]["pred"]["channel_def"].items()
        readme = README.format(
            **metadata, ndlightnet=ndlightnet.__version__,
            labels="\n".join(f"- {number}: {label}" for number, label in labels),
            channels=", ".join(cli.datamodule.modalities),
        )  # fmt: skip
        (draft / "docs" / "README.md").write_text(readme)
    print(f"wrote {given.out}, see {given.out / 'docs' / 'README.md'}")


def inference_of(
    network: dict[str, Any], task: SegmentationTask, data: VolumeData, precision: str
) -> dict[str, Any]:
    """configs/inference.json: what `predict` does, said in MONAI's words."""
    prepare, classes = data._prepare(), len(data.labels)
    intensity = "ndlightnet.data.volume_transforms.Intensity"
    dtype = "uint8" if classes <= 256 else "int16"
    before: list[dict[str, Any]] = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": None},
    ]
    if prepare.spacing is not None:
        before.append({"_target_": "Spacingd", "keys": "image", "pixdim": list(prepare.spacing)})
    before.append({
        "_target_": "ndlightnet.data.volume_transforms.ScaleChannelsd", "keys": "image",
        "intensities": [{"_target_": intensity, **asdict(one)} for one in prepare.intensities],
        "channels": prepare.channels,
    })  # fmt: skip
    after: list[dict[str, Any]] = [
        {
            "_target_": "Invertd", "keys": "pred", "transform": "@preprocessing",
            "orig_keys": "image", "nearest_interp": False,
        },
        {"_target_": "AsDiscreted", "keys": "pred", "argmax": True, "dtype": f"$torch.{dtype}"},
    ]  # fmt: skip
    if task.largest:  # copied into what it was made of, which knows the affine
        largest = "$lambda labels: labels.copy_(keep_largest(labels))"
        after.append({"_target_": "Lambdad", "keys": "pred", "func": largest})
    after.append({
        "_target_": "SaveImaged", "keys": "pred", "output_dir": "@output_dir",
        "output_ext": ".nii.gz", "output_dtype": f"$numpy.{dtype}", "output_postfix": "seg",
        "separate_folder": False, "resample": False,
    })  # fmt: skip
    inferer: dict[str, Any] = {"_target_": "SimpleInferer"}
    if task.window is not None:
        inferer = {
            "_target_": "SlidingWindowInferer", "roi_size": task.window, "sw_batch_size": 1,
            "overlap": task.overlap, "mode": "gaussian", "cpu_thresh": STITCHED // (4 * classes),
        }  # fmt: skip
    whole: Any = "@network_def"
    if task.mirror_axes:
        mirrored = "ndlightnet.inference.Mirrored"
        whole = {"_target_": mirrored, "net": "@network_def", "axes": task.mirror_axes}
    mixed = {"amp_kwargs": {"dtype": MIXED[precision]}} if precision in MIXED else {}
    return {
        "imports": [
            "$from ndlightnet.data.layouts import find_inputs",
            "$from ndlightnet.inference import keep_largest",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/scans'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "datalist": "$[[str(file) for file in case.images] for case in "
        f"find_inputs(@dataset_dir, {len(data.modalities)})]",
        "network_def": network,
        "mirrored": whole,
        "network": "$@mirrored.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": before},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': files} for files in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": inferer,
        "postprocessing": {"_target_": "Compose", "transforms": after},
        "handlers": [
            {
                "_target_": "CheckpointLoader", "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network_def"}, "map_location": "@device",
            },
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator", "device": "@device", "network": "@network",
            "val_data_loader": "@dataloader", "inferer": "@inferer", "val_handlers": "@handlers",
            "postprocessing": "@postprocessing", "amp": bool(mixed), **mixed,
        },
        "run": ["$@evaluator.run()"],
    }  # fmt: skip


def metadata_of(name: str, task: SegmentationTask, data: VolumeData) -> dict[str, Any]:
    """configs/metadata.json, in MONAI's schema."""
    prepare = data._prepare()
    channels = [data.modalities[number] for number in prepare.channels]
    ends: list[float] = []
    for number in prepare.channels:
        one = prepare.intensities[number]
        if one.low is not None and one.high is not None and one.mean is not None:
            ends += [(end - one.mean) / (one.deviation or 1.0) for end in (one.low, one.high)]
    known = len(ends) == 2 * len(channels)
    shared: dict[str, Any] = {
        "type": "image", "spatial_shape": task.window or ["*", "*", "*"], "dtype": "float32",
        "is_patch_data": task.window is not None,
    }  # fmt: skip
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported by ndlightnet"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {
            "ndlightnet": ndlightnet.__version__, "nibabel": nibabel.__version__,
            "pytorch-ignite": IgniteInfo.OPT_IMPORT_VERSION.value,
        },
        "name": name,
        "task": f"Segmentation of {', '.join(data.labels[1:])} in {', '.join(channels)}",
        "description": f"{type(task.net).__name__} from {', '.join(channels)} volumes to labels of "
        f"{', '.join(data.labels[1:])}.",
        "authors": "not named yet",
        "copyright": "not named yet",
        "intended_use": "For research, not for diagnosis.",
        "network_data_format": {
            "inputs": {"image": {
                **shared, "format": "hounsfield" if set(channels) == {"CT"} else "magnitude",
                "modality": ", ".join(channels), "num_channels": len(channels),
                "value_range": [min(ends), max(ends)] if known else [],
                "channel_def": {str(n): channel for n, channel in enumerate(channels)},
            }},
            "outputs": {"pred": {
                **shared, "format": "labels", "num_channels": len(data.labels), "value_range": [],
                "channel_def": {str(n): label for n, label in enumerate(data.labels)},
            }},
        },
    }  # fmt: skip


def _network(cli: TaskCLI, paths: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """MONAI's definition of the network, of several checkpoints their ensemble, and its weights.
    The names in the first checkpoint become the data's."""
    task, data, saved = cli.model, cli.datamodule, []
    for path in paths:
        check_checkpoint(path, task)
        saved.append(torch.load(path, map_location="cpu", weights_only=True))
    names = saved[0].get("names", {})
    if not (names.get("labels") and names.get("modalities")):
        raise DataError(f"{paths[0]}: names no labels, expected a checkpoint that `fit` has left")
    data.set_names(names)
    for name, wanted in (("in_channels", data.in_channels), ("out_channels", len(data.labels))):
        if getattr(task.net, name, wanted) != wanted:
            here = f"{name}={getattr(task.net, name)}"
            raise DataError(f"model.net: {here}, expected {wanted} for the data of {paths[0]}")
    states = [
        {name[4:]: value for name, value in one["state_dict"].items() if name.startswith("net.")}
        for one in saved
    ]
    asked = cli.config.model.net
    definition, weights = _target(asked.as_dict()), states[0]
    if len(states) > 1:
        nets = [definition] * len(states)
        definition = {"_target_": "ndlightnet.inference.Ensemble", "nets": nets}
        weights = {f"nets.{n}.{k}": value for n, s in enumerate(states) for k, value in s.items()}
    try:  # here, and not first where it is used
        read = ConfigParser({"net": json.loads(json.dumps(definition))})
        read.get_parsed_content("net").load_state_dict(weights)
    except Exception as error:  # classes raise what they like
        wrong = f"{asked.class_path} cannot be built from a MONAI config ({one_line(error)})"
        raise DataError(f"model.net: {wrong}") from error
    return definition, weights


def _target(value: Any, called: bool = False) -> Any:
    """jsonargparse's class_path and init_args as MONAI's `_target_`. called: what takes it calls
    it with more arguments to get the object."""
    if isinstance(value, list | tuple):
        return [_target(one) for one in value]
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    made: Any = locate(value["class_path"])
    hints: dict[str, Any] = {}
    for base in reversed(getattr(made, "__mro__", [made])):
        hints |= get_type_hints(base.__init__ if isclass(base) else base)
    arguments = value.get("init_args") or {}
    return {
        "_target_": value["class_path"],
        **({"_mode_": "callable"} if called else {}),
        **{name: _target(one, _is_callable(hints.get(name))) for name, one in arguments.items()},
    }


def _is_callable(hint: Any) -> bool:
    return get_origin(hint) is Callable or any(_is_callable(part) for part in get_args(hint))


@contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """A draft beside `path`, a folder to be made, that becomes `path` when the block ends well."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path}: is there already, expected a new or an empty folder")
    draft = path.resolve().with_name(f".{os.getpid()}.part.{path.name}")
    try:
        yield draft
        os.replace(draft, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)

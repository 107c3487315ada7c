"""The files of a MONAI bundle. The network and the scaling of channels are ndlightnet's; all else are MONAI's
transforms, inferer and evaluator, so that users of MONAI can read, change and serve the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import monai
import nibabel
import numpy as np
import torch
from monai.utils.enums import IgniteInfo

import ndlightnet
from ndlightnet.data.errors import printable
from ndlightnet.training.segmentation.segmentation_task import SegmentationTask
from ndlightnet.training.segmentation.volume_data import VolumeData

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
MIXED = {"16-mixed": "$torch.float16", "bf16-mixed": "$torch.bfloat16"}
STITCHED = 2**31  # bytes of logits: up to so many, windows are blended on the GPU, else on the host
README = """# {name}

{description} {intended_use}

Labels:

{labels}

Install `ndlightnet[tasks]` {ndlightnet} and `monai[fire,ignite]` {monai_version}, or later. Then,
in this folder:

    python -m monai.bundle run --config_file configs/inference.json --dataset_dir SCANS

From elsewhere give `--bundle_root` with this folder, too. Label maps are written to `eval`, or to
`--output_dir`, each on the grid of its scan.

Scans are NIfTI files in mm, or folders with a DICOM series, of: {channels}. Several channels are
one file with four axes, or files CASE_0000, CASE_0001 and so on, of one grid. Voxels must be finite
numbers.

Logits of a scan are held as a whole, in float64 where they are resampled. `predict` of ndlightnet
computes them part by part, reads more formats and repairs more files.

Before you share this, fill in authors and copyright in `configs/metadata.json`, and add
`docs/license.txt`: the data that a network has learned from may say what it may be used for.
"""


def inference_of(network: dict[str, Any], task: SegmentationTask, data: VolumeData, precision: str) -> dict[str, Any]:
    """Return configs/inference.json: what `predict` does, as a MONAI config."""
    prepare, classes = data._prepare(), len(data.labels)
    dtype = "uint8" if classes <= 256 else "int16"
    intensity = "ndlightnet.data.volume.transforms.Intensity"
    scales = [_monai_object(intensity, **asdict(one)) for one in prepare.intensities]
    channels = {"keys": "image", "intensities": scales, "channels": prepare.channels}
    resample = []
    if prepare.spacing is not None:
        resample = [_monai_object("Spacingd", keys="image", pixdim=list(prepare.spacing))]
    before = [
        _monai_object("LoadImaged", keys="image"),
        _monai_object("EnsureChannelFirstd", keys="image"),
        _monai_object("Orientationd", keys="image", axcodes="RAS", labels=None),
        *resample,
        _monai_object("ndlightnet.data.volume.transforms.ScaleChannelsd", **channels),
    ]
    inverse = {"keys": "pred", "transform": "@preprocessing", "orig_keys": "image", "nearest_interp": False}
    names = {"output_dir": "@output_dir", "output_ext": ".nii.gz", "output_postfix": "seg", "separate_folder": False}
    largest = []
    if task.largest:  # copied into the tensor it was made of, which has the affine
        largest = [_monai_object("Lambdad", keys="pred", func="$lambda labels: labels.copy_(keep_largest(labels))")]
    after = [
        _monai_object("Invertd", **inverse),
        _monai_object("AsDiscreted", keys="pred", argmax=True, dtype=f"$torch.{dtype}"),
        *largest,
        _monai_object("SaveImaged", keys="pred", **names, output_dtype=f"$numpy.{dtype}", resample=False),
    ]
    inferer = _monai_object("SimpleInferer")
    if task.window is not None:
        windows = {"roi_size": task.window, "sw_batch_size": 1, "overlap": task.overlap, "mode": "gaussian"}
        inferer = _monai_object("SlidingWindowInferer", **windows, cpu_thresh=STITCHED // (4 * classes))
    network_entries: dict[str, Any] = {"network": "$@network_def.to(@device)"}
    if task.mirror_axes:
        mirrored = _monai_object("ndlightnet.inference.Mirrored", net="@network_def", axes=task.mirror_axes)
        network_entries = {"mirrored": mirrored, "network": "$@mirrored.to(@device)"}
    weights = {"load_path": "$@bundle_root + '/models/model.pt'", "load_dict": {"model": "@network_def"}}
    evaluator = {
        "device": "@device",
        "network": "@network",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
        "val_data_loader": "@dataloader",
    }
    mixed = {"amp_kwargs": {"dtype": MIXED[precision]}} if precision in MIXED else {}
    files = f"find_inputs(@dataset_dir, {len(data.modalities)})"
    return {
        "imports": [
            "$from ndlightnet.data.volume.datasets import find_inputs",
            "$from ndlightnet.inference import keep_largest",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/scans'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "datalist": f"$[[str(file) for file in case.images] for case in {files}]",
        "network_def": network,
        **network_entries,
        "preprocessing": _monai_object("Compose", transforms=before),
        "dataset": _monai_object(
            "Dataset", data="$[{'image': files} for files in @datalist]", transform="@preprocessing"
        ),
        "dataloader": _monai_object("DataLoader", dataset="@dataset", batch_size=1),
        "inferer": inferer,
        "postprocessing": _monai_object("Compose", transforms=after),
        "handlers": [_monai_object("CheckpointLoader", **weights, map_location="@device")],
        "evaluator": _monai_object(
            "SupervisedEvaluator", **evaluator, val_handlers="@handlers", amp=bool(mixed), **mixed
        ),
        "run": ["$@evaluator.run()"],
    }


def _monai_object(name: str, **arguments: Any) -> dict[str, Any]:
    """Return MONAI's config of an object of a class."""
    return {"_target_": name, **arguments}


def metadata_of(name: str, task: SegmentationTask, data: VolumeData) -> dict[str, Any]:
    """Return configs/metadata.json, in MONAI's schema."""
    prepare, labels = data._prepare(), [inert(label) for label in data.labels]
    channels = [inert(data.modalities[number]) for number in prepare.channels]
    ends: list[float] = []
    for number in prepare.channels:
        one = prepare.intensities[number]
        if one.low is not None and one.high is not None and one.mean is not None:
            ends += [(end - one.mean) / (one.deviation or 1.0) for end in (one.low, one.high)]
    value_range = [min(ends), max(ends)] if len(ends) == 2 * len(channels) else []

    def tensor(kind: str, names: Sequence[str], value_range: list[float], **more: Any) -> dict[str, Any]:
        shape: Any = {"spatial_shape": task.window or ["*", "*", "*"], "is_patch_data": task.window is not None}
        numbered = {"num_channels": len(names), "channel_def": {str(n): one for n, one in enumerate(names)}}
        return {
            "type": "image",
            "format": kind,
            "dtype": "float32",
            "value_range": value_range,
            **shape,
            **numbered,
            **more,
        }

    kind = "hounsfield" if set(channels) == {"CT"} else "magnitude"
    image = tensor(kind, channels, value_range, modality=", ".join(channels))
    inputs, outputs = ", ".join(channels), ", ".join(labels[1:])
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported by ndlightnet"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {
            "ndlightnet": ndlightnet.__version__,
            "nibabel": nibabel.__version__,
            "pytorch-ignite": IgniteInfo.OPT_IMPORT_VERSION.value,
        },
        "name": inert(name),
        "task": f"Segmentation of {outputs} in {inputs}",
        "description": f"{type(task.net).__name__} from {inputs} volumes to labels of {outputs}.",
        "authors": "not named yet",
        "copyright": "not named yet",
        "intended_use": "For research, not for diagnosis.",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": tensor("labels", labels, [])}},
    }


def inert(name: str) -> str:
    """Return a name from the data as text that MONAI does not interpret: it evaluates what begins with $, and
    follows references, also to files, that begin with @ and %. Full-width characters replace these."""
    return printable(name).translate(str.maketrans("$@%", "\uff04\uff20\uff05"))


def readme_of(metadata: dict[str, Any], channels: Sequence[str]) -> str:
    """Return docs/README.md. channels: names of the scans' channels, in their order."""
    labels = metadata["network_data_format"]["outputs"]["pred"]["channel_def"].items()
    return README.format(
        **metadata,
        ndlightnet=ndlightnet.__version__,
        channels=", ".join(map(inert, channels)),
        labels="\n".join(f"- {number}: {label}" for number, label in labels),
    )

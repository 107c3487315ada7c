"""Folders of drawn data, complete or absent; sets of drawn cases in the Medical Segmentation Decathlon's layout."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.errors import DataError, writable
from ndlightnet.data.threads import in_threads

RECORD = "drawn.json"  # what a finished set was drawn from
# image (x, y, z[, frames]), label of the same shape, affine (4, 4)
Drawn = tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.float64]]


def draw_once(folder: Path, record: Mapping[str, Any], draw: Callable[[Path], None]) -> Path:
    """Return `folder` with the files that `draw` writes into the folder that it gets, and `record`, what they follow
    from. `folder` appears complete or not at all; a set of this record is left as it is.

    DataError if `folder` holds anything else or cannot be written."""
    folder = Path(folder)
    if _holds(folder, record):
        return folder
    with writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            draft = Path(scratch) / "set"
            draft.mkdir()
            draw(draft)
            (draft / RECORD).write_text(json.dumps(record))
            if not _holds(folder, record):  # another process may have been quicker
                draft.replace(folder)
    return folder


def _holds(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether the set exists: False for no folder or an empty one, DataError for others."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        existing = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: holds something else than a drawn set; remove it") from error
    if existing != record:
        raise DataError(f"{folder}: holds a set drawn with other arguments: {existing}; remove it")
    return True


@dataclass(frozen=True)
class Recipe:
    """How cases KIND_000, KIND_001, ... are drawn. version: to be raised with every change of the drawing, so that
    older sets are not reused. time_step: seconds between frames, 0 for volumes."""

    kind: str
    version: int
    description: str
    labels: Sequence[str]
    draw: Callable[[np.random.Generator], Drawn]
    time_step: float = 0


def draw_cases(folder: Path, recipe: Recipe, training: int, test: int, seed: int, progress: bool = True) -> Path:
    """Draw `training + test` cases, which follow from `seed`, into `folder`, see `draw_once`, and return it. ValueError
    for no training case."""
    if training < 1 or test < 0:
        raise ValueError(f"needs training >= 1 and test >= 0, got {training} and {test}")
    kind, step = recipe.kind, recipe.time_step
    splits = ["Tr"] * training + ["Ts"] * test
    names = [f"{kind}_{number:03d}.nii.gz" for number in range(len(splits))]
    # One random stream per case, spawned from the seed: a case does not depend on the others.
    seeds = np.random.SeedSequence(seed).spawn(len(names))

    def write_set(draft: Path) -> None:
        for name in ("imagesTr", "labelsTr", "imagesTs", "labelsTs"):
            (draft / name).mkdir()

        def write(index: int) -> None:
            image, label, affine = recipe.draw(np.random.default_rng(seeds[index]))
            for content, voxels in (("images", image), ("labels", label)):
                volume: Any = nibabel.Nifti1Image(voxels, affine)
                volume.set_qform(affine, code=1)
                volume.header.set_xyzt_units("mm", "sec" if step else None)
                if step:
                    volume.header["pixdim"][4] = step
                nibabel.save(volume, draft / f"{content}{splits[index]}" / names[index])

        in_threads(write, range(len(names)), f"{kind}s", progress, workers=2)
        entries: dict[str, list[dict[str, str]]] = {"Tr": [], "Ts": []}
        for split, name in zip(splits, names, strict=True):
            entries[split].append({"image": f"./images{split}/{name}", "label": f"./labels{split}/{name}"})
        listing = {
            "name": f"{kind}s".replace("_", " ").capitalize(),
            "description": recipe.description,
            "tensorImageSize": "4D" if step else "3D",
            "modality": {"0": "CT"},
            "labels": {str(number): name for number, name in enumerate(recipe.labels)},
            "numTraining": training,
            "numTest": test,
            "training": entries["Tr"],
            "test": entries["Ts"],
        }
        (draft / "dataset.json").write_text(json.dumps(listing, indent=1) + "\n")

    record = {"kind": kind, "recipe": recipe.version, "training": training, "test": test, "seed": seed}
    return draw_once(folder, record, write_set)


def place_in_scanner(image: Any, label: Any, spacing: Any, rng: np.random.Generator) -> Drawn:
    """Return voxels (x, y, z[, frames]) with an affine to RAS mm; in half of the cases the index order runs to the left
    and back, as scanners store, with the same positions."""
    shape = np.array(label.shape[:3])
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = (rng.uniform(-40, 40, 3) - spacing * (shape - 1) / 2).round(2)
    if rng.random() < 0.5:
        image, label = image[::-1, ::-1], label[::-1, ::-1]
        affine[:2, 3] += spacing[:2] * (shape[:2] - 1)
        affine[:2, :2] *= -1
    return np.ascontiguousarray(image.round().astype(np.int16)), np.ascontiguousarray(label), affine

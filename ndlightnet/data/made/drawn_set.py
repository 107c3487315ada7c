"""Sets of drawn cases, in the Medical Segmentation Decathlon's layout: complete or absent."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.errors import DataError
from ndlightnet.data.threads import in_threads

# image (x, y, z[, frames]), label of the same shape, affine (4, 4)
Drawn = tuple[NDArray[np.int16], NDArray[np.uint8], NDArray[np.float64]]


def make_set(
    folder: Path,
    kind: str,
    numbers: Mapping[str, int],
    listing: Mapping[str, Any],
    draw: Callable[[np.random.Generator], Drawn],
    progress: bool = True,
    time_step: float = 0,
) -> Path:
    """Writes drawn cases into `folder` and returns it.

    kind: of the cases, which are KIND_000, KIND_001, ... numbers: "training" and "test" cases, the
    "seed" from which everything follows, and "recipe", to be raised with every change of the
    drawing; dataset.json holds them beside `listing`. time_step: seconds between frames. `folder`
    appears complete or not at all; one that already holds this set is left as it is.

    Raises DataError when `folder` holds something else or cannot be written.
    """
    folder, key = Path(folder), f"{kind}s"
    if numbers["training"] < 1 or numbers["test"] < 0:
        raise ValueError(f"needs training >= 1 and test >= 0, got {numbers['training']} and {numbers['test']}")
    if _is_complete(folder, key, numbers):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: is there already and is not this set of {key}; remove it")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        for name in ("imagesTr", "labelsTr", "imagesTs", "labelsTs"):
            (draft / name).mkdir(parents=True)
        names = _write(draft, kind, numbers, draw, progress, time_step)
        whole = {**listing, "numTraining": numbers["training"], "numTest": numbers["test"]}
        whole |= {"training": names["Tr"], "test": names["Ts"], key: dict(numbers)}
        (draft / "dataset.json").write_text(json.dumps(whole, indent=1) + "\n")
        draft.replace(folder)
    except OSError as error:
        # Another process may have finished the same set meanwhile: then there is nothing left to
        # do.
        if not _is_complete(folder, key, numbers):
            raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _is_complete(folder: Path, key: str, numbers: Mapping[str, int]) -> bool:
    try:
        listing = json.loads((folder / "dataset.json").read_bytes())
        cases = [*listing["training"], *listing["test"]]
        files = [folder / case[key] for case in cases for key in ("image", "label")]
        return bool(listing[key] == numbers) and all(file.is_file() for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(
    folder: Path,
    kind: str,
    numbers: Mapping[str, int],
    draw: Callable[[np.random.Generator], Drawn],
    progress: bool,
    time_step: float,
) -> dict[str, list[dict[str, str]]]:
    """Write the files; return the entries of dataset.json for "Tr" and "Ts"."""
    parts = ["Tr"] * numbers["training"] + ["Ts"] * numbers["test"]
    names = [f"{kind}_{number:03d}.nii.gz" for number in range(len(parts))]
    # One random stream per case, spawned from the seed: a case does not depend on the others.
    seeds = np.random.SeedSequence(numbers["seed"]).spawn(len(names))

    def write(index: int) -> None:
        image, label, affine = draw(np.random.default_rng(seeds[index]))
        for what, voxels in (("images", image), ("labels", label)):
            volume: Any = nibabel.Nifti1Image(voxels, affine)  # type: ignore[no-untyped-call]
            volume.set_qform(affine, code=1)
            volume.header.set_xyzt_units("mm", "sec" if time_step else None)
            if time_step:
                volume.header["pixdim"][4] = time_step
            nibabel.save(volume, folder / f"{what}{parts[index]}" / names[index])

    in_threads(write, range(len(names)), f"{kind}s", progress, workers=2)
    entries: dict[str, list[dict[str, str]]] = {"Tr": [], "Ts": []}
    for part, name in zip(parts, names, strict=True):
        pair = {"image": f"./images{part}/{name}", "label": f"./labels{part}/{name}"}
        entries[part].append(pair)
    return entries

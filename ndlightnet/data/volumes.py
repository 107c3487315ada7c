"""Medical volumes on disk: decathlon folders, NIfTI files, DICOM series in; NIfTI label maps out.

Everything keeps the grid of the file that it came from: `load_case` gives the voxels as they are
stored, with the affine from voxel indices to RAS millimetres, and `save_labels` writes onto that
same grid.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import torch
from monai.data.meta_tensor import MetaTensor
from monai.transforms.spatial.array import ResampleToMatch
from numpy.typing import NDArray
from pydicom.pixels.processing import apply_rescale
from torch import Tensor

from ndlightnet.data.errors import DataError

NIFTI_ENDINGS = (".nii.gz", ".nii")
# Two grids are one when no corner is off by more than this share of the smallest voxel edge.
# Headers round: a qform holds a rotation as three float32, good to 3e-4 rad: 0.04 mm at 150 mm.
SAME_GRID = 0.1
# DICOM slices are even when no step is off the median by more than this; a missing one is off by 1.
EVEN_GAPS = 0.1


@dataclass(frozen=True)
class Case:
    """One patient: image files (a NIfTI file or a folder with a DICOM series each), first the one
    that gives the grid, and the label file where there is one."""

    name: str
    images: tuple[Path, ...]
    label: Path | None


@dataclass(frozen=True)
class Decathlon:
    """A folder in the Medical Segmentation Decathlon's layout. `labels[n]` names the label number n
    and `modalities[c]` the image file c of every case."""

    folder: Path
    labels: tuple[str, ...]
    modalities: tuple[str, ...]
    training: tuple[Case, ...]
    test: tuple[Case, ...]


def read_decathlon(folder: str | Path) -> Decathlon:
    """Reads `dataset.json` and checks that every listed file is there (the files are not opened).

    Raises DataError for a missing folder or file, a `dataset.json` that cannot be read or is not in
    the decathlon's format, label or modality numbers with gaps, and a listing without any case.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    file = folder / "dataset.json"
    try:
        listing = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{file}: is not valid JSON ({_one_line(error)})") from error
    if not isinstance(listing, dict):
        raise DataError(f"{file}: should hold a JSON object")
    labels = _numbered(file, listing, "labels")
    modalities = _numbered(file, listing, "modality")
    training, test = (
        _listed_cases(file, listing, key, len(modalities)) for key in ("training", "test")
    )
    if not training and not test:
        raise DataError(f"{file}: lists no case under 'training' or 'test'")
    for case in training:
        if case.label is None:
            raise DataError(f"{file}: training case {case.name!r} has no label")
    return Decathlon(folder, labels, modalities, training, test)


def _numbered(file: Path, listing: dict[str, Any], key: str) -> tuple[str, ...]:
    """{"0": "CT", "1": "PET"} -> ("CT", "PET")."""
    names = listing.get(key)
    if not isinstance(names, dict) or not names:
        raise DataError(f'{file}: {key!r} should map numbers to names, such as {{"0": "..."}}')
    numbers = sorted(int(number) if number.isdecimal() else -1 for number in names)
    if numbers != list(range(len(names))):
        raise DataError(f"{file}: {key!r} should number from 0 without gaps, has {sorted(names)}")
    return tuple(str(names[number]) for number in sorted(names, key=int))


def _listed_cases(file: Path, listing: dict[str, Any], key: str, channels: int) -> tuple[Case, ...]:
    entries = listing.get(key, [])
    if not isinstance(entries, list):
        raise DataError(f"{file}: {key!r} should be a list")
    found: list[tuple[tuple[Path, ...], Path | None]] = []
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {"image": entry}
        images, label = fields.get("image"), fields.get("label")
        texts: list[Any] = list(images) if isinstance(images, list) else [images]
        texts += [label] if label else []
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{file}: {key!r} has an entry without image files: {_one_line(entry)}")
        paths = [file.parent / text for text in texts]
        label_path = paths.pop() if label else None
        if len(paths) != channels:
            need = f"should list {channels} image files, one for each modality"
            raise DataError(f"{file}: entry {_one_line(entry)} {need}")
        for path in [*paths, label_path]:
            if path is not None and not path.exists():
                raise DataError(f"{path}: no such file, though {file.name} lists it")
        found.append((tuple(paths), label_path))
    names = _names(file.parent, [images[0] for images, _ in found])
    return tuple(Case(name, *files) for name, files in zip(names, found, strict=True))


def _names(folder: Path, paths: Sequence[Path]) -> list[str]:
    """A name a file: its stem, with the folders before it where stems repeat (a/ct, b/ct)."""
    names = [_stem(path.name) for path in paths]
    if len(set(names)) < len(names):
        places = [Path(os.path.relpath(path, folder)).parts for path in paths]
        names = ["_".join([*parts[:-1], _stem(parts[-1])]) for parts in places]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise DataError(f"{paths[index]}: another case is called {name!r} as well; rename one")
    return names


def _stem(name: str) -> str:
    ending = next((end for end in NIFTI_ENDINGS if name.lower().endswith(end)), "")
    return name[: len(name) - len(ending)]


def find_inputs(path: str | Path) -> list[Case]:
    """What to predict on: a NIfTI file, a folder with a DICOM series, a decathlon folder (its test
    cases), or a folder with NIfTI files and subfolders of one DICOM series each, sorted by name.

    Other files are passed over. Nothing is opened beyond telling DICOM from other files, so a
    broken volume is listed and raises when it is loaded. Raises DataError when there is nothing to
    predict on.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        if not _is_nifti(path):
            raise DataError(f"{path}: is not a NIfTI file; for DICOM give the folder of the series")
        return [Case(_stem(path.name), (path,), None)]
    if (path / "dataset.json").is_file():
        cases = read_decathlon(path).test
        if not cases:
            raise DataError(f"{path}: dataset.json lists no test case")
        return list(cases)
    try:
        inside = sorted(path.iterdir())
        files = [i for i in inside if _is_nifti(i) or (i.is_dir() and _dicom_files(i))]
        if _dicom_files(path):
            files.insert(0, path.resolve())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not files:
        raise DataError(f"{path}: holds no NIfTI file and no DICOM series")
    names = _names(path, files)
    return [Case(name, (file,), None) for name, file in zip(names, files, strict=True)]


def _is_nifti(path: Path) -> bool:
    # Hidden files are left-overs: "._ct.nii.gz" of macOS archives, unfinished writes.
    name = path.name.lower()
    return path.is_file() and name.endswith(NIFTI_ENDINGS) and not name.startswith(".")


def _dicom_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != "DICOMDIR")
    return [file for file in files if pydicom.misc.is_dicom(file)]


def check_cases(cases: Iterable[Case], num_classes: int, progress: bool = True) -> None:
    """Opens every file before a training starts, so that it does not fail hours later.

    Raises DataError, naming the file, for all that `load_case` refuses and for a label map with
    values that are not whole numbers in 0..num_classes-1.
    """
    from rich.progress import track

    def check(case: Case) -> None:
        label = load_case(case).get("label", torch.zeros(1))
        low, high = int(label.min()), int(label.max())
        if low < 0 or high >= num_classes:
            expected = f"expected 0..{num_classes - 1}"
            raise DataError(f"{case.label}: has label values {low}..{high}, {expected}")

    cases = list(cases)
    pool = ThreadPoolExecutor(4)  # inflating gzip, most of the work, releases the interpreter
    try:
        done = pool.map(check, cases)
        for _ in track(done, "checking volumes", total=len(cases), disable=not progress):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def load_case(case: Case) -> dict[str, Any]:
    """Reads one case: {"image", "label" (where there is one), "name"}.

    image: MetaTensor (channels, x, y, z), float32, in the file's own values (CT: Hounsfield units);
    channel 0 keeps its grid and the others are interpolated onto it, with their minimum where they
    do not reach. label: MetaTensor (1, x, y, z), int16. Both carry `.affine`, (4, 4) float64 from
    voxel indices to RAS mm.

    Raises DataError for a file that cannot be read, is not three-dimensional or has an empty axis,
    an affine that cannot be inverted, voxels that are NaN or infinite, a label map off the first
    image's grid or with fractions, and a further image that lies wholly beside the first.
    """
    first, *others = (_read(path) for path in case.images)
    channels: list[Tensor] = [first.as_tensor()]
    for path, other in zip(case.images[1:], others, strict=True):
        if not _overlap(first, other):
            raise DataError(f"{path}: does not overlap {case.images[0]}")
        channels.append(_onto(other, first))
    meta = {"original_affine": first.affine.clone(), "spatial_shape": tuple(first.shape[1:])}
    loaded: dict[str, Any] = {"name": case.name}
    loaded["image"] = MetaTensor(torch.cat(channels), affine=first.affine, meta=dict(meta))
    if case.label is not None:
        label = _read(case.label)
        _check_same_grid(case.label, label, case.images[0], first)
        whole = label.as_tensor().to(torch.int16)
        if not torch.equal(whole.float(), label.as_tensor()):
            raise DataError(f"{case.label}: has labels that are not whole numbers below 32768")
        loaded["label"] = MetaTensor(whole, affine=first.affine, meta=dict(meta))
    return loaded


def _read(path: Path) -> MetaTensor:
    """(1, x, y, z) float32 with its affine; every way of being unusable ends here."""
    try:
        voxels, affine = _read_series(path) if path.is_dir() else _read_nifti(path)
    except DataError:
        raise
    except Exception as error:  # decoders of gzip, NIfTI, DICOM and JPEG raise what they like
        raise DataError(f"{path}: cannot be read ({_one_line(error)})") from error
    if voxels.dtype.kind not in "biuf":
        raise DataError(f"{path}: voxels should be real numbers, are {voxels.dtype}")
    if voxels.size == 0:
        raise DataError(f"{path}: has an empty axis, no voxels")
    if voxels.ndim != 3:
        raise DataError(f"{path}: should have 3 axes, has shape {voxels.shape}")
    if affine.shape != (4, 4) or not np.isfinite(affine).all() or np.linalg.det(affine) == 0:
        raise DataError(f"{path}: has an affine that does not place the voxels in space")
    voxels = np.ascontiguousarray(voxels, dtype=np.float32)
    bad = voxels.size - int(np.isfinite(voxels).sum())
    if bad:
        raise DataError(f"{path}: has {bad} voxels that are NaN or infinite")
    return MetaTensor(torch.from_numpy(voxels)[None], affine=torch.from_numpy(affine))


# MONAI's readers are not used: its NibabelReader rewrites an affine that disagrees with pixdim, and
# its PydicomReader leaves out slices that it cannot read, with a warning, and closes the gap.
def _read_nifti(path: Path) -> tuple[NDArray[Any], NDArray[np.float64]]:
    image: Any = nibabel.load(path)
    return np.asanyarray(image.dataobj), image.affine


def _read_series(folder: Path) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """(x, y, z) with rescale slope and intercept applied, and the affine to RAS mm."""
    files = _dicom_files(folder)
    if len(files) < 2:
        raise DataError(f"{folder}: has {len(files)} DICOM slices, which is not a volume")
    slices = [pydicom.dcmread(file) for file in files]
    for file, header in zip(files, slices, strict=True):
        for tag in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "PixelData"):
            if header.get(tag) is None:
                raise DataError(f"{file}: has no {tag}, or is cut short before it")
    if len({str(header.get("SeriesInstanceUID")) for header in slices}) > 1:
        raise DataError(f"{folder}: holds several DICOM series; give each a folder of its own")
    frames = np.array([[*h.ImageOrientationPatient, *h.PixelSpacing] for h in slices], dtype=float)
    if not np.allclose(frames, frames[0], atol=1e-3):
        raise DataError(f"{folder}: has slices of different orientation or pixel size")
    along_row, along_column, (row_gap, column_gap) = np.split(frames[0], [3, 6])
    normal = np.cross(along_row, along_column)
    # The place says which slice comes next; InstanceNumber is only a number.
    slices.sort(key=lambda header: float(normal @ np.array(header.ImagePositionPatient, float)))
    places = np.array([header.ImagePositionPatient for header in slices], dtype=float)
    steps = np.diff(places, axis=0)
    usual = np.median(steps, axis=0)
    off = np.linalg.norm(steps - usual, axis=1).max()
    if normal @ usual == 0 or off > EVEN_GAPS * np.linalg.norm(usual):
        gaps = f"{(steps @ normal).min():.3g} to {(steps @ normal).max():.3g} mm apart"
        raise DataError(f"{folder}: slices are {gaps}; one is missing or doubled")
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = along_row * column_gap, along_column * row_gap
    affine[:3, 2], affine[:3, 3] = (places[-1] - places[0]) / (len(places) - 1), places[0]
    affine[:2] *= -1  # DICOM's millimetres run to the left and back
    layers = [apply_rescale(header.pixel_array, header).T.astype(np.float32) for header in slices]
    return np.stack(layers, axis=-1), affine


def _corners(volume: MetaTensor) -> NDArray[np.float64]:
    """(8, 4): the outermost voxel centres in mm, homogeneous."""
    ends = np.array(np.meshgrid(*[(0, n - 1) for n in volume.shape[1:]], [1], indexing="ij"))
    return np.asarray(ends.reshape(4, -1).T @ volume.affine.numpy().T)


def _check_same_grid(path: Path, volume: MetaTensor, other_path: Path, other: MetaTensor) -> None:
    if volume.shape != other.shape:
        raise DataError(
            f"{path}: has shape {tuple(volume.shape[1:])}, "
            f"its image {other_path.name} has {tuple(other.shape[1:])}"
        )
    moved = np.linalg.norm(_corners(volume) - _corners(other), axis=1).max()
    edge = float(other.pixdim.min())
    if moved > SAME_GRID * edge:
        raise DataError(
            f"{path}: has another affine than its image {other_path.name}; "
            f"corners are {moved:.3g} mm apart"
        )


def _overlap(first: MetaTensor, other: MetaTensor) -> bool:
    """Whether the boxes around two volumes, on `other`'s index axes, have a part in common."""
    inside = _corners(first) @ np.linalg.inv(other.affine.numpy()).T
    low, high = inside[:, :3].min(0), inside[:, :3].max(0)
    return bool((high >= -0.5).all() and (low <= np.array(other.shape[1:]) - 0.5).all())


def _onto(volume: MetaTensor, target: MetaTensor) -> Tensor:
    # The resampler fills with zero, so zero is made to mean the minimum.
    least = volume.min().item()
    resample: Any = ResampleToMatch(mode="bilinear", padding_mode="zeros", dtype=np.float64)
    shifted: Tensor = resample(volume - least, img_dst=target).as_tensor()
    return (shifted + least).float()


def save_labels(labels: Tensor | NDArray[Any], like: Case, path: str | Path) -> None:
    """Writes labels (x, y, z), whole numbers, as `.nii.gz` on the grid of `like`'s first image.

    uint8, or int16 where a label is above 255. The header (affine, spacing, sform and qform codes)
    is that of the NIfTI source; for a DICOM series the affine is the one `load_case` gives. The
    file appears complete or not at all; its folder is made if needed.

    Raises ValueError for labels of another shape or kind, DataError when the source cannot be read
    or the file cannot be written.
    """
    path = Path(path)
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if not path.name.endswith(".nii.gz"):
        raise ValueError(f"labels are written as .nii.gz, got {path.name}")
    if array.dtype.kind not in "biu":
        raise ValueError(f"labels should be whole numbers, got {array.dtype}")
    source = _geometry(like.images[0])
    if array.shape != source.shape:
        raise ValueError(f"labels have shape {array.shape}, {like.images[0]} has {source.shape}")
    if array.min() < 0 or array.max() >= 2**15:
        raise ValueError(f"labels should be in 0..32767, are {array.min()}..{array.max()}")
    dtype = np.uint8 if array.max() < 256 else np.int16
    # Passing the header along with its own affine is what keeps both codes and both transforms.
    volume = type(source)(array.astype(dtype), source.affine, source.header)
    volume.set_data_dtype(dtype)
    volume.header["cal_min"] = volume.header["cal_max"] = 0  # the image's display window
    draft = path.with_name(f".{path.name[: -len('.nii.gz')]}.{os.getpid()}.part.nii.gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(volume, draft)
        os.replace(draft, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _geometry(path: Path) -> Any:
    """A NIfTI image on the volume's grid: the file itself, or a blank one for a DICOM series."""
    if path.is_dir():
        volume = _read(path)
        blank = np.zeros(tuple(volume.shape[1:]), np.uint8)
        affine = volume.affine.numpy()
        image: Any = nibabel.Nifti1Image(blank, affine)  # type: ignore[no-untyped-call]
        image.set_sform(image.affine, code=1)  # 1: the scanner's own space
        image.header.set_xyzt_units("mm")
        return image
    try:
        return nibabel.load(path)
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({_one_line(error)})") from error


def _one_line(problem: object) -> str:
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text if len(text) <= 160 else text[:157] + "..."

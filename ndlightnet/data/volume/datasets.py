"""Folders of volumes, and which files form a case: the Medical Segmentation Decathlon's layout, nnU-Net's layout, and
plain folders to predict on. No volume is opened here."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ndlightnet.data.errors import DataError, one_line
from ndlightnet.data.folders import Notes, files_below, report_skipped
from ndlightnet.data.volume.dicom_tree import Series, find_series
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.formats import ENDINGS, FILES, FOLDER, PICTURES, RESULTS, companions, reader_of, stem
from ndlightnet.data.volume.image_planes import has_colours
from ndlightnet.data.volume.nifti import is_header

WANTED = f"{', '.join(ENDINGS)} or a {FOLDER.name}"
ALL_ENDINGS = (*ENDINGS, *PICTURES)
NUMBERED = re.compile(r"(.+)_(\d{4})")  # nnU-Net's CASE_0000: the channel after the case


@dataclass(frozen=True)
class Dataset:
    """A folder with a `dataset.json`. `labels[n]` names the label number n and `channels[c]` the channel c of every
    case."""

    folder: Path
    labels: tuple[str, ...]
    channels: tuple[str, ...]
    training: tuple[Case, ...]
    test: tuple[Case, ...]


def read_dataset(folder: str | Path, notes: Notes = None) -> Dataset:
    """Reads `dataset.json`, the decathlon's ("modality") or nnU-Net's ("channel_names"), and checks that every file
    exists (the files are not opened). In the decathlon's layout a case has a file for each modality, or one file with
    all of them on its fourth axis; nnU-Net 1 lists CASE.nii.gz for CASE_0000.nii.gz, CASE_0001.nii.gz, .... In
    nnU-Net's the images are all files of its folders that end in "file_ending", in lower or upper case; a line on files
    that are left out is added to `notes`.

    Raises DataError for a missing folder or file, a `dataset.json` that cannot be read or is in neither format, label
    or channel numbers with gaps, labels that are regions, a training case without a label, and a folder without any
    case.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    file = folder / "dataset.json"
    try:
        dataset = _read(file, json.loads(file.read_bytes()), notes)
    except DataError:
        raise
    except FileNotFoundError as error:
        layouts = "the layout of nnU-Net or of the Medical Segmentation Decathlon"
        raise DataError(f"{file}: no such file, expected a folder in {layouts}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # Brackets may be nested too deeply for the parser.
        raise DataError(f"{file}: cannot be read as JSON ({one_line(error)})") from error
    if not dataset.training and not dataset.test:
        raise DataError(f"{file}: lists no case for training or test")
    for case in dataset.training:
        if case.label is None:
            raise DataError(f"{file}: training case {case.name!r} has no label")
    return dataset


def _read(file: Path, listing: Any, notes: Notes) -> Dataset:
    if not isinstance(listing, dict):
        raise DataError(f"{file}: should hold a JSON object")
    if "channel_names" in listing:
        return _read_nnunet(file, listing, notes)
    if "modality" in listing:
        return _read_decathlon(file, listing)
    raise DataError(f"{file}: has neither 'channel_names' (nnU-Net) nor 'modality' (decathlon)")


# ------------------------------------------------------------------------------------- decathlon


def _read_decathlon(file: Path, listing: dict[str, Any]) -> Dataset:
    labels = _numbered(file, listing, "labels")
    channels = _numbered(file, listing, "modality")
    training, test = (_listed(file, listing, key, len(channels)) for key in ("training", "test"))
    return Dataset(file.parent, labels, channels, training, test)


def _numbered(file: Path, listing: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return names by number: {"0": "CT", "1": "PET"} -> ("CT", "PET")."""
    names = listing.get(key)
    if not isinstance(names, dict) or not names:
        raise DataError(f'{file}: {key!r} should map numbers to names, such as {{"0": "..."}}')
    # int refuses texts of more than 4,300 digits
    return _in_order(file, key, [(int(n) if n.isdecimal() and len(n) < 10 else n, names[n]) for n in names])


def _in_order(file: Path, key: str, numbered: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
    """Return the names of pairs (number, name) by number."""
    numbers = [number for number, _ in numbered]
    if any(type(number) is not int for number in numbers) or sorted(numbers) != [*range(len(numbers))]:
        raise DataError(f"{file}: {key!r} should number from 0 without gaps, has {one_line(numbers)}")
    return tuple(str(name) for _, name in sorted(numbered))


def _listed(file: Path, listing: dict[str, Any], key: str, channels: int) -> tuple[Case, ...]:
    entries = listing.get(key, [])
    if not isinstance(entries, list):
        raise DataError(f"{file}: {key!r} should be a list")
    listed: list[Path] = []
    cases: list[tuple[tuple[Path, ...], Path | None]] = []
    for entry in entries:
        fields = entry if isinstance(entry, dict) else {"image": entry}
        images, label = fields.get("image"), fields.get("label")
        texts: list[Any] = list(images) if isinstance(images, list) else [images]
        texts += [label] if label else []
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{file}: {key!r} has an entry without image files: {one_line(entry)}")
        paths = [file.parent / text for text in texts]
        label_path = paths.pop() if label else None
        if len(paths) not in (1, channels):
            expected = f"{channels} image files, one for each modality (or one with all)"
            raise DataError(f"{file}: entry {one_line(entry)} should list {expected}")
        listed.append(paths[0])
        paths = _of_nnunet_1(paths[0], channels) if len(paths) == 1 else paths
        for path in [*paths, label_path]:
            if path is not None:
                _check_there(path, file)
        cases.append((tuple(paths), label_path))
    names = _names(file.parent, listed)
    return tuple(Case(name, *files) for name, files in zip(names, cases, strict=True))


def _of_nnunet_1(path: Path, channels: int) -> list[Path]:
    """Return CASE_0000.nii.gz, CASE_0001.nii.gz, ... if they are there and CASE.nii.gz is not."""
    name, ending = stem(path), path.name[len(stem(path)) :]
    files = [path.with_name(f"{name}_{channel:04}{ending}") for channel in range(channels + 1)]
    if os.path.exists(path) or not os.path.exists(files[0]):
        return [path]
    if os.path.exists(files[channels]):
        raise _too_many(files[channels], channels, channels)
    return files[:channels]


def _too_many(path: Path, channel: int, channels: int) -> DataError:
    return DataError(f"{path}: is channel {channel}, expected 0..{channels - 1}")


def _check_there(path: Path, file: Path) -> None:
    if not os.path.exists(path):  # Path.exists raises where a name is too long
        raise DataError(f"{path}: no such file, though {file.name} asks for it")


# --------------------------------------------------------------------------------------- nnU-Net


def _read_nnunet(file: Path, listing: dict[str, Any], notes: Notes) -> Dataset:
    channels = _numbered(file, listing, "channel_names")
    labels = _named_numbers(file, listing.get("labels"))
    ending = listing.get("file_ending")
    if str(ending).lower() not in ALL_ENDINGS:
        expected = ", ".join(ALL_ENDINGS)
        raise DataError(f"{file}: 'file_ending' is {one_line(repr(ending))}, expected one of {expected}")
    training, test = (_split(file, kind, str(ending).lower(), len(channels), notes) for kind in ("Tr", "Ts"))
    return Dataset(file.parent, labels, channels, training, test)


def _named_numbers(file: Path, numbers: Any) -> tuple[str, ...]:
    """Return names by number: {"background": 0, "liver": 1} -> ("background", "liver")."""
    if not isinstance(numbers, dict) or not numbers:
        raise DataError(f"{file}: 'labels' should map names to numbers, such as {{'liver': 1}}")
    for name, number in numbers.items():
        if isinstance(number, list):
            region = f"{name!r}: {one_line(number)}"
            raise DataError(f"{file}: 'labels' has the region {region}; one number a label is expected")
        if name == "ignore":
            raise DataError(f"{file}: 'labels' has 'ignore'; partly labelled volumes cannot be used")
    return _in_order(file, "labels", [(number, name) for name, number in numbers.items()])


def _split(file: Path, kind: str, ending: str, channels: int, notes: Notes) -> tuple[Case, ...]:
    """List the cases of images{kind} and labels{kind}; labelsTs may be missing or incomplete."""
    images, labels = (file.parent / f"{what}{kind}" for what in ("images", "labels"))
    if not images.is_dir():
        return ()
    files = _volumes_in(images, (ending,))
    if ending in PICTURES and all(stem(path).endswith("_0000") for path in files):
        channels = 1  # one file of several colours, such as RGB
    report_skipped({*images.iterdir()} - _read_of(images, files), images, f"CASE_0000{ending}", notes)
    label_files = _volumes_in(labels, ALL_ENDINGS) if labels.is_dir() else []
    labelled = {_in_small(path): path for path in label_files}
    for path in files:
        if not NUMBERED.fullmatch(stem(path)):
            raise DataError(f"{path}: should be called CASE_0000{ending}, CASE_0001{ending}, ...")
    cases = []
    for name, channel_files in _joined(files, channels).items():
        for path in channel_files:
            _check_there(path, file)
        label = labelled.get(labels / name.name, labels / name.name)
        if kind == "Tr":
            _check_there(label, file)
        cases.append(Case(stem(name), channel_files, label if label.exists() else None))
    return tuple(cases)


def _joined(files: Sequence[Path], channels: int) -> dict[Path, tuple[Path, ...]]:
    """Group CASE_0000.nii, CASE_0001.nii, ... to {CASE.nii: its `channels` files, there or not}."""
    cases = {}
    by_name = {_in_small(path): path for path in files}
    if len(by_name) < len(files):
        twin = next(path for path in files if by_name[_in_small(path)] != path)
        raise DataError(f"{twin}: {by_name[_in_small(twin)].name} is there as well; remove one")
    for small, path in by_name.items():
        case, channel = _case_of(small), int(stem(path)[-4:])
        if channel >= channels:
            raise _too_many(path, channel, channels)
        ending = small.name[len(stem(small)) :]
        expected = [path.with_name(f"{stem(case)}_{c:04}{ending}") for c in range(channels)]
        cases[case] = tuple(by_name.get(one, one) for one in expected)
    return cases


def _in_small(path: Path) -> Path:
    """Put the ending in lower case: CASE.NII.GZ -> CASE.nii.gz."""
    name = stem(path)
    return path.with_name(name + path.name[len(name) :].lower())


def _case_of(path: Path) -> Path:
    """Drop the channel: CASE_0001.nii -> CASE.nii; others stay. The ending is in lower case."""
    path, match = _in_small(path), NUMBERED.fullmatch(stem(path))
    return path if match is None else path.with_name(match[1] + path.name[len(match[0]) :])


# ---------------------------------------------------------------------------------------- inputs


def find_inputs(
    path: str | Path, channels: int = 1, notes: Notes = None, modality: str | None = None, pictures: bool = False
) -> list[Case]:
    """List the cases to predict on, from a volume's file (.nii.gz, .nii, .hdr beside its .img, .nrrd, .mha, .mhd), a
    folder with a dataset.json (its test cases), or a folder of such files and of DICOM series at any depth, sorted by
    name. Left out are files below a folder that holds such files itself, and folders "derivatives", in which BIDS has
    masks and other results. modality: take only series of this modality (CT, MR, PT, ...). pictures: PNG, TIFF and JPEG
    files count as well. If any of them has colours, each file is a case, whatever its number: a camera's IMG_0000.jpg
    and IMG_0001.jpg are two.

    Files CASE_0000, CASE_0001, ... are one case for a network of several channels; for one channel a `_0000` that every
    file has is left out of the names. Every DICOM series is a case, named as in `find_series`. A line on other DICOM
    objects and one on other files are added to `notes`. Nothing is opened beyond the headers of DICOM files and
    pictures, so a broken volume is listed and raises when it is loaded. Raises DataError when there is nothing to
    predict on.
    """
    path, endings = Path(path), ALL_ENDINGS if pictures else ENDINGS
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if (path / "dataset.json").is_file():
        cases = read_dataset(path, notes).test
        if not cases:
            raise DataError(f"{path}: dataset.json lists no test case")
        return list(cases)
    series: list[Series] = []
    note = ""
    try:
        if path.is_file():
            files, home = [path], path.parent
            if not path.name.lower().endswith(endings):
                if path.name.lower().endswith((reader := reader_of(path)).voxels):
                    headers = " or ".join(path.stem + ending for ending in reader.endings)
                    raise DataError(f"{path}: is read with its header, expected {headers}")
                more = "" if pictures else f" ({', '.join(PICTURES)} with data.patch of 2 sizes)"
                raise DataError(f"{path}: is not a {FILES}{more}; for DICOM give the folder of the series")
        else:
            named, home = _named(map(Path, files_below(path, RESULTS, _pass_over)), endings), path
            files = [file for file in named if _is_there(file)]
            homes = {file.parent for file in files}
            # what lies below a folder of volumes are masks or predictions of them
            files = [file for file in files if not homes & {*file.parent.parents}]
            series, note, slices = find_series(path, modality)
            unread = {*named} - {*files}
            entries = {*path.iterdir()} - {folder for file in unread for folder in file.parents}
            report_skipped((entries | unread) - _read_of(path, files, slices), path, WANTED, notes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not files and not series:
        raise DataError(note or f"{path}: holds no {FILES} and no {FOLDER.name}")
    if note and notes is not None:
        notes.append(note)
    plain = {s.folder.resolve() if s.folder == path else s.folder: s for s in series if not s.name}
    first = [file for file in files if stem(file).endswith("_0000")]
    if pictures and any(map(has_colours, files)):
        channels = 1
    if channels == 1:
        numbered = first if len(first) == len(files) else []
    else:
        begun = {_case_of(file) for file in first}
        numbered = [f for f in files if NUMBERED.fullmatch(stem(f)) and _case_of(f) in begun]
    volumes: list[tuple[Path, tuple[Path, ...]]]
    joined = {*numbered}
    volumes = [(path, (path,)) for path in [*plain, *files] if path not in joined]
    volumes = sorted([*volumes, *_joined(numbered, channels).items()])
    names = _names(home, [path for path, _ in volumes])
    inputs = [
        Case(name, images, None, tuple(plain[place].files) if place in plain else ())
        for name, (place, images) in zip(names, volumes, strict=True)
    ]
    inputs += [Case(s.name, (s.folder,), None, tuple(s.files)) for s in series if s.name]
    inputs.sort(key=lambda case: case.name)
    for one, after in pairwise(inputs):
        if one.name == after.name:
            raise _same_name(after.images[0], after.name)
    return inputs


def _pass_over(_: OSError) -> None:
    """Do nothing for a folder that cannot be opened: `find_series` counts it."""


def _volumes_in(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    return [path for path in _named(folder.iterdir(), endings) if _is_there(path)]


def _is_there(path: Path) -> bool:
    """Return whether a volume's file is there: a link may lead nowhere, a .hdr be another's."""
    pair = path.name.lower().endswith((".hdr", ".hdr.gz"))
    return path.is_file() and (not pair or is_header(path))


def _named(paths: Iterable[Path], endings: tuple[str, ...]) -> list[Path]:
    # Hidden files are left-overs: "._ct.nii.gz" of macOS archives, unfinished writes.
    return sorted(p for p in paths if p.name.lower().endswith(endings) and not p.name.startswith("."))


def _read_of(folder: Path, files: Sequence[Path], slices: Sequence[Path] = ()) -> set[Path]:
    """Return the entries of a folder that these volumes are read from or that hold them, and those that are or hold
    DICOM files, `slices`: a separate note tells which of them are left out."""
    inside = {parent for path in {file.parent for file in (*files, *slices)} for parent in (path, *path.parents)}
    voxels = {file for path in files for file in companions(path)}
    return {*files, *slices, *inside, *voxels, folder / "DICOMDIR"}


def _names(folder: Path, paths: Sequence[Path]) -> list[str]:
    """Return a name per file: its stem, with the folders before it where stems repeat (a/ct, b/ct), and with its ending
    where only that differs (ct.nii, ct.nrrd)."""
    names = [stem(path) for path in paths]
    if len(set(names)) < len(names):
        places = [Path(os.path.relpath(path, folder)).parts or (path.name,) for path in paths]
        names = ["_".join([*folders[:-1], stem(Path(folders[-1]))]) for folders in places]
        if len(set(names)) < len(set(places)):
            full = ["_".join(folders) for folders in places]
            count = Counter(names)
            names = [w if count[n] > 1 else n for n, w in zip(names, full, strict=True)]
    taken: set[str] = set()
    for path, name in zip(paths, names, strict=True):
        if name in taken:
            raise _same_name(path, name)
        taken.add(name)
    return names


def _same_name(path: Path, name: str) -> DataError:
    return DataError(f"{path}: another case is called {name!r} as well; rename one")

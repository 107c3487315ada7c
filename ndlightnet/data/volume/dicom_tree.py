"""The DICOM series below a folder, at any depth and in any mixture, as archives export them."""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import files_below
from ndlightnet.data.volume.dicom_headers import (
    SAME_PLACE,
    SCOUTS,
    VOLUME_TAGS,
    is_dicom,
    is_mosaic,
    kind_of,
    place_of,
    read_header,
    text_of,
)
from ndlightnet.data.volume.formats import ENDINGS, RESULTS, stem

MANY = 500  # files; reading the headers of more takes seconds, which a progress bar shows
KEPT = 40  # letters of each part of a name
ONE_SERIES = ("SeriesInstanceUID", "StudyInstanceUID", "PatientID", "FrameOfReferenceUID")
# The only tags of a header that are held here: there may be tens of thousands of headers.
TAGS = (
    *ONE_SERIES,
    *VOLUME_TAGS,
    "SOPClassUID",
    "SOPInstanceUID",
    "PatientName",
    "Modality",
    "SeriesNumber",
    "SeriesDescription",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "Rows",
)

Differences = tuple[tuple[str, str], ...]  # tags and their values


@dataclass
class Series:
    """Images of one SeriesInstanceUID. folder: the deepest folder that holds them all. volume: what tells these images
    from the other volumes of the series, such as (("EchoNumbers", "2"),). name: "" if the name of the folder is
    enough."""

    folder: Path
    headers: list[Any] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    volume: Differences = ()
    name: str = ""

    def text(self, tag: str) -> str:
        return text_of(self.headers[0], tag) if self.headers else ""

    def texts(self, tag: str) -> set[str]:
        return {text_of(header, tag) for header in self.headers}

    @property
    def scout(self) -> bool:
        """Whether these are scout images: slices in several planes, described as a localizer."""
        planes = len(self.texts("ImageOrientationPatient"))
        return planes > 1 and SCOUTS.search(self.text("SeriesDescription")) is not None


def find_series(root: Path, modality: str | None = None) -> tuple[list[Series], str, list[Path]]:
    """Return every series of images below a folder, in order of their folders, or those of one modality (CT, MR, PT,
    ...); a line on other DICOM objects, "" if there are none; and all DICOM files. Files with the ending of another
    format are not opened. A series that holds several volumes (echoes, acquisitions, phases, times) is returned as one
    for each.

    A series that is alone in the folder, or in a direct subfolder, is named after that folder; any other by patient,
    modality, SeriesNumber and what differs between the volumes and, if that is not unique, by a hash of its UID and
    folder. A file whose header cannot be read is added to every series of its folder, so that they are refused with its
    name: it may be a slice of any.
    """
    collected: list[Series] = []
    begun: dict[tuple[str, ...], list[Series]] = {}  # the same, by what ONE_SERIES names
    skipped: Counter[str] = Counter()
    folders = _headers(root, skipped)
    for folder, headers in folders.items():
        _sort_out(folder, headers, collected, begun, skipped)
    collected = [volume for series in collected for volume in _volumes(series)]
    _name(collected, root)
    chosen = []
    for series in collected:
        its_modality = series.text("Modality").upper()
        if modality is None or not series.headers or its_modality == modality.upper():
            chosen.append(series)
        else:
            skipped[f"{its_modality or 'unknown'} series"] += 1
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(skipped.items()))
    images = "images" if modality is None else f"{modality.upper()} images"
    note = f"{root}: DICOM objects are left out: {listed} (expected series of {images})"
    return chosen, note if skipped else "", [file for some in folders.values() for file in some]


def _headers(root: Path, skipped: Counter[str]) -> dict[Path, dict[Path, Any]]:
    """Return the DICOM files and their headers by folder; None for a header that is unreadable."""
    from rich.progress import track

    def count_closed(_: OSError) -> None:
        skipped["folder that cannot be opened"] += 1

    below = map(Path, files_below(root, RESULTS, count_closed))
    files = [file for file in below if not file.name.lower().endswith(ENDINGS)]
    headers: dict[Path, dict[Path, Any]] = {}
    few = len(files) < MANY
    for file in track(files, "reading DICOM headers", transient=True, disable=few):
        try:
            dicom, header = is_dicom(file), None
        except OSError:  # no right to open it: the ending decides
            dicom = file.suffix.lower() == ".dcm"
        if dicom:
            with suppress(DataError):
                header = read_header(file, TAGS)
            headers.setdefault(file.parent, {})[file] = header
    return headers


def _sort_out(
    folder: Path,
    headers: dict[Path, Any],
    collected: list[Series],
    begun: dict[tuple[str, ...], list[Series]],
    skipped: Counter[str],
) -> None:
    """Add the series of a folder to `collected` and `begun`, and the counts of its other objects to `skipped`."""
    by_uid: dict[str, Series] = {}
    lost = []
    for file, header in headers.items():
        kind = "" if header is None else kind_of(header)
        if kind:
            skipped[kind] += 1
        elif header is None or "SeriesInstanceUID" not in header:
            lost.append(file)
        else:
            series = by_uid.setdefault(text_of(header, "SeriesInstanceUID"), Series(folder))
            series.headers.append(header)
            series.files.append(file)
    images = [one for one in by_uid.values() if not one.scout]
    skipped.update(["localizer"] * sum(len(one.files) for one in by_uid.values() if one.scout))
    for series in images or ([Series(folder)] if lost else []):
        series.files += lost
        _join(collected, begun, series)


def _join(collected: list[Series], begun: dict[tuple[str, ...], list[Series]], series: Series) -> None:
    """Add a series, or the rest of one: some archives put a fixed number of files into a folder and continue in the
    next. A copy, with the same objects, is a separate series."""
    same = begun.setdefault(tuple(map(series.text, ONE_SERIES)), [])
    for one in same if series.text(ONE_SERIES[0]) else ():
        if not one.texts("SOPInstanceUID") & series.texts("SOPInstanceUID"):
            one.folder = Path(os.path.commonpath([one.folder, series.folder]))
            one.headers += series.headers
            one.files += series.files
            return
    same.append(series)
    collected.append(series)


def _volumes(series: Series) -> list[Series]:
    """Return the volumes of a series by the tags that tell apart the images of one place: echoes, acquisitions, phases,
    times. Each has images at more than half of the places: a slice that is there twice is no volume, and tags that
    differ from slice to slice tell none."""
    if not series.headers or any(map(is_mosaic, series.headers)):
        return [series]
    try:
        exact = [place_of(header) for header in series.headers]
    except DataError:  # which is raised again when the series is opened
        return [series]
    places = _numbered(exact)
    if len({*places}) == len(places):
        return [series]
    # an image may be there twice, and a copy may have lost tags
    originals: dict[str, Any] = {}
    headers = [
        originals.setdefault(text_of(header, "SOPInstanceUID") or header.filename, header) for header in series.headers
    ]
    volumes: list[Differences] = [()] * len(places)
    for tag in VOLUME_TAGS:
        finer = [(*volume, (tag, text_of(header, tag))) for volume, header in zip(volumes, headers, strict=True)]
        images = {*zip(finer, places, strict=True)}
        fewest = min(Counter(volume for volume, _ in images).values())
        apart = len(images) > len({*zip(volumes, places, strict=True)})
        if apart and 2 * fewest > len({*places}):
            volumes = finer
    split: dict[Differences, Series] = {}
    for volume, header in zip(volumes, series.headers, strict=True):
        one = split.setdefault(volume, Series(series.folder, volume=volume))
        one.headers.append(header)
        one.files.append(Path(header.filename))
    lost = {*series.files}.difference(*(one.files for one in split.values()))
    for one in split.values():
        one.files += sorted(lost)
    return [*split.values()]


def _numbered(places: Sequence[NDArray[np.float64]]) -> list[int]:
    """Return a number for each place (3,): the same where they are less than SAME_PLACE apart along the axis on which
    they spread most."""
    along = np.stack(places)[:, np.ptp(places, axis=0).argmax()]
    order = along.argsort(kind="stable")
    numbers, number = [0] * len(places), 0
    for before, after in pairwise(order.tolist()):
        number += int(np.linalg.norm(places[after] - places[before]) >= SAME_PLACE)
        numbers[after] = number
    return numbers


def _name(collected: Sequence[Series], root: Path) -> None:
    together = Counter(series.folder for series in collected)
    taken = Counter(stem(entry).casefold() for entry in [*root.iterdir(), root.resolve()])
    named = [
        series
        for series in collected
        if together[series.folder] > 1 or root not in (series.folder, series.folder.parent)
    ]
    for series in named:
        patient = series.text("PatientID") or series.text("PatientName") or "unknown"
        words = [patient, series.text("Modality"), series.text("SeriesNumber")]
        if not series.headers:
            words = list(series.folder.relative_to(root).parts)
        differences = [f"{tag}-{_safe(value)}" for tag, value in series.volume]
        series.name = "_".join([*map(_safe, filter(None, words)), *differences])
        taken[series.name.casefold()] += 1
    for series in named:
        if taken[series.name.casefold()] > 1:
            place = os.path.relpath(series.folder, root)
            source = " ".join([series.text("SeriesInstanceUID"), place, *map(str, series.volume)])
            series.name += f"_{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def _safe(text: str) -> str:
    """Return text as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text)[:KEPT].strip(".-_") or "unknown"

"""Predict on a folder as it comes: 24 volumes that can be predicted and 12 that cannot, each in its own way: a bad one
costs a line, no more. (What a reader says of each fault: tests/data/volume.)"""

import csv
import html
import os
import re
from pathlib import Path
from urllib.parse import unquote

import matplotlib.image
import nibabel
import numpy as np
import pytest

from ndlightnet.data.errors import file_name, printable
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume
from tests.data.volume.files import (
    AFFINE,
    HU,
    broken_image,
    patched,
    random_image,
    write,
    write_itk,
    write_object,
    write_series,
)
from tests.training.segmentation.conftest import units

LONGEST = 255  # bytes of a name, on the file systems of Linux and macOS
AFFINES = (AFFINE, AFFINE[:, [2, 0, 1, 3]], np.diag([1.0, 1, 2, 1]), np.diag([-1.0, 1, -3, 1]))
# what a program may take for something else: TeX, HTML, a formula, an option, a format, a URL; and long names
NAMES = (
    *(r"b$\frac$.nii.gz", "$.nii.gz", "<b>&amp;.nii.gz", "=1+1.nii.gz", "-o.nii.gz", "%s%20.nii.gz", "a b'c\".nii.gz"),
    *("\N{HIRAGANA LETTER A}.nii.gz", "two\nlines\x1b[31m.nii.gz", "_hidden.nii.gz", "UPPER.NII.GZ", "#?.nii"),
    *(os.fsdecode(b"caf\xe9.nii.gz"), os.fsdecode(b"caf\xe8.nii"), "n" * 235 + ".nii.gz", "n" * 247 + ".nii.gz"),
)


def good_inputs(folder: Path) -> list[Path]:
    """24 sources of cases, each called as its case will be."""
    folder.mkdir()
    sources = []
    for number, name in enumerate(NAMES):  # nibabel would not write them all
        path = write(
            folder / ("x.nii.gz" if name.lower().endswith("gz") else "x.nii"),
            random_image(seed=number),
            AFFINES[number % 4],
        )
        sources.append(path.rename(folder / name))
    for ending in ("nrrd", "mha", "mhd"):
        sources.append(write_itk(folder / f"itk_{ending}.{ending}", random_image(), packed=ending == "nrrd"))
    sources.append(write(folder / "short.nii", random_image().astype(np.int16)))
    sources.append(write_series(folder / "series_1", HU, 1.0))
    study = folder / "archive" / "P7" / "study"  # as an archive exports them
    write_object(study / "structures.dcm", "RTSTRUCT")
    for number, gap in enumerate((2.5, 4.0, 5.0), 1):
        tags = {"PatientID": "P7", "SeriesNumber": number}
        sources.append(write_series(study / f"P7_CT_{number}", HU, gap, **tags))
    return sources


def bad_inputs(folder: Path) -> list[Path]:
    """12 sources that cannot be predicted."""
    sources = [
        folder / ("e" * (LONGEST - 7) + ".nii.gz"),
        folder / os.fsdecode(b"empty \xff.nii.gz"),
        folder / "claims.nrrd",
    ]
    sources[0].touch()
    sources[1].touch()
    sources[2].write_text("NRRD0004\ntype: float\ndimension: 3\nsizes: 30000 30000 30000\nencoding: raw\n\n")
    for fault in ("truncated", "nan", "5-D", "flat affine"):
        sources.append(write(folder / f"bad {fault}.nii.gz", random_image()))
        broken_image(sources[-1], fault)
    sources.append(write(folder / "claims.nii", random_image()))
    sources[-1].write_bytes(patched(sources[-1].read_bytes(), 42, np.full(3, 30_000, "<i2").tobytes()))
    sources.append(write(folder / "channels.nii.gz", random_image((9, 7, 11, 2))))
    sources.append(write_series(folder / "rows", HU, Rows=65_535, Columns=65_535))
    sources += [write_series(folder / name, HU) for name in ("gap", "no pixels")]
    sorted(sources[-2].iterdir())[5].unlink()
    for file in sources[-1].iterdir():
        file.write_bytes(file.read_bytes()[:-200])
    return sources


@pytest.mark.slow
def test_a_folder_of_good_and_bad_inputs(predict, network, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out" / "predictions"
    good, bad = good_inputs(folder), bad_inputs(folder)
    assert (len(set(good)), len(set(bad))) == (24, 12)
    (folder / "dangling.nii.gz").symlink_to("/nowhere")
    (folder / "folder.nii.gz").mkdir()
    (folder / "picture.png").write_bytes(b"png")
    network(lambda x: x)  # labels that tell the volumes apart: where a voxel is above 100
    done = predict(folder, units(mean=100))
    assert done.status == 1 and "Traceback" not in done.err

    errors = list(done.errors)  # a DICOM folder is named by itself or by one of its slices
    for path in sorted(bad, key=lambda path: -len(path.name)):
        begin = f"error: {printable(path)}"
        (line,) = [line for line in errors if line.startswith((f"{begin}: ", f"{begin}/"))]
        errors.remove(line)
    assert errors == []
    beside = "3 entries are left out: dangling.nii.gz, folder.nii.gz, picture.png"
    assert done.notes[0].startswith(f"note: {folder}: {beside} (expected .nii.gz, ")
    dicom = f"note: {folder}: DICOM objects are left out: 1 RTSTRUCT (expected series of images)"
    assert [line for line in done.notes if "left out" in line] == [done.notes[0], dicom]

    with (out / "cases.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    cases = [line["case"] for line in lines]
    assert "'=1+1" in cases and "'-o" in cases  # no formulas
    cases = [case.removeprefix("'") for case in cases]
    assert len(set(cases)) == 24 and all(case.isprintable() for case in cases)
    files = [f"{case}.{end}" for case in cases for end in ("nii.gz", "png")]
    assert sorted(os.listdir(out)) == sorted([*files, "cases.csv", "index.html"])
    for case, line in zip(cases, lines, strict=True):
        labels = nibabel.load(out / f"{case}.nii.gz")
        assert labels.get_data_dtype() == np.uint8 and (line["class"], line["dice"]) == ("cube", "")
        ml = np.asarray(labels.dataobj).sum() * abs(np.linalg.det(labels.affine)) / 1000
        assert float(line["volume_ml"]) == pytest.approx(ml, rel=1e-4, abs=1e-6)
    for path in good:
        name = path.name if path.is_dir() else re.sub(r"(?i)\.(nii(\.gz)?|nrrd|mh[ad])$", "", path.name)
        case = name if name in cases else file_name(name)
        source = Volume.read(Case("", (path,), None)).image
        labels = nibabel.load(out / f"{case}.nii.gz")
        np.testing.assert_allclose(labels.affine, source.affine, atol=1e-4)
        np.testing.assert_array_equal(labels.dataobj, source[0].numpy() > 100)
        assert min(matplotlib.image.imread(out / f"{case}.png").shape[:2]) > 100

    page = (out / "index.html").read_text(encoding="utf-8")
    pictures = [unquote(html.unescape(source)) for source in re.findall('src="([^"]*)"', page)]
    assert sorted(pictures) == sorted(f"{case}.png" for case in cases)
    assert page.count("<li>") == 12

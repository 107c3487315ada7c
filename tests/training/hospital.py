"""A folder as it comes: 35 volumes that can be predicted and 25 that cannot, each in its own way.

Every entry is called as its case's source is. The names are part of what a folder can do.
"""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import SimpleITK as sitk

from tests.data.volume.files import AFFINE, HU, broken_image, random_image, write, write_object, write_series

LONGEST = 255  # bytes of a name, on the file systems of Linux and macOS
AFFINES = (AFFINE, AFFINE[:, [2, 0, 1, 3]], np.diag([1.0, 1, 2, 1]), np.diag([-1.0, 1, -3, 1]))
# what a program may take for something else: TeX, HTML, a formula, an option, a format, a URL
NAMES = (
    r"b$\frac$.nii.gz",
    "$.nii.gz",
    "<b>&amp;.nii.gz",
    "=1+1.nii.gz",
    "-o.nii.gz",
    "%s%20.nii.gz",
    "a b'c\".nii.gz",
    "\N{HIRAGANA LETTER A}.nii.gz",
    "two\nlines\x1b[31m.nii.gz",
    "_hidden.nii.gz",
    os.fsdecode(b"caf\xe9.nii.gz"),
    os.fsdecode(b"caf\xe8.nii"),
    "UPPER.NII.GZ",
    "#?.nii",
)


def good_inputs(folder: Path) -> list[Path]:
    """35 sources of cases."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"plain{n}.nii.gz" for n in range(8)]
    for length in range(242, LONGEST + 1, 4):  # what is written beside them has longer names
        names.append("n" * (length - 7) + ".nii.gz")
    sources = []
    for number, name in enumerate([*names, *NAMES]):
        image = nibabel.Nifti1Image(random_image(seed=number), AFFINES[number % 4])
        compress = gzip.compress if name.lower().endswith(".gz") else bytes
        (folder / name).write_bytes(compress(image.to_bytes()))
        sources.append(folder / name)
    for ending in ("nrrd", "mha", "mhd"):
        volume = sitk.GetImageFromArray(random_image((7, 8, 9)))
        volume.SetSpacing((0.5, 1.25, 3.0))
        sources.append(folder / f"itk_{ending}.{ending}")
        sitk.WriteImage(volume, str(sources[-1]), useCompression=ending == "nrrd")
    voxels = random_image()
    voxels[0, :2, 3] = np.nan
    sources.append(write(folder / "some_nan.nii", voxels))
    sources.append(write(folder / "short.nii", random_image().astype(np.int16)))
    sources.append(write_series(folder / "series_1", HU, 1.0))
    study = folder / "archive" / "P7" / "study"  # as an archive exports them
    write_object(study / "structures.dcm", "RTSTRUCT")
    for number, gap in enumerate((2.5, 4.0, 5.0), 1):  # called as their cases will be
        tags = {"PatientID": "P7", "SeriesNumber": number}
        sources.append(write_series(study / f"P7_CT_{number}", HU, gap, **tags))
    return sources


def raw_header(path: Path, change: Callable[[np.ndarray], object]) -> Path:
    """A NIfTI file whose header is changed as nibabel would not."""
    data = bytearray(nibabel.Nifti1Image(random_image(), AFFINE).to_bytes())
    header = np.frombuffer(data, nibabel.Nifti1Header.template_dtype, 1)
    change(header[0])
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def claim(*shape: int) -> Callable[[np.ndarray], None]:
    def change(header: np.ndarray) -> None:
        header["dim"][: len(shape) + 1] = len(shape), *shape

    return change


def broken_inputs(folder: Path) -> list[Path]:
    """25 sources that cannot be predicted."""
    damages = (
        "truncated",
        "truncated inside gzip",
        "corrupt",
        "one bit",
        "not NIfTI",
        "text",
        "nan",
        "infinite",
        "5-D",
        "1-D",
        "empty axis",
        "colour",
        "flat affine",
    )
    sources = []
    for damage in damages:
        path = write(folder / f"bad {damage}.nii.gz", random_image())
        broken_image(path, damage)
        sources.append(path)
    for name in ("e" * (LONGEST - 7) + ".nii.gz", os.fsdecode(b"empty \xff.nii.gz")):
        (folder / name).write_bytes(b"")
        sources.append(folder / name)
    sources.append(raw_header(folder / "claims more.nii", claim(30_000, 30_000, 30_000)))
    sources.append(raw_header(folder / "claims much.nii.gz", claim(30_000, 30_000, 30_000)))
    # a size that a machine may promise and then not have
    sources.append(raw_header(folder / "claims less.nii.gz", claim(1500, 1500, 1500)))
    sources.append(raw_header(folder / "negative.nii.gz", claim(9, -7, 11)))
    sources.append(raw_header(folder / "type.nii", lambda h: h.__setitem__("datatype", 9999)))
    sources.append(write(folder / "channels.nii.gz", random_image((9, 7, 11, 2))))
    nrrd = folder / "claims.nrrd"
    nrrd.write_text("NRRD0004\ntype: float\ndimension: 3\nsizes: 30000 30000 30000\nencoding: raw\n\n")
    sources.append(nrrd)
    sources.append(write_series(folder / "rows", HU, Rows=65_535, Columns=65_535))
    gap = write_series(folder / "gap", HU)
    sorted(gap.iterdir())[5].unlink()
    sources.append(gap)
    sources.append(write_series(folder / "no pixels", HU))
    for file in sources[-1].iterdir():
        file.write_bytes(file.read_bytes()[:-200])
    return sources

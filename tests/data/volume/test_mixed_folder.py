"""A folder of good and bad volumes of all formats: the good ones as ITK reads them, one line for each bad one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK as sitk
from nibabel.spm2analyze import Spm2AnalyzeImage

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, HU, SHAPE, random_image, write_nrrd, write_series

VOXELS = HU.astype(np.int16)
THIN = np.diag([0.4, 0.4, 6.0, 1])
TURNED = AFFINE @ np.eye(4)[[2, 0, 1, 3]]


def nifti(
    voxels: np.ndarray = VOXELS,
    affine: np.ndarray = AFFINE,
    unit: str = "mm",
    kind: Any = nibabel.Nifti1Image,
    change: Callable[[Any], Any] = lambda image: None,
) -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        image = kind(voxels, affine)
        if kind is not Spm2AnalyzeImage:
            image.header.set_xyzt_units(unit)
        change(image)
        nibabel.save(image, path)

    return make


def swapped(voxels: np.ndarray, affine: np.ndarray) -> Any:
    header = nibabel.Nifti1Header(endianness=">")
    return nibabel.Nifti1Image(voxels.astype(">i2"), affine, header)


def only_qform(image: Any) -> None:
    image.set_qform(AFFINE, 1)
    image.set_sform(None, 0)


def itk(fields: bytes = b"", packed: bool = False) -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        image = sitk.GetImageFromArray(VOXELS.T)
        image.SetSpacing((0.5, 0.75, 3.0))
        image.SetOrigin((10.0, -20.0, 30.0))
        image.SetDirection((0.0, -1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0))
        sitk.WriteImage(image, str(path), packed)
        path.write_bytes(path.read_bytes().replace(b"ElementDataFile", fields + b"ElementDataFile"))

    return make


def nan(fraction: float) -> np.ndarray:
    voxels = random_image()
    voxels[np.random.default_rng(0).random(SHAPE) < fraction] = np.nan
    return voxels


def cut(make: Callable[[Path], Any], part: str = "") -> Callable[[Path], None]:
    def cut_file(path: Path) -> None:
        make(path)
        file = path.with_name(path.stem + part) if part else path
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])

    return cut_file


def gone(make: Callable[[Path], Any], part: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        make(path)
        path.with_name(path.stem + part).unlink()

    return remove


def content(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


PAIR = nifti(kind=nibabel.Nifti1Pair)
UM = 'space units: "um" "um" "um"\n'
# By name: how it is written, and the unit in mm where the reference takes it for mm.
GOOD: dict[str, tuple[Callable[[Path], Any], float]] = {
    "plain.nii": (nifti(), 1),
    "packed.nii.gz": (nifti(), 1),
    "UPPER.NII.GZ": (nifti(), 1),
    "second.nii": (nifti(kind=nibabel.Nifti2Image), 1),
    "swapped.nii": (nifti(kind=swapped), 1),
    "micron.nii": (nifti(VOXELS, THIN * 1000, "micron"), 1),
    "metre.nii.gz": (nifti(VOXELS, THIN / 1000, "meter"), 1),
    "unknown.nii": (nifti(unit="unknown"), 1),
    "sform.nii": (nifti(change=lambda image: image.set_qform(None, 0)), 1),
    "qform.nii": (nifti(change=only_qform), 1),
    "turned.nii": (nifti(VOXELS, TURNED), 1),
    "thin.nii": (nifti(VOXELS, THIN), 1),
    "slope.nii": (nifti(change=lambda image: image.header.set_slope_inter(0.25, -10)), 1),
    "bytes.nii": (nifti(np.arange(np.prod(SHAPE)).reshape(SHAPE).astype(np.uint8)), 1),
    "double.nii": (nifti(VOXELS.astype(np.float64)), 1),
    "plane.nii": (nifti(VOXELS[:, :, 0], np.diag([0.4, 0.5, 1, 1])), 1),
    "some_nan.nii": (nifti(nan(0.01)), 1),
    "pair.hdr": (PAIR, 1),
    "pair_packed.hdr.gz": (PAIR, 1),
    "pair_micron.hdr": (nifti(VOXELS, THIN * 1000, "micron", nibabel.Nifti1Pair), 1),
    "analyze.hdr": (nifti(kind=Spm2AnalyzeImage, affine=np.diag([-2.0, 2, 5, 1])), 1),
    "nrrd.nrrd": (itk(), 1),
    "nrrd_packed.nrrd": (itk(packed=True), 1),
    "nrrd_micron.nrrd": (lambda path: write_nrrd(path, VOXELS, THIN * 1000, UM), 1e-3),
    "meta.mha": (itk(), 1),
    "meta_packed.mha": (itk(packed=True), 1),
    "meta_micron.mha": (itk(fields=b"DistanceUnits = um\n"), 1e-3),
    "meta_two.mhd": (itk(), 1),
    "series": (lambda path: write_series(path, HU), 1),
}
# By name: how it is written, and what its line says.
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut.nii.gz": (cut(nifti()), "cannot be read"),
    "cut.nii": (cut(nifti()), "more than a file of"),
    "cut.nrrd": (cut(itk()), "cannot be read"),
    "cut.mha": (cut(itk()), "cannot be read"),
    "cut.hdr": (cut(PAIR, ".img"), "more than a file of"),
    "cut.mhd": (cut(itk(), ".raw"), "cannot be read"),
    "alone.hdr": (gone(PAIR, ".img"), "has no voxels beside it, expected alone.img"),
    "alone.mhd": (gone(itk(), ".raw"), "cannot be read"),
    "empty.nrrd": (content(b""), "cannot be read"),
    "text.nii": (content(b"patient,age\n1,2\n"), "not a NIfTI or Analyze file"),
    "text.mha": (content(b"hello"), "cannot be read"),
    "channels.nii": (nifti(np.zeros((*SHAPE, 2), np.int16)), "has 2 channels, expected 1"),
}


def reference(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return voxels (x, y[, z]) and the affine to RAS, by ITK; by nibabel what ITK does not read (NIfTI-2), turns
    (Analyze) or fills with 0 (NaN)."""
    if path.name in ("second.nii", "analyze.hdr", "some_nan.nii"):
        image: Any = nibabel.load(path)
        return image.get_fdata(), image.affine
    image = sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(path)) if path.is_dir() else str(path))
    dims = image.GetDimension()
    affine = np.eye(4)
    for column, index in enumerate([*np.eye(dims, dtype=int).tolist(), [0] * dims]):
        place = np.array(image.TransformIndexToPhysicalPoint(index))
        affine[:dims, column if column < dims else 3] = place
    affine[:dims, :dims] -= affine[:dims, 3:]
    return sitk.GetArrayFromImage(image).T, np.diag([-1, -1, 1, 1]) @ affine


def test_a_folder_of_good_and_bad_volumes(tmp_path: Path) -> None:
    for name, (make, _) in (*GOOD.items(), *BAD.items()):
        make(tmp_path / name)
    (tmp_path / "envi.hdr").write_text("ENVI\n")
    notes: list[str] = []
    cases = find_inputs(tmp_path, 1, notes)
    assert sorted(case.images[0].name for case in cases) == sorted([*GOOD, *BAD])
    assert len(notes) == 1 and "1 entry is left out: envi.hdr" in notes[0]
    for case in cases:
        path = case.images[0]
        try:
            volume = Volume.read(case, channels=1)
        except DataError as error:
            message, said = str(error), BAD[path.name][1]
            assert message.startswith(f"{path}: ") and said in message, message
            assert message.isprintable() and len(message) < len(str(tmp_path)) + 250
            continue
        voxels, affine = reference(path)
        voxels = np.where(np.isnan(voxels), np.nanmin(voxels), voxels)
        ours = volume.image[0].numpy().reshape(voxels.shape)
        np.testing.assert_allclose(ours, voxels, rtol=1e-6, err_msg=path.name)
        affine[:3] *= GOOD[path.name][1]
        np.testing.assert_allclose(volume.image.affine, affine, atol=1e-5, err_msg=path.name)

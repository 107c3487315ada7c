"""Units of length and time in headers, headers that contradict themselves, and what of a scan's header its labels
keep."""

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from nibabel.spm2analyze import Spm2AnalyzeImage

from ndlightnet.data.volume.file_grid import NO_SIDES, Case
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, SHAPE, load, random_image, random_label, refuses, write, write_nrrd

EDGES = np.array([0.5, 0.75, 2.0])  # mm
UNITS = {"": 1.0, "mm": 1.0, "um": 1e-3, "m": 1e3}
CODES = {"": "unknown", "mm": "mm", "um": "micron", "m": "meter"}  # nibabel's


def write_in(path: Path, unit: str, edges: np.ndarray = EDGES) -> Path:
    """Write a volume whose edges are in a unit of length, in the format of the path's ending."""
    affine = np.diag([*edges / UNITS[unit], 1])
    affine[:3, 3] = [1 / UNITS[unit], 2 / UNITS[unit], 3 / UNITS[unit]]
    voxels = random_image().astype(np.int16)
    kind: Any
    if path.name.endswith((".nii", ".nii.gz", ".hdr")):
        kind = nibabel.Nifti1Pair if path.suffix == ".hdr" else nibabel.Nifti1Image
        image = kind(voxels, affine)
        image.header.set_xyzt_units(CODES[unit])
        nibabel.save(image, path)
    elif path.suffix == ".nrrd":
        fields = f'space units: "{unit}" "{unit}" "{unit}"\n' if unit else ""
        write_nrrd(path, voxels, affine, fields)
    else:
        image = sitk.GetImageFromArray(voxels.T)
        image.SetSpacing(np.diag(affine)[:3].tolist())
        image.SetOrigin((np.diag([-1, -1, 1]) @ affine[:3, 3]).tolist())
        image.SetDirection([-1, 0, 0, 0, -1, 0, 0, 0, 1])
        sitk.WriteImage(image, str(path))
        field = f"DistanceUnits = {unit}\n".encode() if unit else b""
        path.write_bytes(path.read_bytes().replace(b"ElementDataFile", field + b"ElementDataFile"))
    return path


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("ending", [".nii", ".nii.gz", ".hdr", ".nrrd", ".mha"])
def test_units_of_length(tmp_path: Path, ending: str, unit: str) -> None:
    unit = "mm" if (ending, unit) == (".mha", "m") else unit  # MetaImage has no metre
    path = write_in(tmp_path / f"a{ending}", unit)
    volume = load(path)
    expected = np.diag([*EDGES, 1])
    expected[:3, 3] = 1, 2, 3
    np.testing.assert_allclose(volume.image.affine, expected, rtol=1e-6)
    np.testing.assert_allclose(volume.image.pixdim, EDGES, rtol=1e-6)
    volume.save_labels(random_label(), tmp_path / "labels.nii.gz")
    saved = sitk.ReadImage(str(tmp_path / "labels.nii.gz"))  # in mm, by ITK
    np.testing.assert_allclose(saved.GetSpacing(), EDGES, rtol=1e-6)
    np.testing.assert_allclose(saved.GetOrigin(), [-1, -2, 3], rtol=1e-6)
    source = nibabel.load(path).header if ending in (".nii", ".nii.gz", ".hdr") else None
    kept = nibabel.load(tmp_path / "labels.nii.gz").header.get_xyzt_units()[0]
    assert kept == (source.get_xyzt_units()[0] if source else {"um": "micron"}.get(unit, "mm"))
    assert volume.notes == ()
    Volume.read(Case("x", (path,), tmp_path / "labels.nii.gz"), 3)  # on the same grid


def test_analyze(tmp_path: Path) -> None:
    """Its affine is in a file .mat, if there is one; else left and right are not known."""
    image = Spm2AnalyzeImage(random_image().astype(np.int16), AFFINE)
    image.header["vox_units"] = b"mm"
    nibabel.save(image, path := tmp_path / "a.hdr")
    volume = load(path)
    np.testing.assert_allclose(volume.image.affine, AFFINE, atol=1e-5)
    volume.save_labels(random_label(), tmp_path / "labels.nii.gz")
    np.testing.assert_allclose(nibabel.load(tmp_path / "labels.nii.gz").affine, AFFINE, atol=1e-5)
    assert volume.notes == ()
    assert torch.equal(load(tmp_path / "a.img").image, volume.image)
    (tmp_path / "a.mat").unlink()
    volume = load(path)
    assert volume.notes == (f"{path}: an Analyze header has no affine: {NO_SIDES}",)
    np.testing.assert_allclose(volume.image.pixdim, np.linalg.norm(AFFINE[:3, :3], axis=0))
    raw = bytearray(path.read_bytes())
    raw[56:60] = b"um\0\0"  # vox_units
    path.write_bytes(raw)
    np.testing.assert_allclose(load(path).image.pixdim, np.linalg.norm(AFFINE[:3, :3], axis=0) / 1000)


@pytest.mark.parametrize("kind", ["units", "space units"])
def test_units_of_nrrd_axes(tmp_path: Path, kind: str) -> None:
    """Axes may have different units, with a space and without; centimetres and nanometres."""
    path = tmp_path / "a.nrrd"
    fields = f'{kind}: "cm" "\u00b5m" "nm"\n'
    if kind == "units":
        fields += "spacings: 0.1 400 2e5\n"
    affine = np.diag([0.1, 400, 2e5, 1]) if kind == "space units" else None
    write_nrrd(path, random_image(), affine, fields)
    np.testing.assert_allclose(load(path).image.pixdim, [1, 0.4, 0.2])


def test_voxels_below_a_micron_and_unknown_units(tmp_path: Path) -> None:
    path = write_in(tmp_path / "fine.nii", "um", np.array([2e-4, 2e-4, 1e-3]))
    np.testing.assert_allclose(load(path).image.pixdim, [2e-4, 2e-4, 1e-3])
    path = write_in(tmp_path / "fine.nrrd", "um", np.array([2e-4, 2e-4, 1e-3]))
    volume = load(path)
    volume.save_labels(random_label(), tmp_path / "labels.nii.gz")
    Volume.read(Case("x", (path,), tmp_path / "labels.nii.gz"), 3)
    path = write_in(tmp_path / "bare.nii", "", np.array([2e-4, 2e-4, 1e-3]))
    refuses(lambda: load(path), path, "expected 0.001 to 100")
    path = write_nrrd(tmp_path / "odd.nrrd", random_image(), AFFINE, 'space units: "p" "p" "p"\n')
    assert load(path).notes == (f"{path}: its unit of length is p, taken as mm",)
    image = nibabel.Nifti1Image(random_image(), AFFINE)
    image.header["xyzt_units"] = 5
    nibabel.save(image, path := tmp_path / "odd.nii")
    assert load(path).notes == (f"{path}: its unit of length is 5, taken as mm",)


@pytest.mark.parametrize("unit", ["sec", "msec", "usec", "unknown", "hz"])
@pytest.mark.parametrize("ending", [".nii", ".nrrd"])
def test_units_of_time(tmp_path: Path, unit: str, ending: str) -> None:
    voxels, path = random_image((*SHAPE, 2)), tmp_path / f"a{ending}"
    scale = {"sec": 1, "msec": 1e3, "usec": 1e6}.get(unit)
    step = 0.25 * (scale or 1)
    if ending == ".nii":
        image = nibabel.Nifti1Image(voxels, np.diag([0.5, 0.5, 0.5, 1]))
        image.header.set_xyzt_units("micron", unit)
        image.header["pixdim"][4] = step
        nibabel.save(image, path)
    else:
        short = {"sec": "s", "msec": "ms", "usec": "us"}.get(unit, unit)
        fields = f'units: "um" "um" "um" "{short}"\nspacings: 0.5 0.5 0.5 {step}\n'
        write_nrrd(path, voxels, None, fields)
    volume = load(path, over_time=True)
    assert volume.grid.time_step == (None if scale is None else pytest.approx(0.25))
    np.testing.assert_allclose(volume.image.pixdim, [5e-4] * 3)


def test_an_sform_beside_another_pixdim_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", random_image(), np.eye(4))
    assert load(path).notes == ()
    image = nibabel.load(path)
    image.header["pixdim"][1:4] = 2, 2, 3
    nibabel.save(nibabel.Nifti1Image(image.get_fdata(), None, image.header), path)
    volume = load(path)
    note = "its sform has voxels of 1 x 1 x 1, which are taken, pixdim 2 x 2 x 3"
    assert volume.notes == (f"{path}: {note}",)
    np.testing.assert_allclose(volume.image.pixdim, 1)


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image, nibabel.Nifti1Pair])
def test_labels_keep_the_grid_of_a_header_and_nothing_else(tmp_path: Path, kind: Any) -> None:
    image = kind(random_image().astype(np.int16), AFFINE)
    header = image.header
    header.set_xyzt_units("mm", "sec")
    header["descrip"], header["aux_file"], header["intent_name"] = b"J. Doe 1970", b"jdoe", b"Doe"
    header.set_intent("z score", name="Doe")
    header["cal_max"], header["toffset"] = 300, 2.5
    header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"Jane Doe"))
    if kind is not nibabel.Nifti2Image:
        header["db_name"] = b"Doe 1970"
    path = tmp_path / ("a.hdr" if kind is nibabel.Nifti1Pair else "a.nii")
    nibabel.save(image, path)
    load(path).save_labels(random_label(), tmp_path / "l.nii.gz")
    raw = gzip.decompress((tmp_path / "l.nii.gz").read_bytes())
    assert b"Doe" not in raw and b"doe" not in raw
    saved = nibabel.load(tmp_path / "l.nii.gz").header
    assert saved.extensions == [] and saved.get_intent() == ("none", (), "")
    assert (saved["descrip"], saved["aux_file"], saved["cal_max"]) == (b"", b"", 0)
    assert saved.get_xyzt_units() == ("mm", "sec") and saved["toffset"] == 2.5
    assert saved["sizeof_hdr"] == header["sizeof_hdr"]
    np.testing.assert_allclose(saved.get_best_affine(), AFFINE, atol=1e-5)


@pytest.mark.parametrize("largest", [1, 104, 32767])
@pytest.mark.parametrize("steps", [255, 7, 1000])
@pytest.mark.parametrize("intercept", [0, 32000])
def test_labels_with_a_slope(tmp_path: Path, largest: int, steps: int, intercept: int) -> None:
    """Whole numbers up to rounding in float32: 255 x 1/255 is 1.00000006."""
    labels = np.random.default_rng(0).integers(0, largest + 1, SHAPE)
    image = nibabel.Nifti1Image(((labels - intercept) * steps).astype(np.int32), AFFINE)
    image.header.set_slope_inter(np.float32(1 / steps), intercept)
    nibabel.save(image, tmp_path / "label.nii")
    scan = write(tmp_path / "scan.nii", random_image())
    read = Volume.read(Case("x", (scan,), tmp_path / "label.nii")).label
    np.testing.assert_array_equal(read[0], labels)


def test_labels_between_whole_numbers(tmp_path: Path) -> None:
    scan = write(tmp_path / "scan.nii", random_image())
    label = write(tmp_path / "label.nii", np.full(SHAPE, 1.01, np.float32))
    refuses(lambda: Volume.read(Case("x", (scan,), label)), label, "not whole numbers")

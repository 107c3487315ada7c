"""Volumes: what is read from disk, what is refused, what is written, and the transforms between."""

import gzip
import json
import pickle
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from monai.data import DataLoader, MetaTensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume_transforms import augment, invert, preprocess, scale_of, volume_dataset
from ndlightnet.data.volumes import (
    Case,
    check_cases,
    find_inputs,
    load_case,
    read_decathlon,
    save_labels,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"
# Oblique, unequal spacing, first axis to the left: an affine that forgives nothing.
TILT = 0.2
AFFINE = np.array(
    [
        [-1.5, 0, 0, 60.25],
        [0, 2 * np.cos(TILT), -3 * np.sin(TILT), -20.5],
        [0, 2 * np.sin(TILT), 3 * np.cos(TILT), 7.0],
        [0, 0, 0, 1],
    ]
)
SHAPE = (9, 7, 11)


def real(*parts: str) -> Path:
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    return path


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return path


def random_image(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 50, shape).astype(np.float32)


def random_label(shape: tuple[int, ...] = SHAPE, classes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, shape).astype(np.uint8)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    image = write(tmp_path / "images" / "a.nii.gz", random_image())
    return Case("a", (image,), write(tmp_path / "labels" / "a.nii.gz", random_label()))


def refuses(act: Callable[[], Any], path: Path | None, words: str) -> None:
    """A DataError of one line that starts with the path and says what is wrong."""
    with pytest.raises(DataError, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)
    if path is not None:
        assert str(caught.value).startswith(f"{path}:"), str(caught.value)


# ------------------------------------------------------------------------------------- decathlon


@pytest.fixture
def listed(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    for name in ("a", "b", "c"):
        write(tmp_path / "images" / f"{name}.nii.gz", random_image())
        write(tmp_path / "labels" / f"{name}.nii.gz", random_label())
    listing = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "10": "x", "2": "two", "1": "one"},
        "training": [{"image": "./images/a.nii.gz", "label": "./labels/a.nii.gz"}],
        "test": ["./images/b.nii.gz", {"image": ["./images/c.nii.gz"], "label": "labels/c.nii.gz"}],
    }
    del listing["labels"]["10"]
    return tmp_path, listing


def relist(folder: Path, listing: Any) -> Path:
    (folder / "dataset.json").write_text(
        listing if isinstance(listing, str) else json.dumps(listing)
    )
    return folder


def test_decathlon(listed: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = listed
    found = read_decathlon(relist(folder, listing))
    assert found.labels == ("background", "one", "two") and found.modalities == ("MRI",)
    image, label = folder / "images", folder / "labels"
    assert found.training == (Case("a", (image / "a.nii.gz",), label / "a.nii.gz"),)
    assert found.test == (
        Case("b", (image / "b.nii.gz",), None),
        Case("c", (image / "c.nii.gz",), label / "c.nii.gz"),
    )


def test_cases_with_one_file_name_get_different_names(tmp_path: Path) -> None:
    for name in ("p1", "p2"):
        write(tmp_path / name / "ct.nii.gz", random_image())
    listing = {"modality": {"0": "CT"}, "labels": {"0": "b"}}
    listing["test"] = ["p1/ct.nii.gz", "./p2/ct.nii.gz"]  # type: ignore[assignment]
    assert [c.name for c in read_decathlon(relist(tmp_path, listing)).test] == ["p1_ct", "p2_ct"]


def test_decathlon_refuses(listed: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = listed
    file = folder / "dataset.json"

    def bad(path: Path, words: str, **changes: Any) -> None:
        relist(folder, {**listing, **changes})
        refuses(lambda: read_decathlon(folder), path, words)

    refuses(lambda: read_decathlon(folder / "gone"), folder / "gone", "no such folder")
    refuses(lambda: read_decathlon(folder), file, "cannot be read")
    for text, words in (("{", "not valid JSON"), ("[]", "JSON object")):
        relist(folder, text)
        refuses(lambda: read_decathlon(folder), file, words)
    file.write_bytes(b"\xff\xfe\x00")
    refuses(lambda: read_decathlon(folder), file, "not valid JSON")
    bad(file, "without gaps", labels={"0": "b", "2": "x"})
    bad(file, "without gaps", labels={"1": "b", "2": "x"})
    bad(file, "without gaps", labels={"background": 0})
    bad(file, "map numbers", labels=["background"])
    bad(file, "map numbers", modality={})
    bad(file, "no case", training=[], test=[])
    bad(file, "should be a list", training={"image": "x"})
    bad(file, "without image files", training=[{"label": "./labels/a.nii.gz"}])
    bad(file, "without image files", test=[3])
    bad(file, "should list 2 image files", modality={"0": "CT", "1": "PET"})
    bad(file, "should list 1 image files", test=[{"image": []}])
    bad(file, "'a' has no label", training=["./images/a.nii.gz"])
    bad(folder / "images/z.nii.gz", "no such file", test=["./images/z.nii.gz"])
    entry = {"image": "./images/a.nii.gz", "label": "labels/z.nii.gz"}
    bad(folder / "labels/z.nii.gz", "no such file", training=[entry])


# --------------------------------------------------------------------------------------- loading


def test_load_case(case: Case) -> None:
    loaded = load_case(case)
    assert loaded["name"] == "a"
    image, label = loaded["image"], loaded["label"]
    assert isinstance(image, MetaTensor) and isinstance(label, MetaTensor)
    assert (image.shape, image.dtype) == ((1, *SHAPE), torch.float32)
    assert (label.shape, label.dtype) == ((1, *SHAPE), torch.int16)
    np.testing.assert_array_equal(image[0].numpy(), random_image())
    np.testing.assert_array_equal(label[0].numpy(), random_label())
    for volume in (image, label):
        assert volume.affine.dtype == torch.float64
        np.testing.assert_allclose(volume.affine, AFFINE, atol=1e-5)
    assert "label" not in load_case(Case("a", case.images, None))


def test_stored_slope_and_intercept_are_applied(tmp_path: Path) -> None:
    stored = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.eye(4))
    stored.header.set_slope_inter(2.0, -1024.0)
    nibabel.save(stored, tmp_path / "ct.nii")
    image = load_case(Case("ct", (tmp_path / "ct.nii",), None))["image"]
    raw = nibabel.load(tmp_path / "ct.nii")
    assert (raw.dataobj.slope, raw.dataobj.inter) == (2.0, -1024.0)
    np.testing.assert_allclose(image[0], raw.get_fdata())


def test_a_second_grid_is_resampled_onto_the_first(tmp_path: Path) -> None:
    """A smooth function of the place in mm, sampled on two grids, is the same on the first."""

    def sample(affine: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        index = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"))
        x, y, z = (
            np.einsum("ij,jxyz->ixyz", affine[:3, :3], index) + affine[:3, 3, None, None, None]
        )
        return (7 + np.sin(x / 9) + np.cos(y / 8) + 0.05 * z).astype(np.float32)

    fine, small = (np.diag([-1.5, -1.5, 2.0, 1.0]), (21, 19, 15))
    coarse, large = (np.diag([2.5, 2.0, 3.0, 1.0]), (24, 27, 22))
    fine[:3, 3] = 20, 15, -30
    coarse[:3, 3] = -20, -20, -45
    images = write(tmp_path / "ct.nii.gz", sample(fine, small), fine), tmp_path / "pet.nii.gz"
    write(images[1], sample(coarse, large), coarse)
    image = load_case(Case("x", images, None))["image"]
    assert image.shape == (2, *small)
    np.testing.assert_allclose(image.affine, fine)
    # Linear interpolation is off by at most h^2/8 |f''| an axis: 2.5^2/8/81 + 2^2/8/64 = 0.017.
    assert float((image[0] - image[1]).abs().max()) < 0.02

    write(images[1], sample(coarse, large)[:, :, :8], coarse)  # ends at z = -24
    cut = load_case(Case("x", images, None))["image"]
    np.testing.assert_allclose(cut[1, ..., :4], image[1, ..., :4], atol=1e-5)
    least = float(sample(coarse, large)[:, :, :8].min())
    np.testing.assert_allclose(cut[1, ..., 5:], least, rtol=1e-5)

    moved = coarse.copy()
    moved[0, 3] += 500
    write(images[1], sample(coarse, large), moved)
    refuses(lambda: load_case(Case("x", images, None)), images[1], "does not overlap")


def broken_image(path: Path, how: str) -> str:
    """Spoils the image at `path`; returns what the error should say."""
    voxels = random_image()
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "truncated inside gzip":  # the gzip is sound, the volume in it is not
        path.write_bytes(gzip.compress(gzip.decompress(whole)[:-100]))
    elif how == "corrupt":
        path.write_bytes(whole[:200] + bytes(100) + whole[300:])
    elif how == "not NIfTI":
        path.write_bytes(gzip.compress(b"hello" * 200))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
        return "No such file"
    elif how == "nan":
        voxels[1, 2, 3] = np.nan
        write(path, voxels)
        return "1 voxels that are NaN"
    elif how == "infinite":
        voxels[1, 2, 3:5] = -np.inf
        write(path, voxels)
        return "2 voxels that are NaN or infinite"
    elif how == "4-D":
        write(path, random_image((*SHAPE, 2)))
        return "3 axes"
    elif how == "2-D":
        write(path, random_image(SHAPE[:2]))
        return "3 axes"
    elif how == "empty axis":
        write(path, random_image((9, 0, 11)))
        return "empty axis"
    elif how == "colour":
        write(path, np.zeros(SHAPE, [("R", "u1"), ("G", "u1"), ("B", "u1")]))
        return "real numbers"
    elif how == "flat affine":
        # Through the raw header: nibabel itself refuses to write it.
        raw = bytearray(gzip.decompress(whole))
        raw[280:296] = bytes(16)
        path.write_bytes(gzip.compress(bytes(raw)))
        return "affine"
    return "cannot be read"


IMAGE_FAULTS = (
    "truncated", "truncated inside gzip", "corrupt", "not NIfTI", "empty", "gone", "nan",
    "infinite", "4-D", "2-D", "empty axis", "colour", "flat affine",
)  # fmt: skip


@pytest.mark.parametrize("how", IMAGE_FAULTS)
def test_broken_images_are_refused_by_name(case: Case, how: str) -> None:
    words = broken_image(case.images[0], how)
    refuses(lambda: load_case(Case("a", case.images, None)), case.images[0], words)
    refuses(lambda: check_cases([case], 3, progress=False), case.images[0], words)


def test_broken_labels_are_refused_by_name(case: Case) -> None:
    label = case.label
    assert label is not None
    check_cases([case], 3, progress=False)

    def bad(words: str, voxels: np.ndarray, affine: np.ndarray = AFFINE, classes: int = 3) -> None:
        write(label, voxels, affine)
        refuses(lambda: check_cases([case], classes, progress=False), label, words)

    bad(r"0\.\.2, expected 0\.\.1", random_label(), classes=2)
    bad(r"-1\.\.", random_label().astype(np.int16) - 1)
    bad("whole numbers", random_label() + np.float32(0.5))
    bad("whole numbers", random_label().astype(np.float32) * 40000)
    bad("NaN", np.full(SHAPE, np.nan, np.float32))
    bad(r"shape \(9, 7, 10\)", random_label((9, 7, 10)))
    for change in (np.diag([-1, 1, 1, 1]), np.diag([1, 1, 1.05, 1])):
        bad("another affine", random_label(), AFFINE @ change)
    shifted = AFFINE.copy()
    shifted[1, 3] += 0.5
    bad("another affine", random_label(), shifted)
    shifted[1, 3] = AFFINE[1, 3] + 0.05  # rounding of headers is not a fault
    write(label, random_label(), shifted)
    check_cases([case], 3, progress=False)
    label.write_bytes(label.read_bytes()[:60])
    refuses(lambda: check_cases([case], 3, progress=False), label, "cannot be read")


def test_the_check_finds_one_broken_file_among_many(case: Case) -> None:
    sound = [Case(f"c{i}", case.images, case.label) for i in range(20)]
    broken = write(case.images[0].with_name("b.nii.gz"), random_image())
    broken.write_bytes(broken.read_bytes()[:-50])
    refuses(
        lambda: check_cases([*sound, Case("b", (broken,), None), *sound], 3), broken, "cannot be"
    )


# ----------------------------------------------------------------------------------------- DICOM


def write_series(folder: Path, volume: np.ndarray, gap: float = 2.5) -> Path:
    """volume (x, y, z) in HU as a DICOM series from the feet up; file names shuffled."""
    folder.mkdir(parents=True)
    series = pydicom.uid.generate_uid()
    for z in range(volume.shape[2]):
        data = pydicom.Dataset()
        data.file_meta = pydicom.dataset.FileMetaDataset()
        data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
        data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = pydicom.uid.generate_uid()
        data.SeriesInstanceUID, data.InstanceNumber, data.Modality = series, z + 1, "CT"
        data.ImagePositionPatient, data.PixelSpacing = [-30.0, -20.0, 100.0 + gap * z], [1.25, 0.75]
        data.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        data.Columns, data.Rows = volume.shape[:2]
        data.BitsAllocated = data.BitsStored = 16
        data.HighBit, data.PixelRepresentation, data.SamplesPerPixel = 15, 0, 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.RescaleSlope, data.RescaleIntercept = 1, -1024
        data.PixelData = (volume[:, :, z].T + 1024).astype(np.uint16).tobytes()
        data.save_as(folder / f"{(z * 7) % 11:02d}.dcm", enforce_file_format=True)
    return folder


HU = np.random.default_rng(0).integers(-1000, 1500, SHAPE)
# LPS to RAS: x and y change sign; PixelSpacing is (between rows, between columns).
DICOM_AFFINE = np.array([[-0.75, 0, 0, 30], [0, -1.25, 0, 20], [0, 0, 2.5, 100], [0, 0, 0, 1.0]])


def test_dicom_series(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "series [1]", HU)
    (folder / "notes.txt").write_text("not an image")
    (folder / "[more]").mkdir()
    first = pydicom.dcmread(folder / "00.dcm")
    first.InstanceNumber = 99  # the place decides, not the number
    first.save_as(folder / "00.dcm")
    (case,) = find_inputs(folder)
    assert case.name == "series [1]" and case.label is None
    image = load_case(case)["image"]
    np.testing.assert_array_equal(image[0].numpy(), HU)
    np.testing.assert_allclose(image.affine, DICOM_AFFINE)
    save_labels(random_label(), case, tmp_path / "out.nii.gz")
    saved = nibabel.load(tmp_path / "out.nii.gz")
    np.testing.assert_allclose(saved.affine, DICOM_AFFINE, atol=1e-4)
    np.testing.assert_allclose(saved.header.get_zooms(), (0.75, 1.25, 2.5), atol=1e-6)
    np.testing.assert_array_equal(np.asarray(saved.dataobj), random_label())


def test_broken_dicom_is_refused_by_name(tmp_path: Path) -> None:
    def bad(words: str, spoil: Callable[[list[Path]], Any], named: int | None = None) -> None:
        folder = write_series(tmp_path / words.replace(" ", "_"), HU)
        files = sorted(folder.iterdir())
        spoil(files)
        path = folder if named is None else files[named]
        refuses(lambda: load_case(Case("x", (folder,), None)), path, words)

    def edit(file: Path, **tags: Any) -> None:
        data = pydicom.dcmread(file)
        for tag, value in tags.items():
            if value is None:
                delattr(data, tag)
            else:
                setattr(data, tag, value)
        data.save_as(file)

    bad("mm apart", lambda files: files[3].unlink())
    bad("missing or doubled", lambda fs: edit(fs[3], ImagePositionPatient=[-30, -20, 103]))
    bad("to 2.5 mm apart", lambda fs: shutil.copy(fs[3], fs[3].with_name("copy.dcm")))
    bad("several DICOM series", lambda files: edit(files[0], SeriesInstanceUID="1.2.3"))
    bad("different orientation", lambda fs: edit(fs[2], ImageOrientationPatient=[1, 0, 0, 0, 0, 1]))
    bad("has 1 DICOM slices", lambda files: [file.unlink() for file in files[1:]])
    bad("has 0 DICOM slices", lambda files: [file.unlink() for file in files])
    bad("has no ImagePositionPatient", lambda fs: edit(fs[2], ImagePositionPatient=None), named=2)
    bad("no PixelSpacing", lambda files: edit(files[2], PixelSpacing=None), named=2)
    bad("cannot be read", lambda files: edit(files[2], PixelData=b"\0\0"))


# ---------------------------------------------------------------------------------------- inputs


def test_find_inputs(listed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, listing = listed
    (one,) = find_inputs(folder / "images" / "a.nii.gz")
    assert one == Case("a", (folder / "images" / "a.nii.gz",), None)
    assert [c.name for c in find_inputs(str(folder / "images"))] == ["a", "b", "c"]

    mixed = tmp_path / "mixed"
    write(mixed / "z.nii", random_image())
    write_series(mixed / "s1", HU)
    (mixed / "broken.nii.gz").write_bytes(b"")
    (mixed / "._z.nii.gz").write_bytes(b"mac")
    (mixed / "notes.txt").write_text("x")
    (mixed / "empty").mkdir()
    found = find_inputs(mixed)
    assert [c.name for c in found] == ["broken", "s1", "z"]
    assert all(c.label is None for c in found)
    refuses(lambda: load_case(found[0]), mixed / "broken.nii.gz", "cannot be read")
    assert load_case(found[1])["image"].shape == load_case(found[2])["image"].shape

    found = find_inputs(relist(folder, listing))
    assert [(c.name, c.label is None) for c in found] == [("b", True), ("c", False)]


def test_find_inputs_refuses(listed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, listing = listed
    text = tmp_path / "x.txt"
    text.write_text("x")
    (tmp_path / "none").mkdir()
    refuses(lambda: find_inputs(text), text, "not a NIfTI file")
    refuses(lambda: find_inputs(tmp_path / "gone"), tmp_path / "gone", "no such file")
    refuses(lambda: find_inputs(tmp_path / "none"), tmp_path / "none", "holds no NIfTI")
    relist(folder, {**listing, "test": []})
    refuses(lambda: find_inputs(folder), folder, "no test case")
    twins = write(tmp_path / "twins" / "a.nii", random_image()).parent
    write(twins / "a.nii.gz", random_image())
    refuses(lambda: find_inputs(twins), twins / "a.nii.gz", "another case is called 'a'")


# ---------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("codes", [(1, 0), (0, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_save_labels_round_trip(tmp_path: Path, codes: tuple[int, int], ending: str) -> None:
    source = nibabel.Nifti1Image(random_image().astype(np.int16), AFFINE)
    source.set_sform(AFFINE, codes[0])
    source.set_qform(AFFINE, codes[1])
    source.header.set_slope_inter(0.5, 3.0)
    source.header["cal_max"] = 300
    source.header.set_xyzt_units("mm", "sec")
    nibabel.save(source, tmp_path / f"in{ending}")
    case = Case("in", (tmp_path / f"in{ending}",), None)
    path = tmp_path / "new" / "folder" / "out.nii.gz"
    labels = torch.from_numpy(random_label(classes=256)).long()
    save_labels(labels, case, path)
    saved, source = nibabel.load(path), nibabel.load(case.images[0])
    assert saved.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(np.asarray(saved.dataobj), labels.numpy())
    np.testing.assert_allclose(saved.affine, source.affine, atol=1e-4)
    assert (int(saved.header["sform_code"]), int(saved.header["qform_code"])) == codes
    for form in ("get_sform", "get_qform"):
        np.testing.assert_allclose(getattr(saved, form)(), getattr(source, form)(), atol=1e-4)
    np.testing.assert_allclose(saved.header.get_zooms(), source.header.get_zooms(), rtol=1e-6)
    assert saved.header.get_xyzt_units() == ("mm", "sec") and saved.header["cal_max"] == 0
    assert [p.name for p in path.parent.iterdir()] == ["out.nii.gz"], "a draft was left behind"
    # And what was saved can be the label of its image.
    check_cases([Case("in", case.images, path)], 256, progress=False)


def test_save_labels_refuses(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.nii.gz"
    save_labels(random_label().astype(np.int64) * 300, case, out)
    saved = nibabel.load(out)
    assert saved.get_data_dtype() == np.int16 and np.asarray(saved.dataobj).max() == 600
    for labels, words in (
        (random_label((9, 7, 10)), "shape"),
        (random_label((1, *SHAPE)), "shape"),
        (random_image(), "whole numbers"),
        (random_label().astype(int) - 1, r"0\.\.32767"),
        (random_label().astype(int) * 40000, r"0\.\.32767"),
    ):
        with pytest.raises(ValueError, match=words):
            save_labels(labels, case, out)
    with pytest.raises(ValueError, match=r"\.nii\.gz"):
        save_labels(random_label(), case, tmp_path / "out.mha")
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "out.nii.gz"
    refuses(lambda: save_labels(random_label(), case, inside), inside, "cannot be written")

    def full(*_: object) -> None:
        Path(str(_[1])).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = out.read_bytes()
    monkeypatch.setattr(nibabel, "save", full)
    refuses(lambda: save_labels(random_label(), case, out), out, "No space left")
    assert out.read_bytes() == before and not list(tmp_path.glob(".*")), "not atomic"


# ------------------------------------------------------------------------------------ transforms


def test_intensities_by_modality() -> None:
    hu = torch.tensor([-3000.0, -1000, -100, 40, 50, 500, 2000, 9000]).reshape(1, 2, 2, 2)
    ct = scale_of("CT")(hu).flatten()
    assert ct[0] == ct[1] and ct[6] == ct[7] and ct[3] == 0 and (ct[1:7].diff() > 0.09).all()
    suv = scale_of("PET")(torch.tensor([0.0, 2, 20, 80]).reshape(1, 2, 2, 1)).flatten()
    assert suv[0] == 0 and 0.8 < suv[1] < 1 and suv[3] < 5
    for top in (1.0, 1e6):  # MRI has no unit: a factor changes nothing, and one bright voxel little
        mri = torch.from_numpy(random_image((20, 20, 20)))[None] * top
        mri[0, 0, 0, 0] = 1000 * mri.max()
        scaled = scale_of("MRI")(mri)
        assert abs(float(scaled.mean())) < 1e-4 and abs(float(scaled.std()) - 1) < 1e-3
        assert scaled.abs().max() < 4
    assert not torch.isnan(scale_of("MRI")(torch.full((1, 4, 4, 4), 7.0))).any()


def test_prepare_turns_to_ras_and_back(case: Case) -> None:
    loaded = load_case(case)
    prepared = preprocess(["MRI"])(loaded)
    assert prepared["image"].dtype == torch.float32
    assert nibabel.aff2axcodes(prepared["image"].affine.numpy()) == ("R", "A", "S")
    assert torch.equal(prepared["label"][0].as_tensor(), loaded["label"][0].flip(0).as_tensor())
    assert torch.equal(invert(prepared["label"].as_tensor(), prepared), loaded["label"].as_tensor())
    logits = torch.randn(3, *SHAPE)
    assert torch.equal(invert(logits, prepared), logits.flip(1))
    with pytest.raises(ValueError, match="shape"):
        invert(torch.zeros(1, 3, 3, 3), prepared)


def test_stored_axis_order_does_not_matter(tmp_path: Path) -> None:
    """One body, stored in two index orders, is one prepared volume; predictions return to each."""
    voxels, affine = random_image(), np.diag([1.0, 2.0, 3.0, 1.0])
    turned = np.ascontiguousarray(voxels[::-1].transpose(2, 0, 1))
    swap = np.zeros((4, 4))
    swap[[2, 0, 1, 3], [0, 1, 2, 3]] = 1, -1, 1, 1
    swap[0, 3] = SHAPE[0] - 1
    files = write(tmp_path / "a.nii", voxels, affine), tmp_path / "b.nii"
    write(files[1], turned, affine @ swap)
    first, second = (preprocess(["CT"])(load_case(Case("x", (f,), None))) for f in files)
    assert torch.equal(first["image"].as_tensor(), second["image"].as_tensor())
    assert torch.allclose(first["image"].affine, second["image"].affine)
    prediction = torch.arange(voxels.size).reshape(1, *SHAPE)
    back = invert(prediction, second)[0].numpy()
    assert np.array_equal(back, prediction[0].numpy()[::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (2.2, 1.7, 3.5)])
def test_spacing_and_back(tmp_path: Path, spacing: tuple[float, ...]) -> None:
    label = np.zeros((24, 20, 18), np.uint8)
    label[5:15, 4:16, 6:12] = 1
    label[15:19, 4:16, 6:12] = 2
    image = write(tmp_path / "i.nii.gz", label * np.float32(100))
    prepared = preprocess(["CT"], spacing)(
        load_case(Case("x", (image,), write(tmp_path / "l.nii.gz", label)))
    )
    assert prepared["image"].shape == prepared["label"].shape
    assert prepared["label"].dtype == torch.int16
    assert np.allclose(prepared["image"].pixdim, spacing)
    hot = torch.nn.functional.one_hot(prepared["label"][0].as_tensor().long(), 3).movedim(-1, 0)
    for back in (invert(prepared["label"].as_tensor(), prepared)[0],
                 invert(hot.float(), prepared).argmax(0)):  # fmt: skip
        assert back.shape == label.shape
        for n in (1, 2):
            ours, theirs = back.numpy() == n, label == n
            assert 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()) > 0.8
    numbers = invert(prepared["label"].as_tensor() * 40, prepared)
    assert numbers.dtype == torch.int16 and set(numbers.unique().tolist()) == {0, 40, 80}


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    found = []
    for i, shape in enumerate([(30, 26, 22), (18, 33, 21), (9, 8, 7)]):
        label = random_label(shape, 2, seed=i)
        label[3, 4, 5] = 3  # one voxel of a class, and none of class 2
        image = random_image(shape, seed=i) + np.float32(500) * label
        found.append(Case(f"c{i}", (write(tmp_path / f"{i}.nii.gz", image),),
                          write(tmp_path / f"l{i}.nii.gz", label)))  # fmt: skip
    return found


def test_augmented_samples(cases: list[Case]) -> None:
    prepare, patch = preprocess(["MRI"]), (16, 20, 24)
    data = volume_dataset(cases, prepare, augment(patch, 3, 4), progress=False)
    rare = 0
    for _ in range(10):
        for case, samples in zip(cases, (data[i] for i in range(len(cases))), strict=True):
            assert len(samples) == 3
            for sample in samples:
                assert set(sample) == {"image", "label", "name"} and sample["name"] == case.name
                image, label = sample["image"], sample["label"]
                assert type(image) is torch.Tensor and image.dtype == torch.float32
                assert type(label) is torch.Tensor and label.dtype == torch.int64
                assert image.shape == label.shape == (1, *patch)
                assert torch.isfinite(image).all() and set(label.unique().tolist()) <= {0, 1, 3}
                rare += bool((label == 3).any())
    # Evenly drawn classes centre 1/3 of the crops on it, and an even draw of voxels would miss it
    # in most of the others; the smallest volume always holds it.
    assert rare > 40
    first, again = data[0][0]["image"], data[0][0]["image"]
    assert not torch.equal(first, again)


def test_image_and_label_move_together(tmp_path: Path) -> None:
    label = np.zeros((32, 32, 32), np.uint8)
    label[8:20, 10:24, 6:22] = 1
    image = write(tmp_path / "i.nii.gz", label * np.float32(1000) - 300)
    case = Case("x", (image,), write(tmp_path / "l.nii.gz", label))
    data = volume_dataset(
        [case], preprocess(["CT"]), augment((24, 24, 24), 8, 2, (0, 1, 2)), 1, False
    )
    for sample in [s for _ in range(8) for s in data[0]]:
        inside, outside = (sample["image"][sample["label"] == n] for n in (1, 0))
        if len(inside) > 50 and len(outside) > 50:
            assert inside.median() > outside.median() + 1


def test_flips_only_where_asked(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(16, dtype=np.float32)[:, None, None], (16, 16, 16)).copy()
    case = Case("x", (write(tmp_path / "i.nii.gz", ramp, np.eye(4)),),
                write(tmp_path / "l.nii.gz", random_label((16, 16, 16)), np.eye(4)))  # fmt: skip
    for axes, expected in (((), {True}), ((0,), {True, False}), ((1, 2), {True})):
        steps = augment((16, 16, 16), 4, 3, axes)
        data = volume_dataset([case], preprocess(["MRI"]), steps, 1, progress=False)
        samples = [sample["image"][0] for _ in range(8) for sample in data[0]]
        assert {bool(s[12:].mean() > s[:4].mean()) for s in samples} == expected


def test_without_augmentation_the_volume_is_whole(cases: list[Case]) -> None:
    data = volume_dataset(cases, preprocess(["MRI"]), progress=False)
    assert data[1]["image"].shape == (1, 18, 33, 21) and data[1]["name"] == "c1"
    assert torch.equal(data[1]["image"], data[1]["image"])
    assert torch.equal(invert(data[1]["label"], data[1]), load_case(cases[1])["label"].as_tensor())


def test_the_dataset_reads_each_file_once_and_travels(cases: list[Case]) -> None:
    data = volume_dataset(cases, preprocess(["MRI"]), augment((8, 8, 8), 2, 4), progress=False)
    for case in cases:
        case.images[0].unlink()
    data = pickle.loads(pickle.dumps(data))
    loader = DataLoader(data, batch_size=3, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (batch,) = list(loader)
    assert batch["image"].shape == batch["label"].shape == (6, 1, 8, 8, 8)
    assert batch["name"] == ["c0", "c0", "c1", "c1", "c2", "c2"]


# ------------------------------------------------------------------------------------- real data


def test_real_hippocampus() -> None:
    found = read_decathlon(real("hippocampus"))
    assert (len(found.training), len(found.test)) == (190, 40)
    assert found.labels == ("background", "anterior", "posterior")
    some = [*found.training[::12], *found.test[::12]]
    check_cases(some, 3, progress=False)
    with pytest.raises(DataError, match=r"expected 0\.\.1"):
        check_cases(some, 2, progress=False)
    prepare = preprocess(found.modalities)
    for case in some:
        image = prepare(load_case(case))["image"]
        assert abs(float(image.mean())) < 1e-3 and abs(float(image.std()) - 1) < 1e-2


def test_real_sarcoma() -> None:
    found = read_decathlon(real("sarcoma_ct"))
    assert found.modalities == ("CT", "PET") and len(found.training) == 33
    for case in found.training[::8]:
        loaded = load_case(case)
        image, tumour = loaded["image"], loaded["label"] == 1
        grid = nibabel.load(case.images[0])
        assert image.shape == (2, *grid.shape)
        np.testing.assert_allclose(image.affine, grid.affine, atol=1e-4)
        # A tumour takes up sugar: PET on the CT's grid is brighter there than round about it.
        suv = image[1:].as_tensor()
        assert suv[tumour].mean() > 2 * suv[~tumour].mean()
        assert float(suv.max()) <= nibabel.load(case.images[1]).get_fdata().max() + 1e-3


def test_real_dicom_lies_under_its_labels(tmp_path: Path) -> None:
    (case,) = find_inputs(real("ct_torso", "dicom"))
    image = load_case(case)["image"]
    labels = nibabel.load(real("ct_torso", "dicom_labels.nii.gz"))
    assert image.shape == (1, 512, 512, 20) and -1024 <= float(image.min()) < -900
    # The same grid in another index order: match voxels through millimetres.
    to_label = np.linalg.inv(labels.affine) @ image.affine.numpy()
    flip = np.sign(np.diag(to_label)[:3]).astype(int)
    np.testing.assert_allclose(to_label[:3, :3], np.diag(flip), atol=1e-6)
    np.testing.assert_allclose(
        to_label[:3, 3], (flip < 0) * (np.array(labels.shape) - 1), atol=1e-3
    )
    matched = np.asarray(labels.dataobj)[:: flip[0], :: flip[1], :: flip[2]]
    names = {
        name: int(n) for n, name in json.loads(real("ct_torso", "labels.json").read_text()).items()
    }
    hu = {name: float(np.median(image[0].numpy()[matched == n]))
          for name, n in names.items() if (matched == n).any()}  # fmt: skip
    assert 70 < hu["liver"] < 140 and 70 < hu["spleen"] < 160 and 30 < hu["autochthon_left"] < 80
    assert hu["vertebrae_T12"] > 120 and hu["humerus_left"] > 120 and hu["rib_left_9"] > 150
    # And the way back: labels saved for the series lie, in mm, where the given ones do.
    path = tmp_path / "out.nii.gz"
    save_labels(np.ascontiguousarray(matched), case, path)
    ours, theirs = (nibabel.as_closest_canonical(i) for i in (nibabel.load(path), labels))
    np.testing.assert_allclose(ours.affine, theirs.affine, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(ours.dataobj), np.asarray(theirs.dataobj))


def test_broken_jpeg_2000_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    shutil.copytree(real("ct_torso", "dicom"), folder)
    victim = folder / "007.dcm"
    whole = victim.read_bytes()
    victim.chmod(0o644)
    victim.write_bytes(whole[: len(whole) // 2])
    refuses(lambda: load_case(Case("x", (folder,), None)), victim, "cut short")


def test_augmentation_is_quick(cases: list[Case]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = augment((40, 56, 40), 4, 4)
        data = volume_dataset(cases[:2], preprocess(["MRI"]), steps, 1, progress=False)
        data[0]
        start = time.perf_counter()
        count = sum(len(data[i % 2]) for i in range(10))
        assert (time.perf_counter() - start) / count < 0.1, "10 ms on an idle core"
    finally:
        torch.set_num_threads(threads)

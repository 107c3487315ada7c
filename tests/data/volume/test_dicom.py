"""DICOM: series in, segmentations out."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import highdicom
import nibabel
import numpy as np
import pydicom
import pytest
import torch

from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, SHAPE, edit, load, random_image, random_label, real, refuses, write_series

# ----------------------------------------------------------------------------------------- DICOM


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
    image = Volume.read(case).image
    np.testing.assert_array_equal(image[0].numpy(), HU)
    np.testing.assert_allclose(image.affine, DICOM_AFFINE)
    Volume.read(case).save_labels(random_label(), tmp_path / "out.nii.gz")
    saved = nibabel.load(tmp_path / "out.nii.gz")
    np.testing.assert_allclose(saved.affine, DICOM_AFFINE, atol=1e-4)
    np.testing.assert_allclose(saved.header.get_zooms(), (0.75, 1.25, 2.5), atol=1e-6)
    np.testing.assert_array_equal(np.asarray(saved.dataobj), random_label())


def test_a_tilted_gantry_and_a_slope_for_every_slice(tmp_path: Path) -> None:
    """Slices from the head down, leaning: the third axis is the way between their places."""
    turn = [1, 0, 0, 0, np.cos(0.3), np.sin(0.3)]
    folder = write_series(tmp_path / "s", HU, gap=-2.5, ImageOrientationPatient=turn)
    for file in folder.iterdir():
        edit(file, RescaleSlope=pydicom.dcmread(file).InstanceNumber / 2, RescaleIntercept=1.5)
    image = load(folder).image
    slopes = np.arange(1, SHAPE[2] + 1) / 2
    np.testing.assert_array_equal(image[0], ((HU + 1024) * slopes + 1.5)[..., ::-1])
    affine = DICOM_AFFINE.copy()
    affine[:3, 1] = 0, -1.25 * np.cos(0.3), 1.25 * np.sin(0.3)
    affine[2, 3] = 100 - 2.5 * (SHAPE[2] - 1)
    np.testing.assert_allclose(image.affine, affine, atol=1e-12)


def test_files_that_are_no_slices_are_passed_over(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU)
    for name, kind in (("report", "88.11"), ("plan", "481.3"), ("mask", "66.4")):
        file = shutil.copy(folder / "00.dcm", folder / f"{name}.dcm")
        other = pydicom.dcmread(file)
        other.file_meta.MediaStorageSOPClassUID = f"1.2.840.10008.5.1.4.1.1.{kind}"
        del other.PixelData, other.ImagePositionPatient
        other.save_as(file)
    (folder / "ct.json").write_text("{}")
    (folder / "DICOMDIR").write_bytes((folder / "00.dcm").read_bytes())
    loaded = load(folder)
    np.testing.assert_array_equal(loaded.image[0], HU)
    assert loaded.notes == ()


def test_the_series_with_the_most_slices_is_taken(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU[..., :3], SeriesNumber=1)
    write_series(folder, HU, SeriesNumber=7, SeriesDescription="thin\nslices")
    loaded = load(folder)
    np.testing.assert_array_equal(loaded.image[0], HU)
    (note,) = loaded.notes
    assert note.startswith(f"{folder}: holds 2 series") and "\n" not in note
    assert "11 (SeriesNumber 7" in note
    # As many: the lower number; without numbers, the lower UID.
    write_series(folder, HU[::-1], SeriesNumber=5)
    np.testing.assert_array_equal(load(folder).image[0], HU[::-1])
    twins = write_series(tmp_path / "twins", HU, SeriesInstanceUID="1.2.30")
    write_series(twins, HU[::-1], SeriesInstanceUID="1.2.4")
    np.testing.assert_array_equal(load(twins).image[0], HU)


def test_copies_of_a_slice_are_left_out(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU)
    files = sorted(folder.iterdir())
    shutil.copy(files[3], folder / "copy.dcm")
    shutil.copy(files[5], folder / "another.dcm")
    edit(folder / "another.dcm", SOPInstanceUID="1.2.3")  # sent twice, under another number
    loaded = load(folder)
    np.testing.assert_array_equal(loaded.image[0], HU)
    assert loaded.notes == (f"{folder}: 2 slices are there twice; the copies are left out",)
    # The same place with other voxels is no copy: a second phase, or a fault.
    changed = (HU[..., 0].T + 1000).astype(np.uint16).tobytes()
    edit(folder / "copy.dcm", PixelData=changed)
    refuses(lambda: load(folder), folder, "0 to 2.5 mm apart")


def test_one_slice(tmp_path: Path) -> None:
    thick = write_series(tmp_path / "thick", HU[..., :1], SliceThickness=4)
    loaded = load(thick)
    np.testing.assert_array_equal(loaded.image[0], HU[..., :1])
    np.testing.assert_allclose(loaded.image.affine, DICOM_AFFINE @ np.diag([1, 1, 4 / 2.5, 1]))
    assert loaded.notes == ()
    loaded = load(write_series(tmp_path / "plain", HU[..., :1]))
    np.testing.assert_allclose(loaded.image.affine, DICOM_AFFINE @ np.diag([1, 1, 1 / 2.5, 1]))
    assert "taken as 1 mm" in loaded.notes[0]


def test_broken_dicom_is_refused_by_name(tmp_path: Path) -> None:
    def bad(words: str, spoil: Callable[[list[Path]], Any], named: int | None = None) -> None:
        folder = write_series(tmp_path / str(len(list(tmp_path.iterdir()))), HU)
        files = sorted(folder.iterdir())
        spoil(files)
        refuses(lambda: load(folder), folder if named is None else files[named], words)

    bad("mm apart", lambda files: files[3].unlink())
    bad("missing or doubled", lambda fs: edit(fs[3], ImagePositionPatient=[-30, -20, 103]))
    bad(
        r"ImageOrientationPatient is \[1.0, 0.0, 0.0, 0.0, 0.0, 1.0\], expected .* as in 00.dcm",
        lambda fs: edit(fs[2], ImageOrientationPatient=[1, 0, 0, 0, 0, 1]),
        named=2,
    )
    bad("Rows is 9, expected 7 as in", lambda fs: edit(fs[2], Rows=9, Columns=7), named=2)
    bad("has no DICOM slices", lambda files: [file.unlink() for file in files])
    bad("has no ImagePositionPatient", lambda fs: edit(fs[2], ImagePositionPatient=None), named=2)
    bad("no PixelSpacing", lambda files: edit(files[2], PixelSpacing=None), named=2)
    bad("no PixelData", lambda files: edit(files[2], PixelData=None), named=2)
    bad("several frames", lambda files: edit(files[2], NumberOfFrames=8), named=2)
    bad("are colours", lambda files: edit(files[2], SamplesPerPixel=3), named=2)
    bad("cannot be read", lambda files: edit(files[2], PixelData=b"\0\0"), named=2)


# ------------------------------------------------------------------------------------- DICOM-SEG


@pytest.mark.slow
@pytest.mark.parametrize("gap", [2.5, -2.5])
def test_save_segmentation(tmp_path: Path, gap: float) -> None:
    turn = [1, 0, 0, 0, np.cos(0.3), np.sin(0.3)]
    folder = write_series(tmp_path / "s", HU, gap, ImageOrientationPatient=turn)
    case, labels = Case("x", (folder,), None), random_label(classes=4)
    labels[labels == 3] = 2  # the third organ is named, but not there
    path = tmp_path / "new" / "seg.dcm"
    Volume.read(case).save_dicom_seg(torch.from_numpy(labels), path, ["none", "liver", "x" * 80, "gone"])
    assert [file.name for file in path.parent.iterdir()] == ["seg.dcm"], "a draft was left behind"
    found = highdicom.seg.segread(path)
    assert found.SegmentationType == "BINARY" and list(found.segment_numbers) == [1, 2, 3]
    described = [found.get_segment_description(n).segment_label for n in (1, 2, 3)]
    assert described == ["liver", "x" * 64, "gone"]
    # Slice by slice against the files themselves: which labels lie at the place of this file?
    affine = Volume.read(case).image.affine.numpy()
    for file in folder.iterdir():
        source = pydicom.dcmread(file)
        uid = source.SOPInstanceUID
        frame = found.get_pixels_by_source_instance([uid], combine_segments=True, ignore_spatial_locations=True)[0]
        place = np.array([*source.ImagePositionPatient, 1.0]) * [-1, -1, 1, 1]
        x, y, z, _ = np.linalg.inv(affine) @ place
        assert abs(x) < 1e-6 and abs(y) < 1e-6 and abs(z - round(z)) < 1e-6
        np.testing.assert_array_equal(frame, labels[:, :, round(z)].T)
        assert found.StudyInstanceUID == source.StudyInstanceUID
        assert found.FrameOfReferenceUID == source.FrameOfReferenceUID
    for frame in found.PerFrameFunctionalGroupsSequence:
        uid = frame.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        (source,) = [d for d in map(pydicom.dcmread, folder.iterdir()) if d.SOPInstanceUID == uid]
        place = frame.PlanePositionSequence[0].ImagePositionPatient
        np.testing.assert_allclose(place, source.ImagePositionPatient, atol=1e-6)
    orientation = found.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    np.testing.assert_allclose(orientation.ImageOrientationPatient, turn, atol=1e-6)


def test_a_segmentation_may_be_empty_and_lie_in_the_folder_of_its_series(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU)
    case = Case("x", (folder,), None)
    Volume.read(case).save_dicom_seg(np.zeros(SHAPE, int), folder / "seg.dcm", ["b", "liver"])
    found = highdicom.seg.segread(folder / "seg.dcm")
    assert not found.pixel_array.any() and list(found.segment_numbers) == [1]
    loaded = load(folder)
    np.testing.assert_array_equal(loaded.image[0], HU)
    assert loaded.notes == ()


def test_save_segmentation_refuses(case: Case, tmp_path: Path, monkeypatch: Any) -> None:
    folder = write_series(tmp_path / "s", HU)
    series, out, names = Case("x", (folder,), None), tmp_path / "seg.dcm", ["b", "one", "two"]

    def bad(words: str, labels: Any = None, like: Case = series, path: Path = out) -> None:
        labels = random_label() if labels is None else labels
        with pytest.raises(ValueError, match=words) as caught:
            Volume.read(like).save_dicom_seg(labels, path, names)
        assert "\n" not in str(caught.value) and not out.exists()

    bad(r"written as \.dcm", path=tmp_path / "seg.nii.gz")
    bad("shape", random_label((9, 7, 10)))
    bad("whole numbers", random_image())
    bad("go up to 3, names up to 2", random_label(classes=4))
    bad("a.nii.gz: a DICOM-SEG needs a DICOM series", like=case)
    (tmp_path / "file").write_text("")
    bad("file/seg.dcm: cannot be written", path=tmp_path / "file" / "seg.dcm")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "highdicom", None)
        bad(r'pip install "ndlightnet\[dicom\]"')
    edit(folder / "03.dcm", SOPInstanceUID="")
    bad("03.dcm: has no SOPInstanceUID")


# ------------------------------------------------------------------------------------- real data


@pytest.mark.slow
def test_real_dicom_lies_under_its_labels(tmp_path: Path) -> None:
    (case,) = find_inputs(real("ct_torso", "dicom"))
    image = Volume.read(case).image
    labels = nibabel.load(real("ct_torso", "dicom_labels.nii.gz"))
    assert image.shape == (1, 512, 512, 20) and -1024 <= float(image.min()) < -900
    # The same grid in another index order: match voxels through millimetres, and as Volume does.
    to_label = np.linalg.inv(labels.affine) @ image.affine.numpy()
    flip = np.sign(np.diag(to_label)[:3]).astype(int)
    np.testing.assert_allclose(to_label[:3, :3], np.diag(flip), atol=1e-6)
    np.testing.assert_allclose(to_label[:3, 3], (flip < 0) * (np.array(labels.shape) - 1), atol=1e-3)
    matched = np.asarray(labels.dataobj)[:: flip[0], :: flip[1], :: flip[2]]
    ours = Volume.read(replace(case, label=real("ct_torso", "dicom_labels.nii.gz"))).label
    np.testing.assert_array_equal(ours[0].numpy(), matched)
    names = {name: int(n) for n, name in json.loads(real("ct_torso", "labels.json").read_text()).items()}
    hu = {name: float(np.median(image[0].numpy()[matched == n])) for name, n in names.items() if (matched == n).any()}
    assert 70 < hu["liver"] < 140 and 70 < hu["spleen"] < 160 and 30 < hu["autochthon_left"] < 80
    assert hu["vertebrae_T12"] > 120 and hu["humerus_left"] > 120 and hu["rib_left_9"] > 150
    # Corners of the two grids are the same eight places in the patient.
    ends = np.array([[x, y, z, 1] for x in (0, 511) for y in (0, 511) for z in (0, 19)]).T
    places = [a @ ends for a in (image.affine.numpy(), labels.affine)]
    ours, theirs = (sorted(p.T.tolist(), key=lambda q: np.round(q).tolist()) for p in places)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    # And the way back: labels saved for the series lie, in mm, where the given ones do.
    path = tmp_path / "out.nii.gz"
    Volume.read(case).save_labels(np.ascontiguousarray(matched), path)
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
    refuses(lambda: Volume.read(Case("x", (folder,), None)), victim, "cut short")

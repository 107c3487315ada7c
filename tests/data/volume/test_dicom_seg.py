"""Segmentations as DICOM objects (DICOM-SEG) that refer to the slices of their series."""

import sys

import highdicom
import numpy as np
import pydicom
import pytest
import torch

from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, SHAPE, edit, load, random_image, random_label, write_series


@pytest.mark.slow
@pytest.mark.parametrize("gap", [2.5, -2.5])
def test_every_label_lies_on_its_slice(tmp_path, gap):
    tilted = [1, 0, 0, 0, np.cos(0.3), np.sin(0.3)]
    folder = write_series(tmp_path / "s", HU, gap, ImageOrientationPatient=tilted)
    volume, labels = load(folder), random_label(classes=4)
    labels[labels == 3] = 2  # the third organ is named, but not there
    path = tmp_path / "new" / "seg.dcm"
    volume.save_dicom_seg(torch.from_numpy(labels), path, ["none", "liver", "x" * 80, "gone"])
    assert [file.name for file in path.parent.iterdir()] == ["seg.dcm"], "a draft was left behind"
    seg = highdicom.seg.segread(path)
    assert seg.SegmentationType == "BINARY" and list(seg.segment_numbers) == [1, 2, 3]
    assert [seg.get_segment_description(n).segment_label for n in (1, 2, 3)] == ["liver", "x" * 64, "gone"]
    # Slice by slice against the files themselves: which labels lie at the place of this file?
    sources = {source.SOPInstanceUID: source for source in map(pydicom.dcmread, folder.iterdir())}
    for uid, source in sources.items():
        frame = seg.get_pixels_by_source_instance([uid], combine_segments=True, ignore_spatial_locations=True)[0]
        place = np.array([*source.ImagePositionPatient, 1.0]) * [-1, -1, 1, 1]
        x, y, z, _ = np.linalg.inv(volume.image.affine.numpy()) @ place
        assert abs(x) < 1e-6 and abs(y) < 1e-6 and abs(z - round(z)) < 1e-6
        np.testing.assert_array_equal(frame, labels[:, :, round(z)].T)
        assert seg.StudyInstanceUID == source.StudyInstanceUID
        assert seg.FrameOfReferenceUID == source.FrameOfReferenceUID
    for frame in seg.PerFrameFunctionalGroupsSequence:
        uid = frame.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        place = frame.PlanePositionSequence[0].ImagePositionPatient
        np.testing.assert_allclose(place, sources[uid].ImagePositionPatient, atol=1e-6)
    orientation = seg.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence[0]
    np.testing.assert_allclose(orientation.ImageOrientationPatient, tilted, atol=1e-6)


def test_it_may_be_empty_and_lie_in_the_folder_of_its_series(tmp_path):
    folder = write_series(tmp_path / "s", HU)
    load(folder).save_dicom_seg(np.zeros(SHAPE, int), folder / "seg.dcm", ["b", "liver"])
    seg = highdicom.seg.segread(folder / "seg.dcm")
    assert not seg.pixel_array.any() and list(seg.segment_numbers) == [1]
    np.testing.assert_array_equal(load(folder).image[0], HU)
    assert load(folder).notes == ()


def test_what_cannot_be_written(case, tmp_path, monkeypatch):
    folder = write_series(tmp_path / "s", HU)
    series, out = Case("x", (folder,), None), tmp_path / "seg.dcm"

    def bad(words, labels=None, source=series, path=out):
        labels = random_label() if labels is None else labels
        with pytest.raises(ValueError, match=words) as caught:
            Volume.read(source).save_dicom_seg(labels, path, ["b", "one", "two"])
        assert "\n" not in str(caught.value) and not out.exists()

    bad(r"written as \.dcm", path=tmp_path / "seg.nii.gz")
    bad("shape", random_label((9, 7, 10)))
    bad("whole numbers", random_image())
    bad("go up to 3, names up to 2", random_label(classes=4))
    bad("a.nii.gz: a DICOM-SEG needs a DICOM series", source=case)
    (tmp_path / "file").write_text("")
    bad("file/seg.dcm: cannot be written", path=tmp_path / "file" / "seg.dcm")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "highdicom", None)
        bad(r'pip install "ndlightnet\[dicom\]"')
    edit(folder / "03.dcm", SOPInstanceUID="")
    bad("03.dcm: has no SOPInstanceUID")

"""Volumes: which are found, and how labels are written."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, SHAPE, random_image, random_label, read_all, refuses

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
    Volume.read(case).save_labels(labels, path)
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
    read_all([Case("in", case.images, path)], 256)


def test_save_labels_refuses(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.nii.gz"
    Volume.read(case).save_labels(random_label().astype(np.int64) * 300, out)
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
            Volume.read(case).save_labels(labels, out)
    with pytest.raises(ValueError, match=r"\.nii\.gz"):
        Volume.read(case).save_labels(random_label(), tmp_path / "out.mha")
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "out.nii.gz"
    refuses(lambda: Volume.read(case).save_labels(random_label(), inside), inside, "cannot be written")

    def full(*_: object) -> None:
        Path(str(_[1])).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    before = out.read_bytes()
    monkeypatch.setattr(nibabel, "save", full)
    refuses(lambda: Volume.read(case).save_labels(random_label(), out), out, "No space left")
    assert out.read_bytes() == before and not list(tmp_path.glob(".*")), "not atomic"

"""Volumes: which are found, and how labels are written."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume_transforms import preprocess
from ndlightnet.data.layouts import find_inputs, read_dataset
from ndlightnet.data.volumes import (
    Case,
    check_cases,
    load_case,
    save_labels,
)

from .volume_files import (
    AFFINE,
    HU,
    SHAPE,
    random_image,
    random_label,
    real,
    refuses,
    write,
    write_series,
)

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
    found = read_dataset(relist(folder, listing))
    assert found.labels == ("background", "one", "two") and found.channels == ("MRI",)
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
    assert [c.name for c in read_dataset(relist(tmp_path, listing)).test] == ["p1_ct", "p2_ct"]


def test_decathlon_refuses(listed: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = listed
    file = folder / "dataset.json"

    def bad(path: Path, words: str, **changes: Any) -> None:
        relist(folder, {**listing, **changes})
        refuses(lambda: read_dataset(folder), path, words)

    refuses(lambda: read_dataset(folder / "gone"), folder / "gone", "no such folder")
    refuses(lambda: read_dataset(folder), file, "cannot be read")
    for text, words in (("{", "not valid JSON"), ("[]", "JSON object")):
        relist(folder, text)
        refuses(lambda: read_dataset(folder), file, words)
    file.write_bytes(b"\xff\xfe\x00")
    refuses(lambda: read_dataset(folder), file, "not valid JSON")
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


# ------------------------------------------------------------------------------------- real data


def test_real_hippocampus() -> None:
    found = read_dataset(real("hippocampus"))
    assert (len(found.training), len(found.test)) == (190, 40)
    assert found.labels == ("background", "anterior", "posterior")
    some = [*found.training[::12], *found.test[::12]]
    check_cases(some, 3, progress=False)
    with pytest.raises(DataError, match=r"expected 0\.\.1"):
        check_cases(some, 2, progress=False)
    prepare = preprocess(found.channels)
    for case in some:
        image = prepare(load_case(case))["image"]
        assert abs(float(image.mean())) < 1e-3 and abs(float(image.std()) - 1) < 1e-2


def test_real_sarcoma() -> None:
    found = read_dataset(real("sarcoma_ct"))
    assert found.channels == ("CT", "PET") and len(found.training) == 33
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

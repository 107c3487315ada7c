"""Predict on a folder of 60 inputs, 25 of them broken: each bad one costs a line, no more."""

import csv
import html
import os
import re
from urllib.parse import unquote

import matplotlib.image
import nibabel
import numpy as np
import pytest
import torch

from ndlightnet import NDLightUNet
from ndlightnet.data.errors import file_name, printable
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume
from tests.training.hospital import broken_inputs, good_inputs
from tests.training.segmentation.conftest import CLASSES


@pytest.mark.slow
def test_60_inputs_of_which_25_are_broken(segment, checkpoints, tmp_path, monkeypatch):
    folder, out = tmp_path / "in", tmp_path / "out" / "predictions"
    good, bad = good_inputs(folder), broken_inputs(folder)
    assert (len(set(good)), len(set(bad))) == (35, 25)
    (folder / "dangling.nii.gz").symlink_to("/nowhere")
    (folder / "folder.nii.gz").mkdir()
    (folder / "picture.png").write_bytes(b"png")
    # labels that tell the volumes apart: where a voxel is above 100
    monkeypatch.setattr(NDLightUNet, "forward", lambda _, x: torch.cat([-x, x], 1))
    done = segment(
        "predict",
        CLASSES,
        f"--trainer.default_root_dir={tmp_path}/out",
        f"--ckpt_path={checkpoints[0]}",
        "--data.init_args.root=/gone",
        f"--data.init_args.input={folder}",
        "--data.init_args.intensities=[{low: -1e6, high: 1e6, mean: 100, deviation: 1}]",
    )
    assert done.status == 1 and "Traceback" not in done.err

    errors = list(done.errors)  # a DICOM folder is named by itself or by one of its slices
    for path in sorted(bad, key=lambda path: -len(path.name)):
        begin = f"error: {printable(path)}"
        (line,) = [line for line in errors if line.startswith((f"{begin}: ", f"{begin}/"))]
        errors.remove(line)
    assert errors == []
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    beside = "3 entries are left out: dangling.nii.gz, folder.nii.gz, picture.png"
    assert notes[0].startswith(f"note: {folder}: {beside} (expected .nii.gz, ")
    dicom = f"note: {folder}: DICOM objects are left out: 1 RTSTRUCT (expected series of images)"
    assert [line for line in notes if "left out" in line] == [notes[0], dicom]

    with (out / "cases.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    cases = [line["case"] for line in lines]
    assert "'=1+1" in cases and "'-o" in cases  # no formulas
    cases = [case.removeprefix("'") for case in cases]
    assert len(set(cases)) == 35 and all(case.isprintable() for case in cases)
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
    assert page.count("<li>") == 25

"""Segmentation: phantoms through fit, test, predict and resume."""

import csv
import json
import shutil
from pathlib import Path

import matplotlib.image
import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.data.phantoms import LABELS, make_phantoms
from ndlightnet.training import segmentation
from ndlightnet.training.segmentation import SegmentationTask


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory) -> Path:
    """Of seed 3 the test case runs to the left and back, so that turning it back shows."""
    folder = tmp_path_factory.mktemp("phantoms") / "data"
    return make_phantoms(folder, 3, 1, seed=3, progress=False)


@pytest.fixture(scope="module")
def run(phantoms, segment, tmp_path_factory) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("run")
    common = (f"--trainer.default_root_dir={out}", f"--data.init_args.root={phantoms}")
    assert segment("fit", *common).status == 0
    done = segment("test", *common, f"--ckpt_path={out}/checkpoints/best.ckpt")
    assert (done.status, done.errors) == (0, [])
    assert "held-out mean Dice" in done.out
    return out


def test_fit_leaves_checkpoints_and_logs(run):
    for name in ("best.ckpt", "last.ckpt"):
        saved = torch.load(run / "checkpoints" / name, weights_only=True)
        assert (saved["epoch"], saved["global_step"]) == (0, 2)
    rows = list(csv.DictReader(next(run.glob("logs/*/metrics.csv")).open()))
    assert len([row for row in rows if row["loss"]]) == 2
    assert len([row for row in rows if row["val_dice"]]) == 1
    assert list(run.glob("logs/*/events.out.tfevents.*"))


def test_metrics_of_the_test(run):
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics) == {
        "mean_dice", "dice_interval", "std_over_cases", "mean_hd95_mm", "mean_nsd", "dice",
        "hd95_mm", "nsd", "hd95_missing", "parameters", "cases",
    }  # fmt: skip
    assert tuple(metrics["dice"]) == tuple(metrics["hd95_mm"]) == LABELS[1:]
    case = metrics["cases"][0]
    assert [case["name"]] == ["phantom_003"] and len(metrics["cases"]) == 1
    assert list(metrics["dice"].values()) == pytest.approx(case["dice"])
    assert metrics["mean_dice"] == pytest.approx(np.mean(case["dice"]), abs=1e-5)
    known = [d for d in case["hd95_mm"] if d is not None]
    assert metrics["mean_hd95_mm"] == pytest.approx(np.mean(known), abs=1e-5)
    assert metrics["hd95_missing"] == case["hd95_mm"].count(None)
    saved = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(v.numel() for k, v in saved.items() if k.startswith("net."))


def test_dice_in_the_metrics_is_that_of_the_files(run, phantoms):
    """The written label map, against the truth, both as they are on disk."""
    guess = nibabel.load(run / "test" / "phantom_003.nii.gz")
    truth = nibabel.load(phantoms / "labelsTs" / "phantom_003.nii.gz")
    assert guess.shape == truth.shape
    np.testing.assert_allclose(guess.affine, truth.affine)
    a, b = (np.asarray(volume.dataobj) for volume in (guess, truth))
    pairs = [(a == number, b == number) for number in range(1, len(LABELS))]
    dice = [2 * (x & y).sum() / (x.sum() + y.sum()) for x, y in pairs]
    metrics = json.loads((run / "metrics.json").read_text())
    np.testing.assert_allclose(list(metrics["dice"].values()), dice, atol=1e-5)


def test_test_leaves_a_picture_a_table_and_a_page(run):
    picture = matplotlib.image.imread(run / "test" / "phantom_003.png")
    assert picture.shape[0] > 200 and picture.shape[1] > 600 and picture.std() > 0.05
    with (run / "test" / "cases.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["case"], line["class"]) for line in lines] == [
        ("phantom_003", name) for name in LABELS[1:]
    ]
    case = json.loads((run / "metrics.json").read_text())["cases"][0]
    for key in ("dice", "volume_ml", "truth_ml"):
        assert [float(line[key]) for line in lines] == pytest.approx(case[key], rel=1e-5, abs=1e-6)
    assert 'src="phantom_003.png"' in (run / "test" / "index.html").read_text()


def test_predict_without_the_training_data(run, segment, phantoms, tmp_path):
    """One file is good and one cut short; labels' names and channels come with the checkpoint."""
    inputs, out = tmp_path / "inputs", tmp_path / "out"
    inputs.mkdir()
    source = phantoms / "imagesTs" / "phantom_003.nii.gz"
    shutil.copy(source, inputs / "good.nii.gz")
    (inputs / "broken.nii.gz").write_bytes(source.read_bytes()[:5000])
    done = segment(
        "predict", f"--trainer.default_root_dir={out}", "--data.init_args.root=/gone",
        f"--data.init_args.input={inputs}", f"--ckpt_path={run}/checkpoints/best.ckpt",
    )  # fmt: skip
    assert done.status == 1
    assert len(done.errors) == 1 and done.errors[0].startswith(f"error: {inputs}/broken.nii.gz: ")
    wanted = ["good.nii.gz", "good.png"]
    assert sorted(path.name for path in (out / "predictions").iterdir()) == wanted
    written, original = nibabel.load(out / "predictions" / "good.nii.gz"), nibabel.load(source)
    assert written.shape == original.shape and written.get_data_dtype() == np.uint8
    np.testing.assert_allclose(written.affine, original.affine)
    tested = nibabel.load(run / "test" / "phantom_003.nii.gz")  # the same network, the same image
    np.testing.assert_array_equal(np.asarray(written.dataobj), np.asarray(tested.dataobj))


def test_prediction_lies_on_its_voxels(run, segment, phantoms, tmp_path, monkeypatch):
    """A "network" that says 1 above 40 HU, where the prepared CT is 0: the file's threshold."""
    source = phantoms / "imagesTs" / "phantom_003.nii.gz"
    assert nibabel.aff2axcodes(nibabel.load(source).affine) == ("L", "P", "S")
    threshold = lambda net, image, window: torch.cat([-image, image], 1)  # noqa: E731
    monkeypatch.setattr(segmentation, "predict_volume", threshold)
    done = segment(
        "predict", f"--trainer.default_root_dir={tmp_path}", f"--data.init_args.input={source}",
        f"--ckpt_path={run}/checkpoints/best.ckpt",
    )  # fmt: skip
    assert (done.status, done.errors) == (0, [])
    written = nibabel.load(tmp_path / "predictions" / "phantom_003.nii.gz")
    wanted = np.asarray(nibabel.load(source).dataobj) > 40
    np.testing.assert_array_equal(np.asarray(written.dataobj), wanted)


def test_resume_goes_on_where_it_stopped(run, segment, phantoms, tmp_path):
    done = segment(
        "fit", f"--trainer.default_root_dir={tmp_path}", f"--data.init_args.root={phantoms}",
        f"--ckpt_path={run}/checkpoints/last.ckpt", "--trainer.max_epochs=3",
    )  # fmt: skip
    assert (done.status, done.errors) == (0, [])
    rows = list(csv.DictReader(next(tmp_path.glob("logs/*/metrics.csv")).open()))
    assert [(row["epoch"], row["step"]) for row in rows if row["loss"]] == [
        ("1", "2"), ("1", "3"), ("2", "4"), ("2", "5"),
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 2])
def test_last_is_the_last_epoch_and_best_the_best(segment, decathlon, tmp_path, monkeypatch, every):
    """The score falls from epoch to epoch: best.ckpt stays at the first, last.ckpt goes on."""

    def falling(task, batch, _):
        task.log("val_dice", 1.0 / (1 + task.current_epoch), batch_size=1)

    monkeypatch.setattr(SegmentationTask, "validation_step", falling)
    done = segment(
        "fit", f"--trainer.default_root_dir={tmp_path}", f"--data.init_args.root={decathlon}",
        "--data.init_args.patch=[8,8,8]", "--model.net.init_args.out_channels=2",
        "--trainer.max_epochs=5", f"--trainer.check_val_every_n_epoch={every}",
    )  # fmt: skip
    assert done.status == 0
    saved = {path.name: torch.load(path, weights_only=True) for path in tmp_path.rglob("*.ckpt")}
    assert sorted(saved) == ["best.ckpt", "last.ckpt"]
    assert saved["best.ckpt"]["epoch"] == every - 1
    assert saved["last.ckpt"]["epoch"] == 4

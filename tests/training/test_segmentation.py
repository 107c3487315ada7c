"""Segmentation: the measures on cubes, and phantoms through fit, test, predict and resume."""

import csv
import json
import math
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.data.phantoms import LABELS, make_phantoms
from ndlightnet.training.segmentation import SegmentationTask, dice_of, hausdorff95


def cube(number: int, *start: int, shape=(16, 16, 16)) -> torch.Tensor:
    """(1, *shape): a 4 x 4 x 4 cube of label `number` on zeros."""
    labels = torch.zeros(1, *shape, dtype=torch.long)
    labels[(0, *(slice(s, s + 4) for s in start))] = number
    return labels


@pytest.mark.parametrize("axis, shift, dice", [(0, 0, 1), (0, 1, 0.75), (2, 3, 0.25), (1, 5, 0)])
def test_dice_of_shifted_cubes(axis, shift, dice):
    """Two equal cubes shifted by s of 4 voxels share (4 - s) / 4 of their voxels."""
    moved = [4, 4, 4]
    moved[axis] += shift
    found = dice_of(cube(1, *moved), cube(1, 4, 4, 4), 2)
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(dice)


def test_dice_is_per_case_and_class_and_nan_where_the_truth_has_none():
    truth = torch.cat([cube(1, 0, 0, 0), cube(2, 0, 0, 0)])
    guess = torch.cat([cube(1, 0, 0, 2), cube(1, 0, 0, 0)])
    dice = dice_of(guess, truth, 4)
    assert dice.shape == (2, 3)
    wanted = [[0.5, math.nan, math.nan], [math.nan, 0, math.nan]]
    np.testing.assert_allclose(dice.numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("axis, shift", [(0, 1), (1, 2), (2, 3)])
def test_hausdorff_counts_millimetres_along_each_axis(axis, shift):
    """Of a shifted cube a whole side, 16 of its 56 surface voxels, is `shift` voxels off."""
    spacing, moved = (0.5, 2.0, 7.0), [4, 4, 4]
    moved[axis] += shift
    distance = hausdorff95(cube(1, *moved), cube(1, 4, 4, 4), 2, spacing)
    assert distance.shape == (1, 1)
    assert distance.item() == pytest.approx(shift * spacing[axis])


def test_hausdorff_takes_the_95th_percentile():
    """A single stray voxel is beyond the percentile; all of a small prediction is not."""
    stray = cube(1, 4, 4, 4)
    stray[0, 15, 15, 15] = 1
    assert hausdorff95(stray, cube(1, 4, 4, 4), 2, (1, 1, 1)).item() == 0
    far = torch.zeros_like(stray)
    far[0, 4, 4, 15] = 1  # the farthest of the cube's voxels count: 11 layers and a bit away
    assert hausdorff95(far, cube(1, 4, 4, 4), 2, (1, 1, 1)).item() > 11


@pytest.mark.parametrize("guess", [0, 1])
def test_hausdorff_of_an_absent_class_is_not_a_number(guess):
    """Neither has class 3, only the truth has 2, and only one of the guesses has 1."""
    distance = hausdorff95(cube(guess, 0, 0, 0), cube(2, 0, 0, 0), 4, (1, 1, 1))
    assert distance.shape == (1, 3) and not distance.isfinite().any()


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory) -> Path:
    return make_phantoms(tmp_path_factory.mktemp("phantoms") / "data", 3, 1, progress=False)


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
        "mean_dice", "std_over_cases", "mean_hd95_mm", "dice", "hd95_mm", "hd95_missing",
        "parameters", "cases",
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


def test_test_leaves_a_picture(run):
    import matplotlib.image

    picture = matplotlib.image.imread(run / "test_cases.png")
    assert picture.shape[0] > 200 and picture.shape[1] > 600 and picture.std() > 0.05


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

"""Cross-validation on tiny volumes: who predicts whom, what is pooled, what is done once."""

import csv
import json
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.core import cli
from ndlightnet.training.segmentation.cross_validation import folds
from tests.training.conftest import UNET

TWO = "--data.init_args.folds=2"
CASES = [str(number) for number in range(7)]  # to train on; 7 is the test


class Killed(BaseException):
    """What nothing catches."""


@pytest.fixture
def cross(write_decathlon, tmp_path, monkeypatch, capsys):
    """cross(): `folds` with three folds on seven cases; (status, what it said on stdout)."""
    root = write_decathlon(tmp_path / "volumes", cases=8)
    (tmp_path / "config.yaml").write_text(UNET)
    options = {
        "data.init_args.root": root,
        "trainer.default_root_dir": tmp_path / "run",
        "data.init_args.patch": [8, 8, 8],
        "data.init_args.folds": 3,
        "model.lr": 0.02,
        "model.net.init_args.out_channels": 2,
        "trainer.max_epochs": 2,
    }
    argv = ["task.py", "folds", "--config", str(tmp_path / "config.yaml"), *(f"--{k}={v}" for k, v in options.items())]

    def run(*more: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [*argv, *more])
        status = cli.run(SegmentationTask, VolumeData, Path("none"), {"folds": folds})
        return status, capsys.readouterr().out

    return run


def metrics_of(run: Path, *fold: str) -> dict:
    return json.loads(run.joinpath(*fold, "metrics.json").read_text())


@pytest.mark.slow
def test_every_case_is_predicted_once_by_a_network_that_has_not_seen_it(cross, tmp_path, monkeypatch):
    run, trained, predicted = tmp_path / "run", {}, []
    start, case = SegmentationTask.on_train_start, SegmentationTask._case

    def on_train_start(task):
        trained.setdefault(task.data().fold, set()).update(c["name"] for c in task.data().crops.cases)
        start(task)

    def on_case(task, batch, folder):
        predicted.append((task.data().fold, batch["case"].name))
        case(task, batch, folder)

    monkeypatch.setattr(SegmentationTask, "on_train_start", on_train_start)
    monkeypatch.setattr(SegmentationTask, "_case", on_case)
    status, out = cross()
    assert status == 0
    assert sorted(name for _, name in predicted) == CASES
    for fold in range(3):
        held = {name for place, name in predicted if place == fold}
        assert trained[fold] == set(CASES) - held and len(held) in (2, 3)
        assert {case["name"] for case in metrics_of(run, f"fold_{fold}")["cases"]} == held

    pooled = metrics_of(run)
    assert [case["name"] for case in pooled["cases"]] == CASES
    dice = []
    for case_metrics in pooled["cases"]:
        (file,) = run.glob(f"fold_*/test/{case_metrics['name']}.nii.gz")
        truth = tmp_path / "volumes" / "labels" / file.name
        a, b = (np.asarray(nibabel.load(path).dataobj) > 0 for path in (file, truth))
        dice.append(2 * (a & b).sum() / (a.sum() + b.sum()))
        assert case_metrics["dice"] == pytest.approx([dice[-1]], abs=1e-6)
    assert np.mean(dice) > 0 and len(set(dice)) > 1
    assert pooled["mean_dice"] == pytest.approx(np.mean(dice), abs=1e-5)
    of_folds = [metrics_of(run, f"fold_{fold}")["mean_dice"] for fold in range(3)]
    assert pooled["mean_dice_of_folds"] == pytest.approx(of_folds)
    with (run / "cases.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["case"], line["class"]) for line in lines] == [(name, "cube") for name in CASES]
    assert [float(line["dice"]) for line in lines] == pytest.approx(dice, rel=1e-4, abs=1e-6)
    mean, spread = np.mean(of_folds), np.std(of_folds, ddof=1)
    assert f"mean Dice {mean:.3f} ± {spread:.3f} over 3 folds, 7 cases" in out


@pytest.mark.slow
def test_a_fold_is_tested_with_the_averaged_weights(cross, tmp_path, monkeypatch):
    """Those in the checkpoint's state_dict, which `test` would take, not those trained on."""
    start, tested = SegmentationTask.on_test_start, []

    def on_test_start(task):
        tested.append({key: value.clone() for key, value in task.state_dict().items()})
        start(task)

    monkeypatch.setattr(SegmentationTask, "on_test_start", on_test_start)
    average = "--trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging"
    assert cross(average, TWO, "--trainer.max_epochs=1")[0] == 0
    assert len(tested) == 2
    for fold, weights in enumerate(tested):
        last = tmp_path / "run" / f"fold_{fold}" / "checkpoints" / "last.ckpt"
        saved = torch.load(last, weights_only=True)
        raw = saved["current_model_state"]
        assert any(not torch.equal(raw[key], value) for key, value in weights.items())
        for key, value in weights.items():
            assert torch.equal(value, saved["state_dict"][key]), key


@pytest.mark.slow
def test_done_is_done_and_what_was_killed_goes_on(cross, tmp_path, monkeypatch):
    """Killed in the second fold's second epoch: the second call trains that epoch, a third one nothing."""
    step, steps = SegmentationTask.training_step, []

    def training_step(task, batch, number, die=None):
        steps.append((task.data().fold, task.global_step))
        if steps[-1] == die:
            raise Killed
        return step(task, batch, number)

    run = tmp_path / "run"
    monkeypatch.setattr(SegmentationTask, "training_step", lambda *a: training_step(*a, die=(1, 3)))
    with pytest.raises(Killed):
        cross(TWO)
    assert steps == [(0, n) for n in range(4)] + [(1, n) for n in range(4)]
    assert (run / "fold_0" / "metrics.json").exists()
    assert list(metrics_of(run, "fold_1")) == ["fit"] and not (run / "metrics.json").exists()

    steps.clear()
    monkeypatch.setattr(SegmentationTask, "training_step", training_step)
    first = (run / "fold_0" / "metrics.json").stat().st_mtime_ns
    assert cross(TWO)[0] == 0
    assert steps == [(1, 2), (1, 3)]
    assert (run / "fold_0" / "metrics.json").stat().st_mtime_ns == first
    pooled = metrics_of(run)

    steps.clear()
    stamps = {path: path.stat().st_mtime_ns for path in run.glob("fold_*/**/*.nii.gz")}
    assert cross(TWO)[0] == 0
    assert steps == [] and metrics_of(run) == pooled
    assert stamps == {path: path.stat().st_mtime_ns for path in run.glob("fold_*/**/*.nii.gz")}

"""Cross-validation on tiny volumes, killed, called again and once more: who predicts whom, with which weights, what is
pooled, what is done once."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.report.results import write_metrics
from ndlightnet.training.segmentation import cross_validation
from ndlightnet.training.segmentation.cross_validation import folds
from ndlightnet.training.segmentation.metrics import MEASURES
from tests.training.conftest import UNET, last, launch

CASES = [str(number) for number in range(5)]  # to train on; 5 is the test


class Killed(BaseException):
    """What nothing catches."""


def metrics_of(*folders: object) -> dict:
    return json.loads(Path(*folders, "metrics.json").read_text())


def stamps(out: Path) -> dict[Path, int]:
    """When the label maps and metrics of the folds were written."""
    return {path: path.stat().st_mtime_ns for end in ("nii.gz", "json") for path in out.glob(f"fold_*/**/*.{end}")}


@pytest.fixture(scope="module")
def cross(write_decathlon, tmp_path_factory) -> tuple[Path, list[SimpleNamespace]]:
    """The folder of the run, and of each of three calls its steps, cases and weights by fold, what it said, and the
    files and metrics it left. The first is killed in the second epoch of the second of two folds."""
    folder = tmp_path_factory.mktemp("cross")
    places = {"root": write_decathlon(folder / "volumes", cases=6), "out": folder / "run"}
    places |= {"data": {"patch": [8, 8, 8], "folds": 2}, "net": {"out_channels": 2}, "model": {"lr": 0.02}}
    average = "{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.5}}"
    more = ("--trainer.max_epochs=2", f"--trainer.callbacks+={average}")
    calls: list[SimpleNamespace] = []
    step, case, start = SegmentationTask.training_step, SegmentationTask._case, SegmentationTask.on_test_start

    def training_step(task, batch, number):
        data = task.data()
        calls[-1].trained[data.fold] = {one["name"] for one in data.crops.cases}
        calls[-1].steps.append((data.fold, task.global_step))
        if len(calls) == 1 and calls[-1].steps[-1] == (1, 3):
            raise Killed
        return step(task, batch, number)

    def on_case(task, batch, out):
        calls[-1].predicted.append((task.data().fold, batch["case"].name))
        case(task, batch, out)

    def on_test_start(task):
        calls[-1].weights[task.data().fold] = {key: value.clone() for key, value in task.state_dict().items()}
        start(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ndlightnet.training.segmentation.segmentation_task.save_case", lambda *_: None)  # takes long
        for name, method in (("training_step", training_step), ("_case", on_case), ("on_test_start", on_test_start)):
            patch.setattr(SegmentationTask, name, method)
        for number in range(3):
            calls.append(SimpleNamespace(steps=[], predicted=[], trained={}, weights={}))
            arguments = (SegmentationTask, VolumeData, UNET, folder, "folds", *more)
            if number == 0:
                with pytest.raises(Killed):
                    launch(*arguments, commands={"folds": folds}, **places)
            else:
                calls[-1].out = launch(*arguments, commands={"folds": folds}, **places).well().out
            pooled = (folder / "run" / "metrics.json").exists()
            calls[-1].pooled = metrics_of(folder, "run") if pooled else None
            calls[-1].stamps = stamps(folder / "run")
            calls[-1].metrics = [
                path.name for path in sorted((folder / "run").glob("fold_?")) if "cases" in metrics_of(path)
            ]
    return folder, calls


@pytest.mark.slow
def test_done_is_done_and_what_was_killed_goes_on(cross):
    """The second call trains the epoch that was cut off, the third one nothing."""
    first, second, third = cross[1]
    assert first.steps == [(0, n) for n in range(4)] + [(1, n) for n in range(4)]
    assert second.steps == [(1, 2), (1, 3)] and third.steps == third.predicted == []
    assert (first.metrics, second.metrics, first.pooled) == (["fold_0"], ["fold_0", "fold_1"], None)
    unchanged = {path: at for path, at in first.stamps.items() if "fold_0" in path.parts}
    assert len(unchanged) > 2 and unchanged.items() <= second.stamps.items()
    assert third.stamps == second.stamps and third.pooled == second.pooled


@pytest.mark.slow
def test_every_case_is_predicted_once_by_a_network_that_has_not_seen_it(cross):
    folder, (first, second, _) = cross
    run, predicted = folder / "run", first.predicted + second.predicted
    assert sorted(name for _, name in predicted) == CASES
    for fold in range(2):
        held = {name for place, name in predicted if place == fold}
        assert first.trained[fold] == set(CASES) - held and len(held) in (2, 3)
        assert {case["name"] for case in metrics_of(run, f"fold_{fold}")["cases"]} == held
    assert second.trained == {1: first.trained[1]}

    assert [case["name"] for case in second.pooled["cases"]] == CASES
    dice = []
    for case in second.pooled["cases"]:
        (file,) = run.glob(f"fold_*/test/{case['name']}.nii.gz")
        truth = folder / "volumes" / "labels" / file.name
        a, b = (np.asarray(nibabel.load(path).dataobj) > 0 for path in (file, truth))
        dice.append(2 * (a & b).sum() / (a.sum() + b.sum()))
        assert case["dice"] == pytest.approx([dice[-1]], abs=1e-6)
    assert np.mean(dice) > 0 and len(set(dice)) > 1
    assert second.pooled["mean_dice"] == pytest.approx(np.mean(dice), abs=1e-5)
    of_folds = [metrics_of(run, f"fold_{fold}")["mean_dice"] for fold in range(2)]
    assert second.pooled["mean_dice_of_folds"] == pytest.approx(of_folds)
    lines = list(csv.DictReader((run / "cases.csv").open(newline="")))
    assert [(line["case"], line["class"]) for line in lines] == [(name, "cube") for name in CASES]
    assert [float(line["dice"]) for line in lines] == pytest.approx(dice, rel=1e-4, abs=1e-6)
    mean, spread = np.mean(of_folds), np.std(of_folds, ddof=1)
    assert f"mean Dice {mean:.3f} ± {spread:.3f} over 2 folds, 5 cases" in second.out


@pytest.mark.slow
def test_a_fold_is_tested_with_the_averaged_weights(cross):
    """Those in the checkpoint's state_dict, which `test` would take, not those trained on."""
    folder, (first, second, _) = cross
    for fold, weights in {**first.weights, **second.weights}.items():
        saved = torch.load(last(folder / "run" / f"fold_{fold}"), weights_only=True)
        raw = saved["current_model_state"]
        assert any(not torch.equal(raw[key], value) for key, value in weights.items())
        for key, value in weights.items():
            assert torch.equal(value, saved["state_dict"][key]), key
    assert [*first.weights, *second.weights] == [0, 1]


def test_all_folds_are_run_and_count_the_same(tmp_path, monkeypatch, capsys):
    def fold(_, number: int) -> tuple[Path, int]:
        case = {"name": str(number)} | {key: [dice[number]] for key in MEASURES}
        metrics = {"dice": {"x": dice[number]}, "mean_dice": dice[number], "cases": [case]}
        write_metrics(tmp_path / f"fold_{number}", metrics)
        return tmp_path / f"fold_{number}", 3

    dice = [0.1, 0.2, 0.9]
    monkeypatch.setattr(cross_validation, "_fold", fold)
    folds(["--config=plan.yaml"])
    assert metrics_of(tmp_path)["mean_dice_of_folds"] == dice
    line = f"mean Dice {np.mean(dice):.3f} ± {np.std(dice, ddof=1):.3f} over 3 folds, 3 cases"
    assert line in capsys.readouterr().out

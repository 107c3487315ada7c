"""Video classification: moving digits through fit, test and predict."""

import csv
import json
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.digits import MOTIONS
from ndlightnet.training import VideoTask


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("digits") / "data"


DIGITS = ("--data.class_path=MovingDigits", "--data.init_args.videos=[12,6]")


@pytest.fixture(scope="module")
def run(digits, classify, tmp_path_factory) -> Path:
    """The folder of a finished fit and test; the digits are made on the way."""
    out = tmp_path_factory.mktemp("run")
    common = (*DIGITS, f"--trainer.default_root_dir={out}", f"--data.init_args.root={digits}")
    done = classify("fit", *common, "--data.init_args.validation=0.5")
    assert (done.status, done.errors) == (0, [])
    done = classify("test", *common, f"--ckpt_path={out}/checkpoints/last.ckpt")
    assert (done.status, done.errors) == (0, [])
    assert "held-out accuracy" in done.out and "over 6 videos" in done.out
    return out


@pytest.mark.slow
def test_fit_leaves_checkpoints_and_logs(run):
    for name in ("best.ckpt", "last.ckpt"):
        saved = torch.load(run / "checkpoints" / name, weights_only=True)
        assert (saved["epoch"], saved["global_step"]) == (0, 1)  # 6 of 12 clips, 4 in a batch
    rows = list(csv.DictReader(next(run.glob("logs/*/metrics.csv")).open()))
    assert [bool(row["val_accuracy"]) for row in rows].count(True) == 1
    assert list(run.glob("logs/*/events.out.tfevents.*"))


def test_metrics_of_the_test(run):
    metrics = json.loads((run / "metrics.json").read_text())
    expected = {"top1", "top5", "balanced_accuracy", "recall", "majority_class", "auc", "ece", "confusion", "videos"}
    costs = {"parameters", "steps", "train_seconds", "step_ms", "samples_per_second", "peak_memory_gb", "state_size"}
    assert set(metrics) == expected | costs | {"fit"}
    matrix = np.array(metrics["confusion"])
    assert matrix.shape == (6, 6) and metrics["videos"] == 6
    np.testing.assert_array_equal(matrix.sum(1), np.ones(6))  # rows are the truth
    assert metrics["top1"] == pytest.approx(matrix.trace() / 6, abs=1e-5)
    assert tuple(metrics["recall"]) == MOTIONS
    saved = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(v.numel() for k, v in saved.items() if k.startswith("net."))


PICTURES = ("confusion.png", "curves.png", "attribution.png", "test_clips.png")


def test_the_page_of_the_test_shows_all_and_the_table_names_the_files(run, digits):
    assert re.findall('img .*src="(.*?)"', (run / "index.html").read_text()) == list(PICTURES)
    for name in PICTURES:
        picture = matplotlib.image.imread(run / name)
        assert min(picture.shape[:2]) > 300 and picture.std() > 0.05
    rows = list(csv.DictReader((run / "test.csv").open()))
    assert [row["file"] for row in rows] == sorted(map(str, digits.glob("test/*/*.mp4")))
    assert [row["truth"] for row in rows] == [Path(row["file"]).parent.name for row in rows]
    metrics = json.loads((run / "metrics.json").read_text())
    right = sum(row["prediction"] == row["truth"] for row in rows)
    assert right / 6 == pytest.approx(metrics["top1"], abs=1e-5)


def test_predict_agrees_with_test_without_the_training_data(run, classify, digits, tmp_path):
    """The same checkpoint on the same files: the confusion matrix comes out again. A text costs a line."""
    shutil.copytree(digits / "test", tmp_path / "in")
    (tmp_path / "in" / "text.mp4").write_text("this is no video")
    done = classify(
        "predict",
        *DIGITS,
        f"--trainer.default_root_dir={tmp_path}",
        "--data.init_args.root=/gone",
        f"--data.init_args.input={tmp_path}/in",
        f"--ckpt_path={run}/checkpoints/last.ckpt",
    )
    assert done.status == 1
    assert len(done.errors) == 1 and done.errors[0].startswith(f"error: {tmp_path}/in/text.mp4: ")
    predictions = json.loads((tmp_path / "predictions" / "predictions.json").read_text())
    matrix = np.zeros((6, 6), int)
    for path, answer in predictions.items():
        probs = answer["probabilities"]
        assert tuple(probs) == MOTIONS and sum(probs.values()) == pytest.approx(1, abs=1e-4)
        assert answer["class"] == max(probs, key=probs.get)
        matrix[MOTIONS.index(Path(path).parent.name), MOTIONS.index(answer["class"])] += 1
    metrics = json.loads((run / "metrics.json").read_text())
    np.testing.assert_array_equal(matrix, metrics["confusion"])
    pictures = sorted((tmp_path / "predictions").glob("*.png"))
    assert len({path.name[:4] for path in pictures}) == 6 == len(predictions)  # names alone may be equal
    assert matplotlib.image.imread(pictures[0]).std() > 0.05


@pytest.mark.parametrize("validation", [0.5, 0])
def test_a_run_that_breaks_off_leaves_its_last_epoch(run, classify, digits, tmp_path, monkeypatch, validation):
    def step(task, *_):
        if task.current_epoch == 2:
            raise DataError("gone")
        return sum(p.sum() for p in task.net.parameters())

    monkeypatch.setattr(VideoTask, "training_step", step)
    done = classify(
        "fit",
        *DIGITS,
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.max_epochs=4",
        f"--data.init_args.root={digits}",
        f"--data.init_args.validation={validation}",
    )
    assert (done.status, done.errors) == (1, ["error: gone"])
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2 * (3 if validation == 0 else 1)

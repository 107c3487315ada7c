"""Video classification: moving digits through fit, test and predict."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError, printable
from ndlightnet.data.made.digits import MOTIONS
from ndlightnet.data.media import write_video
from ndlightnet.training import VideoTask
from tests.training.conftest import fit_and_test, last


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("digits") / "data"


DIGITS = ("--data.class_path=MovingDigits", "--data.init_args.videos=[12,6]")


@pytest.fixture(scope="module")
def run(digits, classify, tmp_path_factory) -> Path:
    """The folder of a finished fit and test; the digits are made on the way."""
    out = tmp_path_factory.mktemp("run")
    done = fit_and_test(classify, *DIGITS, "--data.init_args.validation=0.5", root=digits, out=out)
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


@pytest.mark.slow
def test_predict_agrees_with_test_without_the_training_data(run, classify, digits, tmp_path):
    """The same checkpoint on the same files: the confusion matrix comes out again. A text costs a line."""
    shutil.copytree(digits / "test", tmp_path / "in")
    (tmp_path / "in" / "text.mp4").write_text("this is no video")
    done = classify("predict", *DIGITS, root="/gone", input=tmp_path / "in", out=tmp_path, ckpt=last(run))
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


LONGEST = 255  # bytes of a name, on the file systems of Linux and macOS
GOOD = (r"b$\frac$.mp4", "n" * (LONGEST - 4) + ".mp4", "UPPER.M4V", "two\nlines.mov", os.fsdecode(b"caf\xe9.mp4"))
BAD = {
    "text.mp4": lambda good: b"this is no video",
    "truncated.mp4": lambda good: good[: len(good) // 2],
    "e" * (LONGEST - 5) + ".webm": lambda good: b"",
    os.fsdecode(b"text \xff.mp4"): lambda good: b"text",
}


def videos(folder: Path) -> None:
    write_video(folder / GOOD[0], np.random.default_rng(0).integers(0, 256, (10, 96, 128, 3), np.uint8), 25)
    good = (folder / GOOD[0]).read_bytes()
    for name in GOOD:
        (folder / name).write_bytes(good)
    for name, content in BAD.items():
        (folder / name).write_bytes(content(good))


@pytest.mark.slow
def test_videos_of_which_some_are_broken(run, classify, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out" / "predictions"
    folder.mkdir()
    videos(folder)
    (folder / "dangling.mp4").symlink_to("/nowhere")
    (folder / "folder.mp4").mkdir()
    (folder / "picture.png").write_bytes(b"png")
    done = classify("predict", out=tmp_path / "out", root="/gone", input=folder, ckpt=last(run))
    assert done.status == 1 and "Traceback" not in done.err
    lines = tuple(f"error: {printable(folder / name)}: " for name in BAD)
    assert sorted(line for error in done.errors for line in lines if error.startswith(line)) == sorted(lines)
    assert len(done.errors) == len(BAD)
    (note,) = done.notes
    assert "2 entries are left out: dangling.mp4, picture.png (expected" in note
    predicted = json.loads((out / "predictions.json").read_text())
    assert sorted(predicted) == sorted(str(folder / name) for name in GOOD)
    assert len(list(out.glob("*.png"))) == len(GOOD) and len(list(out.iterdir())) == len(GOOD) + 1


@pytest.mark.slow
@pytest.mark.parametrize("validation", [0.5, 0])
def test_a_run_that_breaks_off_leaves_its_last_epoch(run, classify, digits, tmp_path, monkeypatch, validation):
    def step(task, *_):
        if task.current_epoch == 2:
            raise DataError("gone")
        return sum(p.sum() for p in task.net.parameters())

    monkeypatch.setattr(VideoTask, "training_step", step)
    more = ("--trainer.max_epochs=4", f"--data.init_args.validation={validation}")
    done = classify("fit", *DIGITS, *more, root=digits, out=tmp_path)
    assert (done.status, done.errors) == (1, ["error: gone"])
    saved = torch.load(last(tmp_path), weights_only=True)
    assert saved["global_step"] == 2 * (3 if validation == 0 else 1)

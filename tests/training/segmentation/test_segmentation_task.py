"""Segmentation: phantoms through fit, test and resume; folds, channels, the best checkpoint."""

import csv
import json
from pathlib import Path

import matplotlib.image
import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.data.made.phantoms import LABELS
from ndlightnet.data.volume.crops import Crops
from ndlightnet.data.volume.transforms import Intensity
from ndlightnet.training import SegmentationTask, VolumeData
from tests.training.conftest import SMALL, fit_and_test, last


def logged(out: Path, name: str) -> list[float]:
    """What was logged under this name, by one process after another."""
    rows = [row for file in sorted(out.glob("logs/*/metrics.csv")) for row in csv.DictReader(file.open())]
    return [float(row[name]) for row in rows if row.get(name)]


@pytest.fixture(scope="module")
def run(phantoms, segment, tmp_path_factory) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("run")
    done = fit_and_test(segment, out=out, root=phantoms)
    assert "held-out mean Dice" in done.out
    return out


@pytest.mark.slow
def test_fit_leaves_checkpoints_and_logs(run):
    for name in ("best.ckpt", "last.ckpt"):
        saved = torch.load(run / "checkpoints" / name, weights_only=True)
        assert (saved["epoch"], saved["global_step"]) == (0, 2)
    assert [len(logged(run, name)) for name in ("loss", "val_dice")] == [2, 1]
    assert list(run.glob("logs/*/events.out.tfevents.*"))
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["parameters"] == sum(v.numel() for k, v in saved["state_dict"].items() if k.startswith("net."))


def test_metrics_page_and_table_are_those_of_the_files(run, phantoms):
    """Dice of the written label map, against the truth, both as they are on disk."""
    guess, truth = (nibabel.load(f / "phantom_003.nii.gz") for f in (run / "test", phantoms / "labelsTs"))
    assert guess.shape == truth.shape
    np.testing.assert_allclose(guess.affine, truth.affine)
    a, b = (np.asarray(volume.dataobj) for volume in (guess, truth))
    dice = [2 * ((a == n) & (b == n)).sum() / ((a == n).sum() + (b == n).sum()) for n in range(1, len(LABELS))]
    metrics = json.loads((run / "metrics.json").read_text())
    assert tuple(metrics["dice"]) == tuple(metrics["hd95_mm"]) == LABELS[1:]
    (case,) = metrics["cases"]
    assert case["name"] == "phantom_003"
    for values in (metrics["dice"].values(), case["dice"]):
        np.testing.assert_allclose(list(values), dice, atol=1e-5)
    assert metrics["mean_dice"] == pytest.approx(np.mean(dice), abs=1e-5)
    lines = list(csv.DictReader((run / "test" / "cases.csv").open(newline="")))
    assert [(line["case"], line["class"]) for line in lines] == [("phantom_003", name) for name in LABELS[1:]]
    for key in ("dice", "volume_ml", "truth_ml"):
        assert [float(line[key]) for line in lines] == pytest.approx(case[key], rel=1e-5, abs=1e-6)
    picture = matplotlib.image.imread(run / "test" / "phantom_003.png")
    assert picture.shape[0] > 200 and picture.shape[1] > 600 and picture.std() > 0.05
    assert 'src="phantom_003.png"' in (run / "test" / "index.html").read_text()


# of five validations: the best one by itself is the second, the best of the running mean the fourth
DICE = (0.5, 0.9, 0.6, 0.6, 0.1)


@pytest.mark.slow
def test_best_follows_the_running_mean_and_last_is_the_last(segment, decathlon, tmp_path, monkeypatch):
    """Also of a training that goes on."""

    def validation_step(task, batch, _):
        task.val_dice[batch["name"]] = [DICE[task.current_epoch]]

    monkeypatch.setattr(SegmentationTask, "validation_step", validation_step)
    places = {"root": decathlon, "out": tmp_path, **SMALL}
    segment("fit", **places).well()
    segment("fit", "--trainer.max_epochs=5", **places, ckpt=last(tmp_path)).well()
    means = [DICE[0]]
    for value in DICE[1:]:
        means.append(0.8 * means[-1] + 0.2 * value)
    assert logged(tmp_path, "ema_dice") == pytest.approx(means)
    assert logged(tmp_path, "val_dice") == pytest.approx(DICE)
    saved = {path.name: torch.load(path, weights_only=True) for path in tmp_path.rglob("*.ckpt")}
    assert sorted(saved) == ["best.ckpt", "last.ckpt"]
    assert saved["best.ckpt"]["epoch"] == int(np.argmax(means)) and saved["last.ckpt"]["epoch"] == 4
    assert saved["best.ckpt"]["ema_dice"] == pytest.approx(max(means))
    assert saved["last.ckpt"]["ema_dice"] == pytest.approx(means[-1])


def test_waiting_is_the_share_of_time_spent_on_slow_crops(segment, decathlon, tmp_path, monkeypatch):
    """By a clock on which, in each of two epochs, four crops last 3 s each, two steps 2 s each, and the validation
    after them, which is no part of it, 100 s."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def lasting(owner: type, name: str, seconds: float) -> None:
        method = getattr(owner, name)

        def slow(*arguments):
            now[0] += seconds
            return method(*arguments)

        monkeypatch.setattr(owner, name, slow)

    lasting(Crops, "__getitem__", 3)
    lasting(SegmentationTask, "training_step", 2)
    lasting(SegmentationTask, "validation_step", 100)
    more = ("--trainer.num_sanity_val_steps=0", "--trainer.max_epochs=2", "--data.init_args.augment=null")
    segment("fit", *more, root=decathlon, out=tmp_path, **SMALL).well()
    assert logged(tmp_path, "waiting") == pytest.approx([4 * 3 / (4 * 3 + 2 * 2)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])  # within the first epoch, and at the end of the second
def test_a_training_cut_off_by_its_steps_goes_on(segment, decathlon, tmp_path, steps):
    """Lightning does not start anew the epoch that it was in."""
    places = {"root": decathlon, "out": tmp_path, **SMALL}
    segment("fit", "--trainer.max_epochs=-1", f"--trainer.max_steps={steps}", **places).well()
    saved = torch.load(last(tmp_path), weights_only=True)
    assert saved["global_step"] == steps and len(saved["cost"][0]) == steps // 2
    segment("fit", "--trainer.max_epochs=-1", "--trainer.max_steps=7", **places, ckpt=last(tmp_path)).well()
    saved = torch.load(last(tmp_path), weights_only=True)
    assert saved["global_step"] == 7 and all(seconds > 0 for seconds in saved["cost"][0])


def test_a_fold_is_held_out_and_all_folds_are_all_cases(decathlon):
    """Of every fold: trained on are the others, tested is the fold."""
    tested = []
    for fold in range(3):
        data = VolumeData(str(decathlon), [8, 8, 8], folds=3, fold=fold, test_on="fold", workers=0)
        data.setup("fit")
        trained = [case["name"] for case in data.crops.cases]
        held = [case["name"] for case in data.val_set]
        data.setup("test")
        assert [case.name for case in data.test_cases] == held
        assert sorted(trained + held) == ["0", "1", "2"] and len(held) == 1
        tested += held
    assert sorted(tested) == ["0", "1", "2"]
    data = VolumeData(str(decathlon), [8, 8, 8], workers=0)
    data.setup("test")
    assert [case.name for case in data.test_cases] == ["3"]


@pytest.mark.slow
def test_a_fold_works_in_a_folder_of_its_own(segment, decathlon, tmp_path):
    places = {"root": decathlon, "out": tmp_path, **SMALL}
    fold = ("--data.init_args.fold=1", "--data.init_args.folds=3")
    segment("fit", *fold, **places).well()
    assert [path.name for path in tmp_path.iterdir() if path != decathlon] == ["fold_1"]
    best = tmp_path / "fold_1" / "checkpoints" / "best.ckpt"
    segment("test", *fold, "--data.init_args.test_on=fold", **places, ckpt=best).well()
    (case,) = json.loads((tmp_path / "fold_1" / "metrics.json").read_text())["cases"]
    assert case["name"] in ("0", "1", "2")


def test_the_network_gets_the_channels_asked_for(tmp_path, write_decathlon):
    """The second of two files, scaled by its own intensity."""
    folder = write_decathlon(tmp_path / "two", channels=2)
    scales = [Intensity(0, 1, 0, 1), Intensity(-1000, 1000, 50, 10)]
    data = VolumeData(str(folder), [8, 8, 8], intensities=scales, channels=[1], augment=None, workers=0)
    data.setup("fit")
    assert data.in_channels == 1
    voxels = np.asarray(nibabel.load(folder / "images" / "0_b.nii.gz").dataobj)
    (case,) = [case for case in [*data.crops.cases, *data.val_set] if case["name"] == "0"]
    # of a case to train on what is padded is cut off; the files lie along RAS already
    image = case["image"].as_tensor()
    assert image.shape == (1, 12, 10, 8)
    np.testing.assert_allclose(image[0].numpy(), (voxels - 50) / 10, atol=1e-4)


def loss_of(monkeypatch: pytest.MonkeyPatch, outputs: list[torch.Tensor] | torch.Tensor, label: torch.Tensor) -> float:
    task = SegmentationTask(torch.nn.Identity())
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    monkeypatch.setattr(task.net, "forward", lambda image: outputs)
    return task.training_step((label, label, torch.zeros(2)), 0).item()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_each_output_of_deep_supervision_counts_half_of_the_one_before(monkeypatch, levels):
    """All labels are alike, so that each grid has the same ones; the loss is that of the outputs alone."""
    label = torch.ones(2, 1, 8, 8, 8)
    outputs = [torch.randn(2, 3, *[8 >> level] * 3) for level in range(levels)]
    alone = [loss_of(monkeypatch, logits, label[..., : 8 >> n, : 8 >> n, : 8 >> n]) for n, logits in enumerate(outputs)]
    weights = {1: [1.0], 2: [2 / 3, 1 / 3], 3: [4 / 7, 2 / 7, 1 / 7]}[levels]
    expected = sum(weight * loss for weight, loss in zip(weights, alone, strict=True))
    assert len(set(alone)) == levels
    assert loss_of(monkeypatch, outputs, label) == pytest.approx(expected, rel=1e-5)

"""Volumes in folders, from files to a CSV; averaged weights, augmentation, mirrored answers."""

import csv
import json
import os
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import lightning
import nibabel
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError, printable
from ndlightnet.data.volume.augment import Augment
from ndlightnet.data.volume.class_folders import read_volume
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.training import AveragedWeights, ImageData, ImageTask, VolumeFolders
from tests.data.volume.files import broken_image, random_image, write
from tests.training.conftest import Done, Watcher, fit_and_test, last, launcher, set_up

TINY = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 8
  log_every_n_steps: 1
  enable_progress_bar: false
  callbacks: [{class_path: ndlightnet.training.AveragedWeights, init_args: {decay: 0.8}}]
model:
  lr: 1.0e-2
  mirror: [0, 2]
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 3, in_chans: 1, num_classes: 2, patch_size: 2, embed_dim: 16, depth: 1}
data:
  class_path: ndlightnet.training.VolumeFolders
  init_args:
    root: nowhere
    size: [8, 7, 6]
    batch_size: 8
    validation: 0.2
    augment: {flip_axes: [0, 2], shift: 1, turn: 0.5}
"""


def save(path: Path, radius: float, seed: int, edge: float = 2.0) -> Path:
    """A bright ball of `radius` mm in noise, voxels of `edge` mm."""
    shape = [round(36 / edge), round(32 / edge), round(28 / edge)]
    centred = (np.stack(np.indices(shape), -1) - (np.array(shape) - 1) / 2) * edge
    voxels = 500.0 * (np.linalg.norm(centred, axis=-1) < radius)
    voxels += np.random.default_rng(seed).normal(0, 40, shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(voxels.astype(np.float32), np.diag([edge, edge, edge, 1]))
    nibabel.save(image, path)
    return path


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small and large balls in millimetres; voxels of two sizes in both."""
    root = tmp_path_factory.mktemp("scans")
    for split, count in (("train", 20), ("test", 5)):
        for name, radius in (("large", 12), ("small", 7)):
            for n in range(count):
                save(root / split / name / f"{n}.nii.gz", radius, n, (2.0, 3.0)[n % 2])
    return root


balls = launcher(ImageTask, ImageData, TINY)


@pytest.fixture(scope="module")
def trained(balls, scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("run")
    fit_and_test(balls, root=scans, out=out)
    return out


@pytest.fixture
def predict(balls, trained: Path, tmp_path: Path) -> Callable[[], Done]:
    """predict(): how a prediction of the files in tmp_path/new ended, without the training data."""
    return lambda: balls("predict", root="gone", input=tmp_path / "new", out=tmp_path, ckpt=last(trained))


@pytest.mark.slow
def test_balls_of_two_sizes_are_told_apart(trained: Path) -> None:
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["tokens"] == 4 * 4 * 3  # a patch of 2 sticks out of 7 cells
    rows = list(csv.DictReader((trained / "test.csv").open()))
    assert [row["truth"] for row in rows] == ["large"] * 5 + ["small"] * 5
    assert all(Path(row["file"]).parts[-2] == row["truth"] for row in rows)
    assert (trained / "attribution.png").stat().st_size > 5000
    assert metrics["images"] == 10 and list(metrics["recall"]) == ["large", "small"]
    assert metrics["top1"] >= 0.9 and metrics["auc"] >= 0.9 and metrics["majority_class"] == 0.5


def network(out: Path) -> tuple[NDLightNet, dict]:
    saved = torch.load(last(out), weights_only=True)
    net = NDLightNet(3, 1, 2, patch_size=2, embed_dim=16, depth=1).eval()
    net.load_state_dict({k[4:]: v for k, v in saved["state_dict"].items() if k[:4] == "net."})
    return net, saved


def test_predictions_are_those_of_the_averaged_weights(trained: Path, predict, tmp_path: Path) -> None:
    """Of new files into a CSV, without the training data; a broken one costs a line, no more."""
    new = tmp_path / "new"
    paths = [save(new / "c.nii.gz", 12, 99), save(new / "a.nii", 7, 98, 3.0)]
    (new / "b.nii.gz").write_bytes(b"no volume")
    done = predict()
    assert done.status == 1 and len(done.errors) == 1
    assert done.errors[0].startswith(f"error: {new / 'b.nii.gz'}: cannot be read")
    with open(tmp_path / "predictions.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "prediction", "large", "small"]
    assert [row[:2] for row in rows] == [[str(paths[1]), "small"], [str(paths[0]), "large"]]
    net, saved = network(trained)
    mean, deviation = saved["names"]["scale"]
    for row in rows:
        case = Case("", (Path(row[0]),), None)
        volume = read_volume(case, (8, 7, 6), saved["names"]["spacing"]).double()
        image = ((volume - mean) / deviation).float()[None, None]
        ways = [way for n in range(3) for way in combinations((2, 4), n)]
        with torch.no_grad():
            expected = torch.stack([net(image.flip(w)).softmax(-1) for w in ways]).mean(0)[0]
        assert [float(x) for x in row[2:]] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
def test_names_and_headers_end_nothing(predict, tmp_path: Path) -> None:
    new = tmp_path / "new"
    names = [r"b$\frac$.nii.gz", "n" * 248 + ".nii.gz", "UP.NII.GZ", os.fsdecode(b"caf\xe9.nii")]
    good = [save(new / name, 12, 9) for name in names]
    bad = [write(new / f"{fault}.nii.gz", random_image()) for fault in ("truncated", "flat affine")]
    for path in bad:
        broken_image(path, path.name.removesuffix(".nii.gz"))
    bad.append(new / os.fsdecode(b"text \xff.nii"))
    bad[-1].write_text("text")
    (new / "picture.png").write_bytes(b"")
    done = predict()
    assert done.status == 1 and len(done.errors) == 3
    for path in bad:
        assert sum(line.startswith(f"error: {printable(path)}: ") for line in done.errors) == 1
    assert done.notes[0].startswith(f"note: {new}: 1 entry is left out: picture.png (")
    with open(tmp_path / "predictions.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["file"] for row in rows) == sorted(map(printable, good))
    assert {row["prediction"] for row in rows} == {"large"}

    for path in good:
        path.unlink()
    done = predict()
    assert done.status == 1 and len(done.errors) == 3


def test_what_a_checkpoint_keeps(trained: Path, scans: Path) -> None:
    _, saved = network(trained)
    assert saved["names"]["classes"] == ["large", "small"]
    # no training volume is cut: 36 x 33 x 28 mm, 12 x 11 x 9 voxels of 3 mm
    assert saved["names"]["spacing"] == pytest.approx([36 / 8, 33 / 7, 28 / 6])
    current, average = saved["current_model_state"], saved["state_dict"]
    assert any(not torch.equal(current[name], average[name]) for name in average)


@pytest.mark.parametrize(
    ("options", "mirror", "text"),
    [
        ({"size": [8, 8]}, (), "data.size: [8, 8], expected three numbers"),
        ({"spacing": [1, 0, 1]}, (), "data.spacing: [1, 0, 1], expected three"),
        ({"classes": ["x", "y"]}, (), "classes=['x', 'y'], has ['large', 'small']"),
        ({}, (3,), "model.mirror: (3,), expected axes from 0 to 2"),
        ({"shift": 2, "augment": Augment()}, (), "shift=2, flips=(): with augment"),
    ],
)
def test_what_does_not_fit(scans: Path, options: dict, mirror: tuple[int, ...], text: str) -> None:
    net = NDLightNet(3, 1, 2, patch_size=2, embed_dim=8, depth=1)
    with pytest.raises(DataError, match=re.escape(text)):
        set_up(ImageTask(net, mirror=mirror), VolumeFolders(str(scans), **{"size": [8, 7, 6]} | options))


def test_predict_without_input_or_checkpoint() -> None:
    for path, text in (
        (None, "data.input: expected a file or a folder"),
        ("x", "--ckpt_path: predict expects the check"),
    ):
        with pytest.raises(DataError, match=text):
            VolumeFolders("gone", [8, 7, 6], input=path).predict_dataloader()
    with pytest.raises(DataError, match=r"gone.npz: predict reads files, with ImageFolders or VolumeFolders"):
        ImageData("gone.npz").predict_dataloader()


def test_training_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("train/a", "train/b", "test/a", "test/b"):
        save(tmp_path / folder / "0.nii.gz", 9, 0)
    (tmp_path / "train" / "a" / "a.png").write_bytes(b"")
    VolumeFolders(str(tmp_path), [4, 4, 4], validation=0.0).setup("fit")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {tmp_path}/train/a: 1 entry is left out: a.png")
    bad = tmp_path / "test" / "b" / "0.nii.gz"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(DataError, match=f"^{bad}: cannot be read"):
        VolumeFolders(str(tmp_path), [4, 4, 4], validation=0.0).setup("fit")


def fitted(data: ImageData, folder: Path) -> tuple[Watcher, dict]:
    """A task that has been trained and then tested by the same trainer, and its checkpoint."""
    lightning.seed_everything(3)
    task = Watcher(NDLightNet(3, 1, 2, patch_size=2, embed_dim=8, depth=1), lr=1e-2)
    saving = ModelCheckpoint(folder, "x", save_on_train_epoch_end=True, enable_version_counter=False)
    callbacks, quiet = [AveragedWeights(decay=0.9), saving], {"logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=folder,
        **quiet,
    )
    trainer.fit(task, data)
    trainer.test(task, data, ckpt_path=folder / "x.ckpt", weights_only=True, verbose=False)
    return task, torch.load(folder / "x.ckpt", weights_only=True)


@pytest.mark.slow
def test_augmented_batches_and_a_test_by_the_same_trainer(scans: Path, tmp_path: Path) -> None:
    """The batches follow from the seed, differ between epochs, and are of the training alone; the test is of the
    averaged weights."""
    augment = Augment(flip_axes=(0,), shift=1, turn=0.5)
    data = [VolumeFolders(str(scans), [8, 7, 6], batch_size=8, augment=augment) for _ in range(2)]
    (one, saved), (two, _) = (fitted(each, tmp_path) for each in data)
    assert len(one.batches) == 2 * 4  # 36 of 40 in whole batches of 8
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one.batches, two.batches, strict=True))
    still = (data[0].train_set.images[:, None] - data[0].mean) / data[0].std
    images = torch.cat([batch[0] for batch in one.batches])
    unchanged = [bool((image == still).flatten(1).all(1).any()) for image in images]
    assert sum(unchanged) < 0.2 * len(images)  # (1/3)^3 / 4 draw nothing to speak of
    assert not torch.equal(*images.chunk(2))  # the epochs
    assert data[0].augment.spacing == pytest.approx(tuple(data[0].spacing))
    for batch in data[0].val_dataloader():
        assert torch.equal(
            data[0].on_after_batch_transfer(batch, 0)[0], (batch[0].float() - data[0].mean) / data[0].std
        )
    for name, value in one.net.named_parameters():
        assert torch.equal(value, saved["state_dict"][f"net.{name}"])
        assert not torch.equal(value, saved["current_model_state"][f"net.{name}"])

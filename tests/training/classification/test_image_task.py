"""Images and volumes in memory: their splits and batches, what a run leaves, its measures."""

import json
import re
import struct
from pathlib import Path

import lightning
import matplotlib.image
import numpy as np
import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.nn import mixers
from ndlightnet.training import ImageData, ImageTask
from tests.training.conftest import IMAGES, Watcher, fit_and_test, last, launcher, set_up

TINY = IMAGES.replace("ImageFolders", "ImageData").replace(
    "size: 8, scale: [0.5, 1], batch_size: 16, crop_pct: 1, workers: 0", "batch_size: 16, shift: 1, flips: [0, 1]"
)


def stripes(count: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Noise, rows and columns: three classes that moves do not change."""
    rng = np.random.default_rng(count)
    labels = rng.integers(0, 3, count)
    at = np.arange(size) // 2 % 2 * 200
    patterns = np.stack([np.zeros((size, size)), *np.broadcast_arrays(at[:, None], at)])
    return (patterns[labels] + rng.integers(0, 50, (count, size, size))).astype(np.uint8), labels


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder of IDX files: 240 images to train with, 50 to test."""
    folder = tmp_path_factory.mktemp("idx")
    for split, count in (("train", 240), ("t10k", 50)):
        images, labels = stripes(count)
        for array, name in ((images, "images-idx3"), (labels.astype(np.uint8), "labels-idx1")):
            head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{split}-{name}-ubyte").write_bytes(head + array.tobytes())
    return folder


tiny = launcher(ImageTask, ImageData, TINY)


@pytest.fixture(scope="module")
def trained(tiny, pictures, tmp_path_factory) -> Path:
    """The folder of a finished fit and test."""
    out, data = tmp_path_factory.mktemp("out"), {"classes": ["noise", "rows", "columns"]}
    done = fit_and_test(tiny, root=pictures, out=out, data=data, net={"in_chans": 1})
    assert "held-out accuracy" in done.out
    for name in ("confusion.png", "test_images.png"):
        picture = matplotlib.image.imread(out / name)
        assert min(picture.shape[:2]) > 150 and picture.std() > 0.05
    return out


@pytest.mark.slow
def test_a_small_set_is_learnt(trained):
    metrics = json.loads((trained / "metrics.json").read_text())
    matrix = np.array(metrics["confusion"])
    assert metrics["images"] == matrix.sum() == 50
    assert metrics["top1"] == pytest.approx(matrix.trace() / matrix.sum(), abs=1e-5)
    assert metrics["top1"] > 0.95 > 0.8 > metrics["majority_class"] and metrics["auc"] > 0.95
    assert list(metrics["recall"]) == ["noise", "rows", "columns"]
    assert metrics["tokens"] == 4 * 4 and metrics["steps"] == 4 * 13  # 216 of 240 in whole batches of 16
    assert 0 < metrics["step_ms"] / 1e3 <= metrics["train_seconds"]
    assert metrics["latency_ms"] > 0 and metrics["latency_one_ms"] > 0
    assert metrics["peak_memory_gb"] is None
    saved = torch.load(last(trained), weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(v.numel() for v in saved.values())


@pytest.mark.parametrize(
    "options, net, text",
    [
        ({}, {"num_classes": 4}, "num_classes=3, got 4"),
        ({}, {"in_chans": 3}, "in_chans=1, got 3"),
        ({}, {"dims": 3}, "dims=2, got 3"),
        ({"classes": ["a", "b"]}, {}, "labels up to 2: classes are ['a', 'b']"),
        ({"flips": (2,)}, {}, "flips=(2,): axes are 0 to 1"),
        ({"validation": 1.0}, {}, "validation=1.0: 0 samples to train with, expected 1 or more of 0"),
        ({"train_limit": 0}, {}, "train_limit=0, validation=0.1: 0 samples"),
        ({"train_limit": 217}, {}, "217 samples to train with, expected 1 or more of 216"),
    ],
)
def test_what_does_not_fit_the_data(pictures, options, net, text):
    arguments = {"dims": 2, "in_chans": 1, "num_classes": 3, "patch_size": 2, "embed_dim": 8, "depth": 1} | net
    with pytest.raises(DataError, match=f"^{pictures}: .*{re.escape(text)}"):
        set_up(ImageTask(NDLightNet(**arguments)), ImageData(str(pictures), **options))


def test_splits_of_the_data(pictures, tmp_path):
    data = ImageData(str(pictures), validation=0.25, train_limit=30)
    data.setup("fit")
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (30, 60, 50)
    images, labels = (torch.from_numpy(x.astype(np.int64)) for x in stripes(240))
    numbers = {tuple(image.flatten().tolist()): n for n, image in enumerate(images)}
    train, held = (
        [numbers[tuple(image.flatten().tolist())] for image in split.images] for split in (data.train_set, data.val_set)
    )
    assert not set(train) & set(held) and held == list(range(0, 240, 4))
    assert torch.equal(data.train_set.labels, labels[train])
    counts = {"train": 64, "val": 16, "test": 24}  # volumes with their own part for validation
    content = {f"{split}_images": np.zeros((count, 7, 6, 5), np.uint8) for split, count in counts.items()}
    content |= {f"{split}_labels": np.arange(count)[:, None] % 2 for split, count in counts.items()}
    np.savez(tmp_path / "volumes.npz", **content)
    data = ImageData(str(tmp_path / "volumes.npz"))
    data.setup("fit")
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (64, 16, 24)
    assert data.train_set.images.shape == (64, 7, 6, 5)


def test_test_images_are_normalised_and_nothing_else(close, pictures):
    data = ImageData(str(pictures), batch_size=64, shift=3, flips=(0, 1))
    data.setup("test")
    scale = stripes(240)[0].astype(np.float64)
    images, labels = stripes(50)
    expected = torch.from_numpy((images - scale.mean()) / scale.std())[:, None].float()
    for loader in (data.test_dataloader(), data.test_dataloader()):
        (batch,) = loader
        normalised, truth, numbers = data.on_after_batch_transfer(batch, 0)
        close(normalised, expected, 1e-6)
        assert truth.tolist() == labels.tolist() and numbers.tolist() == list(range(50))
    (held,) = data.val_dataloader()
    assert len(held) == 3  # no moves


def watched(root: Path, folder: Path, epochs: int, **net) -> list[tuple[torch.Tensor, ...]]:
    lightning.seed_everything(5)
    task = Watcher(NDLightNet(2, 1, 3, patch_size=2, embed_dim=8, **net))
    data = ImageData(str(root), batch_size=64, shift=2, flips=(1,))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(task, data)
    return task.batches


def test_networks_that_are_compared_see_the_same_batches(pictures, tmp_path):
    """Whatever they draw themselves; and another order with other moves in every epoch."""
    some = watched(pictures, tmp_path, 2, depth=1)
    others = watched(pictures, tmp_path, 2, depth=2, mixer=mixers.Identity, drop_path_rate=0.5)
    assert len(some) == len(others) == 2 * 3
    for one, two in zip(some, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for n in range(3):
        assert not torch.equal(some[n][2], some[n + 3][2])
    data = ImageData(str(pictures))
    data.setup("fit")
    for images, labels, numbers in some:
        assert torch.equal(labels, data.train_set.labels[numbers])
        still = (data.train_set.images[numbers][:, None] - data.mean) / data.std
        moved = (images != still).flatten(1).any(1).float().mean()
        assert moved > 0.8  # 1 of 50 draws, and chance, leave an image as it was

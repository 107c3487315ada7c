"""The recipe of ImageNet on a folder of the same shape, in two processes."""

import json
from pathlib import Path

import pytest
import torch

from ndlightnet.__main__ import door
from tests.training.conftest import last, options
from tests.training.forked import run_forked

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_two_processes_train_and_one_tests(write_stripes, tmp_path):
    root = write_stripes(tmp_path / "imagenet", train=20, test=4, side=40)
    (root / "test").rename(root / "val")
    (root / "test").symlink_to(root / "val")
    (root / "train" / "rows" / "000.png").write_bytes(b"damaged")
    config, small = ROOT / "configs" / "imagenet_tiny.yaml", {"num_classes": 3, "embed_dim": 16, "depth": 2}
    data, trainer = {"size": 32, "workers": 1, "batch_size": 5}, {"accelerator": "cpu", "enable_progress_bar": False}
    common = ["--config", config, *options(root=root, out=tmp_path, trainer=trainer, data=data, net=small)]
    more = ("--trainer.devices=2", "--trainer.max_epochs=2", "--model.warmup_epochs=1")
    words = ["fit", *map(str, common), *more, "--trainer.check_val_every_n_epoch=1"]
    assert run_forked(tmp_path / "log", door, "image_cls", words, count=2) == [0, 0]
    assert "train/rows/000.png: cannot be read" in (tmp_path / "log").read_text()
    saved = torch.load(last(tmp_path), weights_only=True)
    assert saved["global_step"] == 2 * 60 // (2 * 5)
    assert saved["names"] == {"classes": ["columns", "plain", "rows"]}
    assert door("image_cls", ["test", *map(str, common), f"--ckpt_path={last(tmp_path)}"]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["images"] == 12 and metrics["samples_per_second"] > 0

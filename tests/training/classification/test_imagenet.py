"""The recipe of ImageNet on a folder of the same shape, in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ndlightnet.training import ImageFolders, ImageTask, run

ROOT = Path(__file__).parents[3]


def two_processes(*arguments: object) -> str:
    """What a command line prints; it ends well."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PYTHONPATH": paths}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "ndlightnet", "image_cls"]
    command = [*launcher, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_two_processes_train_and_one_tests(write_stripes, tmp_path):
    root = write_stripes(tmp_path / "imagenet", train=20, test=4, side=40)
    (root / "test").rename(root / "val")
    (root / "test").symlink_to(root / "val")
    (root / "train" / "rows" / "000.png").write_bytes(b"damaged")
    common = (
        "--config",
        ROOT / "configs" / "imagenet_tiny.yaml",
        f"--data.init_args.root={root}",
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--data.init_args.size=32",
        "--data.init_args.workers=1",
        "--data.init_args.batch_size=5",
        "--model.net.init_args.num_classes=3",
        "--model.net.init_args.embed_dim=16",
        "--model.net.init_args.depth=2",
    )
    more = ("--trainer.devices=2", "--trainer.max_epochs=2", "--model.warmup_epochs=1")
    text = two_processes("fit", *common, *more, "--trainer.check_val_every_n_epoch=1")
    assert "train/rows/000.png: cannot be read" in text
    last = tmp_path / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    assert saved["global_step"] == 2 * 60 // (2 * 5)
    assert saved["names"] == {"classes": ["columns", "plain", "rows"]}
    test = ["test", *map(str, common), f"--ckpt_path={last}"]
    assert run(ImageTask, ImageFolders, Path("none"), arguments=test) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["images"] == 12 and metrics["samples_per_second"] > 0

"""Generation of colour images in class folders, and what the test says of their neighbours."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

from ndlightnet.training import GenerationTask, ImageFolders, LabelledData, run

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false}
model:
  sampling_steps: 2
  samples: 6
  net:
    class_path: ndlightnet.NDLightDiT
    init_args: {dims: 2, num_classes: 2, embed_dim: 16, depth: 1, tpe_states: 4}
data:
  class_path: ndlightnet.training.ImageFolders
  init_args: {root: nowhere, size: 8, batch_size: 4, scale: null, crop_pct: 1.0, workers: 0}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Ten images of each colour to train with, four to test; one cannot be read."""
    root, rng = tmp_path_factory.mktemp("folders"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for channel, name in enumerate(("red", "green")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 60, (8, 8, 3), np.uint8)
                pixels[..., channel] += 180
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    (root / "train" / "red" / "broken.png").write_bytes(b"no picture")
    return root


@pytest.mark.slow
def test_fit_test_and_predict_on_class_folders(folders, tmp_path, capfd):
    (tmp_path / "c.yaml").write_text(CONFIG)

    def launch(command: str, *more: str) -> int:
        config, root = f"--config={tmp_path}/c.yaml", f"--data.init_args.root={folders}"
        arguments = [command, config, root, f"--trainer.default_root_dir={tmp_path}", *more]
        return run(GenerationTask, LabelledData, Path("none"), None, arguments)

    last = f"--ckpt_path={tmp_path}/checkpoints/last.ckpt"
    assert launch("fit") == 0
    capfd.readouterr()
    assert launch("test", last) == 0  # training did without the broken file, too
    err = capfd.readouterr().err
    assert f"note: {folders}/train/red/broken.png: cannot be read" in err and "error" not in err
    (folders / "test" / "red" / "cut.png").write_bytes(b"no picture")
    assert launch("test", last) == 1  # it stops nothing
    (folders / "test" / "red" / "cut.png").unlink()
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert "test/red/cut.png: cannot be read" in error
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["test_samples"] == 8 and metrics["samples"] == 6
    assert launch("predict", "--model.size=[8,12]", last) == 0
    (first, *_) = sorted((tmp_path / "predictions").glob("0*"))
    assert first.name == "00000_green.png" and Image.open(first).size == (12, 8)
    capfd.readouterr()
    assert launch("fit", "--data.init_args.mixup=0.5", f"--trainer.default_root_dir={tmp_path / 'new'}") == 1
    assert "data.mixup, data.cutmix: above 0, expected 0" in capfd.readouterr().err


def test_pixels_are_normalised_and_back(folders):
    data = ImageFolders(str(folders), 8, scale=None, crop_pct=1.0, workers=0, batch_size=4)
    data.setup("fit")
    count = 0
    for batch in data.plain_train_dataloader():
        pixels = batch[0]
        images, labels, _ = data.on_after_batch_transfer(batch, 0)
        assert torch.equal(data.to_pixels(images), pixels)
        assert torch.equal(data.from_pixels(pixels), images)
        count += len(labels)
    assert count == len(data.train_set) - 1  # but the broken one

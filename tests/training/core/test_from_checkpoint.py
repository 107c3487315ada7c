"""The network of a training, from its checkpoint alone, with the weights that it averaged."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet import NDLightNet, NDLightUNet, mixers
from ndlightnet.training import ImageData, ImageTask, run

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightNet
    init_args:
      {dims: 2, in_chans: 1, num_classes: 3, patch_size: 2, embed_dim: 16, depth: 2,
       mixer: [TNL, {class_path: ndlightnet.nn.mixers.LAVO, init_args: {window: 3}}]}
data:
  class_path: ndlightnet.training.ImageData
  init_args: {root: nowhere, batch_size: 4}
"""


def fit(folder: Path, averaged: bool) -> Path:
    """Train a tiny network on noise for two epochs. Return the last checkpoint."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_images"] = rng.integers(0, 256, (12, 8, 8), np.uint8)
        arrays[f"{split}_labels"] = np.arange(12)[:, None] % 3
    np.savez(folder / "data.npz", **arrays)
    (folder / "config.yaml").write_text(CONFIG)
    places = [f"--trainer.default_root_dir={folder}/out", f"--data.init_args.root={folder}/data.npz"]
    places += ["--trainer.callbacks=ndlightnet.training.AveragedWeights"] * averaged
    arguments = ["fit", "--config", str(folder / "config.yaml"), *places]
    assert run(ImageTask, ImageData, Path("none"), arguments=arguments) == 0
    return folder / "out" / "checkpoints" / "last.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [True, False])
def test_the_network_of_a_training(averaged, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["task.py"])
    path = fit(tmp_path, averaged)
    saved = torch.load(path, weights_only=True)
    net = NDLightNet.from_checkpoint(path)
    assert not net.training and net.num_classes == 3
    assert [type(block.mixer) for block in net.blocks] == [mixers.TNL, mixers.LAVO]
    assert net.config["mixer"][1]["LAVO"]["window"] == 3
    for key, x in net.state_dict().items():
        assert torch.equal(x, saved["state_dict"][f"net.{key}"])
    assert ("current_model_state" in saved) == averaged
    if averaged:
        assert not torch.equal(net.head.weight, saved["current_model_state"]["net.head.weight"])
    with pytest.warns(UserWarning, match="num_classes=5, saved with 3"):
        assert NDLightNet.from_checkpoint(path, num_classes=5).head.out_features == 5
    with pytest.raises(ValueError, match=r"last.ckpt: holds a NDLightNet, expected a NDLightUNet"):
        NDLightUNet.from_checkpoint(path)
    net.save_pretrained(tmp_path / "hub")
    x = torch.randn(1, 1, 8, 8)
    assert torch.equal(NDLightNet.from_pretrained(tmp_path / "hub")(x), net(x))


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.ckpt: no such checkpoint"):
        NDLightNet.from_checkpoint(tmp_path / "x.ckpt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.ckpt").write_text("")
    for name, line in (("run", "run: a folder"), ("run/x.ckpt", r"x\.ckpt: no such checkpoint")):
        with pytest.raises(FileNotFoundError, match=rf"{line}, expected .*run/last\.ckpt"):
            NDLightNet.from_checkpoint(tmp_path / name)
    for content in ({"a": 1}, {"state_dict": 3}, [1]):
        torch.save(content, tmp_path / "x.ckpt")
        with pytest.raises(ValueError, match=r"x\.ckpt: not a checkpoint of `ndlightnet"):
            NDLightNet.from_checkpoint(tmp_path / "x.ckpt")
    torch.save({"state_dict": {"loss.weight": torch.zeros(1)}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="holds no weights of a network"):
        NDLightNet.from_checkpoint(tmp_path / "x.ckpt")

"""Which checkpoint of a run is used, and which becomes best.ckpt."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from ndlightnet import NDLightNet
from ndlightnet.training.core.cli import TaskCLI
from ndlightnet.training.core.export import load_network
from ndlightnet.training.core.runs import find_checkpoint

NET = {"dims": 1, "in_chans": 1, "num_classes": 2, "embed_dim": 4, "depth": 1}


def test_a_folder_stands_for_its_best_checkpoint(tmp_path):
    """Where last.ckpt lies beside it, too; without it, for the last one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    net = {"class_path": "ndlightnet.NDLightNet", "init_args": NET}
    (tmp_path / "config.yaml").write_text(yaml.dump({"model": {"net": net}}))
    nets = {name: NDLightNet(**NET) for name in ("last", "best")}
    for name in ("last", "best"):  # the folder's only one, then one of two
        weights = nets[name].state_dict()
        torch.save({"state_dict": {f"net.{key}": x for key, x in weights.items()}}, folder / f"{name}.ckpt")
        assert find_checkpoint(tmp_path) == (folder / f"{name}.ckpt", tmp_path)
        loaded, path = load_network(tmp_path)
        assert path == folder / f"{name}.ckpt"
        assert all(torch.equal(x, weights[key]) for key, x in loaded.state_dict().items())


class Scored(L.LightningModule):
    """Its validations give 1, 3 and 2."""

    monitor = "score"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, _):
        return self.weight * batch.sum()

    def validation_step(self, batch, _):
        self.log("score", (1.0, 3.0, 2.0)[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_best_is_the_highest_score(tmp_path, monkeypatch):
    """By the callbacks that the command line gives its trainer."""
    built = {}
    monkeypatch.setattr(LightningCLI, "instantiate_trainer", lambda cli, **options: built.update(options))
    config = {"trainer.default_root_dir": tmp_path, "trainer.enable_progress_bar": False, "trainer.logger": False}
    cli = SimpleNamespace(
        subcommand="fit", model=Scored(), datamodule=None, config_init=config, _get=lambda values, key: values.get(key)
    )
    # `super()` in the method wants one of its class
    cli = type("Cli", (TaskCLI,), {"__init__": lambda self, **state: vars(self).update(state)})(**vars(cli))
    cli.instantiate_trainer()
    saves = [callback for callback in built["callbacks"] if isinstance(callback, ModelCheckpoint)]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        callbacks=saves,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(torch.ones(1))
    trainer.fit(cli.model, loader, loader)
    epochs = {path.stem: torch.load(path, weights_only=True)["epoch"] for path in (tmp_path / "checkpoints").iterdir()}
    assert epochs == {"best": 1, "last": 2}

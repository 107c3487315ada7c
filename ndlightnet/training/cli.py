"""The command line of every task: Lightning's, with our loggers, checkpoints and one-line errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from ndlightnet.data.errors import DataError
from ndlightnet.training.report import check_writable


class TaskCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict`, configured by YAML and overridden by arguments."""

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        # a checkpoint is data, not code
        return {**super()._prepare_subcommand_kwargs(subcommand), "weights_only": True}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        root = Path(self._get(self.config_init, "trainer.default_root_dir") or "runs")
        check_writable(root)
        callbacks = [*(self._get(self.config_init, "trainer.callbacks") or []), RichProgressBar()]
        loggers: list[Logger] | bool = False
        if self.subcommand == "fit":
            monitor = getattr(self.model, "monitor", None)
            callbacks.append(
                ModelCheckpoint(
                    root / "checkpoints", "best", monitor=monitor, mode="max", save_last=True,
                    enable_version_counter=False,
                )
            )  # fmt: skip
            callbacks.append(LearningRateMonitor())
            loggers = [CSVLogger(root, "logs"), TensorBoardLogger(root, "logs")]
        return super().instantiate_trainer(
            default_root_dir=root, logger=loggers, callbacks=callbacks, **kwargs
        )


def run(task: type[L.LightningModule], data: type[L.LightningDataModule], default_config: Path) -> int:
    """Run a task's command line; without arguments train and test on `default_config`.

    Returns the exit status: 0, or 1 after an error in the data or a file that could not be predicted.
    """
    arguments = sys.argv[1:]
    alone = not arguments
    try:
        cli = TaskCLI(
            task,
            data,
            subclass_mode_data=True,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            args=["fit", "--config", str(default_config)] if alone else arguments,
        )
        if alone:
            cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path="best", weights_only=True)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for failure in cli.model.failures:
        print(f"error: {failure}", file=sys.stderr)
    if cli.model.summary:
        print(cli.model.summary)
    return 1 if cli.model.failures else 0

"""The folder of a run, `trainer.default_root_dir`: checkpoints, config and metrics lie in the same
places in it, whatever logs the training."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only

from ndlightnet.data.errors import DataError, atomic_write
from ndlightnet.models.weights import no_checkpoint
from ndlightnet.training.report.results import write_metrics

CONFIG = "config.yaml"


def checkpoint_in(run: Path, *names: str) -> Path | None:
    """Return the first checkpoint of these names that a run's folder has, None without any."""
    paths = (run / "checkpoints" / f"{name}.ckpt" for name in names)
    return next((path for path in paths if path.is_file()), None)


def resumption(run: Path) -> list[str]:
    """Return the arguments by which `fit` goes on with the run in a folder, none if it is new."""
    checkpoint = checkpoint_in(run, "last", "best")
    return [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Return a checkpoint and the folder of its run. path: the checkpoint, or the folder, of which
    best.ckpt or else last.ckpt is taken. DataError if there is none."""
    run = path if path.is_dir() else path.absolute().parent.parent
    checkpoint = checkpoint_in(path, "best", "last") if path.is_dir() else path
    if checkpoint is None or not checkpoint.is_file():
        raise DataError(no_checkpoint(path))
    return checkpoint, run


def saved_config(run: Path) -> Path:
    """Return the config that `fit` has saved in a run's folder. DataError without one."""
    if not (run / CONFIG).is_file():
        raise DataError(f"{run / CONFIG}: no such file, which `fit` leaves beside checkpoints/")
    return run / CONFIG


@rank_zero_only
def check_unused(run: Path, resumed: str | None) -> None:
    """Raise DataError if a training would replace the checkpoints of another one: the folder has
    some, and the training does not resume from one of them, `resumed`."""
    saved = sorted((run / "checkpoints").glob("[!.]*.ckpt"))  # and no drafts
    folder = (run / "checkpoints").resolve()  # not that of a fold or another run below this one
    if resumed is not None and Path(resumed).resolve().parent == folder:
        return
    if not saved or any(run.glob("hpc_ckpt_*.ckpt")):  # Lightning resumes a requeued job of SLURM
        return
    latest = checkpoint_in(run, "last", "best") or saved[-1]
    raise DataError(
        f"{run}: holds the checkpoints of a run, which `fit` would replace; --ckpt_path {latest} "
        "goes on with it, --trainer.default_root_dir FOLDER begins another one"
    )


class SaveConfig(SaveConfigCallback):
    """Saves the config of a training in its run's folder, when data and network have been checked. A different one
    that lies there, as of the training that this one resumes, is kept as config_1.yaml, config_2.yaml, ..."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Do nothing: the network is compared with the data later."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        path = Path(trainer.default_root_dir) / CONFIG
        config = self.config.clone()
        config.ckpt_path = None  # or the file could begin no other training
        text = self.parser.dump(config, skip_none=False)
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            numbered = (path.with_stem(f"{path.stem}_{number}") for number in count(1))
            path.rename(next(free for free in numbered if not free.exists()))
        with atomic_write(path) as draft:
            draft.write_text(text, encoding="utf-8")


class _Late:
    """Mixin of loggers that make their folder with the first value: a run that is refused before it leaves none."""

    begun = False
    hyperparams: tuple[Any, Any] | None = None

    @property
    def experiment(self) -> Any:
        return super().experiment if self.begun else DummyLogger().experiment  # type: ignore[misc]

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        self.hyperparams = (args, options)  # of a task or data that call `save_hyperparameters`

    def log_metrics(self, *args: Any, **options: Any) -> None:
        if not self.begun:
            self.begun = True
            if self.hyperparams is not None:
                values, more = self.hyperparams
                super().log_hyperparams(*values, **more)  # type: ignore[misc]
        super().log_metrics(*args, **options)  # type: ignore[misc]


class LateCSVLogger(_Late, CSVLogger):
    """CSVLogger that makes its folder with the first value."""


class LateTensorBoardLogger(_Late, TensorBoardLogger):
    """TensorBoardLogger that makes its folder with the first value."""


class FitMetrics(L.Callback):
    """Writes the metrics of the last and the best validation, under "fit", to metrics.json, and
    without validation those of the last step. monitor: the metric by which one is best, or None."""

    def __init__(self, monitor: str | None) -> None:
        self.monitor = monitor
        self.metrics: dict[str, dict[str, float]] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.metrics

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metrics = state_dict

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.metrics:
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        last = {"epoch": trainer.current_epoch, "step": trainer.global_step, **logged}
        best = self.metrics.get("best")
        if self.monitor in last and (best is None or self._score(last) > self._score(best)):
            best = last
        self.metrics = {"last": last, **({} if best is None else {"best": best})}
        if trainer.is_global_zero:
            write_metrics(Path(trainer.default_root_dir), fit=self.metrics)

    def _score(self, metrics: dict[str, float]) -> float:
        return float(np.nan_to_num(metrics.get(self.monitor or "", np.nan), nan=-np.inf))

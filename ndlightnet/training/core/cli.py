"""The command line of every task: Lightning's, with our loggers, checkpoints and one-line
errors."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from ndlightnet.data.errors import DataError, clear_drafts
from ndlightnet.training.core.checkpoints import WholeCheckpoints
from ndlightnet.training.core.report import check_writable, say

NAMES = ("names",)
# what a training goes on from: without the loops it would begin anew, without a word
RESUMED = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


class TaskCLI(LightningCLI):
    """`fit`, `validate`, `test`, `predict`, and `stream` where the trainer can; configured by YAML
    and overridden by arguments."""

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        more = {"stream": {"model", "datamodule"}} if hasattr(self.trainer_class, "stream") else {}
        return {**LightningCLI.subcommands(), **more}

    def before_instantiate_classes(self) -> None:
        """`model.causal` becomes an argument of the network before that is built."""
        causal = self._get(self.config, "model.causal")
        if causal is None and self.subcommand == "stream":
            causal = True
        if causal is not None:
            net = self._get(self.config, "model.net")
            if "causal" not in net.get("init_args", {}):
                raise DataError(f"model.causal: {net.class_path} has no argument causal")
            net.init_args.causal = causal

    def instantiate_classes(self) -> None:
        """What a constructor says of its arguments, without the parser's words around it."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            said: BaseException = error
            while said.__cause__ is not None and not isinstance(said, DataError):
                said = said.__cause__
            raise DataError(" ".join(str(said).split())) from error

    def _run_subcommand(self, subcommand: str) -> None:
        """A disk that is full when Lightning writes, such as a log, ends it with one line, too."""
        try:
            super()._run_subcommand(subcommand)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            what = error.filename or f"{self.trainer.default_root_dir}: logs"
            raise DataError(f"{what}: cannot be written ({error.strerror})") from error

    def _parse_ckpt_path(self) -> None:
        """Our checkpoints hold no arguments: the config says them all."""

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        task = type(self.model)
        if subcommand == "predict" and task.predict_step is L.LightningModule.predict_step:
            raise DataError(f"predict: {task.__name__} has none, expected fit, validate or test")
        if kwargs.get("ckpt_path"):
            entries = NAMES if subcommand == "stream" else self.model.saved
            entries += RESUMED if subcommand == "fit" else ()
            check_checkpoint(kwargs["ckpt_path"], self.model, self.datamodule, entries)
        if subcommand == "stream":
            return kwargs
        # a checkpoint is data, not code
        return {**kwargs, "weights_only": True}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        root = Path(self._get(self.config_init, "trainer.default_root_dir") or "runs")
        fold = getattr(self.datamodule, "fold", None)
        root = root if fold is None else root / f"fold_{fold}"
        if self.subcommand != "stream":
            check_writable(root)
            clear_drafts(root)

        def given(key: str) -> Any:
            return self._get(self.config_init, f"trainer.{key}")

        callbacks, loggers = list(given("callbacks") or []), given("logger")
        if given("enable_progress_bar") is not False:
            callbacks.append(RichProgressBar())
        if self.subcommand != "fit":
            loggers, self.save_config_callback = False, None
        elif loggers in (None, True):
            csv = CSVLogger(root, "logs")
            loggers = [csv, TensorBoardLogger(root, "logs", version=csv.version)]
        if loggers:
            callbacks.append(LearningRateMonitor())
        if self.subcommand == "fit" and given("enable_checkpointing") is not False:
            folder = root / "checkpoints"
            monitor = getattr(self.model, "monitor", None)
            callbacks += [
                ModelCheckpoint(
                    folder, "best", monitor=monitor, mode="max", enable_version_counter=False
                ),
                # one of its own: beside a monitor, `save_last` keeps the last best, not the last
                ModelCheckpoint(
                    folder, "last", save_on_train_epoch_end=True, enable_version_counter=False
                ),
            ]
        plugins = given("plugins") or []
        plugins = [*plugins] if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(WholeCheckpoints())
        return super().instantiate_trainer(
            default_root_dir=root, logger=loggers, callbacks=callbacks, plugins=plugins, **kwargs
        )


def check_checkpoint(
    path: str, model: L.LightningModule, data: Any, entries: Sequence[str] = NAMES
) -> None:
    """DataError for a file that is missing, no checkpoint, or one of another network, and for a
    checkpoint without weights, without one of the `entries` or without a name that `data` need."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such checkpoint")
    try:
        saved = torch.load(path, map_location="meta", weights_only=True)
        keys, expected = saved.keys(), "one that `fit` has left"
    except Exception as error:  # whatever is in the file
        raise DataError(f"{path}: not a checkpoint of ours ({type(error).__name__})") from error
    if lost := [key for key in ("state_dict", *entries) if key not in keys]:
        raise DataError(f"{path}: the checkpoint lacks {', '.join(lost)}, expected {expected}")
    weights, names = saved["state_dict"], saved["names"]
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        raise DataError(f"{path}: state_dict holds no weights, expected {expected}")
    known = names if isinstance(names, dict) else {}
    if lost := [key for key in data.names() if not isinstance(known.get(key), list)]:
        raise DataError(f"{path}: names has no list {', '.join(lost)}, expected {expected}")
    if saved.get("causal") not in (None, getattr(model, "causal", None)):
        what = "causal, go on" if saved["causal"] else "not causal, train one"
        raise DataError(f"{path}: its network is {what} with --model.causal true")
    own = model.state_dict()
    for name in [*own, *weights]:
        here, there = (tuple(d[name].shape) if name in d else "none" for d in (own, weights))
        if here != there:
            raise DataError(
                f"{path}: the checkpoint of another network: {name} is {there} there, {here} here"
            )


def task_cli(
    task: type[L.LightningModule],
    data: type[L.LightningDataModule],
    args: list[str] | None = None,
    run: bool = True,
) -> TaskCLI:
    """The command line of a task, done: with `args`, or those of this process. run=False: `args`
    without a subcommand, and what they say is made but not run."""
    return TaskCLI(
        task,
        data,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        trainer_class=getattr(task, "trainer_class", L.Trainer),
        args=args,
        run=run,
    )


def run(
    task: type[L.LightningModule],
    data: type[L.LightningDataModule],
    default: Path,
    commands: Mapping[str, Callable[[list[str]], None]] | None = None,
) -> int:
    """Run a task's command line; without arguments train and test on the config `default`.

    commands: subcommands beside Lightning's, which are given the rest of the arguments.
    Returns the exit status: 0, or 1 after an error in the data or a file that could not be
    predicted.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(monai|lightning)\.")
    # commands of our own give arguments of their own
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    alone = len(sys.argv) == 1
    try:
        if not alone and sys.argv[1] in (commands or {}):
            commands[sys.argv[1]](sys.argv[2:])  # type: ignore[index]
            return 0
        cli = task_cli(task, data, ["fit", "--config", str(default)] if alone else None)
        if alone:
            last = Path(cli.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
            cli.trainer.test(cli.model, cli.datamodule, ckpt_path=str(last), weights_only=True)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(cli.model.notes)
    for failure in cli.model.failures:
        print(f"error: {failure}", file=sys.stderr)
    if cli.model.summary:
        print(cli.model.summary)
    return 1 if cli.model.failures else 0

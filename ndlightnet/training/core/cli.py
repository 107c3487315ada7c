"""The command line of every task: LightningCLI with our loggers, checkpoints and one-line errors."""

from __future__ import annotations

import errno
import logging
import re
import sys
import warnings
from argparse import SUPPRESS
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only

from ndlightnet.data.errors import DataError, clear_drafts, one_line, printable
from ndlightnet.data.folders import DATA_VARIABLE
from ndlightnet.layout.spelling import did_you_mean
from ndlightnet.models.hub import CLASS
from ndlightnet.nn.mixers.names import jsonable
from ndlightnet.training.core.checkpoints import NAMES, AtomicCheckpoints, check_checkpoint
from ndlightnet.training.core.costs import parameter_count
from ndlightnet.training.core.options import TaskParser, check, check_configs, expect_config
from ndlightnet.training.core.runs import (
    FitMetrics,
    LateCSVLogger,
    LateTensorBoardLogger,
    SaveConfig,
    check_unused,
    checkpoint_in,
    resumption,
)
from ndlightnet.training.report.results import check_writable, log_rank_zero

# entries needed to resume a training: without "loops" it would silently start again
RESUMED = ("epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers")


class TaskCLI(LightningCLI):
    """Command line with `fit`, `validate`, `test`, `predict` and, if the trainer has it, `stream`; configured by YAML
    files and overridden by arguments. The optimizer and the schedule are those of the task, see `adamw`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        defaults = {"subclass_mode_data": True, "parser_class": TaskParser, "auto_configure_optimizers": False}
        super().__init__(*args, **{**defaults, **options})

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        super().add_core_arguments_to_parser(parser)
        for name in ("optimizer", "lr_scheduler"):  # null in configs that LightningCLI has saved
            parser.add_argument(f"--{name}", type=type(None), help=SUPPRESS)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        more = {"stream": {"model", "datamodule"}} if hasattr(self.trainer_class, "stream") else {}
        return {**LightningCLI.subcommands(), **more}

    def before_instantiate_classes(self) -> None:
        """Copy `model.causal` to the arguments of the network before it is built."""
        causal = self._get(self.config, "model.causal")
        if causal is None and self.subcommand == "stream":
            causal = True
        if causal is not None:
            net = self._get(self.config, "model.net")
            if "causal" not in net.get("init_args", {}):
                raise DataError(f"model.causal: {net.class_path} has no argument causal")
            net.init_args.causal = causal

    def instantiate_classes(self) -> None:
        """Build the classes; a constructor's ValueError becomes a DataError of its text alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, DataError):
                cause = cause.__cause__
            raise DataError(" ".join(str(cause).split())) from error
        except TypeError as error:  # arguments of a mixer, which are not checked before
            raise DataError(f"model: {one_line(error)}") from error
        except (RuntimeError, OSError) as error:  # timm's, for a name or weights that it has not
            raise DataError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        if net := self._get(self.config, "model.net"):  # a task may build its own
            kind, arguments = type(self.model.net), net.as_dict()
            name = f"{kind.__module__}.{kind.__qualname__}"  # a class may be imported from several modules
            options = {**arguments.get("init_args", {}), **arguments.get("dict_kwargs", {})}
            self.model.net_config = {CLASS: name, **jsonable(options)}

    def _check_source(self) -> None:
        """Raise DataError if the data do not exist; it names the config that says how to get them."""
        source = getattr(self.datamodule, "source", None)
        if self.subcommand not in ("fit", "validate", "test") or not isinstance(source, Path) or source.exists():
            return
        files = [str(file) for file in self._get(self.config, "config") or []]
        heads = [file for file in files if Path(file).is_file() and "# Data:" in Path(file).read_text("utf-8")]
        hint = f"; the first lines of {heads[0]} say how to get the data" if heads else ""
        places = "" if source.is_absolute() else f", here or in ${DATA_VARIABLE}"
        raise DataError(f"{source}: no such file or folder (data.root={self.datamodule.root}{places}){hint}")

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand; DataError if the disk is full when Lightning writes, say, a log."""
        try:
            super()._run_subcommand(subcommand)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            what = error.filename or f"{self.trainer.default_root_dir}: logs"
            raise DataError(f"{what}: cannot be written ({error.strerror})") from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing: our checkpoints hold no arguments, the config has them all."""

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        task = type(self.model)
        if subcommand == "predict" and task.predict_step is L.LightningModule.predict_step:
            raise DataError(f"predict: {task.__name__} has none, expected fit, validate or test")
        if kwargs.get("ckpt_path"):
            entries = NAMES if subcommand == "stream" else self.model.saved
            entries += RESUMED if subcommand == "fit" else ()
            check_checkpoint(kwargs["ckpt_path"], self.model, self.datamodule, entries)
            if subcommand == "fit":
                self._check_resumption(kwargs["ckpt_path"])
        elif subcommand in ("validate", "test"):
            self.model.notes.append(f"--ckpt_path: {subcommand} got none and measures the network as it was built")
        if subcommand == "test":
            kwargs["verbose"] = False  # the task's summary has the results
        # a checkpoint is data, not code
        return kwargs if subcommand == "stream" else {**kwargs, "weights_only": True}

    def after_validate(self) -> None:
        if not sum(self.trainer.num_val_batches):
            raise DataError(f"{self.datamodule.root}: validate: there is nothing to validate with")

    def _check_resumption(self, path: str) -> None:
        """Print a note if a training that is resumed has no epoch left. DataError if the strategy cannot resume it."""
        saved = torch.load(path, map_location="meta", weights_only=True)
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            numbers = [number for group in saved["optimizer_states"][0]["param_groups"] for number in group["params"]]
            # Lightning takes the numbers as those of the order in the network, which only this strategy writes
            expected = "one of a training with ModelParallelStrategy, or its weights by --model.init"
            check("--ckpt_path", path, numbers != sorted(numbers), expected)
        epochs = saved["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        trainer: Any = self.trainer
        if 0 < (trainer.max_epochs or 0) <= epochs:
            end = f"nothing is left of trainer.max_epochs={trainer.max_epochs}"
            log_rank_zero([f"{path}: has been trained for {epochs} epochs, {end}"])

    @rank_zero_only
    def before_fit(self) -> None:
        size = f"{type(self.model.net).__name__}, {parameter_count(self.model.net):,} parameters"
        print(f"{size}; results in {self.trainer.default_root_dir}", file=sys.stderr)

    @rank_zero_only
    def after_fit(self) -> None:
        folder = Path(self.trainer.default_root_dir) / "checkpoints"
        if names := sorted(file.name for file in folder.glob("*.ckpt")):
            print(f"checkpoints in {folder}: {', '.join(names)}", file=sys.stderr)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        def option(key: str) -> Any:
            return self._get(self.config_init, f"trainer.{key}")

        def several(key: str) -> list[Any]:
            value = option(key) or []
            return [*value] if isinstance(value, list) else [value]

        root = Path(option("default_root_dir") or "runs")
        fold = getattr(self.datamodule, "fold", None)
        root = root if fold is None else root / f"fold_{fold}"
        self._check_source()
        saves = self.subcommand == "fit" and not option("fast_dev_run")
        if saves:
            check_unused(root, self._get(self.config_init, "ckpt_path"))
        if self.subcommand != "stream":
            check_writable(root)
            clear_drafts(root)
        callbacks, plugins, loggers = several("callbacks"), several("plugins"), option("logger")
        if option("enable_model_summary") is None:
            kwargs["enable_model_summary"] = False  # `before_fit` prints the useful part
        if option("enable_progress_bar") is not False:
            callbacks.append(RichProgressBar())
        if self.subcommand != "fit":
            loggers, self.save_config_callback = False, None
        elif loggers in (None, True):
            csv = LateCSVLogger(root, "logs")
            loggers = [csv, LateTensorBoardLogger(root, "logs", version=csv.version)]
        if loggers:
            callbacks.append(LearningRateMonitor())
        monitor = self.model.monitor
        if saves:
            callbacks.append(FitMetrics(monitor))
        if self.subcommand == "fit" and option("enable_checkpointing") is not False:
            folder = root / "checkpoints"
            callbacks += [
                ModelCheckpoint(folder, "best", monitor=monitor, mode="max", enable_version_counter=False),
                # a second callback: with a monitor, `save_last` saves the last best, not the last
                ModelCheckpoint(folder, "last", save_on_train_epoch_end=True, enable_version_counter=False),
            ]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpoints())
        return super().instantiate_trainer(
            default_root_dir=root, logger=loggers, callbacks=callbacks, plugins=plugins, **kwargs
        )


# Messages that Lightning prints in every run, to be hidden: beginnings of its log lines ...
LINES = re.compile(
    "[GTH]PU available|LOCAL_RANK|You are using a CUDA|Using |Seed set to|💡 Tip|Loading `train_dataloader`"
    "|`Trainer.fit` stopped: `max_|Restor(ing|ed all) states|Loaded model weights|Found current_model_state"
    "|The following callbacks returned in"
)
# ... and patterns of its warnings about what is intended here (workers, predictions that are
# written and not returned, checkpoints that are overwritten, a test without the callbacks of
# `fit`, no validation, averages of a task whose configure_model shards nothing and which are tested
# and used for prediction) or about what concerns only its developers
WARNINGS = (
    r".*does not have many workers|This DataLoader will create|Total length of",
    r"Checkpoint directory .* exists and is not empty|The dirpath has changed|`ModelCheckpoint\(monitor=",
    r"Be aware that when using `ckpt_path`|LightningCLI's args parameter|predict returned None",
    r".*(LeafSpec|treespec)|You defined a `validation_step` but have no",
    r"You're using the WeightAveraging callback(, but loading| with a model that overrides the configure_model)",
    r"The AccumulateGrad node's stream",  # of captured networks, whose stream is another one
)


def quiet() -> None:
    """Hide LINES, WARNINGS, the FutureWarnings of MONAI and Lightning, and those of Pillow about
    odd tags and large images, which it reads."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(monai|lightning)\.")
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in (
        "pytorch.utilities.rank_zero",
        "fabric.utilities.rank_zero",
        "fabric.utilities.seed",
        "pytorch.accelerators.cuda",
    ):
        logging.getLogger(f"lightning.{name}").addFilter(_is_no_hint)


def _is_no_hint(record: logging.LogRecord) -> bool:
    return LINES.match(record.getMessage()) is None


def task_cli(
    task: type[L.LightningModule], data: type[L.LightningDataModule], args: list[str] | None = None, run: bool = True
) -> TaskCLI:
    """Run a task's command line with `args`, default: those of this process, and return it.
    run=False: `args` have no subcommand; the objects are built, but nothing is run."""
    return TaskCLI(
        task,
        data,
        save_config_callback=SaveConfig,
        save_config_kwargs={"save_to_log_dir": False},
        trainer_class=getattr(task, "trainer_class", L.Trainer),
        args=args,
        run=run,
    )


def _demonstration(config: Path) -> list[str]:
    """Return the arguments that train on a config, or go on with what an earlier call has left."""
    trainer = yaml.safe_load(config.read_text(encoding="utf-8")).get("trainer", {})
    root = Path(trainer.get("default_root_dir", "runs"))
    if resumed := resumption(root):
        log_rank_zero([f"{root}: holds a run, which goes on unless finished; delete it to begin another"])
    return ["fit", "--config", str(config), *resumed]


def run(
    task: type[L.LightningModule],
    data: type[L.LightningDataModule],
    default: Path,
    commands: Mapping[str, Callable[[list[str]], int | None]] | None = None,
    arguments: list[str] | None = None,
) -> int:
    """Run a task's command line; without arguments train and test on the config `default`.

    commands: more subcommands by name, functions that take the rest of the arguments and return an exit status, or None
    for 0. arguments: default: those of this process. Returns the exit status: 0, or 1 after an error in the data or a
    file that could not be predicted.
    """
    quiet()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        check_configs(words)
        if words and words[0] in (commands or {}):
            return commands[words[0]](words[1:]) or 0  # type: ignore[index]
        if commands and words[:1] in (["-h"], ["--help"]):
            print(f"Beside the subcommands below: {', '.join(commands)}; each takes --help.\n")
        streams = hasattr(getattr(task, "trainer_class", L.Trainer), "stream")
        trainings = ["fit", "validate", "test", "predict", *["stream"] * streams]
        if words and words[0] in trainings and "net" in signature(task).parameters:  # not of a task that builds its own
            expect_config(words, default)
        names = [*trainings, *(commands or {})]
        if words and words[0] not in names and not words[0].startswith("-"):
            wrong = f"{words[0]}: no such command{did_you_mean(words[0], names)}"
            print(f"error: {printable(wrong)}", file=sys.stderr)
            return 2
        cli = task_cli(task, data, words or _demonstration(default))
        if not words:
            last = checkpoint_in(Path(cli.trainer.default_root_dir), "last", "best")
            cli.trainer.test(cli.model, cli.datamodule, ckpt_path=str(last), weights_only=True, verbose=False)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not cli.trainer.is_global_zero:
        return 0  # the first process has all failures; torchrun would end it, which may still write
    log_rank_zero(cli.model.notes)
    for failure in cli.model.failures:
        print(f"error: {failure}", file=sys.stderr)
    if cli.model.summary:
        print(cli.model.summary)
    return 1 if cli.model.failures else 0

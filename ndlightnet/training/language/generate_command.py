"""The command `generate`: a language model continues a text, on the terminal, as it is drawn."""

from __future__ import annotations

import sys
import unicodedata
from argparse import ArgumentError, ArgumentParser
from pathlib import Path
from typing import Any

import torch

from ndlightnet.data.errors import DataError
from ndlightnet.inference import generate_text
from ndlightnet.training.core.checkpoints import check_checkpoint
from ndlightnet.training.core.cli import TaskCLI
from ndlightnet.training.core.options import check_configs
from ndlightnet.training.core.runs import find_checkpoint, saved_config
from ndlightnet.training.language.text_data import TextData
from ndlightnet.training.language.text_task import TextTask


class GenerateCLI(TaskCLI):
    """Command line that takes the config of a training, or one that `fit` has saved."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        add = parser.add_argument
        add("--ckpt_path", type=str | None, required=True, help="a checkpoint, or a run's folder")
        add("--prompt", type=str, default="\n", help="the text to continue")
        add("--length", type=int, default=500, help="bytes to write at most")
        add("--temperature", type=float, default=0.8, help="0: always the most likely byte")
        add("--top_k", type=int | None, default=None, help="draw from so many bytes only")
        add("--stop", type=list[str], default=[], help="texts that end it: --stop='[\"END\"]'")
        add("--seed", type=int, default=0, help="of the draws")
        add("--weights_only", type=bool | None, help="not used, `fit` saves it")


def generate(arguments: list[str]) -> int:
    """Print the prompt and its continuation. arguments: `--ckpt_path RUN --prompt TEXT` and the
    options of GenerateCLI; without `--config` the one that `fit` has saved beside the checkpoint.

    Raises DataError for a missing or wrong checkpoint or config and for options out of range.
    """
    if not {"-h", "--help"} & {*arguments}:
        arguments = _with_files(arguments)
        check_configs(arguments)
    cli = GenerateCLI(TextTask, TextData, args=arguments, run=False)
    options, task = cli.config, cli.model
    check_checkpoint(options.ckpt_path, task, cli.datamodule)
    task.load_state_dict(torch.load(options.ckpt_path, map_location="cpu", weights_only=True)["state_dict"])
    plugin: Any = cli.trainer.precision_plugin
    task = plugin.convert_module(task).to(cli.trainer.strategy.root_device).eval()
    draws = {name: options[name] for name in ("temperature", "top_k", "stop")}
    draws["generator"] = torch.Generator().manual_seed(options.seed)
    try:
        with plugin.forward_context():
            texts = generate_text(task.net, options.prompt, options.length, **draws)
            _show(options.prompt)
            for text in texts:
                _show(text)
    except ValueError as error:
        raise DataError(error) from error
    except KeyboardInterrupt:
        pass
    _show("\n")
    return 0


def _show(text: str) -> None:
    """Print text; on a terminal with its control characters escaped, which could act on it."""
    if sys.stdout.isatty():
        text = "".join(
            x.encode("unicode_escape").decode() if unicodedata.category(x) in ("Cc", "Cf") and x not in "\n\t" else x
            for x in text
        )
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _with_files(arguments: list[str]) -> list[str]:
    """Add the best or last checkpoint of a run's folder in `--ckpt_path`, which overrides it, and, if
    there is no config among the arguments, the one that `fit` has saved in the run."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--ckpt_path")
    parser.add_argument("-c", "--config", action="append")
    try:
        files, _ = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise DataError(error) from error
    if files.ckpt_path is None:
        raise DataError("--ckpt_path: expected a checkpoint or the folder of a run, got none")
    checkpoint, run = find_checkpoint(Path(files.ckpt_path))
    try:
        configs = [] if files.config else [f"--config={saved_config(run)}"]
    except DataError as error:
        raise DataError(f"{error}; expected it, or --config FILE") from error
    return [*configs, *arguments, f"--ckpt_path={checkpoint}"]

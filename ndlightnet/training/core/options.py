"""Options of a command line and of configs: a wrong one is one line that names it, its value and what was expected."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from inspect import isclass, signature
from itertools import pairwise
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from ndlightnet.data.errors import DataError, one_line, printable
from ndlightnet.layout.spelling import did_you_mean


def check(argument: str, value: object, good: bool, expected: str) -> None:
    """Raise DataError that names an `argument` of the command line unless `good`."""
    if not good:
        raise DataError(f"{argument}: {value}, expected {expected}")


PLANNED = "runs/NAME/plan.yaml"  # an example of a config, which `plan` writes
HELP = re.compile(r"--([\w.]+\.)?help\b")  # also --data.help=CLASS


class OneLine:
    """Mixin of parsers that end the process with one line, status 2, on wrong options. The beginning of an option is
    not that option: `--lr` would be `--lr_scheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of a class inside another one
            super().error(message, ex)  # type: ignore[misc]
        parser = getattr(ex, "subcommand_parser", None) or self
        options = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
        words = [word.partition("=")[0].rstrip(":") for word in message.split() if word.startswith("--")]
        near = [did_you_mean(word[2:], options, "") for word in words if word[2:] not in options]
        hint = f"; did you mean --{near[0]}?" if any(near[:1]) else ""
        self.exit(2, f"error: {printable(shortened(message) + hint)}\n")
        raise AssertionError("exit returned")


class TaskParser(OneLine, LightningArgumentParser):
    """The parser of a task."""


class CommandParser(OneLine, ArgumentParser):
    """The parser of a function whose parameters are its options."""


class WordsParser(OneLine, argparse.ArgumentParser):
    """The parser of a command that takes several words for an argument, which jsonargparse does not."""


def shortened(message: str) -> str:
    """Return a message of jsonargparse as one line: for an argument that a class does not have, the one that was
    probably meant; for a value of a wrong type, the option, the value and the types. Others keep their words."""
    line = " ".join(message.split())
    option = ".".join(re.findall(r'Parser key "([\w.]+)"', line))
    if unknown := re.search(r"class_path '([\w.]+)': Option '(\w+)' is not accepted", line):
        path, name = unknown.groups()
        source: Any = locate(path)
        if isclass(source):  # with those that **kwargs pass on
            names: Iterable[str] = ArgumentParser().add_class_arguments(source, fail_untyped=False)
        else:
            names = signature(source).parameters
        return f"{option}.{name}: {path} has no such argument{did_you_mean(name, names)}"
    inner = line[max(line.rfind("Parser key"), 0) :]  # what follows its value is of the options around it
    value = re.search(r"(?:Got value|Given value|path string): (.*?)(?: - |$)", inner)
    types = dict.fromkeys(
        re.findall(
            r"Expected a (?:<class '(?:\w+\.)*|typing\.)?(dot import path|Literal\[.*?\]|\w+)",
            inner[: value.start(1) if value else 0],
        )
    )
    expected = " or ".join(types).replace("NoneType", "null")
    return f"{option}: {value[1]}, expected {expected}" if option and value and types else line


def expect_config(words: list[str], example: Path | str) -> None:
    """Raise DataError if a command and its options name neither a config nor a network. example: a config."""
    options = ("-c", "--config", "--model.net", "--model=", "-h", "--print_config")
    named = "--model" in words or any(word.startswith(options) or HELP.match(word) for word in words)
    path = Path(example)
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    check(words[0], "got no config", named, f"one, such as --config {path}")


def check_configs(arguments: list[str]) -> None:
    """Raise a DataError that names the file for each `--config FILE` of a command line that is missing or no YAML."""
    joined = [one.partition("=")[2] for one in arguments if one.startswith("--config=")]
    pairs = pairwise(arguments)
    for name in joined + [after for one, after in pairs if one in ("-c", "--config")]:
        file = Path(name)
        if any(sign in name for sign in "{\n"):  # the config itself
            continue
        if not file.is_file():
            raise DataError(f"{name}: no such file, expected the path of a config (YAML)")
        try:
            yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{name}: cannot be read ({error.strerror})") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else ""
            raise DataError(f"{name}: is not valid YAML ({line or one_line(error)})") from error

"""What a wrong option of a command line or a config says: one line with the option, its value and
what was expected, in place of jsonargparse's pages of usage."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from ndlightnet.data.errors import DataError, one_line, printable
from ndlightnet.layout.spelling import did_you_mean

TYPES = (  # what is cut off or replaced in the names of types
    (r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1"),
    (r"NoneType", "None"),
    (r"typing\.Literal\[(.*?)\]", r"\1"),
    (r"(?:collections\.abc|typing|pathlib|[\w.]+\.modules\.module|lightning[\w.]*)\.(?=\w)", ""),
)
# where the classes of an option are most often from
HOMES = {
    "mixer": "ndlightnet.nn.mixers",
    "cross": "ndlightnet.nn.mixers",
    "data": "ndlightnet.training",
    "callbacks": "ndlightnet.training",
}
RECIPE = (
    "AdamW with a cosine schedule is fixed; expected its options model.lr, model.weight_decay, "
    "model.warmup_epochs, model.min_lr, model.layer_decay"
)


class OneLine:
    """Mixin of parsers that end the process with one line, status 2, on wrong options."""

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of a class inside another one
            super().error(message, ex)  # type: ignore[misc]
        parser = getattr(ex, "subcommand_parser", None) or self
        self.exit(2, f"error: {printable(explained(message, _options(parser)))}\n")
        raise AssertionError("exit returned")


class TaskParser(OneLine, LightningArgumentParser):
    """The parser of a task."""


class CommandParser(OneLine, ArgumentParser):
    """The parser of a function whose parameters are its options."""


def _options(parser: Any) -> list[str]:
    """Return the names of all options of a parser: model.net, model.lr, trainer.max_epochs, ..."""
    names = (name for action in parser._actions for name in action.option_strings or [action.dest])
    return sorted({name.lstrip("-") for name in names} - {"c", "h", "help", "print_shtab"})


def explained(message: str, options: Iterable[str]) -> str:
    """Return one line for a message of jsonargparse; `options`: the names that the parser has."""
    if found := re.match(r"unrecognized arguments: ([^\s=]+)", message):
        given = found[1]
        if not given.startswith("-"):
            return f"{given}: expected options only, such as --config FILE"
        return f"{given}: no such option{_nearest(given.lstrip('-'), options, '--')}"
    if found := re.search(r"(?:Subcommand|Group) '(.+?)' does not accept option '(.+?)'", message):
        group = "" if message.startswith("Subcommand") else f"{found[1]}."
        return f"{group}{found[2]}: no such option{_nearest(group + found[2], options)}"
    if found := re.match(r'(?:argument --|Parser key ")(optimizer|lr_scheduler)\b', message):
        return f"{found[1]}: {RECIPE}"
    # the keys on the way to the innermost message, each once
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    classes = re.findall(r"class_path[ =]'([\w.]+)'", message)
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        path, name = classes[-1] if classes else "", found[1]
        what = f"{path.rpartition('.')[2]} has no such argument" if path else "no such option"
        return f"{key}.{name}: {what}{did_you_mean(name, _arguments(path) or options)}"
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        module, name = found[1], found[2]
        near = did_you_mean(name, _public(module))
        return f"{key}={module}.{name}: {module} has no {name}{near}"
    if found := re.search(r"Expected a dot import path string: (.+)", message):
        value = found[1].partition(". Got value")[0]
        module = HOMES.get(key.rpartition(".")[2], "ndlightnet")
        near = did_you_mean(value, _public(module), "")
        likely = f"; did you mean {module}.{near}?" if near else ", such as ndlightnet.NDLightNet"
        return f"{key}={value}: expected the path of a class{likely}"
    if found := re.search(r"the following arguments are required: (.+)", message):
        return f"{f'{key}={classes[-1]}: ' if classes else ''}lacks the arguments {found[1]}"
    if found := re.search(r"File does not exist: '(.+?)'|Path is not a file: '(.+?)'", message):
        return f"{found[1] or found[2]}: no such file (--{key})"
    value, expected = _value(message)
    if key and expected:
        return f"{key}={value}: expected {expected}"
    return " ".join(message.split())[:500]


def _value(message: str) -> tuple[str, str]:
    """Return the value that has the wrong type, and the types that were expected, of a message."""
    message = message[message.rfind("Parser key ") :]  # the innermost
    unions = list(re.finditer(r"Subtypes: \[(.+)\]", message))
    if unions:
        given = re.search(r"Given value: (.*)", message[unions[-1].end() :])
        value, kinds = given[1] if given else "?", unions[-1][1]
    elif found := re.search(r"Expected an? (.+?)\. Got value: (.*)", message):
        kinds, value = found[1], found[2]
    else:
        return "", ""
    for old, new in TYPES:
        kinds = re.sub(old, new, kinds)
    if kinds.endswith(", None"):
        kinds = f"{kinds.removesuffix(', None')} or None"
    return value.partition(". Got value: ")[0], kinds


def _nearest(name: str, options: Iterable[str], prefix: str = "") -> str:
    """Return did_you_mean for a dotted name, part by part: model.nett.depth -> model.net.depth."""
    known, parts = [option.split(".") for option in options], name.split(".")
    for at, part in enumerate(parts):
        there = {one[at] for one in known if one[:at] == parts[:at] and len(one) > at}
        if not there or part in there:
            continue
        near = did_you_mean(part, there, "")
        if "net" in there and part in _arguments("ndlightnet.NDLightNet"):
            near = f"net.{part}"
        start = prefix + "".join(f"{one}." for one in parts[:at])
        rest = "".join(f".{one}" for one in parts[at + 1 :])
        if near:
            return f"; did you mean {start}{near}{rest}?"
        return f"; expected one of {', '.join(f'{start}{one}' for one in sorted(there))}"
    return ""


def _arguments(path: str) -> list[str]:
    """Return the names of the arguments of a class, those of its bases included."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return []
    inits = [one.__init__ for one in getattr(found, "__mro__", ())[:-1]] or [found]
    names = {
        parameter.name
        for init in inits
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return sorted(names - {"self"})


def _public(module: str) -> list[str]:
    found = import_module(module)
    return getattr(found, "__all__", None) or [n for n in dir(found) if not n.startswith("_")]


def unexpected(message: str) -> str:
    """Return one line for the TypeError of a constructor's arguments."""
    found = re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", message)
    if found is None:
        return f"model: wrong type of an argument ({one_line(message)})"
    known = _arguments(f"{HOMES['mixer']}.{found[1]}")
    return f"{found[1]} has no argument {found[2]}{did_you_mean(found[2], known) if known else ''}"


def check_configs(arguments: list[str]) -> None:
    """Raise a DataError that names the file for each `--config FILE` of a command line that is
    missing or no YAML."""
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
            where = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else ""
            raise DataError(f"{name}: is not valid YAML ({where or one_line(error)})") from error

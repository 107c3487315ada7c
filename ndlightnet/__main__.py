"""The command `ndlightnet TASK ...`: every task of the library, by name."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple, ParamSpec

from ndlightnet.version import __version__

Arguments = ParamSpec("Arguments")
INSIDE = Path(__file__).parent / "configs"
# an installed wheel has the folder inside the package, a clone beside it
CONFIGS = INSIDE if INSIDE.is_dir() else INSIDE.parents[1] / "configs"
# packages of the extra `tasks`, by the names they are imported by
EXTRA = {
    "lightning",
    "jsonargparse",
    "torchmetrics",
    "monai",
    "nibabel",
    "SimpleITK",
    "pydicom",
    "scipy",
    "torchvision",
    "av",
    "rich",
    "tensorboard",
    "matplotlib",
    "sklearn",
    "jinja2",
    "diffusers",
    "captum",
    "tokenizers",
    "nltk",
    "plyfile",
    "soundfile",
    "torchaudio",
    "numpy",
    "yaml",
    "PIL",
}
TRAINING = "ndlightnet.training"
HELP = (["-h"], ["--help"])
TRAININGS = {
    "fit": "train, or go on with a training",
    "validate": "measure a network on what training validates with",
    "test": "measure a network on the test data",
    "predict": "write predictions",
    "stream": "predict at each frame of a video or a pipe, as it arrives",
}


class Door(NamedTuple):
    """A task: a line on it, its class and that of its data, its default config, its commands beside
    Lightning's, and which of TRAININGS it has. Classes and functions are `module:name` below ndlightnet.training."""

    line: str
    task: str
    data: str
    config: str
    commands: dict[str, str] = {}  # noqa: RUF012 (never written to)
    trainings: tuple[str, ...] = ("fit", "validate", "test", "predict")


# run, not imported: `import ndlightnet.training` loads Lightning, which takes seconds
_FOLDERS = sorted((Path(__file__).parent / "training").glob("*/__init__.py"))
DOORS = {name: Door(**entry) for file in _FOLDERS for name, entry in run_path(str(file)).get("COMMANDS", {}).items()}


def _command(run: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Let a command end with status 1 if a package of EXTRA is missing, after one line, and if the
    reader of its output has closed the pipe, as `head` does, without a word."""

    @wraps(run)
    def command(*args: Arguments.args, **options: Arguments.kwargs) -> int:
        try:
            try:
                return run(*args, **options)
            finally:
                if sys.stdout is not None:  # None: it was closed before
                    sys.stdout.flush()  # at the end of the process it could not be caught
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRA:
                raise
            hint = 'pip install "ndlightnet[tasks]"'
            print(f"error: {package} is not installed: {hint}", file=sys.stderr)
        except BrokenPipeError:
            try:
                print(flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            else:  # another pipe, such as a worker's
                raise
        return 1

    return command


@_command
def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments`, default: that of this process. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        print(f"ndlightnet {__version__}")
        return 0
    if words and words[0] in DOORS:
        return door(words[0], words[1:])
    if words[:1] == ["export"]:
        from ndlightnet.training.core.export import export

        return export(words[1:])
    if words[:1] not in ([], *HELP):
        from ndlightnet.data.errors import printable
        from ndlightnet.layout.spelling import did_you_mean

        wrong = f"{words[0]}: no such task{did_you_mean(words[0], DOORS)}"
        print(f"error: {printable(wrong)}", file=sys.stderr)
        return 2
    print("usage: ndlightnet TASK COMMAND [--config FILE] ...\n\ntasks:")
    for name, entry in DOORS.items():
        print(f"  {name:17}{entry.line}")
        if entry.commands:
            print(f"  {'':17}  also: {', '.join(entry.commands)}")
    print("\ncommands: fit, validate, test, predict; ndlightnet TASK fit --help lists the options")
    print("ndlightnet export RUN --to onnx|pt2: a run's network as a file that runs without us")
    print(f"configs: {CONFIGS}")
    return 0


@_command
def door(name: str, arguments: list[str] | None = None) -> int:
    """Run the task of this name with these arguments, default: those of this process. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        return main(words)
    entry = DOORS[name]
    if words in HELP:  # without torch and Lightning, which take seconds
        print(_help(f"ndlightnet {name}" if arguments else Path(sys.argv[0]).name, entry))
        return 0
    # before torch is loaded: threads that wait for others soon sleep, or runs side by side stall each other
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from ndlightnet.training.core.cli import run

    commands = {key: partial(_call, path) for key, path in entry.commands.items()}
    return run(_load(entry.task), _load(entry.data), CONFIGS / f"{entry.config}.yaml", commands, words)


def _help(program: str, entry: Door) -> str:
    lines = {name: TRAININGS[name] for name in entry.trainings}
    lines |= {name: _first_sentence(path) for name, path in entry.commands.items()}
    return "\n".join(
        [
            f"usage: {program} COMMAND [--config FILE] ...\n\n{entry.line}\n\ncommands:",
            *(f"  {name:11}{line}" for name, line in lines.items()),
            "\nCOMMAND --help lists the options. A config is a YAML file of them, and may be given several times.",
            f"Without a command: fit and test with {CONFIGS / entry.config}.yaml",
        ]
    )


def _first_sentence(path: str) -> str:
    """Return the beginning of a function's docstring, read from its file: importing it takes seconds."""
    module, name = path.split(":")
    file = Path(__file__).parent.joinpath("training", *module.split(".")).with_suffix(".py")
    functions = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    text = next(ast.get_docstring(node) or "" for node in functions if node.name == name)
    sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".")
    return sentence[:1].lower() + sentence[1:]


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(f"{TRAINING}.{module}"), name)


def _call(path: str, arguments: list[str]) -> int | None:
    """Call a function of the list of arguments, or one whose parameters are its options."""
    from jsonargparse import auto_cli

    from ndlightnet.training.core.options import CommandParser

    function: Callable[..., int | None] = _load(path)
    if [*signature(function).parameters] == ["arguments"]:
        return function(arguments)
    auto_cli(function, args=arguments, parser_class=CommandParser)
    return 0


if __name__ == "__main__":
    sys.exit(main())

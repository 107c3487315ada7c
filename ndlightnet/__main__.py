"""The command `ndlightnet TASK ...`: every task of the library, by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import NamedTuple, ParamSpec

from ndlightnet import __version__

Arguments = ParamSpec("Arguments")
INSIDE = Path(__file__).parent / "configs"
# an installed wheel has the folder inside the package, a clone beside it
CONFIGS = INSIDE if INSIDE.is_dir() else INSIDE.parents[1] / "configs"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads wait
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
    "numpy",
    "yaml",
    "PIL",
}
SEGMENTATION = "ndlightnet.training.segmentation"


class Door(NamedTuple):
    """A task: a line on it, the names of its two classes in ndlightnet.training, its default
    config, and its commands beside Lightning's, each by `module:function`."""

    line: str
    task: str
    data: str
    config: str
    commands: dict[str, str] = {}  # noqa: RUF012 (never written to)


DOORS = {
    "image_cls": Door("classify images, in colour or grey", "ImageTask", "LabelledData", "coloured_digits"),
    "video_cls": Door("classify videos, of files or a camera", "VideoTask", "VideoData", "digits"),
    "volume_cls": Door("classify volumes (CT, MRI)", "ImageTask", "ImageData", "adrenal28"),
    "signal_cls": Door("classify signals of different lengths", "SignalTask", "SignalData", "spoken_digits"),
    "ct_segmentation": Door(
        "segment volumes (CT, MRI, several channels)",
        "SegmentationTask",
        "VolumeData",
        "phantoms",
        {name: f"{SEGMENTATION}.{name}:{name}" for name in ("plan", "folds", "bundle")},
    ),
    "image_gen": Door(
        "generate images, clips and volumes by diffusion", "GenerationTask", "LabelledData", "handwritten_gen"
    ),
    "pretrain": Door(
        "learn from images, videos or volumes without labels",
        "PretrainTask",
        "LabelledData",
        "coloured_digits_pretrain",
    ),
    "text_lm": Door(
        "a language model of bytes",
        "TextTask",
        "TextData",
        "enwik8",
        {name: f"ndlightnet.training.language.{name}:{name}" for name in ("curves", "generate")},
    ),
    "forecast": Door("forecast an hourly series", "ForecastTask", "SeriesData", "ett"),
}


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
            if (error.name or "").partition(".")[0] not in EXTRA:
                raise
            hint = 'pip install "ndlightnet[tasks]"'
            print(f"error: {error.name} is not installed: {hint}", file=sys.stderr)
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
    """The command line, of this process or as given. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--version"]:
        print(f"ndlightnet {__version__}")
        return 0
    if given and given[0] in DOORS:
        return door(given[0], None if arguments is None else given[1:], begin=1)
    if given[:1] == ["export"]:
        from ndlightnet.training.core.export import export

        return export(given[1:])
    asked = given[:1] in ([], ["-h"], ["--help"])
    if not asked:
        from ndlightnet.data.errors import printable
        from ndlightnet.layout.spelling import did_you_mean

        wrong = f"{given[0]}: no such task{did_you_mean(given[0], DOORS)}"
        print(f"error: {printable(wrong)}", file=sys.stderr)
        return 2
    print("usage: ndlightnet TASK COMMAND [--config FILE] ...\n\ntasks:")
    for name, found in DOORS.items():
        print(f"  {name:17}{found.line}")
        if found.commands:
            print(f"  {'':17}  also: {', '.join(found.commands)}")
    print("\ncommands: fit, validate, test, predict; ndlightnet TASK fit --help lists the options")
    print("ndlightnet export RUN --to onnx|pt2: a run's network as a file that runs without us")
    print(f"configs: {CONFIGS}")
    return 0


@_command
def door(name: str, arguments: list[str] | None = None, begin: int = 0) -> int:
    """The task of this name, with these arguments, or with those of this process from number
    `begin` on. Returns the exit status."""
    given = sys.argv[1 + begin :] if arguments is None else arguments
    if given[:1] == ["--version"]:
        return main(given)
    if arguments is None:
        _wait_briefly()
    from ndlightnet import training

    found = DOORS[name]
    task, data = getattr(training, found.task), getattr(training, found.data)
    commands = {key: partial(_call, where) for key, where in found.commands.items()}
    return training.run(task, data, CONFIGS / f"{found.config}.yaml", commands, given)


def _call(where: str, arguments: list[str]) -> int | None:
    """A function of the list of arguments, or one whose parameters are its options."""
    from jsonargparse import auto_cli

    from ndlightnet.training.core.options import CommandParser

    module, name = where.split(":")
    function: Callable[..., int | None] = getattr(import_module(module), name)
    if [*signature(function).parameters] == ["arguments"]:
        return function(arguments)
    auto_cli(function, args=arguments, parser_class=CommandParser)
    return 0


def _wait_briefly() -> None:
    """Begins this process anew with OpenMP's threads set to sleep soon while they wait.

    By default they spin for milliseconds, so that runs side by side wait for each other's spinning.
    A step of the first command's network on 2 cores, alone and with the same beside it: 0.15 s and
    1.20 s by default, 0.17 s and 0.42 s like this, 0.34 s and 0.30 s if they sleep at once. OpenMP
    reads the variable when torch is loaded, which `import ndlightnet` has done before we are asked.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = "1000"
        if os.name == "posix":  # elsewhere exec returns to the shell at once
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

"""The command `bundle`: a trained segmentation network as a MONAI bundle, a folder that `python -m monai.bundle`
runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isclass
from pathlib import Path
from pydoc import locate
from typing import Any, get_args, get_origin, get_type_hints

import torch
import yaml
from monai.bundle.config_parser import ConfigParser
from torch import Tensor

from ndlightnet.data.errors import DataError, one_line, writable
from ndlightnet.training.core.checkpoints import check_checkpoint
from ndlightnet.training.core.cli import TaskCLI
from ndlightnet.training.core.options import PLANNED, check, expect_config
from ndlightnet.training.segmentation.bundle_files import inference_of, metadata_of, readme_of
from ndlightnet.training.segmentation.segmentation_task import SegmentationTask
from ndlightnet.training.segmentation.volume_data import VolumeData


class BundleCLI(TaskCLI):
    """Command line that takes configs of `plan` and those that `fit` has saved."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument("--out", type=str, required=True, help="folder to write")
        parser.add_argument("--ckpt_path", type=str | None, required=True, help="of `fit`")
        parser.add_argument("--weights_only", type=bool | None, help="not used, `fit` saves it")


def bundle(arguments: list[str]) -> None:
    """Write a bundle of MONAI. arguments: `--ckpt_path best.ckpt --out bundles/NAME`, the training's config and what
    overrides it. The folder `out`, new or empty before, appears complete or not at all.

    Raises DataError for a checkpoint of another network, for a network that MONAI cannot build from the config, and
    where `out` holds something or cannot be written.
    """
    expect_config(["bundle", *arguments], PLANNED)
    cli = BundleCLI(SegmentationTask, VolumeData, args=arguments, run=False)
    patch, expected = cli.datamodule.patch, "3 sizes: bundles are of volumes, not of pictures or series over time"
    check("data.patch", patch, len(patch) == 3, expected)
    out = Path(cli.config.out)
    definition, weights = _network(cli, [cli.config.ckpt_path, *cli.model.ensemble])
    inference = inference_of(definition, cli.model, cli.datamodule, str(cli.trainer.precision))
    metadata = metadata_of(out.resolve().name, cli.model, cli.datamodule)
    with _whole_folder(out) as draft:
        for name in ("configs", "models", "docs"):
            (draft / name).mkdir(parents=True)
        for name, content in (("inference", inference), ("metadata", metadata)):
            text = json.dumps(content, indent=4, allow_nan=False)
            (draft / "configs" / f"{name}.json").write_text(text + "\n")
        with (draft / "models" / "model.pt").open("wb") as file:
            torch.save(weights, file)
        readme = readme_of(metadata, cli.datamodule.modalities)
        (draft / "docs" / "README.md").write_text(readme)
    print(f"wrote {out}, see {out / 'docs' / 'README.md'}")


def _network(cli: TaskCLI, paths: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return MONAI's definition of the network, or of the ensemble of several checkpoints, and its weights. The
    names in the first checkpoint become the data's."""
    task, data, saved = cli.model, cli.datamodule, []
    for path in paths:
        check_checkpoint(path, task, data)
        saved.append(torch.load(path, map_location="cpu", weights_only=True))
    names = saved[0]["names"]
    if not (names.get("labels") and names.get("modalities")):
        raise DataError(f"{paths[0]}: names no labels, expected a checkpoint that `fit` has left")
    data.set_names(names)
    for name, expected in (("in_channels", data.in_channels), ("out_channels", len(data.labels))):
        value = getattr(task.net, name, expected)
        check("model.net", f"{name}={value}", value == expected, f"{expected} for the data of {paths[0]}")
    states = [{k[4:]: x for k, x in one["state_dict"].items() if k.startswith("net.")} for one in saved]
    # as `fit` saves it: a class that is a default by its name
    net_config = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))["model"]["net"]
    weights = states[0]
    if len(states) > 1:
        weights = {f"nets.{n}.{k}": value for n, s in enumerate(states) for k, value in s.items()}
    try:  # so that it fails here, not where it is used
        definition = _target(net_config)
        if len(states) > 1:
            definition = {"_target_": "ndlightnet.inference.Ensemble", "nets": [definition] * len(states)}
        parser = ConfigParser({"net": json.loads(json.dumps(definition))})
        parser.get_parsed_content("net").load_state_dict(weights)
    except Exception as error:  # classes may raise anything
        why = one_line(error.__cause__ or error)  # MONAI's own error only lists the arguments
        wrong = f"{net_config['class_path']} cannot be built from a MONAI config ({why})"
        raise DataError(f"model.net: {wrong}") from error
    return definition, weights


def _target(value: Any, called: bool = False) -> Any:
    """Convert jsonargparse's class_path and init_args, and dotted names of classes and functions, to MONAI's
    `_target_`. called: the receiver calls it with more arguments to get the object."""
    if isinstance(value, list | tuple):
        return [_target(one, called) for one in value]
    if called and isinstance(value, str) and "." in value:
        return {"_target_": value, "_mode_": "callable"}
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    target: Any = locate(value["class_path"])
    hints: dict[str, Any] = {}
    for base in reversed(getattr(target, "__mro__", [target])):
        hints |= get_type_hints(base.__init__ if isclass(base) else base)
    arguments = value.get("init_args") or {}
    return {
        "_target_": value["class_path"],
        **({"_mode_": "callable"} if called else {}),
        **{name: _target(one, _is_callable(hints.get(name))) for name, one in arguments.items()},
    }


def _is_callable(hint: Any) -> bool:
    return get_origin(hint) is Callable or any(_is_callable(argument) for argument in get_args(hint))


@contextmanager
def _whole_folder(path: Path) -> Iterator[Path]:
    """Yield the path of a draft folder, which becomes `path` if the block makes it and succeeds."""
    draft = path.resolve().parent / f".{os.getpid()}.part.{path.name}"
    try:
        with writable(path):
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise DataError(f"{path}: is there already, expected a new or an empty folder")
            yield draft
            os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)

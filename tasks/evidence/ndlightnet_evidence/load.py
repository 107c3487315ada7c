"""Which samples a config names."""

from __future__ import annotations

from typing import Any

from ndlightnet.training import ImageData, ImageFolders, TextData
from ndlightnet_evidence.photographs import Photographs
from ndlightnet_evidence.sets import Images, Samples, Text

KINDS: dict[str, tuple[Any, Any]] = {
    "ImageData": (ImageData, Images),
    "ImageFolders": (ImageFolders, Photographs),
    "TextData": (TextData, Text),
}


def load(config: dict[str, Any]) -> Samples:
    """Read the data of a config, whose class must be one of KINDS."""
    name = config["data"]["class_path"].rpartition(".")[2]
    if name not in KINDS:
        raise ValueError(f"data: {name}: expected {', '.join(KINDS)}")
    module, kind = KINDS[name]
    samples: Samples = kind(module(**config["data"]["init_args"]), config["trainer"]["max_epochs"])
    samples.smoothing = config["model"].get("label_smoothing", samples.smoothing)
    return samples

"""Tasks on Lightning: a network with its loss, metrics, data and command line."""

from __future__ import annotations

import sys
from types import ModuleType

from ndlightnet.training.classification.data import LabelledData
from ndlightnet.training.classification.image_folders import ColouredDigits, ImageFolders
from ndlightnet.training.classification.images import HandwrittenDigits, ImageData, ImageTask
from ndlightnet.training.classification.signals import SignalData, SignalTask
from ndlightnet.training.classification.video_data import MovingDigits, VideoData
from ndlightnet.training.classification.videos import VideoTask
from ndlightnet.training.classification.volumes import VolumeFolders
from ndlightnet.training.core.averaging import AveragedWeights
from ndlightnet.training.core.cli import TaskCLI, run
from ndlightnet.training.forecasting.data import SeriesData
from ndlightnet.training.forecasting.task import ForecastTask
from ndlightnet.training.generation.task import GenerationTask
from ndlightnet.training.language.data import TextData
from ndlightnet.training.language.task import TextTask
from ndlightnet.training.pretraining.data import UnlabelledFiles
from ndlightnet.training.pretraining.task import PretrainTask
from ndlightnet.training.segmentation.data import MovingPhantoms, PhantomVolumes, VolumeData
from ndlightnet.training.segmentation.task import SegmentationTask

__all__ = [
    "AveragedWeights",
    "ColouredDigits",
    "ForecastTask",
    "GenerationTask",
    "HandwrittenDigits",
    "ImageData",
    "ImageFolders",
    "ImageTask",
    "LabelledData",
    "MovingDigits",
    "MovingPhantoms",
    "PhantomVolumes",
    "PretrainTask",
    "SegmentationTask",
    "SeriesData",
    "SignalData",
    "SignalTask",
    "TaskCLI",
    "TextData",
    "TextTask",
    "UnlabelledFiles",
    "VideoData",
    "VideoTask",
    "VolumeData",
    "VolumeFolders",
    "run",
]

# former modules that older YAML files name, such as ndlightnet.training.images.ImageData
MOVED = ("averaging", "images", "signals", "text", "videos", "volume_folders", "volumes")


def __getattr__(name: str) -> ModuleType:
    """Return this package for a name in MOVED: it has all that YAML files use of that module."""
    if name in MOVED:
        return sys.modules[__name__]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

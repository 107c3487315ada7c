"""Tasks on Lightning: a network with its loss, metrics, data and command line."""

from ndlightnet.training.classification import VideoTask
from ndlightnet.training.cli import TaskCLI, run
from ndlightnet.training.forecasting import ForecastTask, SeriesData
from ndlightnet.training.images import ImageData, ImageTask
from ndlightnet.training.segmentation import PhantomVolumes, SegmentationTask, VolumeData
from ndlightnet.training.signals import SignalData, SignalTask
from ndlightnet.training.text import TextData, TextTask
from ndlightnet.training.videos import MovingDigits, VideoData

__all__ = [
    "ForecastTask",
    "ImageData",
    "ImageTask",
    "MovingDigits",
    "PhantomVolumes",
    "SegmentationTask",
    "SeriesData",
    "SignalData",
    "SignalTask",
    "TaskCLI",
    "TextData",
    "TextTask",
    "VideoData",
    "VideoTask",
    "VolumeData",
    "run",
]

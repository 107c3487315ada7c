"""Tasks on Lightning: a network with its loss, metrics, data and command line."""

from ndlightnet.training.classification.images import ImageData, ImageTask
from ndlightnet.training.classification.signals import SignalData, SignalTask
from ndlightnet.training.classification.videos import MovingDigits, VideoData
from ndlightnet.training.classification.videos_task import VideoTask
from ndlightnet.training.classification.volume_folders import VolumeFolders
from ndlightnet.training.core.averaging import AveragedWeights
from ndlightnet.training.core.cli import TaskCLI, run
from ndlightnet.training.forecasting.series import ForecastTask, SeriesData
from ndlightnet.training.language.text import TextData, TextTask
from ndlightnet.training.segmentation.data import PhantomVolumes, VolumeData
from ndlightnet.training.segmentation.task import SegmentationTask

__all__ = [
    "AveragedWeights",
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
    "VolumeFolders",
    "run",
]

"""Tasks on Lightning: a network with its loss, metrics, data and command line."""

from ndlightnet.training.classification import VideoTask
from ndlightnet.training.cli import TaskCLI, run
from ndlightnet.training.segmentation import SegmentationTask
from ndlightnet.training.signals import SignalData, SignalTask
from ndlightnet.training.videos import MovingDigits, VideoData
from ndlightnet.training.volumes import PhantomVolumes, VolumeData

__all__ = [
    "MovingDigits",
    "PhantomVolumes",
    "SegmentationTask",
    "SignalData",
    "SignalTask",
    "TaskCLI",
    "VideoData",
    "VideoTask",
    "VolumeData",
    "run",
]

"""Segmentation of volumes: the task, its data, and the results of tests and predictions."""

from ndlightnet.training.segmentation.data import MovingPhantoms, PhantomVolumes, VolumeData
from ndlightnet.training.segmentation.task import SegmentationTask

__all__ = ["MovingPhantoms", "PhantomVolumes", "SegmentationTask", "VolumeData"]

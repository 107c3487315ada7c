"""Segmentation of volumes: the task, its data, and what a test or a prediction leaves."""

from ndlightnet.training.segmentation.data import PhantomVolumes, VolumeData
from ndlightnet.training.segmentation.task import SegmentationTask

__all__ = ["PhantomVolumes", "SegmentationTask", "VolumeData"]

"""Tasks on Lightning: a network with its loss, metrics, data and command line."""

from __future__ import annotations

from ndlightnet.training.classification.image_data import HandwrittenDigits, ImageData
from ndlightnet.training.classification.image_folders import ColouredDigits, ImageFolders, Pathfinder
from ndlightnet.training.classification.image_task import ImageTask
from ndlightnet.training.classification.signal_data import SignalData
from ndlightnet.training.classification.signal_task import SignalTask
from ndlightnet.training.classification.video_data import MovingDigits, VideoData
from ndlightnet.training.classification.video_task import VideoTask
from ndlightnet.training.classification.volume_folders import VolumeFolders
from ndlightnet.training.core.averaging import AveragedWeights
from ndlightnet.training.core.cli import TaskCLI, run
from ndlightnet.training.core.data_module import LabelledData
from ndlightnet.training.forecasting.forecast_task import ForecastTask
from ndlightnet.training.forecasting.series_data import SeriesData
from ndlightnet.training.generation.generation_task import GenerationTask
from ndlightnet.training.language.masked_data import MaskedTextData
from ndlightnet.training.language.sentence_data import ListOps, MadeSentences, SentenceData
from ndlightnet.training.language.summary_data import MadeNotes, SummaryData
from ndlightnet.training.language.summary_task import SummaryTask
from ndlightnet.training.language.text_cls_task import TextClsTask
from ndlightnet.training.language.text_data import TextData
from ndlightnet.training.language.text_mlm_task import MaskedTextTask
from ndlightnet.training.language.text_task import TextTask
from ndlightnet.training.points.cloud_data import CloudFolders, MadeShapes, PartialClouds, ShapeClasses
from ndlightnet.training.points.completion_task import CompletionTask
from ndlightnet.training.points.point_cls_task import PointClsTask
from ndlightnet.training.pretraining.pretrain_task import PretrainTask
from ndlightnet.training.pretraining.unlabelled_files import UnlabelledFiles
from ndlightnet.training.segmentation.segmentation_task import SegmentationTask
from ndlightnet.training.segmentation.volume_data import MovingPhantoms, PhantomVolumes, VolumeData
from ndlightnet.training.speech.speech_data import MadeBabble, SpeechData
from ndlightnet.training.speech.tts_task import TTSTask

__all__ = [
    "AveragedWeights",
    "CloudFolders",
    "ColouredDigits",
    "CompletionTask",
    "ForecastTask",
    "GenerationTask",
    "HandwrittenDigits",
    "ImageData",
    "ImageFolders",
    "ImageTask",
    "LabelledData",
    "ListOps",
    "MadeBabble",
    "MadeNotes",
    "MadeSentences",
    "MadeShapes",
    "MaskedTextData",
    "MaskedTextTask",
    "MovingDigits",
    "MovingPhantoms",
    "PartialClouds",
    "Pathfinder",
    "PhantomVolumes",
    "PointClsTask",
    "PretrainTask",
    "SegmentationTask",
    "SentenceData",
    "SeriesData",
    "ShapeClasses",
    "SignalData",
    "SignalTask",
    "SpeechData",
    "SummaryData",
    "SummaryTask",
    "TTSTask",
    "TaskCLI",
    "TextClsTask",
    "TextData",
    "TextTask",
    "UnlabelledFiles",
    "VideoData",
    "VideoTask",
    "VolumeData",
    "VolumeFolders",
    "run",
]

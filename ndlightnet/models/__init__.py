"""Whole networks."""

from ndlightnet.models.backbone import NDLightNet, ndlightnet_base, ndlightnet_small, ndlightnet_tiny
from ndlightnet.models.dit import DIT_SIZES, NDLightDiT
from ndlightnet.models.forecaster import Forecaster
from ndlightnet.models.frame_networks import FrameByFrame, FramesAsChannels
from ndlightnet.models.masked import MaskedDecoder, Reconstruction, masked_loss
from ndlightnet.models.point_completion import PointCompletion
from ndlightnet.models.seq2seq import Seq2Seq
from ndlightnet.models.tts import AutoregressiveTTS, ParallelTTS
from ndlightnet.models.unet import NDLightUNet

__all__ = [
    "DIT_SIZES",
    "AutoregressiveTTS",
    "Forecaster",
    "FrameByFrame",
    "FramesAsChannels",
    "MaskedDecoder",
    "NDLightDiT",
    "NDLightNet",
    "NDLightUNet",
    "ParallelTTS",
    "PointCompletion",
    "Reconstruction",
    "Seq2Seq",
    "masked_loss",
    "ndlightnet_base",
    "ndlightnet_small",
    "ndlightnet_tiny",
]

"""Whole networks."""

from ndlightnet.models.backbone import (
    NDLightNet,
    ndlightnet_base,
    ndlightnet_small,
    ndlightnet_tiny,
)
from ndlightnet.models.dit import DIT_SIZES, NDLightDiT
from ndlightnet.models.forecaster import Forecaster
from ndlightnet.models.frames import FrameByFrame, FramesAsChannels
from ndlightnet.models.unet import NDLightUNet

__all__ = [
    "DIT_SIZES",
    "Forecaster",
    "FrameByFrame",
    "FramesAsChannels",
    "NDLightDiT",
    "NDLightNet",
    "NDLightUNet",
    "ndlightnet_base",
    "ndlightnet_small",
    "ndlightnet_tiny",
]

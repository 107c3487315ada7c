"""Whole networks."""

from ndlightnet.models.backbone import (
    NDLightNet,
    ndlightnet_base,
    ndlightnet_small,
    ndlightnet_tiny,
)
from ndlightnet.models.forecaster import Forecaster
from ndlightnet.models.frames import FrameByFrame, FramesAsChannels
from ndlightnet.models.unet import NDLightUNet

__all__ = [
    "Forecaster",
    "FrameByFrame",
    "FramesAsChannels",
    "NDLightNet",
    "NDLightUNet",
    "ndlightnet_base",
    "ndlightnet_small",
    "ndlightnet_tiny",
]

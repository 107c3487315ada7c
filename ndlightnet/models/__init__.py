"""Whole networks."""

from ndlightnet.models.backbone import (
    DecodeState,
    NDLightNet,
    ndlightnet_base,
    ndlightnet_small,
    ndlightnet_tiny,
)
from ndlightnet.models.unet import NDLightUNet

__all__ = [
    "DecodeState",
    "NDLightNet",
    "NDLightUNet",
    "ndlightnet_base",
    "ndlightnet_small",
    "ndlightnet_tiny",
]

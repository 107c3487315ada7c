"""Whole networks."""

from ndlightnet.models.backbone import (
    NDLightNet,
    ndlightnet_base,
    ndlightnet_small,
    ndlightnet_tiny,
)
from ndlightnet.models.unet import NDLightUNet

__all__ = [
    "NDLightNet",
    "NDLightUNet",
    "ndlightnet_base",
    "ndlightnet_small",
    "ndlightnet_tiny",
]

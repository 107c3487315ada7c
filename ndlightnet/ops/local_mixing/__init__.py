"""Local mixing: a depthwise convolution on a grid of any number of axes."""

from ndlightnet.ops.local_mixing.api import local_mixing, local_mixing_step
from ndlightnet.ops.local_mixing.offsets import dense, star

__all__ = ["dense", "local_mixing", "local_mixing_step", "star"]

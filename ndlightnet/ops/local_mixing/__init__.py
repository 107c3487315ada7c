"""Local mixing: a depthwise convolution on a grid of any number of axes."""

from ndlightnet.ops.local_mixing.api import begin_local_mixing, local_mixing, local_mixing_step
from ndlightnet.ops.local_mixing.offsets import dense, star

__all__ = ["begin_local_mixing", "dense", "local_mixing", "local_mixing_step", "star"]

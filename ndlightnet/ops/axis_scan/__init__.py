"""MD-TPE: a sum over axes of one-dimensional exponential Toeplitz products (LightNet, Eq. 9)."""

from ndlightnet.ops.axis_scan.api import axis_scan
from ndlightnet.ops.axis_scan.lines import line_scan, line_state, line_step

__all__ = ["axis_scan", "line_scan", "line_state", "line_step"]

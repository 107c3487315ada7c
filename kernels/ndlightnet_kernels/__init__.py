"""Triton kernels of ndlightnet: plain functions on tensors, which import torch and triton only and
register no operators. ndlightnet.ops calls them through operators.

  position    positions of tokens and angles of slots, for operators and kernels; without Triton
  attention   global attention; attention_backward: its gradients
  causal      causal attention; causal_backward: its gradients; step: one token, for decoding
  segments    merges of States; frames: prefix and sliding merges over frames
  axis_scan   MD-TPE; axis_taps: the Toeplitz taps that it multiplies by; axis_lines: its lines
  axis_states what its long lines carry from tile to tile
  gate        output norm and gate   swiglu   SiLU(gate) * up
  residual_norm  residual add and LayerNorm             planes   planes at the edges of slabs
  instance_norm  instance norm, a residual and SiLU
  phases      MD-LRPE angles         tiles    functions that the attention kernels share
  plans       tiles and programs     launch   plans and compiled programs, cached
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


def interpreted() -> bool:
    """Return whether Triton runs kernels on the CPU, in its interpreter (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def device_reason(device: torch.device) -> str:
    """Return why Triton cannot run on a device, empty if it can."""
    return _device_reason_once(device)


# as torch.compiler.assume_constant_result does, but without importing torch._dynamo and Triton
device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _device_reason_once(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "" if major >= 8 else f"compute capability {major}.{minor}: expected 8.0 or more"
    if device.type == "cpu" and interpreted():
        return ""
    return f"tensors on {device.type}: expected cuda"

"""Triton kernels of ndlightnet: plain functions on tensors, which import torch and triton only and
register no operators. ndlightnet.ops calls them through operators.

  position    positions of tokens and angles of slots, for operators and kernels; without Triton
  attention   global attention; attention_backward: its gradients
  causal      causal attention; causal_backward: its gradients; step: one token, for decoding
  segments    merges of States; frames: prefix and sliding merges over frames
  axis_scan   MD-TPE; axis_taps: the Toeplitz taps that it multiplies by; axis_lines: its lines
  axis_states what its long lines carry from tile to tile
  gate        output norm and gate   swiglu   SiLU(gate) * up
  residual_norm  residual add and LayerNorm
  instance_norm  instance norm, a residual and SiLU
  phases      MD-LRPE angles         tiles    functions that the attention kernels share
  plans       tiles and programs     launch   plans and compiled programs, cached
"""

from __future__ import annotations


def interpreted() -> bool:
    """Return whether Triton runs kernels on the CPU, in its interpreter (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)

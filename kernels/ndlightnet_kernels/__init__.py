"""Triton kernels of ndlightnet: torch and triton in, nothing of ours; plain functions on tensors
that register nothing. ndlightnet.ops calls them through operators.

  position    where tokens lie and how fast slots turn, for operators and kernels; free of Triton
  attention   global attention; attention_backward: its gradients; plans: launches
  causal      causal attention; causal_backward: its gradients; step: one token, for decoding
  axis_scan   MD-TPE; axis_taps: what it multiplies with
  gate        output norm and gate
  phases      MD-LRPE angles         tiles    what the attention kernels share
"""

from __future__ import annotations


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)

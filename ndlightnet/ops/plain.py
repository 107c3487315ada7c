"""When an operator runs as plain torch operations instead of its own autograd.Function, whose
gradient is written out: torch.func and forward-mode AD have to differentiate what it computes, and
an exported file has to hold operations that other programs know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from ndlightnet.layout.abstract import exporting


def transformed() -> bool:
    """Return whether a transform of torch.func or forward-mode AD is active."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def plain() -> bool:
    """Return whether to run plain operations, without writing into a tensor: in transforms,
    torch.export and torch.jit.trace."""
    if torch.compiler.is_compiling():
        return exporting()
    return transformed() or torch._C._get_tracing_state() is not None


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Run torch's scaled_dot_product_attention, in transforms by the form that has a derivative in forward mode."""
    if not transformed():
        return scaled_dot_product_attention(q, k, v, **options)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, **options)

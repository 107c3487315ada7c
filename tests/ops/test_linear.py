"""Linear attention: the sums against all scores at once, and an explicit wish for one of them."""

import pytest
import torch

from ndlightnet.nn.mixers import LinearAttention
from ndlightnet.ops.linear import Sums, causal_linear_attention, linear_attention


def sample(n=12, source=12):
    """q, k of positive features, v, and the sums before."""
    q, k = torch.rand(2, n, 3, 4).double(), torch.rand(2, source, 3, 4).double()
    v, m = torch.randn(2, source, 3, 5).double(), torch.randn(2, 3, 4, 5).double()
    return [x.requires_grad_() for x in (q, k, v)], Sums(torch.rand(2, 3, 4).double(), m)


@pytest.mark.parametrize("denominator", [False, True])
@pytest.mark.parametrize("source", [12, 7])
def test_the_global_form_is_its_reference(close, close_grads, source, denominator):
    qkv, _ = sample(source=source)
    ours, theirs = (linear_attention(*qkv, denominator=denominator, impl=impl) for impl in ("auto", "reference"))
    close(ours, theirs, 1e-12)
    close_grads(ours, theirs, qkv, 1e-11)


@pytest.mark.parametrize("denominator", [False, True])
@pytest.mark.parametrize("frames", [1, 4, 12])
def test_the_causal_form_is_its_reference(close, close_grads, frames, denominator):
    qkv, sums = sample()
    (ours, *_), (theirs, *_) = results = [
        causal_linear_attention(*qkv, frames, sums, denominator=denominator, impl=impl)
        for impl in ("auto", "reference")
    ]
    close(ours, theirs, 1e-12)
    close_grads(ours, theirs, qkv, 1e-11)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        close(a, b, 1e-12)


def test_a_wish_that_cannot_be_served_raises():
    """Flash-linear-attention has the causal form of single tokens, and runs on a card."""
    qkv, sums = sample()
    has = "expected 'auto', 'torch' or 'reference' for linear_attention"
    with pytest.raises(ValueError, match=f"impl='fla': {has}"):
        linear_attention(*qkv, denominator=True, impl="fla")
    with pytest.raises(ValueError, match=f"impl='fla': {has}"):
        causal_linear_attention(*qkv, 4, sums, denominator=True, impl="fla")
    with pytest.raises(ValueError, match=r"no gated_linear_attention for .* on cpu"):
        causal_linear_attention(*qkv, 12, sums, denominator=True, impl="fla")
    layer, x = LinearAttention(8, impl="fla"), torch.randn(1, 4, 3, 8)
    for causal in (False, True):
        with pytest.raises(ValueError, match=f"impl='fla': {has}"):
            layer(x, causal=causal)
    with pytest.raises(ValueError, match="on cpu"):
        layer(x[:, :, 0], causal=True)

"""With values of 1 the weights of a query add up to those that it was made of, in 16 bits too."""

import pytest
import torch

from ndlightnet.ops import causal_attention

from .kernel_cases import BRAIN, DEVICE

# where numpy warns, the interpreter does what a GPU does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def least_exact() -> torch.Tensor:
    """A logit in bfloat16 whose exponential lies as far as any from those that bfloat16 has."""
    logits = torch.linspace(-0.69, 0, 2000).to(BRAIN)
    p = logits.double().exp()
    return logits[((p.to(BRAIN).double() - p) / p).abs().argmax()]


def stored(x: torch.Tensor) -> torch.Tensor:
    """Numbers as a kernel stores them in bfloat16: rounded by a card, cut off by the interpreter."""
    if DEVICE.type == "cuda":
        return x.to(BRAIN).double()
    return (x.float().view(torch.int32) & -0x10000).view(torch.float32).double()


def test_sums_are_of_the_weights_that_the_products_see():
    """Keys are exp(k) rounded to bfloat16, and so are those in the sums. Otherwise all outputs are off by
    the rounding of one number, up to 0.39 %, where the roundings of different queries cancel.

    The first token lies so far below the others that only the careful form serves it. Chunks are of 32
    tokens; the interpreter rounds in products alone, and would not round the sums of a State.
    """
    length, heads, dim = 256 if DEVICE.type == "cuda" else 32, 16, 16
    q = torch.randn(1, length, heads, dim, device=DEVICE).to(BRAIN)
    far = torch.rand(q.shape, device=DEVICE) < 0.3  # so that no two sums are rounded alike
    k = torch.where(far, -64, least_exact().to(DEVICE))
    k[:, 0], k[:, 1] = -64, 0
    out, _ = causal_attention(q, k, torch.ones_like(q), impl="triton")
    expected = stored(torch.nn.functional.silu(q.double()).sum(-1, keepdim=True).expand_as(q))
    later = slice(length // 2, length)  # of many tokens of that logit
    a, b = out.double()[:, later].flatten(), expected[:, later].flatten()
    ratio = (a @ b) / (b @ b)
    assert abs(ratio - 1) < 1.5e-3, f"weights add up to {ratio:.5f}"

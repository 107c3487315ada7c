"""Windows over tokens that begin with the last token of a chunk: one of two tokens, or of a chunk and two."""

import pytest
import torch

from ndlightnet.ops import axis_causal_attention

from .kernel_cases import DEVICE

# where numpy warns, the interpreter does what a GPU does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.mark.parametrize("steep", [False, True])
@pytest.mark.parametrize("window", [2, 34])
def test_the_oldest_token_of_a_window(close, close_grads, dense, window, steep):
    """Chunks are of 32 tokens. steep: logits that only the careful form can sum."""
    length = 70
    q, k, v = (torch.randn(1, length, 1, 3, device=DEVICE) for _ in "qkv")
    if steep:
        k = k + 70 * torch.randint(2, k.shape, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = axis_causal_attention(*leaves, length, window=window, return_state=False, impl="triton")
    token = torch.arange(length, device=DEVICE)
    age = token[:, None] - token
    see = ((age >= 0) & (age < window)).double()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = dense(*exact, see=see)
    close(out.double(), expected, 1e-5)
    close_grads(out, expected, leaves, 1e-5, exact)

"""Every operator of the kernels with a gradient raises where that is differentiated again, in the
words of the torch forms."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from ndlightnet import ops
from ndlightnet.layout import Ragged
from ndlightnet.ops.norm_gate import norm_gate

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan
from .kernel_cases import DEVICE

LAYOUT, MADE = Ragged([(2, 2)]), {"impl": "triton"}


def scanned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (4, 8), coefficients and log decays of two axes."""
    coef = x.flatten()[:16].reshape(2, 8, 1)
    return x[0, :, 0], coef, -torch.ones(2, 1, device=DEVICE)


def state_of(x: Tensor) -> Tensor:
    return ops.summarize(x, x, **MADE).memory


RUNS = {
    "global": lambda x: ops.global_attention(x, x, x, **MADE),
    "summarize": state_of,
    "read": lambda x: ops.read(x, ops.summarize(x.detach(), x.detach(), **MADE), **MADE),
    "causal": lambda x: ops.causal_attention(x, x, x, **MADE)[0],
    "frames": lambda x: ops.axis_causal_attention(x, x, x, 2, **MADE)[0],
    "packed": lambda x: packed_attention(x[0], x[0], x[0], LAYOUT, **MADE),
    "packed frames": lambda x: packed_axis_causal_attention(x[0], x[0], x[0], LAYOUT, **MADE),
    "gate": lambda x: norm_gate(x, x, *torch.ones(2, 8, device=DEVICE), **MADE),
    "gate and local branch": lambda x: norm_gate(x, x, *torch.ones(2, 8, device=DEVICE), local=x, **MADE),
    "scan": lambda x: ops.axis_scan(scanned(x)[0].view(1, 2, 2, 8), *scanned(x)[1:], **MADE),
    "packed scan": lambda x: packed_axis_scan(scanned(x)[0], LAYOUT, *scanned(x)[1:], **MADE),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_raises(name):
    x = torch.randn(1, 4, 1, 8, device=DEVICE, requires_grad=True)
    (g,) = grad(RUNS[name](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative: the gradient of this operator"):
        grad(g.sum(), x)


@pytest.mark.parametrize("name", RUNS)
def test_behind_a_checkpoint_the_first_one_is_the_same(name):
    """Saved tensors are read once, which is all that a checkpoint allows."""
    torch.manual_seed(0)
    x = torch.randn(1, 4, 1, 8, device=DEVICE, requires_grad=True)
    (expected,) = grad(RUNS[name](x).square().sum(), x)
    (found,) = grad(checkpoint(RUNS[name], x, use_reentrant=False).square().sum(), x)
    assert torch.equal(found, expected) and found.any()

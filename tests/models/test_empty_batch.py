"""An empty batch gives every network's parameters a gradient of zeros: DDP waits for each."""

from functools import partial

import pytest
import torch

from ndlightnet import NDLightDiT, NDLightNet, NDLightUNet, mixers
from ndlightnet.models import Forecaster

SMALL = {"patch_size": 2, "embed_dim": 16, "depth": 1}
CELLS = {
    **{
        f"{dims} axes{', causal' * causal}": (partial(NDLightNet, causal=causal, **SMALL), dims)
        for dims in (1, 2, 3, 4)
        for causal in (False, True)
    },
    "a stem": (partial(NDLightNet, stem_blocks=1, **SMALL | {"patch_size": 4}), 2),
    **{f"U-Net, {dims} axes": (partial(NDLightUNet, widths=(4, 8)), dims) for dims in (1, 2, 3, 4)},
    "U-Net, hybrid": (
        partial(
            NDLightUNet, widths=(4, 8, 16), convs=(1, 1, 0), depths=(0, 0, 1), size="hybrid", deep_supervision=True
        ),
        3,
    ),
}
OTHERS = {
    "text": (
        lambda: NDLightNet(1, vocab_size=11, embed_dim=16, depth=1, causal=True),
        lambda: (torch.zeros(0, 7, dtype=torch.int64),),
    ),
    **{
        f"DiT, {dims} axes": (
            partial(NDLightDiT, dims, 1, num_classes=3, **SMALL),
            lambda dims=dims: (torch.zeros(0, 1, *[4] * dims), torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
        )
        for dims in (1, 2, 3, 4)
    },
    "Forecaster": (
        lambda: Forecaster(3, 4, embed_dim=16, depth=1),
        lambda: (torch.zeros(0, 8, 3), torch.zeros(0, 12, 4)),
    ),
}


def check(net, *inputs, **how):
    out = net.train()(*inputs, **how)
    outputs = out if isinstance(out, list) else [out]
    assert all(len(y) == 0 for y in outputs)
    sum(y.sum() for y in outputs).backward()
    for name, p in net.named_parameters():
        assert not p.requires_grad or (p.grad is not None and not p.grad.any()), name


@pytest.mark.parametrize("name", CELLS)
def test_networks_of_cells(name):
    make, dims = CELLS[name]
    check(make(dims, 1, 3), torch.zeros(0, 1, *[8] * dims))


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks(name):
    make, inputs = OTHERS[name]
    check(make(), *inputs())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", mixers.__all__)
def test_mixers(name, causal):
    if isinstance(made := getattr(mixers, name), type):
        check(made(16), torch.zeros(0, 4, 3, 16, requires_grad=True), causal=causal)

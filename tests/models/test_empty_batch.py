"""An empty batch gives every network's parameters a gradient of zeros: DDP waits for each."""

from functools import partial

import pytest
import torch

from ndlightnet import NDLightDiT, NDLightNet, NDLightUNet
from ndlightnet.models import Forecaster

SMALL = {"patch_size": 2, "embed_dim": 16, "depth": 1}
HYBRID = {"widths": (4, 8, 16), "convs": (1, 1, 0), "depths": (0, 0, 1), "size": "hybrid", "deep_supervision": True}
NONE = torch.zeros(0)


def cells(dims: int) -> torch.Tensor:
    return torch.zeros(0, 1, *[8] * dims)


NETS = {
    **{
        f"{dims} axes{', causal' * causal}": (partial(NDLightNet, dims, 1, 3, causal=causal, **SMALL), [cells(dims)])
        for dims in (1, 2, 3, 4)
        for causal in (False, True)
    },
    "a stem": (partial(NDLightNet, 2, 1, 3, stem_blocks=1, **SMALL), [cells(2)]),
    **{f"U-Net, {dims} axes": (partial(NDLightUNet, dims, widths=(4, 8)), [cells(dims)]) for dims in (1, 2, 3, 4)},
    "U-Net, hybrid": (partial(NDLightUNet, 3, **HYBRID), [cells(3)]),
    "text": (partial(NDLightNet, 1, vocab_size=11, embed_dim=16, depth=1, causal=True), [torch.zeros(0, 7).long()]),
    **{
        f"DiT, {dims} axes": (partial(NDLightDiT, dims, 1, num_classes=3, **SMALL), [cells(dims), NONE, NONE.long()])
        for dims in (1, 2, 3, 4)
    },
    "Forecaster": (partial(Forecaster, 3, 4, embed_dim=16, depth=1), [torch.zeros(0, 8, 3), torch.zeros(0, 12, 4)]),
}


@pytest.mark.parametrize("name", NETS)
def test_an_empty_batch(name):
    make, inputs = NETS[name]
    net = make().train()
    out = net(*inputs)
    outputs = out if isinstance(out, list) else [out]
    assert all(len(y) == 0 for y in outputs)
    sum(y.sum() for y in outputs).backward()
    for key, p in net.named_parameters():
        assert not p.requires_grad or (p.grad is not None and not p.grad.any()), key

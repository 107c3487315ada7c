"""What all networks promise: gradients of all parameters, also of an empty batch, with checkpoints, in low precision;
shapes on device meta."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from ndlightnet import NDLightDiT, NDLightNet, NDLightUNet, pack
from ndlightnet.models import AutoregressiveTTS, Forecaster, ParallelTTS, Seq2Seq
from ndlightnet.nn.layers import GridLayer
from ndlightnet.nn.mixers.base import Mixer
from ndlightnet.nn.position import MDTPE

# not 5 to 7 cells along the first of three axes: there torch 2.14 is wrong on a CPU, see tests/nn/test_stem.py
SPACES = {1: (37,), 2: (9, 14), 3: (9, 5, 6), 4: (3, 5, 4, 6), 5: (5, 2, 3, 2, 3)}
SMALL = {"patch_size": 2, "embed_dim": 16, "depth": 2, "tpe_states": 4}
HYBRID = {"widths": (4, 8, 16), "convs": (1, 1, 0), "depths": (0, 0, 1), "size": "hybrid", "deep_supervision": True}
SPEECH = {"embed_dim": 16, "depth": 1, "decoder_depth": 2, "tpe_states": 4}
image, unet = partial(NDLightNet, **SMALL), partial(NDLightUNet, widths=(8, 16, 24), depths=(0, 1, 1))


def cells(dims: int, batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 2, *SPACES[dims]),)


def noisy(dims: int, batch: int) -> tuple[Tensor, ...]:
    return *cells(dims, batch), 1000 * torch.rand(batch), torch.arange(batch) % 3


Inputs = Callable[[int], tuple[Tensor, ...]]  # of a number of samples
NETS: dict[str, tuple[partial[nn.Module], Inputs]] = {
    **{
        f"{dims} axes{', causal' * causal}": (partial(image, dims, 2, 3, causal=causal), partial(cells, dims))
        for dims in SPACES
        for causal in (False, True)
    },
    **{f"a stem, {dims} axes": (partial(image, dims, 2, 3, stem_blocks=1), partial(cells, dims)) for dims in (1, 2, 3)},
    **{f"U-Net, {dims} axes": (partial(unet, dims, 2, 3), partial(cells, dims)) for dims in SPACES},
    **{f"U-Net, separable, {n} axes": (partial(unet, n, 2, 3, separable=True), partial(cells, n)) for n in (1, 2)},
    "U-Net, causal": (partial(unet, 4, 2, 3, causal=True), partial(cells, 4)),
    "U-Net, hybrid": (partial(NDLightUNet, 3, 2, 3, **HYBRID), partial(cells, 3)),
    "text": (
        partial(image, 1, vocab_size=11, patch_size=None, causal=True),
        lambda batch: (torch.randint(11, (batch, 7)),),
    ),
    **{f"DiT, {n} axes": (partial(NDLightDiT, n, 2, num_classes=3, **SMALL), partial(noisy, n)) for n in (1, 2, 3, 4)},
    "DiT, tokens": (partial(NDLightDiT, 2, 2, num_classes=3, condition="tokens", **SMALL), partial(noisy, 2)),
    "Forecaster": (
        partial(Forecaster, 3, 4, embed_dim=16, depth=1, decoder_depth=2),
        lambda batch: (torch.randn(batch, 8, 3), torch.rand(batch, 12, 4)),
    ),
    "Seq2Seq": (
        partial(Seq2Seq, 11, embed_dim=16, depth=1, decoder_depth=2, tpe_states=4),
        lambda batch: (torch.randint(11, (batch, 8)), torch.randint(11, (batch, 5))),
    ),
    **{
        net.__name__: (
            partial(net, 11, 5, **SPEECH),
            lambda batch: (torch.randint(11, (batch, 6)), torch.randn(batch, 19, 5)),
        )
        for net in (AutoregressiveTTS, ParallelTTS)
    },
}
PACK = (partial(image, 2, 2, 3), lambda batch: (pack([torch.randn(2, 6, 4), torch.randn(2, 6, 3)], 2),))
networks = pytest.mark.parametrize("make, inputs", NETS.values(), ids=NETS)


def drawn(make: partial[nn.Module]) -> nn.Module:
    """Return a network; a DiT, whose branches begin at zero, without weights of zeros: its output depends on all."""
    net = make()
    if isinstance(net, NDLightDiT):
        for p in net.parameters():
            if not p.any():
                nn.init.normal_(p, std=0.3)
    return net


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = net(*inputs)
    return [out] if isinstance(out, Tensor) else [y for y in out if y.is_floating_point()]


def gradients(net: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    learnt = {name: p for name, p in net.named_parameters() if p.requires_grad}
    loss = sum(y.float().square().sum() for y in outputs(net, inputs))
    return dict(zip(learnt, grad(loss, [*learnt.values()]), strict=True))


@networks
def test_an_empty_batch_has_gradients_of_zeros(make, inputs):
    """DDP waits for each."""
    net = make().train()
    out = outputs(net, inputs(0))
    assert all(len(y) == 0 for y in out)
    sum(y.sum() for y in out).backward()
    for key, p in net.named_parameters():
        assert not p.requires_grad or (p.grad is not None and not p.grad.any()), key


@networks
def test_every_parameter_trains_and_samples_do_not_see_each_other(close, make, inputs):
    net, xs = drawn(make), inputs(2)
    for name, g in gradients(net.train(), xs).items():
        assert g.isfinite().all() and g.any(), name
    net.eval()
    for x, y in zip(outputs(net, tuple(x[1:] for x in xs)), outputs(net, xs), strict=True):
        close(x, y[1:], 1e-4)


@networks
def test_shapes_on_device_meta(make, inputs):
    xs = inputs(2)
    shapes = outputs(make(device="meta"), tuple(x.to("meta") for x in xs))
    for x, y in zip(shapes, outputs(make(), xs), strict=True):
        assert x.is_meta and x.shape == y.shape and x.dtype == y.dtype
    sum(x.sum() for x in shapes).backward()


@networks
def test_autocast_is_close_to_float32(make, inputs):
    """Tens of layers, each with roundings of 2^-9, in the mean."""
    net, xs = drawn(make), inputs(2)
    expected = outputs(net.eval(), xs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs(net, xs)
        grads = gradients(net.train(), xs)
    for y, z in zip(actual, expected, strict=True):
        assert (y - z).abs().max() < 30 * 2**-9 * z.abs().max()
    assert all(g.isfinite().all() for g in grads.values())


# the others are not called with checkpoints, or not by their mixers' `forward`, which is counted
OTHERS = ("Forecaster", "Seq2Seq", "AutoregressiveTTS", "ParallelTTS", "DiT, tokens")
RECOMPUTED = {name: case for name, case in NETS.items() if name not in OTHERS} | {"a pack": PACK}


@pytest.mark.parametrize("make, inputs", RECOMPUTED.values(), ids=RECOMPUTED)
def test_grad_checkpointing_changes_no_gradient(close, make, inputs):
    """It calls every mixer again."""
    net, xs, calls = drawn(make).train(), inputs(2), Counter()
    again = [m for m in net.modules() if isinstance(m, Mixer)]
    for module in again:
        module.register_forward_hook(lambda module, *_: calls.update([module]))
    expected = gradients(net, xs)
    net.set_grad_checkpointing()
    assert all(module.grad_checkpointing for module in net.modules() if isinstance(module, GridLayer))
    for name, g in gradients(net, xs).items():
        close(g, expected[name], 1e-5)
    assert [calls[module] for module in again] == [3] * len(again)  # the first time, forward, backward


@pytest.mark.parametrize(
    "net",
    [
        partial(NDLightNet, 2, num_classes=3),
        partial(NDLightDiT, 2, 2, num_classes=3),
        partial(NDLightUNet, 2, 1, 2, widths=(8, 16), depths=(0, 1)),
        partial(Seq2Seq, 11, decoder_depth=1),
        partial(AutoregressiveTTS, 11, 5, decoder_depth=1),
        partial(ParallelTTS, 11, 5, decoder_depth=1),
    ],
    ids=lambda net: net.func.__name__,
)
def test_each_network_takes_the_papers_md_tpe(net):
    small = {} if net.func is NDLightUNet else {"embed_dim": 16, "depth": 1}
    for tpe, published in (("published", True), (True, False)):
        layers = [layer for layer in net(tpe=tpe, **small).modules() if isinstance(layer, MDTPE)]
        assert layers and all(layer.published == published for layer in layers)
    assert not any(isinstance(layer, MDTPE) for layer in net(tpe=False, **small).modules())
    with pytest.raises(ValueError, match=r"^tpe='one way': expected True, False or 'published'"):
        net(tpe="one way", **small)

"""Streams from CUDA graphs on a card: what they give without, whatever comes between."""

from functools import partial

import pytest
import torch

from ndlightnet import LightNetAttention, NDLightNet
from ndlightnet.nn import mixers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = (3, 1, 1, 2, 2, 1, 1, 5, 1, 2, 2)  # of the pieces: whole patches, and halves that wait
STREAMING = [
    kind
    for kind in (getattr(mixers, name) for name in mixers.__all__)
    if hasattr(kind, "advance") and kind is not LightNetAttention
]
windowed = partial(LightNetAttention, window=3, forget=0.1)
local = partial(mixers.WithLocal, mixer=mixers.WindowAttention, local="both", dense=True)


def network(mixer=LightNetAttention):
    torch.manual_seed(0)
    model = NDLightNet(3, 2, 5, patch_size=2, embed_dim=64, depth=2, tpe_states=4, causal=True, mixer=mixer)
    return model.cuda().eval()


def pieces():
    x = torch.randn(2, 2, sum(SIZES), 8, 6, device="cuda")
    return x.split(SIZES, 2)


def captured(stream):
    return sum(one is not None for one in stream.graphs.captured.values())


@pytest.mark.parametrize("mixer", [LightNetAttention, windowed, local, *STREAMING])
def test_it_is_the_stream_without_graphs(mixer, close):
    model = network(mixer)
    ours, plain = model.stream(2), model.stream(2, cuda_graph=False)
    for x in pieces():
        close(ours(x), plain(x), 1e-5)  # rounding of float32, where cuBLAS chooses otherwise
    assert captured(ours) and plain.graphs is None
    kept = ours.state_dict()
    before = [x.clone() for x in torch.utils._pytree.tree_leaves(kept) if torch.is_tensor(x)]
    for x in pieces():
        ours(x)
    after = [x for x in torch.utils._pytree.tree_leaves(kept) if torch.is_tensor(x)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    plain.load_state_dict(kept)
    ours.load_state_dict(kept)
    for x in pieces():
        close(ours(x), plain(x), 1e-5)


def test_pauses_resets_and_weights_that_change(close):
    model = network()
    ours, plain = model.stream(2), model.stream(2, cuda_graph=False)
    for i, x in enumerate(pieces() + pieces()):
        active = [True, i % 5 != 4]
        close(ours(x, active), plain(x, active), 1e-5)
        if i == 12:
            assert torch.equal(ours.finish([False, True]), plain.finish([False, True]))
        if i == 15:
            with torch.no_grad():
                model.head.weight.mul_(2)
                model.blocks[0].mixer.q_proj.weight.mul_(2)
    assert captured(ours)


def test_autocast_and_inference_mode_between():
    model = network()
    ours, plain = model.stream(2), model.stream(2, cuda_graph=False)
    contexts = (torch.inference_mode, partial(torch.autocast, "cuda", torch.bfloat16), torch.no_grad)
    for i, x in enumerate(pieces() + pieces() + pieces()):
        with contexts[i % 3]():
            a, b = ours(x), plain(x)
        # sums of bfloat16 products in another order, here and there
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()


def test_few_graphs_are_held():
    stream = network().stream(2)
    for n in (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22):
        for _ in range(3):
            stream(torch.randn(2, 2, n, 8, 6, device="cuda"))
    assert captured(stream) == stream.graphs.most == len(stream.graphs.captured)

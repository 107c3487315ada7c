"""predict_large: slabs in turn give what the whole gives."""

import itertools
from functools import partial

import pytest
import torch
from rich.progress import Progress

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.nn.convolutional import ConvBlock
from ndlightnet.parallel import split_sizes
from ndlightnet.parallel.turns import Sweeper, Turns
from tests.parallel.sharded_networks import CASES, FLOAT32

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.shape == expected.shape and y.dtype == expected.dtype
    error = (y - expected).abs().max() / expected.abs().max()
    assert error <= BOUNDS[expected.dtype]


CELLS = [name for name, case in CASES.items() if not case.words]
SINGLE = [name for name in FLOAT32 if name in CELLS]


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float64) for name in CELLS), *((name, torch.float32) for name in SINGLE)]
)
def test_slabs_in_turn_give_what_the_whole_gives(name, dtype):
    case = CASES[name]
    torch.manual_seed(0)
    net = case.make().to(dtype).eval()
    x = torch.randn(2, *case.shape, dtype=dtype)
    with torch.no_grad():
        expected = net(x)
    for slabs in (1, 3, None):
        close(net.predict_large(x, slabs), expected)


def test_a_network_without_a_decoder_and_one_that_gives_features():
    torch.manual_seed(0)
    flat = NDLightUNet(2, 1, 3, strides=[], widths=[8], convs=[1], depths=[1]).double().eval()
    x = torch.randn(1, 1, 7, 6, dtype=torch.float64)
    close(flat.predict_large(x, 3), flat(x).detach())
    net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=1).double().eval()
    net.reset_classifier(3, global_pool="")
    close(net.predict_large(x, 2), net(x).detach())


def test_files_are_removed_and_the_result_is_mapped_slab_by_slab(tmp_path):
    torch.manual_seed(0)
    net = NDLightUNet(2, 1, 3, widths=(8, 16)).double().eval()
    x = torch.randn(1, 1, 16, 14, dtype=torch.float64)
    shapes = []

    def then(logits):
        shapes.append(tuple(logits.shape))
        return logits.argmax(1).byte()

    labels = net.predict_large(x, 4, folder=tmp_path, then=then)
    assert torch.equal(labels, net(x).argmax(1).byte())
    assert shapes == [(1, 3, 4, 14)] * 4 and not list(tmp_path.iterdir())


def test_memory_of_a_slab(monkeypatch):
    """No layer gets more than a slab, but for MD-TPE, which gets as much: all of some channels."""
    net = NDLightNet(3, 1, 5, patch_size=1, embed_dim=32, depth=1, tpe_states=8).eval()
    largest = 0
    real = torch.nn.functional.linear

    def watched(x, *rest):
        nonlocal largest
        largest = max(largest, x.numel())
        return real(x, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    x = torch.randn(1, 1, 16, 8, 8)
    net.predict_large(x, 8)
    slab, wide = x.numel() // 8, 3 * 32  # the gated MLP is the widest
    assert largest <= slab * wide


def test_features_of_the_first_level_are_not_stored(monkeypatch):
    stored = []
    real = Sweeper._stored

    def noted(self, x):
        stored.append(tuple(x.shape))
        return real(self, x)

    monkeypatch.setattr(Sweeper, "_stored", noted)
    net = NDLightUNet(2, 1, 3, widths=(8, 16, 24)).eval()
    net.predict_large(torch.randn(1, 1, 32, 16), 4)
    assert (1, 16, 4, 8) in stored and (1, 3, 8, 16) in stored
    assert not [shape for shape in stored if shape[1] == 8]


@pytest.fixture
def sweeps(monkeypatch):
    ranks, begin = [], Turns.begin
    monkeypatch.setattr(Turns, "begin", lambda turns, rank: ranks.append(rank) or begin(turns, rank))
    return ranks


def test_a_block_takes_two_sweeps(sweeps):
    net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=3, tpe=False).eval()
    net.predict_large(torch.randn(1, 1, 8, 8), 4)
    # one for the embedding, two for each block, two for the mean over tokens
    assert len(sweeps) == 4 * (1 + 2 * 3 + 2)


def test_a_convolution_block_takes_five_sweeps(sweeps):
    """Edges, statistics, edges, statistics, the result."""
    block, x, sizes = (ConvBlock(2, 3, 4).double().eval(), torch.randn(1, 3, 8, 6).double(), (2, 2, 4))
    sweeper = Sweeper(torch.device("cpu"), 2, 0, sizes, None, None)

    def layer(exchange, slab):
        return block(slab, sweeper.slab(exchange, slab.shape[2:]))

    with torch.no_grad():
        y = sweeper.apply(layer, list(x.split(sizes, 2)))
        close(torch.cat(y, 2), block(x))
    assert sweeps == [0, 1, 2] * 5


INPUTS = {
    "integers": torch.ones(1, 1, 8, 8, dtype=torch.int16),
    "float64": torch.ones(1, 1, 8, 8, dtype=torch.float64),
    "channels": torch.ones(1, 2, 8, 8),
    "axes": torch.ones(1, 8, 8),
    "no cells": torch.ones(1, 1, 8, 0),
    "an array": torch.ones(1, 1, 8, 8).numpy(),
}


@pytest.mark.parametrize("x", INPUTS.values(), ids=list(INPUTS))
@pytest.mark.parametrize("kind", ["NDLightNet", "NDLightUNet", "separable"])
def test_inputs_are_refused_as_by_the_forward(kind, x):
    if kind == "NDLightNet":
        net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=16, depth=1)
    else:
        net = NDLightUNet(2, 1, 3, widths=(4, 8), separable=kind == "separable")
    errors = []
    for run in (net.eval(), net.predict_large):
        with pytest.raises((ValueError, TypeError)) as error:
            run(x)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1] and errors[0][1].startswith("input ")


def test_wrong_uses_are_refused():
    small, x = partial(NDLightNet, 2, 1, 5, patch_size=2, embed_dim=32, depth=1), torch.randn(1, 1, 8, 8)
    for net, slabs, message in (
        (small(), None, r"in training mode: expected eval\(\)"),
        (small().eval(), 0, "slabs=0: expected 1 or more"),
        (small(mixer="SoftmaxAttention").eval(), None, "SoftmaxAttention takes whole samples; expected a mixer"),
        (small(stem_blocks=1).eval(), None, "shard_grid and predict_large: expected none with stem"),
    ):
        with pytest.raises(ValueError, match=message):
            net.predict_large(x, slabs)


def test_split_sizes():
    assert split_sizes(17, 3, 4) == (4, 8, 5)
    assert split_sizes(12, 3) == (4, 4, 4)
    for size, count, multiple in itertools.product(range(1, 40), range(1, 5), (1, 2, 4)):
        if -(-size // multiple) < count:
            with pytest.raises(ValueError, match=f"an axis of {size}: expected {count}"):
                split_sizes(size, count, multiple)
            continue
        sizes = split_sizes(size, count, multiple)
        assert sum(sizes) == size and len(sizes) == count and min(sizes) > 0
        assert all(n % multiple == 0 for n in sizes[:-1])


def test_progress_names_layers_and_slabs(monkeypatch):
    texts, update = [], Progress.update
    monkeypatch.setattr(
        Progress, "update", lambda *job, description: texts.append(description) or update(*job, description=description)
    )
    net = NDLightUNet(2, 1, 3, widths=(8, 16)).eval()
    net.predict_large(torch.randn(1, 1, 16, 14), 2, progress=True)
    assert texts[0] == "layer 1, slab 1 of 2" and "layer 2, slab 2 of 2" in texts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="expected a GPU")
@pytest.mark.parametrize("name", ["volume", "video, causal", "U-Net M", "U-Net, hybrid"])
@pytest.mark.parametrize("files", [False, True])
def test_slabs_are_copied_to_a_gpu_and_back(name, files, tmp_path):
    case = CASES[name]
    torch.manual_seed(0)
    net = case.make().cuda().eval()
    x = torch.randn(2, *case.shape)
    # TF32's rounding differs from one form of a convolution to another
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        close(net.predict_large(x, 3, folder=tmp_path if files else None), net(x.cuda()).cpu())

"""Inputs of a wrong type or dtype are named in one line, by networks, mixers and operators."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch

from ndlightnet import MultiheadAttention, NDLightNet, NDLightUNet, mixers, ops, pack
from ndlightnet.models import Forecaster
from ndlightnet.ops import causal_attention, read, summarize

NET = partial(NDLightNet, 2, num_classes=3, patch_size=4, embed_dim=16, depth=1, tpe_states=4)
CELLS, TOKENS = (1, 3, 8, 8), (1, 5, 16)


def attend(x):
    return MultiheadAttention(16, 2, batch_first=True)(x, x, x)


def by_name(name):
    return lambda x: getattr(mixers, name)(16)(x)


def forecast(x):
    return Forecaster(16, 1, embed_dim=16, depth=1)(x, torch.zeros(1, 9, 4))


# what takes floats: (name of the argument, shape)
MODULES = {
    "NDLightNet": (lambda x: NET()(x), "input", CELLS),
    "stream": (lambda x: NET(causal=True).stream(cuda_graph=False)(x), "input", CELLS),
    "NDLightUNet": (lambda x: NDLightUNet(2, 3, widths=[4, 8])(x), "input", CELLS),
    "separable": (lambda x: NDLightUNet(2, 3, widths=[4, 8], causal=True)(x), "input", CELLS),
    "MultiheadAttention": (attend, "query", TOKENS),
    "Forecaster": (forecast, "values", TOKENS),
    **{
        name: (by_name(name), "x", TOKENS)
        for name in mixers.__all__
        if isinstance(getattr(mixers, name), type) and name not in ("Mixer", "StreamingMixer")
    },
}
HEADS = (1, 5, 2, 8)
OPERATORS = {
    "summarize": (lambda x: summarize(x, x), "k", HEADS),
    "read": (lambda x: read(x, summarize(*torch.randn(2, *HEADS))), "q", HEADS),
    "causal_attention": (lambda x: causal_attention(x, *torch.randn(2, *HEADS)), "q", HEADS),
    "gated_linear_attention": (lambda x: ops.gated_linear_attention(x, x, x), "q", HEADS),
    "elementwise_memory": (lambda x: ops.elementwise_memory(x, x, torch.ones(1, 1, 1, 1, 1), x), "shrink", HEADS),
    "axis_scan": (lambda x: ops.axis_scan(x, torch.ones(1, 16, 2), -torch.ones(1, 2)), "x", TOKENS),
    "local_mixing": (lambda x: ops.local_mixing(x, torch.ones(1, 16), [[0]]), "x", TOKENS),
}


@pytest.mark.parametrize("kind", [*MODULES, *OPERATORS])
def test_arrays_and_integers_are_named(kind):
    call, name, shape = {**MODULES, **OPERATORS}[kind]
    call(torch.randn(shape))
    with pytest.raises(TypeError, match=rf"^{name} of type numpy.ndarray: expected a torch.Tensor"):
        call(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=rf"^{name} \(.*\) torch.uint8: expected floats"):
        call(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("kind", [name for name in MODULES if name != "Identity"])
def test_float64_is_named(kind):
    call, name, shape = MODULES[kind]
    with pytest.raises(ValueError, match=rf"^{name} \(.*\) torch.float64: expected torch.float32"):
        call(torch.randn(shape).double())


def test_a_context_and_masks_are_named():
    x = torch.randn(TOKENS)
    with pytest.raises(TypeError, match=r"^context of type list: expected a torch.Tensor$"):
        mixers.LightNetAttention(16)(x, context=[[0.0]])
    with pytest.raises(ValueError, match=r"^context .* torch.float64: expected torch.float32"):
        mixers.LightNetAttention(16)(x, context=x.double())
    with pytest.raises(TypeError, match=r"^mask of type numpy.ndarray: expected a torch.Tensor"):
        NET()(torch.randn(CELLS), np.ones((1, 8, 8), bool))
    with pytest.raises(TypeError, match=r"^key_padding_mask of type numpy.ndarray: "):
        MultiheadAttention(16, 2)(x, x, x, key_padding_mask=np.ones((5, 1), bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_what_is_no_token_number_is_named(dtype):
    net = NDLightNet(1, vocab_size=5, embed_dim=16, depth=1)
    with pytest.raises(ValueError, match=r"^input .*: expected token numbers .* integers: int64 or int32"):
        net(torch.zeros(1, 7, dtype=dtype))
    assert net(torch.zeros(1, 7, dtype=torch.int32)).shape == (1, 7, 5)


@pytest.mark.parametrize("words", [[0, 5], [-1, 4]])
def test_token_numbers_out_of_range_are_named(words):
    """Of a batch, a pack and a stream."""
    net = NDLightNet(1, vocab_size=5, embed_dim=16, depth=1, causal=True).eval()
    x = torch.tensor(words)
    inputs = (net, x[None]), (net, net.pack([x])), (net.stream(cuda_graph=False), x[None])
    for run, given in inputs:
        with pytest.raises(ValueError, match=rf"^input .* from {min(words)} to {max(words)}: expe"):
            run(given)


def test_an_input_smaller_than_a_patch_is_said():
    net = NET(patch_size=(4, 16)).eval()
    with pytest.warns(UserWarning, match=r"^input \(1, 3, 3, 8\): smaller than patch_size=\(4, 16"):
        net(torch.randn(1, 3, 3, 8))
    with warnings.catch_warnings(action="error"):
        net(torch.randn(1, 3, 4, 8))  # a whole patch along one axis, such as time
        signal = NDLightNet(1, num_classes=2, patch_size=4, embed_dim=16, depth=1, causal=True)
        signal.eval().stream(cuda_graph=False)(torch.randn(1, 3, 1))  # it waits for more
        NDLightNet(1, vocab_size=5, embed_dim=16, depth=1)(torch.zeros(1, 1, dtype=torch.int64))


def test_samples_of_a_pack_are_named():
    with pytest.raises(TypeError, match=r"^samples\[1\] of type ndarray: expected a torch.Tensor"):
        pack([torch.zeros(3, 8, 8), np.zeros((3, 8, 8))], 4)
    net = NET()
    with pytest.raises(ValueError, match=r"^values .* torch.float64: expected torch.float32"):
        net(net.pack([torch.zeros(3, 8, 8).double()]))


@pytest.mark.slow
def test_what_torch_casts_or_moves_is_let_through():
    """Autocast, doubles in a double network, a half network, fake tensors and compiled graphs."""
    x = torch.randn(CELLS)
    net = NET().eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x.bfloat16()).dtype == torch.bfloat16
    expected = net.double()(x.double())
    assert expected.dtype == torch.float64
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x.double()), expected)
    program = torch.export.export(net, (x.double(),))
    torch.testing.assert_close(program.module()(x.double()), expected)
    assert NET().to("meta")(x.to("meta")).is_meta
    assert net.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "net, shape",
    [
        (NET(), (1, 3, 0, 8)),
        (NET(causal=True), (1, 3, 8, 0)),
        (NDLightNet(1, vocab_size=5, embed_dim=16, depth=1, num_classes=2), (1, 0)),
        (NDLightUNet(2, 3, widths=[4, 8]), (1, 3, 8, 0)),
        (NDLightUNet(2, 3, widths=[4, 8], separable=True), (1, 3, 0, 8)),
    ],
)
def test_an_input_without_cells_is_named(net, shape):
    dtype = torch.int64 if len(shape) == 2 else torch.float32
    with pytest.raises(ValueError, match=r"^input \(1, .*0.*\): expected 1 or more cells along"):
        net(torch.zeros(shape, dtype=dtype))
    no_samples = (0, *[size or 8 for size in shape[1:]])
    assert len(net.eval()(torch.zeros(no_samples, dtype=dtype))) == 0

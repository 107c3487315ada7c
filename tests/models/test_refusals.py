"""What networks, mixers and operators refuse, each in one line with the argument, its value and what was expected."""

import re
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from ndlightnet import MultiheadAttention, NDLightDiT, NDLightNet, NDLightUNet, mixers, ops, pack
from ndlightnet.models import Forecaster
from ndlightnet.nn import MDTPE, Block, DropPath, Patchify
from ndlightnet.nn.mixers import LightNetAttention, SoftmaxAttention
from ndlightnet.nn.mixers.recurrent import Recurrent
from ndlightnet.ops import causal_attention, read, summarize

image = partial(NDLightNet, **{"dims": 2, "num_classes": 3, "patch_size": 4, "embed_dim": 16, "depth": 1})
words = partial(NDLightNet, dims=1, vocab_size=5, embed_dim=16, depth=1)
stem = partial(image, stem_blocks=1)
unet = partial(NDLightUNet, **{"dims": 2, "in_channels": 3})
dit = partial(NDLightDiT, **{"dims": 2, "in_chans": 1, "num_classes": 3, "embed_dim": 16, "depth": 1})
cast = partial(Forecaster, 3, **{"label_length": 6, "embed_dim": 16})
light = partial(LightNetAttention, **{"dim": 32, "heads": 2})
near = partial(mixers.WithLocal, **{"dim": 8, "mixer": "Identity", "dims": 1})
multihead = partial(MultiheadAttention, **{"embed_dim": 16, "num_heads": 4})
DELTAS = (mixers.GatedDeltaNet, mixers.KimiDeltaAttention)
SCANS = [kind for kind in (getattr(mixers, name) for name in mixers.__all__) if issubclass(kind, Recurrent)]

ARGUMENTS = [
    *((make, {"dims": value}, rf"dims={value}: expected an int >= 1") for make in (image, unet) for value in (0, 2.0)),
    *((make, {"dtype": "float32"}, "dtype='float32': expected a torch.dtype") for make in (image, unet)),
    *((make, {"in_chans": 0}, r"in_chan\w*=0: expected an int >= 1") for make in (image, partial(NDLightUNet, 2))),
    *((image, {"num_classes": value}, f"num_classes={value}: expected an int >= 0") for value in (-3, 2.0)),
    (unet, {"out_channels": 2.0}, "out_channels=2.0: expected an int >= 1"),
    *(
        (words, {name: value}, rf"^{name}={value!r}: expected an int >= 1")
        for name in ("embed_dim", "depth", "vocab_size")
        for value in (4.0, 0, "4")
    ),
    *(
        (image, {"patch_size": value}, f"^patch_size={re.escape(repr(value))}: expected an int >= 1")
        for value in (4.0, 0, "4", (2, 2, 2))
    ),
    (words, {"dims": 2}, "dims=2 with vocab_size=5: expected dims=1"),
    (words, {"tpe": "both"}, "tpe='both': expected True, False or 'published'"),
    (
        words,
        {"mixer": "NystromAttention", "causal": True},
        "causal=True: NystromAttention has no causal form, expected another mixer",
    ),
    (image, {"mixer": SoftmaxAttention(16)}, r"mixer=SoftmaxAttention\(\.\.\.\): expected"),
    (stem, {"dims": 4, "patch_size": 2}, "dims=4 with stem_blocks: expected 1, 2 or 3, torch has no Conv"),
    (stem, {"patch_size": (3, 4)}, r"patch_size=\(3, 4\): expected powers of 2"),
    (stem, {"patch_size": (4, 8), "embed_dim": 18}, "embed_dim=18: expected a multiple of 4"),
    (stem, {"causal": True}, "stem_blocks=1 with causal=True: expected 0"),
    (words, {"stem_blocks": 1}, "stem_blocks=1 with vocab_size=5: expected 0"),
    (image, {"stem_blocks": -1}, "stem_blocks=-1: expected"),
    (unet, {"dims": 4, "separable": False}, "dims=4 with separable=False: expected 1, 2 or 3"),
    (unet, {"depths": (1, 1)}, r"depths=\(1, 1\): .*strides="),
    (unet, {"widths": (), "depths": ()}, "widths="),
    (unet, {"widths": 8, "strides": [2] * 3}, "widths=8: expected 4 numbers"),
    (unet, {"size": "XL"}, "size='XL': expected 'hybrid', 'S', 'M' or 'L'"),
    *((unet, {"strides": [step]}, "strides=") for step in ((2, 2, 2), 0, (2, 0))),
    (unet, {"strides": 2}, "^strides=2: expected a list with, for each level"),
    (unet, {"strides": [2], "convs": (1, -1)}, "convs="),
    (unet, {"strides": [2], "widths": (8, 0)}, "widths="),
    (unet, {"strides": [2], "depths": (0, -1)}, "depths="),
    (unet, {"strides": [2], "convs": (0, 1)}, r"convs=\(0, 1\): expected 1 or more at the first level"),
    (unet, {"causal": True, "separable": False}, "causal=True with separable=False"),
    *((unet, {"causal": True, "strides": s}, "strides=.*: expected 1 along the first") for s in ([2], [(1, 2), 2])),
    (dit, {"size": "M"}, "size='M': expected 'S', 'B', 'L' or 'XL'"),
    (dit, {"num_classes": -1}, "num_classes=-1: expected an int >= 0"),
    (dit, {"patch_size": (2, 2, 2)}, r"patch_size=\(2, 2, 2\): expected an int >= 1 or 2 of them"),
    *((cast, {name: value}, f"{name}={value}: expected") for name, value in (("label_length", -1), ("period", 0))),
    (cast, {"embed_dim": 15}, "embed_dim=15: expected an even number"),
    *((cast, {name: 0}, f"{name}=0") for name in ("depth", "decoder_depth")),
    *((cast, {name: LightNetAttention(16)}, rf"{name}=LightNetAttention\(\.\.\.\)") for name in ("mixer", "cross")),
    *((light, {"dims": 2, "radius": value}, f"radius={value}: expected an int >= 1") for value in (0, 1.5)),
    *((light, {"window": value}, f"window={value}: expected an int, 1 or more") for value in (0, 1.5)),
    *((light, {"forget": value}, f"forget={value}: expected a finite number") for value in (-1, float("inf"))),
    (light, {"forget": (0.1,)}, r"forget=\(0.1,\): .* or 2 of them"),
    (light, {"forget": (0.1, float("nan"))}, "forget="),
    (light, {"heads": 5}, "heads=5: expected a divisor of dim=32"),
    (light, {"key_scale": 0.0}, "key_scale=0.0: expected"),
    (light, {"dims": 1, "local": "value"}, "local='value': expected 'values', 'input', 'both' or None$"),
    *((near, {"local": on}, f"local={on!r}: expected 'values', 'input' or 'both'$") for on in (None, "value")),
    (near, {"dims": None}, "dims=None: expected the number of axes"),
    (near, {"mixer": lambda dim: torch.nn.Linear(dim, dim)}, "mixer: makes a Linear, expected a Mixer"),
    *((partial(mixers.LAVO, 64), {"window": value}, "window=") for value in (0, (2, 0), (), "none", 2.5)),
    *((partial(mixers.LongShortAttention, 12), {"window": w}, "window=") for w in (0, (2, 0), (), "none", 2.5)),
    (partial(mixers.LongShortAttention, 12), {"slots": 0}, "slots=0: expected an int >= 1"),
    (partial(mixers.NystromAttention, 12), {"landmarks": 0}, "landmarks=0: expected an int >= 1"),
    *((partial(mixers.WindowAttention, 12), {"window": w}, "window=") for w in (0, -1, (), (3, 0), 2.5, (2, 2.5))),
    (partial(mixers.LrpeAttention, 16), {"core": "dct"}, "core='dct': expected"),
    (partial(mixers.CosformerAttention, 16), {"reach": 0}, "reach=0: expected"),
    *((partial(delta, 16), {"dt_min": 0.1, "dt_max": 0.01}, "dt_min=0.1, dt_max=0.01: expected") for delta in DELTAS),
    *((partial(kind, 16), {"scan": "spiral"}, "scan='spiral'") for kind in SCANS),
    *((DropPath, {"p": value}, "drop_path=") for value in (-0.1, 1.0)),
    *((partial(MDTPE, 1, 6), {"states": value}, "states=") for value in (0, 3, -2)),
    (partial(MDTPE, 2, 6), {"states": 3, "causal": True}, "states=3.* 2"),
    *((partial(Patchify, 2, 3, dim=4), {"patch_size": n}, "patch_size=") for n in (0, (2,), (2, 2, 2), (2, -1))),
    *((multihead, {name: True}, f"{name} .*: expected False") for name in ("add_bias_kv", "add_zero_attn")),
    (multihead, {"num_heads": 3}, "^num_heads=3: expected a divisor of embed_dim=16"),
    (multihead, {"kdim": 0}, "^kdim=0: expected an int >= 1"),
]


@pytest.mark.parametrize("make, options, message", ARGUMENTS)
def test_wrong_arguments(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


ONES = zeros(1, 8, 8, dtype=torch.bool)
INPUTS = [
    (image, (zeros(2, 1, 8, 8),), r"input \(2, 1, 8, 8\) .*in_chans=3"),
    (image, (zeros(2, 3, 8),), r"input \(2, 3, 8\) .* with 2 axes"),
    (image, (zeros(1, 3, 8, 8), ONES.float()), r"mask \(1, 8, 8\) torch.float32: expected bool \(1, 8, 8\)"),
    (image, (zeros(1, 3, 8, 8), ONES[:, None]), r"mask \(1, 1, 8, 8\) torch.bool: expected bool"),
    (stem, (zeros(1, 3, 8, 8), ONES), "mask: expected none with stem_blocks, which mix cells"),
    (stem, (pack([zeros(3, 8, 8)], 4),), "packed samples: expected none with stem_blocks"),
    (image, (pack([zeros(1, 8, 8)], 4),), r"^packed samples \(4, 16\) .*patch_size=\(4, 4\), of in_chans=3$"),
    (words, (pack([zeros(1, 8)], 4),), r"^packed samples \(2, 4\) .* pack words$"),
    (image, (pack([zeros(3, 8, 8).double()], 4),), "^values .* torch.float64: expected torch.float32"),
    (words, (zeros(1, 7),), r"^input .*: expected token numbers \(batch, length\), integers: int64 or int32"),
    (words, (zeros(1, 7, dtype=torch.uint8),), "^input .*: expected token numbers"),
    (words, (zeros(2, 3, 4, dtype=torch.int64),), r"input \(2, 3, 4\) .*\(batch, length\)"),
    *((partial(unet, separable=s), (zeros(2, 2, 8, 8),), r"\(2, 2, 8, 8\)") for s in (False, True)),
    *((unet, (zeros(2, 3, *[8] * axes),), "input of shape .* with 2 axes") for axes in (1, 3)),
    (dit, (zeros(2, 3, 4, 4), 1.0), r"input \(2, 3, 4, 4\): expected .* in_chans=1"),
    (dit, (zeros(2, 1, 4), 1.0), "with 2 axes"),
    (dit, (zeros(2, 1, 4, 0), 1.0), "expected 1 or more cells along each axis"),
    (dit, (zeros(2, 1, 4, 4), zeros(3)), r"t \(3,\): expected one time or \(2,\)"),
    (dit, (zeros(2, 1, 4, 4), 1.0, zeros(2)), r"y \(2,\) torch.float32: expected class"),
    (dit, (zeros(2, 1, 4, 4), 1.0, torch.tensor([0, 4])), r"y \(2,\) .* 0 to 4: expected 0 to 3"),
    (dit, (zeros(2, 1, 4, 4).double(), 1.0), "torch.float64: expected torch.float32"),
    (partial(dit, num_classes=0), (zeros(1, 1, 4, 4), 1.0, zeros(1)), "y with num_classes=0: expected None"),
    (cast, (zeros(2, 5, 3), zeros(2, 10, 4)), r"values \(2, 5, 3\).*\(batch, 6 or more, 3"),
    (cast, (zeros(2, 10, 3), zeros(2, 10, 4)), "and times of more steps"),
    (cast, (zeros(2, 10, 2), zeros(2, 15, 4)), r"values \(2, 10, 2\)"),
    (partial(mixers.CosformerAttention, 16, reach=(3, 4)), (zeros(1, 5, 16),), r"reach=\(3, 4\): expected"),
    (partial(mixers.WindowAttention, 12, window=(3, 3)), (zeros(1, 4, 4, 4, 12),), r"window=\(3, 3\)"),
    (partial(cast, period=24), (zeros(2, 10, 3), zeros(2, 15, 4)), r"expected \(batch, 24 or more, 3"),
]


@pytest.mark.parametrize("make, inputs, message", INPUTS)
def test_wrong_inputs(make, inputs, message):
    with pytest.raises(ValueError, match=message):
        make()(*inputs)


def test_methods_that_a_network_cannot_offer():
    calls = [
        (lambda: stem().pack([zeros(3, 8, 8)]), "pack: expected none with stem_blocks"),
        (lambda: image().pack([zeros(3, 8, 8), zeros(1, 8, 8)]), r"^samples\[1\] \(1, 8, 8\): .*\(in_chans=3, \*sp"),
        (lambda: image().pack([zeros(3, 8)]), r"^samples\[0\] \(3, 8\): .* with 2 axes"),
        (lambda: words().pack([zeros(3, 8)]), r"^samples\[0\] \(3, 8\): expected words \(length,\)"),
        (lambda: stem().set_input_size(patch_size=2), "not with stem_blocks"),
        (lambda: words().set_input_size(32), "not of words"),
        (
            lambda: light(lrpe="rotary").advance(zeros(2, 1, 32), light().init_state(2), 0),
            "causal=True with lrpe='rotary'",
        ),
        (lambda: image().init_state(2), "causal=False: expected a causal network"),
        (lambda: Block(8, SoftmaxAttention).advance(zeros(2, 1, 8), None, 0), "SoftmaxAttention has no method advance"),
        (lambda: image(causal=True, mixer="SoftmaxAttention").stream(), "SoftmaxAttention has no method advance"),
        (lambda: image(causal=True).advance(zeros(2, 3), image(causal=True).init_state(2)), r"input \(2, 3\)"),
        (lambda: image().reset_classifier(3, "max"), "global_pool='max': expected 'avg', '' or None"),
        (lambda: image().set_input_size((4, 4, 4)), r"img_size=\(4, 4, 4\)"),
        (lambda: image().forward_intermediates(zeros(1, 3, 8, 8), output_fmt="NCL"), "output_fmt='NCL'"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


CELLS, TOKENS, HEADS = (1, 3, 8, 8), (1, 5, 16), (1, 5, 2, 8)


def attend(x):
    return MultiheadAttention(16, 2, batch_first=True)(x, x, x)


# what takes floats: (call, name of the argument, shape)
MODULES = {
    "NDLightNet": (lambda x: image()(x), "input", CELLS),
    "stream": (lambda x: image(causal=True).stream(cuda_graph=False)(x), "input", CELLS),
    "NDLightUNet": (lambda x: unet(widths=[4, 8])(x), "input", CELLS),
    "separable": (lambda x: unet(widths=[4, 8], causal=True)(x), "input", CELLS),
    "MultiheadAttention": (attend, "query", TOKENS),
    "Forecaster": (lambda x: Forecaster(16, 1, embed_dim=16, depth=1)(x, zeros(1, 9, 4)), "values", TOKENS),
    **{name: (lambda x, name=name: getattr(mixers, name)(16)(x), "x", TOKENS) for name in mixers.__all__},
}
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
def test_arrays_integers_and_other_dtypes(kind):
    call, name, shape = {**MODULES, **OPERATORS}[kind]
    call(torch.randn(shape))
    with pytest.raises(TypeError, match=rf"^{name} of type numpy.ndarray: expected a torch.Tensor"):
        call(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=rf"^{name} \(.*\) torch.uint8: expected floats"):
        call(zeros(*shape, dtype=torch.uint8))
    if kind in MODULES and kind != "Identity":
        with pytest.raises(ValueError, match=rf"^{name} \(.*\) torch.float64: expected torch.float32"):
            call(torch.randn(shape).double())


def test_contexts_masks_and_samples_of_a_pack():
    x, layer = torch.randn(TOKENS), LightNetAttention(16)
    with pytest.raises(TypeError, match=r"^context of type list: expected a torch.Tensor$"):
        layer(x, context=[[0.0]])
    with pytest.raises(ValueError, match=r"^context .* torch.float64: expected torch.float32"):
        layer(x, context=x.double())
    with pytest.raises(TypeError, match=r"^mask of type numpy.ndarray: expected a torch.Tensor"):
        image()(torch.randn(CELLS), np.ones((1, 8, 8), bool))
    with pytest.raises(TypeError, match=r"^key_padding_mask of type numpy.ndarray: "):
        MultiheadAttention(16, 2)(x, x, x, key_padding_mask=np.ones((5, 1), bool))
    with pytest.raises(TypeError, match=r"^samples\[1\] of type ndarray: expected a torch.Tensor"):
        pack([zeros(3, 8, 8), np.zeros((3, 8, 8))], 4)


@pytest.mark.parametrize("numbers", [[0, 5], [-1, 4]])
def test_token_numbers_out_of_range(numbers):
    """Of a batch, a pack and a stream."""
    net, x = words(causal=True).eval(), torch.tensor(numbers)
    for run, tokens in (net, x[None]), (net, net.pack([x])), (net.stream(cuda_graph=False), x[None]):
        with pytest.raises(ValueError, match=rf"^input .* from {min(numbers)} to {max(numbers)}: expected 0 to 4"):
            run(tokens)


def test_an_input_smaller_than_a_patch_gives_a_warning():
    net = image(patch_size=(4, 16)).eval()
    with pytest.warns(UserWarning, match=r"^input \(1, 3, 3, 8\): smaller than patch_size=\(4, 16"):
        net(torch.randn(1, 3, 3, 8))
    with warnings.catch_warnings(action="error"):
        net(torch.randn(1, 3, 4, 8))  # a whole patch along one axis, such as time
        signal = NDLightNet(1, num_classes=2, patch_size=4, embed_dim=16, depth=1, causal=True)
        signal.eval().stream(cuda_graph=False)(torch.randn(1, 3, 1))  # it waits for more
        words()(zeros(1, 1, dtype=torch.int32))


@pytest.mark.slow
def test_what_torch_casts_or_moves_is_let_through():
    """Autocast, doubles in a double network, a half network, fake tensors and compiled graphs."""
    x, net = torch.randn(CELLS), image(mixer="Identity").eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x.bfloat16()).dtype == torch.bfloat16
    expected = net.double()(x.double())
    assert expected.dtype == torch.float64
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x.double()), expected)
    assert image().to("meta")(x.to("meta")).is_meta
    assert net.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "make, shape",
    [
        (image, (1, 3, 0, 8)),
        (partial(image, causal=True), (1, 3, 8, 0)),
        (partial(words, num_classes=2), (1, 0)),
        (partial(unet, widths=[4, 8]), (1, 3, 8, 0)),
        (partial(unet, widths=[4, 8], separable=True), (1, 3, 0, 8)),
    ],
)
def test_an_input_without_cells(make, shape):
    net, dtype = make(), torch.int64 if len(shape) == 2 else torch.float32
    with pytest.raises(ValueError, match=r"^input \(1, .*0.*\): expected 1 or more cells along"):
        net(zeros(*shape, dtype=dtype))
    no_samples = (0, *[size or 8 for size in shape[1:]])
    assert len(net.eval()(zeros(*no_samples, dtype=dtype))) == 0


def test_a_language_model_takes_a_text_of_no_words():
    assert words(causal=True)(zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 5)

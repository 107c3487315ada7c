"""NDLightNet on any number of axes, at the published sizes, padded, compiled, decoded."""

from functools import partial

import pytest
import torch
from torch.autograd import grad

from ndlightnet import LightNetAttention, NDLightNet, ndlightnet_base, ndlightnet_small, ndlightnet_tiny

SIZES = {1: (37,), 2: (13, 9), 3: (5, 6, 7), 4: (3, 4, 3, 5), 5: (3, 2, 3, 2, 3)}
tiny = partial(NDLightNet, in_chans=2, num_classes=5, embed_dim=32, depth=2, tpe_states=4)
ROBERTA = {"vocab_size": 50265, "embed_dim": 512, "depth": 6, "tpe_states": 128}  # its words
every_dims = pytest.mark.parametrize("dims", SIZES)


def text(**options):
    options = dict(embed_dim=32, depth=2, tpe_states=4, causal=True, vocab_size=50) | options
    return NDLightNet(1, **options)


def millions(model):
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.parametrize(
    "build, expected",
    [
        (partial(ndlightnet_tiny, 2, patch_size=16), 6.0),
        (partial(ndlightnet_small, 2, patch_size=16), 22.64),
        (partial(ndlightnet_base, 2, patch_size=16), 87.74),
        (partial(ndlightnet_small, 2, patch_size=16, tpe=False), 22.54),
        (partial(ndlightnet_base, 2, patch_size=16, tpe=False), 87.54),
        (partial(text, **ROBERTA, mixer=partial(LightNetAttention, heads=8, local=None)), 45.07),
    ],
)
def test_parameters_are_the_papers(build, expected):
    with torch.device("meta"):
        assert abs(millions(build()) / expected - 1) < 0.002  # they give two to four digits


@pytest.mark.slow
@every_dims
@pytest.mark.parametrize("patch_size, causal", [(2, False), (2, True), (None, False)])
def test_any_number_of_axes_trains_every_parameter(dims, patch_size, causal):
    model = tiny(dims, patch_size=patch_size, causal=causal)
    x = torch.randn(2, 2, *SIZES[dims])
    y = model(x)
    assert y.shape == (2, 5)
    shapes = tiny(dims, patch_size=patch_size, causal=causal, device="meta")
    x = x.to("meta")
    for out in (shapes(x), shapes(x, x[:, 0] > 0), shapes(shapes.pack(list(x)))):
        assert out.is_meta and out.shape == (2, 5)
        out.sum().backward()
    if patch_size is None:  # about 256 cells
        assert model.embed.patch == ((256, 16, 6, 4, 3)[dims - 1],) * dims
        return
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, g in zip(names, grad(y.square().sum(), parameters), strict=True):
        assert g.isfinite().all() and g.any(), name


@every_dims
def test_any_size_at_any_time(close, dims):
    """Odd sizes are those that zeros at the end complete to a multiple of the patch."""
    model = tiny(dims, patch_size=2).eval()
    for shape in (SIZES[dims], tuple(n + 1 for n in SIZES[dims]), (1,) * dims):
        x = torch.randn(2, 2, *shape)
        even = torch.zeros(2, 2, *[n + n % 2 for n in shape])
        even[(slice(None), slice(None), *map(slice, shape))] = x
        close(model(x), model(even), 1e-5)
        assert model.forward_features(x).shape == (2, *[-(-n // 2) for n in shape], 32)


@pytest.mark.slow
@every_dims
@pytest.mark.parametrize("causal", [False, True])
def test_padded_samples_get_what_they_get_alone(close, dims, causal):
    """Padding of whole patches, whatever lies in it, at the end of every axis."""
    model = tiny(dims, patch_size=2, causal=causal).eval()
    small, big = tuple(n + n % 2 for n in SIZES[dims]), tuple(n + n % 2 + 4 for n in SIZES[dims])
    x, mask = torch.full((2, 2, *big), torch.nan), torch.zeros(2, *big, dtype=torch.bool)
    inside = (slice(None), *map(slice, small))
    x[0][inside], mask[0][inside[1:]] = torch.randn(2, *small), True
    x[1], mask[1] = torch.randn(2, *big), True
    y = model(x, mask)
    close(y[:1], model(x[:1][(slice(None), *inside)]), 1e-4)
    close(y[1:], model(x[1:]), 1e-4)
    features = model.forward_features(x, mask)
    close(model.forward_head(features, mask=mask), y, 1e-6)
    none = model(x[:1], mask[:1] & False)
    assert none.isfinite().all()


def test_the_papers_position_code_scans_forward_only():
    assert [len(tiny(2, tpe_bidirectional=way).tpe.coef) for way in (False, None)] == [2, 4]


def test_head_is_the_mean_over_tokens(close):
    model, x = tiny(2, patch_size=2).eval(), torch.randn(3, 2, 6, 4)
    features = model.forward_features(x)
    pooled = features.mean((1, 2))
    close(model.forward_head(features, pre_logits=True), pooled, 1e-5)
    close(model(x), pooled @ model.head.weight.T + model.head.bias, 1e-5)
    assert tiny(2, patch_size=2, num_classes=0)(x).shape == (3, 32)
    assert model.head_drop.p == 0 and tiny(2, drop_rate=0.25).head_drop.p == 0.25


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_bfloat16_autocast_is_close_to_float32(dims, causal):
    """Two blocks of about 15 roundings of 2^-9 each; the residual stream stays float32."""
    model, x = tiny(dims, patch_size=2, causal=causal).eval(), torch.randn(2, 2, *SIZES[dims])
    expected = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, features = model(x), model.forward_features(x)
    assert features.dtype == torch.float32
    assert (actual - expected).abs().max() < 30 * 2**-9 * expected.abs().max()
    for g in grad(actual.float().square().sum(), list(model.parameters())):
        assert g.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_grad_checkpointing_changes_no_gradient(close, packed):
    model, x = tiny(2, patch_size=2, drop_path_rate=0.2), torch.randn(2, 2, 6, 4)
    x = model.pack([x[0], x[1, :, :3]]) if packed else x
    assert [block.drop_path.p for block in model.blocks] == pytest.approx([0, 0.2])  # grows with depth
    model.blocks[1].drop_path.p = 0.0
    plain = grad(model(x).square().sum(), list(model.parameters()))
    calls = []
    model.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    model.set_grad_checkpointing()
    again = grad(model(x).square().sum(), list(model.parameters()))
    assert len(calls) == 2  # once forward, once again in the backward pass
    for a, b in zip(again, plain, strict=True):
        close(a, b, 1e-6)


# a masked image with checkpointed blocks, whose layout goes through the checkpoint; frames in groups
# (ops/frames.py), in tiles; words
COMPILED = {
    "image": partial(tiny, 2, patch_size=2, depth=1),
    "groups": partial(tiny, 2, patch_size=2, depth=1, causal=True, mixer=partial(LightNetAttention, heads=1)),
    "tiles": partial(tiny, 2, patch_size=2, depth=1, causal=True, mixer=partial(LightNetAttention, heads=8)),
    "words": text,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["image", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("groups", "tiles", "words"))]
)
def test_compile_without_a_graph_break(close, close_grads, name):
    torch._dynamo.reset()
    model = COMPILED[name]()
    inputs: tuple = (torch.randint(50, (2, 70)),)
    if name != "words":
        inputs = torch.randn(2, 2, *SIZES[2]), torch.rand(2, *SIZES[2]) < 0.9
    expected = model(*inputs)
    model.set_grad_checkpointing(name == "image")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(*inputs)
    close(y, expected, 1e-5)
    close_grads(y, expected, list(model.parameters()), 1e-4)


def test_language_model_ties_its_weights_and_others_do_not():
    model = text()
    assert model.head.weight is model.embed.weight
    assert model(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 50)
    classifier = text(num_classes=3, causal=False)
    assert classifier(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("once", [False, True])
def test_weights_stay_tied_when_a_state_dict_is_assigned(device, once):
    """Of the network alone and as a part, from a checkpoint that holds them once or twice."""
    net, words = text().eval(), torch.arange(6)[None]
    state = net.state_dict()
    if once:
        del state["head.weight"]
    parent = torch.nn.ModuleList([text(device=device)]).eval()
    named = {f"0.{name}": x for name, x in state.items()}
    missing, _ = parent.load_state_dict(named, strict=not once, assign=True)
    assert missing == ["0.head.weight"] * once  # as torch does, and as safetensors expects it
    assert parent[0].head.weight is parent[0].embed.weight
    assert torch.equal(parent[0](words), net(words))
    parent[0].load_state_dict(state, strict=not once)

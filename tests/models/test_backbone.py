"""NDLightNet on any number of axes, at the published sizes, padded, compiled, decoded."""

from functools import partial

import pytest
import torch

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


@every_dims
def test_a_patch_has_256_cells_where_none_is_given(dims):
    """And so it is on device meta, also with a mask and of a pack."""
    net, x = tiny(dims, device="meta"), torch.empty(2, 2, *SIZES[dims], device="meta")
    assert net.embed.patch == ((256, 16, 6, 4, 3)[dims - 1],) * dims
    for out in (net(x, x[:, 0] > 0), net(net.pack(list(x)))):
        assert out.is_meta and out.shape == (2, 5)
        out.sum().backward()


def test_the_residual_stream_stays_in_float32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiny(2, patch_size=2).forward_features(torch.randn(2, 2, *SIZES[2])).dtype == torch.float32


def test_the_papers_position_code_scans_forward_only_and_is_that_of_its_sizes():
    assert [len(tiny(2, tpe=form).tpe.coef) for form in ("published", True)] == [2, 4]
    for published in (ndlightnet_tiny, ndlightnet_small, ndlightnet_base):
        assert published(2, device="meta").tpe.published and not tiny(2, device="meta").tpe.published


def test_head_is_the_mean_over_tokens(close):
    model, x = tiny(2, patch_size=2).eval(), torch.randn(3, 2, 6, 4)
    features = model.forward_features(x)
    pooled = features.mean((1, 2))
    close(model.forward_head(features, pre_logits=True), pooled, 1e-5)
    close(model(x), pooled @ model.head.weight.T + model.head.bias, 1e-5)
    assert tiny(2, patch_size=2, num_classes=0)(x).shape == (3, 32)
    assert model.head_drop.p == 0 and tiny(2, drop_rate=0.25).head_drop.p == 0.25


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
    compiled = torch.compile(model, fullgraph=True, backend="eager" if name == "image" else "aot_eager")
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

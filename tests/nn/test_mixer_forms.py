"""What every mixer of the catalogue promises beyond shapes and masks: its forms agree, its
gradients are right, it stands extreme inputs, autocast and torch.compile."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from ndlightnet.layout import Ragged
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.base import Mixer
from ndlightnet.nn.mixers.recurrent import Recurrent

from .mixer_cases import (
    CATALOGUE,
    CAUSAL,
    CROSS,
    FORMS,
    LAVO_WINDOWS,
    LOCAL,
    REMEMBERS,
    WINDOWS,
    build,
    having,
    without_angles,
)

# mixers that see all tokens alike, wherever they are read; the others read them in an order
WHOLE = {"Identity", "LightNetAttention", "LinearAttention", "LongShortAttention", "LrpeAttention", "SoftmaxAttention"}
every = pytest.mark.parametrize("name", CATALOGUE)
forms = pytest.mark.parametrize("name, causal", FORMS)
grids = pytest.mark.parametrize("shape", [(70,), (4, 2, 3)], ids=str)


def numbers(state) -> int:
    return sum(x.numel() * (2 if x.is_complex() else 1) for x in tree_leaves(state))


def wide(name: str) -> Mixer:
    """Two heads of 64, and a window that is wider than the grids: who sees whom is the same for all."""
    return getattr(mixers, name)(128, **({"window": 128} if name == "WindowAttention" else {}))


@every
@grids
def test_a_mixer_keeps_the_shape_trains_every_parameter_and_mixes_all_tokens_of_a_sample(close, name, shape):
    assert issubclass(getattr(mixers, name), Mixer)
    m, x = wide(name), torch.randn(2, *shape, 128, requires_grad=True)
    y = m(x)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()
    close(y[1:2], m(x[1:2]), 1e-5)
    close(m(x, mask=torch.ones(2, *shape, dtype=torch.bool)), y, 1e-5)
    parameters = {key: p for key, p in m.named_parameters() if p.requires_grad}
    grads = grad(y.square().sum(), [x, *parameters.values()], retain_graph=True)
    for key, g in zip(["x", *parameters], grads, strict=True):
        assert g.isfinite().all() and g.any(), key
    tokens = y.flatten(1, -2)
    for t in (0, tokens.shape[1] - 1) if name != "Identity" else ():
        assert grad(tokens[0, t].square().sum(), x, retain_graph=True)[0][0].any(-1).all()


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "Identity"])  # it has no weights
@pytest.mark.parametrize("dim", [0, -8])
def test_a_width_without_channels_is_refused(name, dim):
    with pytest.raises(ValueError, match=rf"^dim={dim}: expected an int >= 1$"):
        getattr(mixers, name)(dim)


@pytest.mark.parametrize("name", CAUSAL)
@grids
def test_causal_gradients_to_later_frames_are_exactly_zero(name, shape):
    """A token sees its whole frame and all before it."""
    x = torch.randn(1, *shape, 128, requires_grad=True)
    y = wide(name)(x, causal=True)
    for t in {0, 3, 64, shape[0] - 1} & {*range(shape[0])}:
        token = y[:, t].flatten(1)[:, -128:]
        pulled = grad(token.square().sum(), x, retain_graph=True)[0]
        assert not pulled[:, t + 1 :].any() and pulled[:, t].any()
        assert name == "Identity" or pulled[:, : t + 1].any(-1).all()


@pytest.mark.parametrize("name", sorted(WHOLE))
@grids
def test_the_last_frame_of_the_causal_form_sees_everything(close, name, shape):
    m, x = wide(name), torch.randn(2, *shape, 128)
    close(m(x, causal=True)[:, -1], m(x)[:, -1], 1e-5)


@every
def test_position_of_a_token_matters_where_there_is_a_code(name):
    """With a position code rolling a grid does not roll the output."""
    m, x = wide(name), torch.randn(1, 4, 6, 128)
    for axis in (1, 2):
        moved = (m(x.roll(-1, axis)) - m(x).roll(-1, axis)).abs().max() > 1e-3
        without = ("ABCAttention", "Identity", "LinearAttention", "NystromAttention", "RandomFeatureAttention")
        assert moved == (name not in without)


@every
def test_a_mixer_of_16_bits_returns_16_bits(name):
    m, x = build(name).bfloat16(), torch.randn(2, 3, 2, 16).bfloat16()
    for causal in {False, name in CAUSAL}:
        y = m(x, causal=causal)
        assert y.dtype == x.dtype and y.isfinite().all()


LIGHTNETS = [{"window": 3}, {"window": 1, "forget": 0.3}, {"forget": 1e12, "lrpe": None}]
STREAMS = [  # mixer, grid, options
    *((name, shape, {}) for name in REMEMBERS for shape in ((70,), (5, 2, 3))),
    *((name, shape, {}) for name in LOCAL if name.split()[0] in REMEMBERS for shape in ((20,), (7, 3))),
    *(("LightNetAttention", shape, options) for shape in ((20,), (5, 2, 3)) for options in LIGHTNETS),
    *(("LAVO", shape, {"window": window}) for shape, window in LAVO_WINDOWS.items()),
    *(("LongShortAttention", shape, {"window": window}) for shape, window in WINDOWS.items()),
    *(("WindowAttention", shape, {"window": window}) for shape, window in WINDOWS.items()),
    *(("WindowAttention", shape, {"window": WINDOWS[shape], "rotary": True}) for shape in WINDOWS if len(shape) < 4),
]


@pytest.mark.parametrize("name, shape, options", STREAMS, ids=str)
@pytest.mark.parametrize("sizes", [(1,), (2, 0, 3, 1), (6, 100)], ids=str)
def test_pieces_hand_over_their_state(close, name, shape, options, sizes):
    """Of any sizes, from a State whose size stays, which state_size says."""
    m, x = build(name, 12, dims=len(shape), **options).double(), torch.randn(2, *shape, 12).double()
    for p in m.parameters():
        if not p.any():  # as biases of windows are at first
            torch.nn.init.normal_(p)
    state, outputs, at = m.init_state(2, None, shape[1:]), [], 0
    shapes = [x.shape for x in tree_leaves(state)]
    assert all(size[0] == 2 for size in shapes)
    for size in itertools.cycle(sizes):
        y, state = m.advance(x[:, at : at + size], state, at)
        outputs, at = [*outputs, y], at + size
        assert [x.shape for x in tree_leaves(state)] == shapes
        if at >= shape[0]:
            break
    close(torch.cat(outputs, 1), m(x, causal=True), 1e-9)
    if len(shape) == 1:
        assert m.state_size == numbers(state) / 2


@pytest.mark.parametrize("name", REMEMBERS)
def test_samples_of_a_stream_have_positions_of_their_own(close, name):
    """One after two frames, the other after four; windows are shorter than that, and longer."""
    options = {
        "LAVO": {"window": (3, 2)},
        "LongShortAttention": {"window": (3, 2)},
        "WindowAttention": {"window": (3, 2), "rotary": True},
    }.get(name, {})
    m, x = build(name, **options).double(), torch.randn(2, 9, 3, 16).double()
    starts = (2, 4)
    each = [m.advance(x[i : i + 1, :f], m.init_state(1, space=(3,)), 0)[1] for i, f in enumerate(starts)]
    state = tuple(torch.cat(pair) for pair in zip(*each, strict=True))
    state = type(each[0])(*state) if state else ()
    y, _ = m.advance(torch.stack([x[0, 2:7], x[1, 4:]]), state, torch.tensor(starts))
    expected = m(x, causal=True)
    close(y, torch.stack([expected[0, 2:7], expected[1, 4:]]), 1e-9)


@pytest.mark.parametrize("name", REMEMBERS)
def test_gradients_go_through_the_state(name):
    """Of what came before the state, and of nothing at all, against differences."""
    m, x = build(name, 4).double(), torch.randn(1, 6, 4).double().requires_grad_()

    def run(x: Tensor) -> Tensor:
        one, state = m.advance(x[:, :3], m.init_state(1), 0)
        nothing, state = m.advance(x[:, 3:3], state, 3)
        two, _ = m.advance(x[:, 3:], state, 3)
        assert nothing.shape == (1, 0, 4)
        return torch.cat([one, two], 1)

    assert gradcheck(run, x)
    if name != "Identity":  # also before the state
        assert grad(run(x)[:, 3:].square().sum(), x)[0][:, :3].any(-1).all()


@every
def test_a_memory_that_grows_has_no_size(name):
    m = build(name)
    assert (m.state_size is None) == (name not in REMEMBERS)


@forms
def test_gradients(name, causal):
    """Of the input and of all parameters, against differences."""
    m, x = build(name, 4).double(), torch.randn(1, 6, 4).double().requires_grad_()
    # angles are float32, whatever the network is: too coarse for differences
    names = [key for key, p in m.named_parameters() if p.requires_grad and "log_factor" not in key]
    values = [m.get_parameter(key).detach().clone().requires_grad_() for key in names]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(m, dict(zip(names, values, strict=True)), x, {"causal": causal})

    assert gradcheck(run, (x, *values), fast_mode=True)


@forms
def test_nothing_but_padding(name, causal):
    """Reads 0, and pulls at nothing."""
    m, x = build(name), torch.randn(2, 3, 4, 16, requires_grad=True)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[0] = False
    y = m(x, mask=mask, causal=causal)
    if name == "Identity":
        assert torch.equal(y, x)
        return
    assert not y[0].any() and y[1].isfinite().all()
    g, *grads = grad(y.square().sum(), [x, *(p for p in m.parameters() if p.requires_grad)])
    assert not g[0].any() and g[1].any() and all(g.isfinite().all() for g in (g, *grads))


@forms
@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 3), (2, 3, 0), (0, 4, 3)], ids=str)
def test_no_tokens_or_no_samples(name, causal, shape):
    """Without samples every parameter has a gradient of zeros: DDP waits for each."""
    m, x = build(name), torch.randn(*shape, 16, requires_grad=True)
    y = m(x, causal=causal)
    assert y.shape == x.shape
    y.sum().backward()
    for key, p in m.named_parameters() if shape[0] == 0 else ():
        assert not p.requires_grad or (p.grad is not None and not p.grad.any()), key


@forms
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_extreme_inputs_give_finite_results(name, causal, size):
    m, x = build(name), (size * torch.randn(2, 70, 16)).requires_grad_()
    y = m(x, causal=causal)
    grads = grad(y.sum(), [x, *(p for p in m.parameters() if p.requires_grad)])
    assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", [*CATALOGUE, *LOCAL])
def test_samples_end_to_end_are_the_samples_alone(close, name):
    m, layout = build(name, dims=2), Ragged([(3, 4), (1, 2), (5, 3)])
    x = torch.randn(layout.length, 16)
    mask = torch.rand(layout.length) < 0.7
    mask[list(layout.offsets[:-1])] = True
    for causal in {False, name.split()[0] in CAUSAL}:
        alone = [m(one, causal=causal).reshape(-1, 16) for one in layout.split(x)]
        close(m(x, layout=layout, causal=causal), torch.cat(alone), 1e-5)
    both = zip(layout.split(x), layout.split(mask), strict=True)
    alone = [m(one, mask=keep).reshape(-1, 16) for one, keep in both]
    close(m(x, layout=layout, mask=mask)[mask], torch.cat(alone)[mask], 1e-5)


@forms
def test_bfloat16_autocast_is_close_to_float32(name, causal):
    """Unit roundoff 2^-9, about ten roundings in a row; a hundred tokens."""
    m, x = build(name, 32), torch.randn(2, 100, 32)
    expected, remembers = m(x, causal=causal), causal and name in REMEMBERS
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = m(x, causal=causal)
        _, half = m.advance(x, m.init_state(2), 0) if remembers else (None, ())
    _, state = m.advance(x, m.init_state(2), 0) if remembers else (None, ())
    assert [x.dtype for x in half] == [x.dtype for x in state]  # memories stay exact
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 10 * 2**-9 * expected.abs().max()
    parameters = [p for p in m.parameters() if p.requires_grad]
    if parameters:
        grads = grad(actual.float().sum(), parameters)
        for g, p in zip(grads, parameters, strict=True):
            assert g.dtype == p.dtype and g.isfinite().all()


@pytest.mark.parametrize("name", CROSS)
def test_cross_form_reads_another_source(close, name):
    """Of another length, all of it but its padding, and nothing else."""
    m, x, source = build(name), torch.randn(2, 5, 16), torch.randn(2, 9, 16)
    source.requires_grad_()
    y = m(x, context=source)
    assert y.shape == x.shape
    assert grad(y[:, 0].square().sum(), source)[0].any(-1).all()
    mask = torch.rand(2, 9) < 0.6
    mask[:, 0] = True
    hidden = m(x, context=torch.where(mask[..., None], source, torch.nan), mask=mask)
    close(hidden, m(x, context=torch.where(mask[..., None], source, 7.0), mask=mask), 1e-6)
    assert not torch.allclose(hidden, y, rtol=1e-3)
    with pytest.raises(ValueError, match=r"causal=True with a context"):
        m(x, context=source, causal=True)
    with pytest.raises(ValueError, match=r"layout with a context"):
        m(x[0], context=source[0], layout=Ragged([(5,)]))


@pytest.mark.parametrize("name", [name for name in CROSS if name != "LongShortAttention"])  # it has no neighbourhood
def test_who_reads_its_own_tokens_reads_as_without_a_source(close, name):
    """Some of the tokens, of all of them: the first where tokens are seen at once; where they are
    read one after the other, the last with those before it that a short convolution wants."""
    scan = name in having("scan")
    more = {"scan": "raster"} if scan else {"window": None} if name == "LAVO" else {}
    m, x = build(name, **more).double(), torch.randn(2, 9, 16).double()
    if scan:
        m = without_angles(m)  # which count from the corner
        close(m(x[:, -4:], context=x)[:, -1], m(x, causal=True)[:, -1], 1e-11)
    else:
        close(m(x[:, :5], context=x), m(x)[:, :5], 1e-11)


@pytest.mark.parametrize("name", having("context_dim"))
def test_a_source_may_be_of_another_width(name):
    m = build(name, context_dim=8)
    assert m(torch.randn(2, 5, 16), context=torch.randn(2, 3, 8)).isfinite().all()


@pytest.mark.parametrize("name", having("scan"))
def test_scans_of_a_grid(close, name):
    """Both ways in one order; in as many orders as axes; all with the same weights. On one axis
    `axes` is `both`; on several, with the axes swapped, it gives the same with the axes swapped."""
    x = torch.randn(2, 3, 4, 16)
    ways = {scan: without_angles(build(name, scan=scan)).double() for scan in ("raster", "both", "axes")}
    for m in ways.values():
        m.load_state_dict(ways["both"].state_dict())
    x = x.double()
    line = x.flatten(1, 2)
    close(ways["axes"](line), ways["both"](line), 1e-12)
    close(ways["both"](x).flatten(1, 2), ways["both"](line), 1e-12)
    close(ways["raster"](x).flatten(1, 2), ways["both"](line, causal=True), 1e-12)
    close(ways["axes"](x, causal=True), ways["raster"](x), 1e-12)
    assert not torch.allclose(ways["axes"](x), ways["both"](x), rtol=1e-3)


# Forms for each operator; of a recurrent mixer the causal form is one of its orders. tests/doors compiles networks of
# LightNetAttention and Mamba, tests/models/test_export_sizes.py exports all mixers.
COMPILED = [
    (name, causal)
    for name, causal in FORMS
    if name not in {"GatedDeltaNet", "KimiDeltaAttention", "HGRN2", "TNL", "LrpeAttention"}
    if not (causal and issubclass(getattr(mixers, name), Recurrent))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, causal", COMPILED)
def test_compile_gives_the_same(close, name, causal):
    torch.compiler.reset()
    m, x = build(name), torch.randn(2, 3, 5, 16, requires_grad=True)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    y, expected = compiled(x, causal=causal), m(x, causal=causal)
    close(y, expected, 1e-5)
    close(grad(y.square().sum(), x)[0], grad(expected.square().sum(), x)[0], 1e-4)


@forms
def test_shapes_are_found_on_device_meta(name, causal):
    """Without numbers, with and without padding, and by the names of the forms."""
    m = build(name).to("meta")
    x = torch.empty(2, 70, 3, 16, device="meta")
    mask = torch.empty(2, 70, 3, dtype=torch.bool, device="meta")
    for keep in (None, mask):
        y = m(x, mask=keep, causal=causal)
        assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype
    assert m.implementation(x, causal).startswith("torch")

"""A local branch for every mixer of the catalogue: what it adds, and that masks, packs, the causal
form and streams stay what they were."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.autograd import grad
from torch.utils._pytree import tree_leaves

from ndlightnet.layout import Grid, Ragged
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers import WithLocal
from ndlightnet.nn.mixers.base import Factory, reads_context
from ndlightnet.nn.mixers.with_local import LocalMixer

CATALOGUE = mixers.__all__
REMEMBERS = [name for name in CATALOGUE if hasattr(getattr(mixers, name), "advance")]
every = pytest.mark.parametrize("name", CATALOGUE)
BRANCH = "LightNetAttention's branch"  # it has one without a wrapper
places = pytest.mark.parametrize("on", ["values", "input", "both"])
two = pytest.mark.parametrize("on", ["values", "both"])
both = pytest.mark.parametrize("causal", [False, True])
DIM = 8


def factory(name: str) -> Factory:
    """Two heads where there are heads, and what does not depend on the length of a sample."""
    options = {"CosformerAttention": {"reach": 9}, "Identity": {}}
    heads = {} if name in ("Identity", "Mamba", "RWKV4", "S4", "S5") else {"heads": 2}
    return partial(getattr(mixers, name), **heads, **options.get(name, {}))


def layer(name: str, dims: int = 1, **options) -> LocalMixer:
    if name == BRANCH:
        return mixers.LightNetAttention(DIM, 2, dims=dims, **options).double()
    return WithLocal(DIM, factory(name), dims=dims, **options).double()


def tokens(*shape: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, *shape, DIM, dtype=torch.float64)


INSIDE = [name for name in CATALOGUE if name not in ("Identity", "S4", "S5")]


@pytest.mark.parametrize("name", INSIDE)
@both
@places
def test_it_is_a_branch_in_front_of_the_output_map(close, name, on, causal):
    """SiLU(local(values)) is added to what the mixer's own output projection reads, with the values
    that its own projection gives (RWKV-4's of the token alone, without its shift)."""
    m, x = layer(name, 2, local=on), tokens(4, 3)
    z = (
        x
        if m.local_input is None
        else x + m.local_input.forward(x.flatten(1, 2), Grid((4, 3)), None, causal).view_as(x)
    )
    if hasattr(m.mixer, "v_proj"):
        v = m.mixer.v_proj(z)
    elif name == "Mamba":
        v = m.mixer.in_proj(z).chunk(2, -1)[0]
    elif m.mixer.lookback:  # a short convolution comes first
        v = m.mixer.in_proj(z)[..., 2 * m.mixer.heads * m.mixer.key_dim :][..., :DIM]
    else:
        v = m.mixer.inputs(m.mixer.project(z.flatten(1, 2)), None).v.reshape(z.shape)
    u = torch.zeros(v.shape).double()  # SiLU(0) = 0
    if m.local_values is not None:
        u = m.local_values.forward(v.flatten(1, 2), Grid((4, 3)), None, causal)
    out = m.mixer.out_proj if name == "Mamba" else m.mixer.o_proj

    def add(_, inputs):
        return inputs[0] + torch.nn.functional.silu(u).view_as(inputs[0])

    with out.register_forward_pre_hook(add):
        expected = m.mixer(z, causal=causal)
    close(m(x, causal=causal), expected, 1e-12)
    assert m.implementation(x, causal) == m.mixer.implementation(x, causal)


@pytest.mark.parametrize("name", ["Identity", "S4", "S5"])
def test_a_mixer_without_projections_gets_the_branch_as_it_is(close, name):
    m, x = layer(name), tokens(9)
    u = m.local_values(x, Grid((9,)), None, True)
    close(m(x, causal=True), m.mixer(x, causal=True) + u * u.sigmoid(), 1e-12)


@every
@places
def test_the_branch_matters_and_is_counted(name, on):
    m, x = layer(name, 2, local=on, dense=True), tokens(3, 5)
    x.requires_grad_()
    width = 2 * DIM if name == "Mamba" else DIM
    taps = 9 * ((on != "input") * width + (on != "values") * DIM)
    count = sum(p.numel() for p in m.parameters())
    assert count == sum(p.numel() for p in m.mixer.parameters()) + taps
    parameters = dict(m.named_parameters())
    learnt = [p for p in parameters.values() if p.requires_grad]
    grads = grad(m(x).square().sum(), [x, *learnt])
    assert all(g.isfinite().all() for g in grads)
    local = [key for key in parameters if key.startswith("local")]
    assert len(local) == (2 if on == "both" else 1)
    assert (m(x) - m.mixer(x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*CATALOGUE, BRANCH])
@both
@two
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sample_is_the_sample_alone(close, name, on, causal, side):
    m, x, mask = layer(name, 2, local=on), tokens(6, 4), torch.zeros(2, 6, 4, dtype=torch.bool)
    real = slice(2, 6) if side == "left" else slice(0, 4)
    mask[:, real] = True
    y = m(torch.where(mask[..., None], x, torch.nan), mask=mask, causal=causal)
    close(y[:, real], m(x[:, real], causal=causal), 1e-9)
    large = torch.where(mask[..., None], x, 1e3).requires_grad_()
    hidden = m(large, mask=mask, causal=causal)
    close(hidden[mask], y[mask], 1e-12)
    parameters = [p for p in m.parameters() if p.requires_grad]
    grads = grad(hidden[mask].square().sum(), [large, *parameters])
    assert all(g.isfinite().all() for g in grads) and not grads[0][~mask].any()


@pytest.mark.parametrize("name", [*CATALOGUE, BRANCH])
@both
@two
def test_samples_end_to_end_are_the_samples_alone(close, name, on, causal):
    m, layout = layer(name, 2, local=on, dense=True), Ragged([(3, 4), (1, 2), (5, 3)])
    x = torch.randn(layout.length, DIM, dtype=torch.float64)
    mask = torch.rand(layout.length) < 0.7
    mask[list(layout.offsets[:-1])] = True
    alone = [m(one, causal=causal).reshape(-1, DIM) for one in layout.split(x)]
    close(m(x, layout=layout, causal=causal), torch.cat(alone), 1e-12)
    pairs = zip(layout.split(x), layout.split(mask), strict=True)
    alone = [m(one, mask=keep, causal=causal).reshape(-1, DIM) for one, keep in pairs]
    y = m(x, layout=layout, mask=mask, causal=causal)
    close(y[mask], torch.cat(alone)[mask], 1e-12)


@pytest.mark.parametrize("name", [*CATALOGUE, BRANCH])
@two
def test_causal_gradients_to_later_frames_are_exactly_zero(name, on):
    m, x = layer(name, 2, local=on, radius=2), tokens(5, 2, batch=1).requires_grad_()
    y = m(x, causal=True)
    for t in range(5):
        pulled = grad(y[:, t].square().sum(), x, retain_graph=True)[0]
        assert not pulled[:, t + 1 :].any() and pulled[:, t].any()


@pytest.mark.parametrize("name", [*REMEMBERS, BRANCH])
@places
@pytest.mark.parametrize("shape", [(20,), (7, 3)], ids=str)
def test_a_stream_is_the_whole(close, name, on, shape):
    m, x = layer(name, len(shape), local=on, radius=2), tokens(*shape)
    state, outputs = m.init_state(2, None, shape[1:]), []
    shapes = [x.shape for x in tree_leaves(state)]
    cuts = sorted({0, 1, shape[0], *torch.randint(1, shape[0], (3,)).tolist()})
    for start, end in pairwise(cuts):
        y, state = m.advance(x[:, start:end], state, start)
        outputs.append(y)
        assert [x.shape for x in tree_leaves(state)] == shapes
    close(torch.cat(outputs, 1), m(x, causal=True), 1e-9)
    if len(shape) == 1:
        frames = 4 * sum(local.weight.shape[1] for local in (m.local_values, m.local_input) if local)
        without = (m if name == BRANCH else m.mixer).init_state(1)
        numbers = tree_leaves(without.memory if name == BRANCH else without)
        assert m.state_size == frames + sum(x.numel() * (2 if x.is_complex() else 1) for x in numbers)


def test_errors_and_what_it_cannot():
    for kind, refused, message in (
        (partial(WithLocal, mixer="Identity"), None, "local=None: expected 'values', 'input' or 'both'$"),
        (partial(WithLocal, mixer="Identity"), "value", "local='value': expected 'values', 'input' or 'both'$"),
        (mixers.LightNetAttention, "value", "local='value': expected 'values', 'input', 'both' or None$"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(DIM, dims=1, local=refused)
    with pytest.raises(ValueError, match="dims=None: expected the number of axes"):
        WithLocal(DIM, mixers.Identity)
    with pytest.raises(ValueError, match="mixer: makes a Linear, expected a Mixer"):
        WithLocal(DIM, lambda dim: torch.nn.Linear(dim, dim), dims=1)
    m = layer("SoftmaxAttention")
    assert m.state_size is None and not reads_context(m)
    with pytest.raises(ValueError, match="SoftmaxAttention has no method advance"):
        m.init_state(1)
    with pytest.raises(ValueError, match="context: WithLocal has no cross form"):
        m(tokens(3), context=tokens(4))
    with pytest.raises(ValueError, match="2 axes, local mixing with dims=1"):
        m(tokens(3, 4))

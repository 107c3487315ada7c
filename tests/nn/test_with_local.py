"""The local branch of a mixer: what it adds, and what it refuses. That masks, packs, the causal form and streams stay
what they were, test_padding.py and test_mixer_forms.py show for all mixers with a branch."""

from functools import partial

import pytest
import torch
from torch.autograd import grad

from ndlightnet.layout import Grid
from ndlightnet.nn.mixers import LightNetAttention, WithLocal
from ndlightnet.nn.mixers.base import reads_context

from .mixer_cases import CATALOGUE, FORMS, build

places = pytest.mark.parametrize("on", ["values", "input", "both"])
DIM = 8


def layer(name: str, dims: int = 1, **options) -> WithLocal:
    return WithLocal(DIM, partial(build, name), dims=dims, **options).double()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, DIM, dtype=torch.float64)


INSIDE = [form for form in FORMS if form[0] not in ("Identity", "S4", "S5")]


@pytest.mark.parametrize("name, causal", INSIDE)
@places
def test_it_is_a_branch_in_front_of_the_output_map(close, name, on, causal):
    """SiLU(local(values)) is added to what the mixer's own output projection reads, with the values
    that its own projection gives (RWKV-4's of the token alone, without its shift)."""
    m, x = layer(name, 2, local=on), tokens(4, 3)
    z = x
    if m.local_input is not None:
        z = x + m.local_input(x.flatten(1, 2), Grid((4, 3)), None, causal).view_as(x)
    if hasattr(m.mixer, "v_proj"):
        v = m.mixer.v_proj(z)
    elif name == "Mamba":
        v = m.mixer.in_proj(z).chunk(2, -1)[0]
    elif name == "HGRN":  # of two channels, a complex one
        v = m.mixer.in_proj(z)[..., : 2 * DIM]
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


@pytest.mark.parametrize("name", CATALOGUE)
@places
def test_the_branch_matters_and_is_counted(name, on):
    m, x = layer(name, 2, local=on, dense=True), tokens(3, 5)
    x.requires_grad_()
    width = 2 * DIM if name in ("Mamba", "HGRN") else DIM
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


@places
@pytest.mark.parametrize("make", [partial(WithLocal, mixer="TNL"), LightNetAttention])
def test_a_stream_is_the_whole(close, make, on):
    m, x = make(DIM, dims=1, local=on, radius=2).double(), tokens(9)
    state, outputs = m.init_state(2), []
    for start in range(0, 9, 2):
        y, state = m.advance(x[:, start : start + 2], state, start)
        outputs.append(y)
    close(torch.cat(outputs, 1), m(x, causal=True), 1e-9)


def test_what_it_cannot():
    m = layer("SoftmaxAttention")
    assert m.state_size is None and not reads_context(m)
    with pytest.raises(ValueError, match="SoftmaxAttention has no method advance"):
        m.init_state(1)
    with pytest.raises(ValueError, match="context: WithLocal has no cross form"):
        m(tokens(3), context=tokens(4))
    with pytest.raises(ValueError, match="2 axes, local mixing with dims=1"):
        m(tokens(3, 4))

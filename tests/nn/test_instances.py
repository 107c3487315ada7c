"""Mixers as instances of the general memory recurrence m_t = f_t . m_(t-1) + e_t i_t^T, y_t =
Re(m_t)^T s_t: with their own inputs, written as expand, forget, input and shrink."""

import copy
import math

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers import lightnet
from ndlightnet.ops import fla
from ndlightnet.ops.dispatch import Support
from ndlightnet.ops.recurrence import memory

N = 11


def recurrence(m):
    """The inputs of a recurrent mixer's recurrence, and what it reads."""
    x = torch.randn(2, N, 16, dtype=torch.float64)
    z = torch.nn.functional.pad(m.project(x), (0, 0, m.lookback, 0))
    inputs = m.inputs(z, None)
    return inputs, m.recur(inputs, m.initial_memory(2, None), inclusive=2)


@pytest.mark.parametrize("name", ["TNL", "GLA", "HGRN2"])
def test_row_and_scalar_decays_are_of_type_one(close, name):
    inputs, (y, last) = recurrence(getattr(mixers, name)(16, 2).double())
    f = inputs.log_decay.exp()[..., None]
    if name == "TNL":
        assert f.shape[-2] == 1 and (f == f[:, :1]).all()
    if name == "HGRN2":
        close(inputs.k, 1 - f[..., 0], 1e-12)
    expected = memory.reference(inputs.q, inputs.k, f, inputs.v)
    close(y, expected[0], 1e-11)
    close(last, expected[1], 1e-11)


def test_hgrn_turns_what_it_forgets(close):
    """Token by token, in complex numbers."""
    m = mixers.HGRN(16).double()
    x, h, reads = torch.randn(2, N, 16, dtype=torch.float64), 0, []
    real, imag, decay, gate = m.in_proj(x).split([16, 16, 16, 32], -1)
    f, silu = decay.sigmoid(), torch.nn.functional.silu
    for t in range(N):
        h = f[:, t] * torch.exp(1j * m.theta) * h + (1 - f[:, t]) * (silu(real) + 1j * silu(imag))[:, t]
        reads.append(torch.cat([h.real, h.imag], -1))
    close(m(x, causal=True), m.o_proj(m.norm(silu(gate) * torch.stack(reads, 1))), 1e-12)


@pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"])
@pytest.mark.parametrize("negative", [False, True])
def test_delta_rules_are_of_type_two(close, name, negative):
    """f_t = (I - beta k k^T) Diag(alpha), e_t = beta k; the keys of length 1."""
    inputs, (y, last) = recurrence(getattr(mixers, name)(16, 2, negative=negative).double())
    k, beta = inputs.k, inputs.beta[..., None]
    assert (k.norm(dim=-1) - 1).abs().max() < 1e-3
    assert beta.min() > 0 and (1 < beta.max() < 2 if negative else beta.max() < 1)
    f = torch.eye(8, dtype=torch.float64) - beta[..., None] * k[..., None] * k[..., None, :]
    if inputs.log_decay is not None:
        f = f * inputs.log_decay.exp()[..., None, :]
    assert (inputs.log_decay is None) == (name == "DeltaNet")
    assert torch.allclose(f, f.mT) == (name != "KimiDeltaAttention")
    expected = memory.reference(inputs.q, beta * k, f, inputs.v, None, torch.matmul)
    close(y, expected[0], 1e-11)
    close(last, expected[1], 1e-11)


def qkv(m):
    x = torch.randn(2, N, 16, dtype=torch.float64)
    return x, *(proj(x).unflatten(-1, (2, 8)) for proj in (m.q_proj, m.k_proj, m.v_proj))


def test_linear_attention_has_its_denominator_as_a_value_channel_of_ones(close):
    m = mixers.LinearAttention(16, 2).double()
    x, q, k, v = qkv(m)
    q, k = (torch.nn.functional.elu(z) + 1 for z in (q, k))
    ones = torch.ones(1, 1, 1, 1, 1)
    y, _ = memory.reference(q, k, ones, torch.cat([v, torch.ones_like(v[..., :1])], -1))
    close(m(x, causal=True), m.o_proj((y[..., :-1] / y[..., -1:]).flatten(2)), 1e-11)


KERNELS = {"softmax": lambda q, k: (q @ k.mT).exp(), "gaussian": lambda q, k: (-torch.cdist(q, k).square() / 2).exp()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_features_estimate_a_kernel(close, kernel):
    """The mean over many draws of directions is the kernel, within standard errors; a layer is linear attention with
    such features, of any scale that is learnt."""
    m = mixers.RandomFeatureAttention(16, 2, kernel=kernel).double()
    x, *heads, v = qkv(m)

    def features(y, scale):
        y = y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * scale[:, None]
        z = torch.einsum("bthc,hfc->bthf", y, m.directions)
        if kernel == "softmax":
            return y, (z - y.square().sum(-1, keepdim=True) / 2).exp()
        return y, torch.cat([z.sin(), z.cos()], -1)

    draws = []
    for _ in range(500):
        m.reset_own()
        (q, phi_q), (k, phi_k) = (features(y, torch.ones(2).double()) for y in heads)
        draws.append(torch.einsum("bthf,bshf->bhts", phi_q, phi_k) / 8)
    draws = torch.stack(draws)
    exact = KERNELS[kernel](q.transpose(1, 2), k.transpose(1, 2))
    error = (draws.mean(0) - exact).abs() / (draws.std(0) / len(draws) ** 0.5)
    assert error.max() < 5 and error.mean() < 1
    for log_scale, most in ((0.3, 1.35), (9.0, 30 / 8**0.5)):
        torch.nn.init.constant_(m.log_scale, log_scale)
        (_, q), (_, k) = (
            features(y, torch.full((2,), min(math.exp(log_scale), most), dtype=torch.float64)) for y in heads
        )
        wide = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        y, _ = memory.reference(q, k, torch.ones(1, 1, 1, 1, 1), wide)
        y = y[..., :-1] / y[..., -1:]
        if kernel == "gaussian":
            y, _ = memory.reference(q, k, torch.ones(1, 1, 1, 1, 1), v)
            y = torch.nn.functional.rms_norm(y, y.shape[-1:], eps=1e-6)
        close(m(x, causal=True), m.o_proj(y.flatten(2)), 1e-10)
        close(copy.deepcopy(m).float()(x.float(), causal=True).double(), m(x, causal=True), 1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_random_features_of_a_token_of_zeros(kernel):
    """It has no direction, and no gradient without bounds."""
    m, x = mixers.RandomFeatureAttention(16, 2, kernel=kernel), torch.randn(1, 6, 16)
    x[0, 3] = 0
    (dx,) = torch.autograd.grad(m(x.requires_grad_()).square().sum(), x)
    assert dx.abs().max() < 1e4


def test_abc_without_a_source_gives_zeros():
    m, x = mixers.ABCAttention(16, 2), torch.randn(2, 5, 16)
    assert not m(x, context=torch.randn(2, 0, 16)).any()


@pytest.mark.parametrize("grid", [(N,), (150,), (4, 3), (50, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slots", [3, 40])  # frames of 3 tokens are larger than the state, smaller than it
def test_abc_reads_means_with_weights_of_each_slot(close, close_grads, grid, causal, slots):
    """Token by token, logits up to hundreds, in several chunks."""
    m = mixers.ABCAttention(16, 2, slots=slots).double()
    m.control.weight.data *= 200
    x = torch.randn(2, *grid, 16, dtype=torch.float64, requires_grad=True)
    q, k, v, logits = (
        proj(x).flatten(1, -2).unflatten(-1, (2, -1)) for proj in (m.q_proj, m.k_proj, m.v_proj, m.control)
    )
    reads, frame = [], math.prod(grid[1:])
    for t in range(q.shape[1]):
        seen = (t // frame + 1) * frame if causal else None
        weights = logits[:, :seen].softmax(1)
        keys, values = (torch.einsum("bshm,bshd->bhmd", weights, y[:, :seen]) for y in (k, v))
        scores = torch.einsum("bhd,bhmd->bhm", q[:, t], keys) / 8**0.5
        reads.append(torch.einsum("bhm,bhmd->bhd", scores.softmax(-1), values))
    expected = m.o_proj(torch.stack(reads, 1).flatten(2)).view_as(x)
    y = m(x, causal=causal)
    close(y, expected, 1e-11)
    close_grads(y, expected, [x, *m.parameters()], 1e-9)


def test_cosformer_is_complex_with_one_angle(close):
    """relu features, f = exp(i pi / (2 reach)), and the denominator's channel."""
    m = mixers.CosformerAttention(16, 2, reach=20).double()
    x, q, k, v = qkv(m)
    f = torch.exp(1j * torch.tensor(math.pi / 40, dtype=torch.float64)).reshape(1, 1, 1, 1, 1)
    wide = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    y, _ = memory.reference(q.relu(), k.relu(), f, wide)
    close(m(x, causal=True), m.o_proj((y[..., :-1] / y[..., -1:].clamp(min=1e-6)).flatten(2)), 1e-5)


@pytest.mark.parametrize("core", ["cosine", "rotary"])
def test_lrpe_turns_its_memory(close, core):
    """Complex with an angle for each channel, or by f = W^T, what a step does to a head's channels."""
    m = mixers.LrpeAttention(16, 2, core=core).double()
    x, q, k, v = qkv(m)
    q, k = (torch.nn.functional.silu(z) for z in (q, k))
    if core == "cosine":
        f = torch.exp(1j * 10000.0 ** (-2 * torch.arange(8).double() / 8)).reshape(1, 1, 1, 8, 1)
        y, _ = memory.reference(q, k, f, v)
    else:
        units = torch.eye(8, dtype=torch.float64)[:, None, None].expand(8, 2, 2, 8)
        turned = m.add_position(units, Grid((2,)), (None,))[:, 1]  # (channel, head, what it becomes)
        y, _ = memory.reference(q, k, turned.transpose(0, 1)[None, None], v, None, torch.matmul)
    y = torch.nn.functional.rms_norm(y, y.shape[-1:], eps=1e-6)
    close(m(x, causal=True), m.o_proj(y.flatten(2)), 1e-5)  # frequencies are float32


@pytest.mark.parametrize("name", ["TNL", "GLA", "HGRN2", "DeltaNet", "KimiDeltaAttention"])
def test_both_ways_count_a_token_once(close, name):
    """Forth as it is; back without what the token itself has written: decay and erasure stay."""
    m = getattr(mixers, name)(16, 2).double()
    x = torch.randn(2, N, 16, dtype=torch.float64)
    z = m.project(x)

    def one_way(z, reads_itself):
        inputs = m.inputs(torch.nn.functional.pad(z, (0, 0, m.lookback, 0)), None)
        k, beta = inputs.k, inputs.beta
        f = torch.eye(k.shape[-1], dtype=torch.float64).expand(*k.shape[:3], -1, -1)
        e = k if beta is None else k * beta[..., None]
        if beta is not None:
            f = f - e[..., None] * k[..., None, :]
        if inputs.log_decay is not None:
            f = f * inputs.log_decay.exp()[..., None, :]
        held, out = torch.zeros_like(m.initial_memory(2, None)), []
        for t in range(N):
            held = f[:, t] @ held
            written = held + e[:, t, ..., None] * inputs.v[:, t, :, None]
            out.append(torch.einsum("bhk,bhkd->bhd", inputs.q[:, t], written if reads_itself else held))
            held = written
        return inputs, torch.stack(out, 1)

    inputs, forth = one_way(z, True)
    _, back = one_way(z.flip(1), False)
    close(m(x), m.output(inputs, forth + back.flip(1)), 1e-11)
    assert not torch.allclose(m(x), m(x, causal=True), rtol=1e-3)


COSFORMER = {  # reach, x's grid, the source's, the offset at which an axis' cosine is 0
    "a grid": (None, (3, 4), None, (3, 4)),
    "a longer source": (None, (4,), (9,), (9,)),
    "a shorter source": (None, (9,), (4,), (9,)),
    "beyond its reach": (4, (9,), None, (4,)),
}


@pytest.mark.parametrize("case", COSFORMER)
def test_cosformer_is_its_formula(close, case):
    """Weights relu(q) . relu(k) times the mean of the axes' cosines; none is negative. Both grids
    count from the same corner; tokens past the reach count as at it."""
    reach, shape, source_shape, zero = COSFORMER[case]
    m = mixers.CosformerAttention(16, 2, reach=reach).double()
    x = torch.randn(2, *shape, 16, dtype=torch.float64)
    source = x if source_shape is None else torch.randn(2, *source_shape, 16, dtype=torch.float64)
    q = m.q_proj(x.flatten(1, -2)).unflatten(-1, (2, 8))
    k, v = (proj(source.flatten(1, -2)).unflatten(-1, (2, 8)) for proj in (m.k_proj, m.v_proj))
    zero = torch.tensor(zero).double()
    at, of = (
        torch.cartesian_prod(*map(torch.arange, z.shape[1:-1])).reshape(-1, len(zero)).double().minimum(zero)
        for z in (x, source)
    )
    cos = (math.pi / 2 * (at[:, None] - of) / zero).cos().mean(-1)
    weight = torch.einsum("bthk,bshk->bhts", q.relu(), k.relu()) * cos
    assert (weight > -1e-12).all()
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-6)
    y = m.o_proj(torch.einsum("bhts,bshd->bthd", weight, v).flatten(2)).reshape(x.shape)
    close(m(x, context=None if source is x else source), y, 1e-6)


@pytest.mark.parametrize("name", ["CosformerAttention", "LrpeAttention", "UnsharedLightNet"])
def test_coordinates_that_cannot_be_shared(name):
    m, x = getattr(mixers, name)(16, 2), torch.randn(2, 9, 16)
    with pytest.raises(ValueError, match=r"context on a grid \(3, 3\), x on \(9,\)"):
        m(x, context=x.unflatten(1, (3, 3)))


@pytest.mark.parametrize("core", ["cosine", "rotary"])
def test_lrpe_scores_depend_on_offsets_alone(core):
    """W_n^H W_m = W_(m - n): moving both tokens by the same vector changes no score; moving one does. W is unitary."""
    m = mixers.LrpeAttention(16, 2, core=core).double()
    q, k = torch.randn(2, 1, 1, 2, 8, dtype=torch.float64)

    def score(n, at):
        a, b = (m.add_position(x, Grid((1, 1), place), (1, 1)) for x, place in ((q, n), (k, at)))
        return (a * b).sum()

    base = score((2, 1), (4, 5))
    assert torch.allclose(score((7, 3), (9, 7)), base, rtol=1e-5)
    for moved in ((4, 6), (5, 5)):
        assert abs(score((2, 1), moved) - base) > 1e-3
    assert torch.allclose(m.add_position(q, Grid((1, 1), (3, 2)), (1, 1)).norm(), q.norm(), rtol=1e-6)


def test_without_positions_the_order_of_tokens_does_not_matter(close):
    """Linear attention sees a grid as a set: any permutation, of tokens or of axes."""
    m, x = mixers.LinearAttention(16, 2).double(), torch.randn(2, 3, 4, 5, 16).double()
    close(m(x.permute(0, 3, 1, 2, 4)), m(x).permute(0, 3, 1, 2, 4), 1e-12)
    line, order = x.flatten(1, 3), torch.randperm(60)
    close(m(line[:, order]), m(line)[:, order], 1e-12)
    close(m(line).reshape(x.shape), m(x), 1e-12)


@pytest.mark.parametrize("name", ["GLA", "LAVO", "S4", "RWKV4"])
def test_an_axis_of_one_is_no_axis(close, name):
    """(9, 1) is (9,), with one window for all axes."""
    more = {"LAVO": {"window": 4}}
    m = getattr(mixers, name)(16, **more.get(name, {})).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    close(m(x[:, :, None]).squeeze(2), m(x), 1e-6)


COUNTS = {
    "LinearAttention": lambda d, h: 4 * d * d,
    "CosformerAttention": lambda d, h: 4 * d * d,
    "LrpeAttention": lambda d, h: 4 * d * d + d,
    "TNL": lambda d, h: 5 * d * d + h,
    "GLA": lambda d, h: 4 * d * d + 24 * d + d // h + d // 2,
    "HGRN": lambda d, _: 7 * d * d + 3 * d,
    "HGRN2": lambda d, h: 4 * d * d + d,
    "DeltaNet": lambda d, h: 4 * d * d + 12 * d + h * d + d // h,
    "GatedDeltaNet": lambda d, h: 5 * d * d + 12 * d + 2 * h * d + d // h + 2 * h,
    "KimiDeltaAttention": lambda d, h: 4 * d * d + 14 * d + h * d + 4 * d * d // h + d // h + h,
    "ABCAttention": lambda d, h: 4 * d * d + 64 * h * d,
    "LongShortAttention": lambda d, h: 4 * d * d + 64 * h * d + h * 31,
    "NystromAttention": lambda d, h: 4 * d * d,
    "SoftmaxAttention": lambda d, h: 4 * d * d + d // 2,
    "UnsharedLightNet": lambda d, h: 4 * d * d + 2 * d * d // h + 2 * d * (d // 8) + 3 * d,
    "WindowAttention": lambda d, h: 4 * d * d + h * 7,
    "Mamba": lambda d, _: 6 * d * d + (6 * 16 + 4 * 3 + 14) * d,
    "S4": lambda d, _: 2 * d * d + 2 * 64 * d + 2 * d,
    "S5": lambda d, _: d * d + 2 * 64 * d + d + 3 * 64 // 2,
    "RandomFeatureAttention": lambda d, h: 4 * d * d + h + d * d // h,
    "RWKV4": lambda d, _: 4 * d * d + 5 * d,
}


@pytest.mark.parametrize("name, count", COUNTS.items())
def test_parameters_are_as_the_docstrings_say(name, count):
    m = getattr(mixers, name)(48, **({} if name in ("HGRN", "Mamba", "S4", "S5", "RWKV4") else {"heads": 3}))
    assert sum(p.numel() for p in m.parameters()) == count(48, 3)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention"])
@pytest.mark.parametrize("first, last", [(1e-3, 0.1), (1e-6, 1e-5), (3.0, 3.0)])
def test_first_steps(name, first, last):
    """Of tokens that say nothing, float32; from 0.001 to 0.1 by default."""
    torch.manual_seed(1)
    options = {} if (first, last) == (1e-3, 0.1) else {"dt_min": first, "dt_max": last}
    step = torch.nn.functional.softplus(getattr(mixers, name)(256, **options).dt_bias)
    assert (step >= first * (1 - 1e-5)).all() and (step <= last * (1 + 1e-5)).all()
    if first < last and len(step) > 100:  # evenly drawn in the logarithm
        assert abs((step < (first * last) ** 0.5).float().mean() - 0.5) < 2 / len(step) ** 0.5


def test_first_rates():
    """Of 256 heads: gated DeltaNet's from 0 to 16, KDA's from 1."""
    torch.manual_seed(1)
    gated, kimi = (getattr(mixers, name)(256, 256).A_log.exp() for name in ("GatedDeltaNet", "KimiDeltaAttention"))
    assert 0 < gated.min() < 1 <= kimi.min() < 2 and min(gated.max(), kimi.max()) > 15
    assert max(gated.max(), kimi.max()) < 16 * (1 + 1e-5)


def test_implementation_names_the_reason():
    m = mixers.GLA(128)
    assert m.implementation(torch.randn(1, 2, 128)) == "torch (tensors on cpu: expected cuda)"
    assert mixers.GLA(128, impl="reference").implementation(torch.randn(1, 2, 128)) == "reference"


@pytest.mark.parametrize("name", ["LinearAttention", "CosformerAttention", "LrpeAttention", "GLA"])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_implementation_is_what_runs(monkeypatch, name, shape, causal):
    called = []

    def kernel(q, k, v, decay, state):
        called.append(name)
        return torch.zeros_like(v), state

    monkeypatch.setattr(fla, "supports", lambda *_: Support())
    monkeypatch.setattr(fla, "gated_linear_attention", kernel)
    m, x = getattr(mixers, name)(16), torch.randn(2, *shape, 16)
    m(x, causal=causal)
    assert m.implementation(x, causal) == ("fla" if called else "torch")
    assert bool(called) == (name == "GLA" or (causal and shape != (3, 4)))


@pytest.mark.parametrize("causal, operation", [(False, "global_attention"), (True, "axis_causal_attention")])
def test_lightnet_asks_for_the_kernel_of_its_form(monkeypatch, causal, operation):
    def supported(name, x, *, position):
        return Support(f"{name} {position.shape}")

    monkeypatch.setattr(lightnet, "supported", supported)
    m = mixers.LightNetAttention(16)
    assert m.implementation(torch.randn(2, 3, 4, 16), causal) == f"torch ({operation} (3, 4))"


@pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"])
def test_padding_neither_writes_nor_decays(name):
    """In the delta rules, whose short convolution takes the last tokens on into it."""
    m, keep = getattr(mixers, name)(16, 2), torch.rand(2, N) < 0.5
    z = torch.nn.functional.pad(m.project(torch.randn(2, N, 16)), (0, 0, m.lookback, 0))
    inputs = m.inputs(z, keep)
    for written in (inputs.beta, inputs.log_decay):
        assert written is None or (not written[~keep].any() and written[keep].all())


@pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaNet", "KimiDeltaAttention"])
def test_the_short_convolution_of_delta_rules_is_torchs(close, name):
    m = getattr(mixers, name)(16, 2).double()
    z = m.project(torch.randn(2, N, 16, dtype=torch.float64))
    inputs = m.inputs(torch.nn.functional.pad(z, (0, 0, 3, 0)), None)
    near = torch.nn.functional.conv1d(torch.nn.functional.pad(z[..., :48].mT, (3, 0)), m.conv[:, None], groups=48)
    close(inputs.v.flatten(2), torch.nn.functional.silu(near.mT)[..., 32:], 1e-12)


GATES = {"GLA": "silu", "GatedDeltaNet": "silu", "KimiDeltaAttention": "sigmoid"}


@pytest.mark.parametrize("name, activation", GATES.items())
def test_gates_of_the_output(close, name, activation):
    m = getattr(mixers, name)(16, 2).double()
    inputs, (y, _) = recurrence(m)
    gate = getattr(torch.nn.functional, activation)(inputs.gate)
    close(m.output(inputs, y), m.o_proj((m.norm(y) * gate).flatten(2)), 1e-12)

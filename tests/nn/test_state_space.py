"""S4, S5, Mamba and RWKV-4 as layers: their formulas from their own parameters, on grids, with
padding, and what they start from."""

import math
from functools import partial

import pytest
import torch
from torch.autograd import grad
from torch.nn import functional as F

from ndlightnet import NDLightNet
from ndlightnet.nn.mixers.mamba import Mamba
from ndlightnet.nn.mixers.rwkv import RWKV4
from ndlightnet.nn.mixers.s4 import S4
from ndlightnet.nn.mixers.s5 import S5
from ndlightnet.ops.recurrence import wkv
from ndlightnet.ops.recurrence.ssm import legs

KINDS = {"S4": partial(S4, state=8), "S5": partial(S5, state=8), "Mamba": Mamba, "RWKV4": RWKV4}
every = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
DIM, N = 6, 20


def build(kind, **more):
    return kind(DIM, **more).double()


def tokens(*shape):
    return torch.randn(2, *shape, DIM, dtype=torch.float64)


def zero_order_hold(m, log_dt):
    """exp(dt a), and the integral of exp(a t) over a step."""
    a = torch.complex(-m.A_log.exp(), m.A_imag)
    dt = log_dt.exp()
    return (dt * a).exp(), ((dt * a).exp() - 1) / a


def two_sided(m):
    """The kernel (lags, channels) of an S4 from its parameters."""
    f, gain = zero_order_hold(m, m.log_dt[:, None])
    c = torch.view_as_complex(m.C) * gain
    lag = torch.arange(N)[:, None, None]
    return 2 * (c * f**lag).sum(-1).real


@pytest.mark.parametrize("dim", [1, DIM])
def test_s4_is_a_convolution_a_channel(close, dim):
    """Both ways, with the kernel of the distance between two tokens: the token itself once."""
    m, x = S4(dim, 8).double(), torch.randn(2, N, dim, dtype=torch.float64)
    lag = torch.arange(N)[:, None] - torch.arange(N)
    weights = two_sided(m)[lag.abs()]
    for causal in (False, True):
        kernel = (weights * (lag >= 0)[..., None]) if causal else weights
        h = F.gelu(torch.einsum("tsc,bsc->btc", kernel, x) + m.D * x) @ m.out_proj.weight.T
        close(m(x, causal=causal), h[..., :dim] * h[..., dim:].sigmoid(), 1e-12)


def test_s5_is_one_system_of_all_channels(close):
    m, x = build(KINDS["S5"]), tokens(N)
    f, gain = zero_order_hold(m, m.log_dt)
    b, c = torch.view_as_complex(m.B) * gain, torch.view_as_complex(m.C)
    reads = []
    for way in (x, x.flip(1)):
        held, read = torch.zeros(2, 4, dtype=b.dtype), []
        for t in range(N):
            before, added = f * held, way[:, t].to(b.dtype) @ b
            held = before + added
            read.append(2 * ((before if len(reads) else held) @ c.T).real)
        reads.append(torch.stack(read, 1))
    for causal, y in ((True, reads[0]), (False, reads[0] + reads[1].flip(1))):
        h = F.gelu(y + m.D * x)
        close(m(x, causal=causal), h * (h @ m.gate_proj.weight.T).sigmoid(), 1e-12)
    x.requires_grad_()
    pulled = grad(m.recur(m.inputs(x, None), m.initial_memory(2, None), 2)[0][:, -1, 0].sum(), x)[0]
    assert pulled.all()  # of every channel


def test_mamba_is_its_formula(close):
    """With torch's convolution. Without the step in what is added, or without D u, it is not."""
    m, x = build(Mamba), tokens(N)

    def one_way(x, reads_itself, note=False):
        u, gate = (x @ m.in_proj.weight.T).chunk(2, -1)
        padded = F.pad(u.mT, (3, 0))
        u = F.silu(F.conv1d(padded, m.conv[:, None], m.conv_bias, groups=2 * DIM).mT)
        low, b, c = (u @ m.x_proj.weight.T).split([1, 16, 16], -1)
        delta = (1 + (low @ m.delta_weight.T + m.dt_bias).exp()).log()
        held, read = torch.zeros(2, 2 * DIM, 16).double(), []
        for t in range(N):
            before = (-delta[:, t, :, None] * m.A_log.exp()).exp() * held
            step = 1 if note else delta[:, t, :, None]
            held = before + step * u[:, t, :, None] * b[:, t, None]
            read.append(torch.einsum("bck,bk->bc", held if reads_itself else before, c[:, t]))
        return torch.stack(read, 1), u, gate

    def out(y, gate):
        return (y * F.silu(gate)) @ m.out_proj.weight.T

    forth, u, gate = one_way(x, True)
    causal = m(x, causal=True)
    close(causal, out(forth + m.D * u, gate), 1e-11)
    back = one_way(x.flip(1), False)[0].flip(1)
    close(m(x), out(forth + back + m.D * u, gate), 1e-11)
    for y in (one_way(x, True, note=True)[0] + m.D * u, forth):
        assert (out(y, gate) - causal).abs().max() > 1e-3


def test_rwkv4_is_its_formula(close):
    m, x = build(RWKV4), tokens(N)
    at = torch.arange(N)[:, None] - torch.arange(N)
    itself = torch.eye(N, dtype=torch.bool)[..., None]

    def projected(z):
        before = F.pad(z, (0, 0, 1, 0))[:, :-1]
        mixed = (mix * z + (1 - mix) * before for mix in (m.mix_r, m.mix_k, m.mix_v))
        layers = (m.r_proj, m.k_proj, m.v_proj)
        return [z @ layer.weight.T for z, layer in zip(mixed, layers, strict=True)]

    r, k, v = projected(x)
    lag = (at.abs() - 1)[..., None]
    forth = torch.where(itself, k[:, None] + m.bonus, k[:, None] - lag * m.decay.exp())
    forth = forth.masked_fill(at[..., None] < 0, -torch.inf)
    y = torch.einsum("btsc,bsc->btc", forth.softmax(2), v)
    close(m(x, causal=True), (r.sigmoid() * y) @ m.o_proj.weight.T, 1e-12)
    # back again: keys and values mixed with the token that comes after
    _, k2, v2 = (z.flip(1) for z in projected(x.flip(1)))
    back = (k2[:, None] - lag * m.decay.exp()).masked_fill(at[..., None] >= 0, -torch.inf)
    weights = torch.cat([forth, back], 2).softmax(2)
    y = torch.einsum("btsc,bsc->btc", weights, torch.cat([v, v2], 1))
    close(m(x), (r.sigmoid() * y) @ m.o_proj.weight.T, 1e-12)


@pytest.mark.parametrize("scan", ["raster", "both"])
def test_rwkv_reads_long_sequences_in_segments(close, close_grads, monkeypatch, scan):
    m, x = build(RWKV4, scan=scan), tokens(N).requires_grad_()
    expected, sums, lengths = m(x), wkv.weighted_sums, []
    monkeypatch.setattr(wkv, "weighted_sums", lambda k, *rest: (lengths.append(k.shape[1]), sums(k, *rest))[1])
    monkeypatch.setattr(wkv, "SEGMENT", 7 * DIM * 2 * (1 if scan == "raster" else 2))
    actual = m(x)
    assert lengths == [7, 7, 6]
    close(actual, expected, 1e-12)
    close_grads(actual, expected, [x, *m.parameters()], 1e-11)


@every
def test_axes_are_all_orders_added_up(close, kind):
    """On (3, 4): by rows and by columns, from the start and from the end; of the tokens seen."""
    m, x = build(kind, scan="axes"), tokens(3, 4)
    rows, columns = torch.arange(12), torch.arange(12).reshape(3, 4).T.flatten()
    for keep in (torch.ones(2, 12, dtype=torch.bool), torch.rand(2, 12) < 0.8):
        y = m(x, mask=keep.reshape(2, 3, 4)).flatten(1, 2)
        for row, real in enumerate(keep):
            z, inputs, reads = m.project(x[row : row + 1]).flatten(1, 2), [], []
            for order in (rows, rows.flip(0), columns, columns.flip(0)):
                order = order[real[order]]
                inputs.append(m.inputs(F.pad(z[:, order], (0, 0, m.lookback, 0)), None))
                read, _ = m.recur(inputs[-1], m.initial_memory(1, None), 0 if reads else 1)
                reads.append(read[:, order.argsort()])
            read = m.join(m.join(m.join(*reads[:2]), reads[2]), reads[3])
            close(y[row : row + 1, real], m.output(inputs[0], read), 1e-12)


def first_mixer(kind, dim=64):
    """Of a network, which initialises its linear maps after it has been built."""
    return NDLightNet(1, 3, 2, patch_size=4, embed_dim=dim, depth=1, mixer=kind).blocks[0].mixer


def between(x, low, high):
    """A sample of a uniform distribution over the range: in it, and near both ends."""
    return low <= x.min() < low + 0.2 * (high - low) and high - 0.2 * (high - low) < x.max() <= high


def test_s4_and_s5_start_from_legs_in_a_network(close):
    for kind in (S4, S5):
        m, expected = first_mixer(kind, 48), legs(64)[0]
        assert (m.A_log == torch.tensor(0.5).log()).all()
        close(m.A_imag.data, expected.imag.float().expand_as(m.A_imag), 1e-6)
        assert between(m.log_dt, math.log(1e-3), math.log(0.1))
        # of a mean of 48 squares 0.2 is one standard deviation, of the 1,500 pairs below 0.03
        assert abs(m.D.square().mean() - 1) < 0.8
        assert abs(m.C.square().sum(-1).mean() / (1 if kind is S4 else 2 / 64) - 1) < 0.15
        if kind is S5:
            assert abs(m.B.square().sum(-1).mean() * 48 - 1) < 0.15


def test_mamba_starts_as_the_original_in_a_network(close):
    m = first_mixer(Mamba)
    assert between(F.softplus(m.dt_bias).log(), math.log(1e-3), math.log(0.1))
    close(m.A_log.exp(), torch.arange(1.0, 17).expand(128, 16), 1e-6)
    assert (m.D == 1).all()
    assert between(m.conv, -0.5, 0.5) and between(m.conv_bias, -0.5, 0.5)
    assert between(m.delta_weight, -0.5, 0.5)  # rank 4


def test_rwkv4_starts_as_the_middle_layer_of_the_original_in_a_network(close):
    m, at = first_mixer(RWKV4), torch.arange(64)
    close(m.decay.data, -5 + 8 * (at / 63) ** 1.35, 1e-6)
    zigzag = torch.tensor([0.0, 0.5, -0.5]).repeat(22)[:64]
    close(m.bonus.data, math.log(0.3) + zigzag, 1e-6)
    close(m.mix_k.data, (at / 64) ** 0.5, 1e-6)
    close(m.mix_v.data, (at / 64) ** 0.5 + 0.15, 1e-6)
    close(m.mix_r.data, (at / 64) ** 0.25, 1e-6)
    assert RWKV4(1)(torch.randn(2, 3, 1)).isfinite().all()

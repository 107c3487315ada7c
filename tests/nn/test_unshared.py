"""LightNet with a decay of its own: against loops over tokens, and with its key's decay LightNet's causal form."""

import pytest
import torch
from torch.nn import functional as F

from ndlightnet import NDLightNet
from ndlightnet.nn.mixers import UnsharedLightNet, published_mixer
from ndlightnet.ops.position import frequencies

N, DIM, HEADS = 7, 8, 2


def layer(scan="both"):
    m = UnsharedLightNet(DIM, HEADS, scan=scan).double()
    torch.nn.init.normal_(m.lrpe.log_factor)
    torch.nn.init.normal_(m.k_proj.weight)
    torch.nn.init.normal_(m.decay_proj[1].weight, std=3)
    return m


def by_loops(m, x, keep, both):
    """One sample (length, dim) of the tokens kept, on one axis: each query adds up what is left of each value."""
    q, k, f, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (m.q_proj, m.k_proj, m.decay_proj, m.v_proj))
    theta = frequencies(DIM // HEADS, 1) * m.lrpe.log_factor.exp()

    def read(order):
        weights, reads, of_k, of_f = {}, {}, 0, 0
        for t in order:
            of_k, of_f = of_k + k[t].exp(), of_f + f[t].exp()
            weights = {s: weight * (1 - f[t].exp() / of_f) for s, weight in weights.items()}
            weights[t] = k[t].exp() / of_k
            reads[t] = {s: (F.silu(q[t]) * w * torch.cos((t - s) * theta)).sum(-1)[:, None] for s, w in weights.items()}
        return reads

    order, out = [t for t in range(len(x)) if keep[t]], []
    ways = [read(order), read(order[::-1])] if both else [read(order)]
    for t in order:
        y = sum(score * v[s] for number, way in enumerate(ways) for s, score in way[t].items() if s != t or not number)
        y = F.layer_norm(y.flatten(), (DIM,), m.norm.weight, m.norm.bias, 1e-6)
        out.append(m.o_proj(y * m.gate(x[t]).sigmoid()))
    return torch.stack(out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_its_formula(close, close_grads, causal, padded):
    m, x = layer(), torch.randn(2, N, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, N) < 0.6 if padded else torch.ones(2, N, dtype=torch.bool)
    mask[:, 3] = True
    y = m(x, mask=mask if padded else None, causal=causal)[mask]
    expected = torch.cat([by_loops(m, *sample, not causal) for sample in zip(x, mask, strict=True)])
    close(y, expected, 1e-10)
    close_grads(y, expected, (x, *m.parameters()), 1e-9)


def test_logits_beyond_the_range_of_exp(close):
    """A number added to all logits changes nothing."""
    m, x = layer(), torch.randn(1, N, DIM, dtype=torch.float64)
    expected = m(x, causal=True)
    for logits in (m.k_proj, m.decay_proj):
        logits.register_forward_hook(lambda _, inputs, out: out + 1000)
    close(m(x, causal=True), expected, 1e-9)
    assert m.float()(1e4 * x.float()).isfinite().all()


@pytest.mark.parametrize("shape", [(9,), (130,), (5, 1)], ids=str)
def test_with_the_decay_of_its_key_it_is_lightnets_causal_form(close, close_grads, shape):
    m, paper = UnsharedLightNet(128).double(), published_mixer(128).double()
    for name, module in paper.named_children():
        setattr(m, name, module)
    m.decay_proj = m.k_proj
    torch.nn.init.normal_(m.lrpe.log_factor)
    torch.nn.init.normal_(m.k_proj.weight, std=0.3)
    x = torch.randn(2, *shape, 128, dtype=torch.float64, requires_grad=True)
    actual, expected = m(x, causal=True), paper(x, causal=True)
    close(actual, expected, 1e-9)
    close_grads(actual, expected, (x, *paper.parameters()), 1e-8)


def test_the_papers_size_without_sharing():
    """26 layers of width 1,024: the decays have as many parameters as Table 4's two sizes, 385 and 379 M, are apart."""
    net = NDLightNet(1, vocab_size=9, embed_dim=1024, depth=26, causal=True, mixer=UnsharedLightNet, device="meta")
    count = sum(p.numel() for name, p in net.named_parameters() if "decay_proj" in name)
    assert 384.5e6 - 379.5e6 < count < 385.5e6 - 378.5e6

"""The basis of LAVO's memory: orthonormal in each head at the start."""

import torch

from ndlightnet.nn.mixers.lavo import LAVO


def test_memory_vectors_are_orthogonal_at_first():
    """They learn freely from there, as in the paper."""
    m = LAVO(8, heads=2, window=4).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64)

    def crosstalk():
        mean = torch.randn(2, m.head_dim, dtype=torch.float64)
        memory = torch.einsum("hrd,hd->hr", m.basis, mean)[..., None] * m.basis
        gram = memory @ memory.mT
        return (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max() / gram.max()

    identity = torch.eye(4, dtype=torch.float64)
    assert (m.basis @ m.basis.mT - identity).abs().max() < 1e-6 and crosstalk() < 1e-6
    before, target = m.basis.detach().clone(), torch.randn_like(x)
    optimizer, losses = torch.optim.Adam(m.parameters(), 0.05), []
    for _ in range(30):
        loss = (m(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and (m.basis - before).abs().max() > 1e-2
    assert crosstalk() > 1e-3


def test_parameters():
    def count(**options):
        return sum(p.numel() for p in LAVO(128, **options).parameters())

    projections, bases = 4 * 128**2, 64 * 128
    assert count() == projections + bases + 2 * 31
    assert count(window=8) == projections + bases + 2 * 15
    assert count(window=(4, 8, 8)) == projections + bases + 2 * (7 + 15 + 15)
    assert count(window=None) == count(context_dim=128) == 3 * 128**2 + bases
    assert count(context_dim=40) == 2 * 128**2 + 40 * 128 + bases
    assert LAVO(96, heads=4).basis.shape == (4, 24, 24)
    # what the paper's memory adds to 12 layers of GPT-2: 0.59 M
    added = 12 * LAVO(768).basis.numel()
    assert round(added / 1e6, 2) == 0.59

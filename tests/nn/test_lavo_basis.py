"""The basis of LAVO's memory: orthogonal from the start or for good, per head or over the width."""

import pytest
import torch

from ndlightnet.nn.mixers.lavo import LAVO


@pytest.mark.parametrize("orthogonal", ["init", "param"])
def test_memory_vectors_are_orthogonal(orthogonal):
    """At first; after training only where the basis is kept orthonormal."""
    m = LAVO(8, heads=2, memories=3, window=4, orthogonal=orthogonal).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64)

    def crosstalk():
        mean = torch.randn(2, m.head_dim, dtype=torch.float64)
        memory = torch.einsum("hrd,hd->hr", m.bases(), mean)[..., None] * m.bases()
        gram = memory @ memory.mT
        return (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().max() / gram.max()

    identity = torch.eye(3, dtype=torch.float64)
    assert (m.bases() @ m.bases().mT - identity).abs().max() < 1e-6 and crosstalk() < 1e-6
    before, target = m.bases().detach().clone(), torch.randn_like(x)
    optimizer, losses = torch.optim.Adam(m.parameters(), 0.05), []
    for _ in range(30):
        loss = (m(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and (m.bases() - before).abs().max() > 1e-2
    assert (crosstalk() < 1e-12) == (orthogonal == "param")
    if orthogonal == "param":
        assert (m.bases() @ m.bases().mT - identity).abs().max() < 1e-12
        assert m.bfloat16().bases().dtype == torch.float32


def test_parameters():
    def count(**options):
        return sum(p.numel() for p in LAVO(128, **options).parameters())

    projections, bases = 4 * 128**2, 64 * 128
    assert count() == projections + bases + 2 * 31
    assert count(window=8, memories=16) == projections + 16 * 128 + 2 * 15
    assert count(window=(4, 8, 8)) == projections + bases + 2 * (7 + 15 + 15)
    assert count(window=None) == count(context_dim=128) == 3 * 128**2 + bases
    assert count(context_dim=40) == 2 * 128**2 + 40 * 128 + bases
    assert LAVO(96, heads=4).basis.shape == (4, 24, 24)
    # what the paper's memory adds to 12 layers of GPT-2: 0.59 M
    added = 12 * LAVO(768).basis.numel()
    assert round(added / 1e6, 2) == 0.59


def test_a_basis_over_the_whole_width(close):
    """Its vectors are orthonormal over the width, not within a head; all heads see one H."""
    for orthogonal in ("init", "param"):
        m = LAVO(16, 2, memories=12, basis="full", orthogonal=orthogonal, window=None).double()
        x = torch.randn(2, 9, 16, dtype=torch.float64)
        b = m.bases()
        assert b.shape == (2, 12, 8)
        wide = torch.cat([*b], -1)
        close(wide @ wide.mT, torch.eye(12, dtype=torch.float64), 1e-6)
        q = m.q_proj(x).unflatten(-1, (2, 8))
        h = m.v_proj(x).mean(1) @ wide.mT  # (batch, memories)
        memory = torch.einsum("hrd,br->bhrd", b, h)
        weight = (torch.einsum("bthd,bhrd->bthr", q, memory) / 8**0.5).softmax(-1)
        y = torch.einsum("bthr,bhrd->bthd", weight, memory)
        close(m(x), m.o_proj(y.flatten(2)), 1e-12)
        assert not torch.allclose(b[0] @ b[0].mT, torch.eye(12, dtype=torch.float64), atol=1e-2)
    with pytest.raises(ValueError, match=r"basis='half': expected"):
        LAVO(16, basis="half")
    with pytest.raises(ValueError, match=r"memories=17: expected 1 to 16"):
        LAVO(16, 2, memories=17, basis="full")

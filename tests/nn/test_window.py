"""WindowAttention against softmax over all pairs, in float64, with the others masked away."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ndlightnet.nn.mixers import WindowAttention

GRIDS = {(7,): 3, (130,): 5, (5, 6): 2, (9, 20): (3, 6), (4, 3, 5): (2, 1, 3), (2, 3, 2, 4): 2}
DIM, HEADS = 12, 2


def plainly(net: WindowAttention, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Token by token: the scores of those in reach along every axis, softmax, the mean of v."""
    batch, *grid, dim = x.shape
    if mask is None:
        mask = torch.ones(batch, *grid, dtype=torch.bool)
    windows = np.broadcast_to(net.window, len(grid))
    tokens, real = x.reshape(batch, -1, dim), mask.reshape(batch, -1)
    at = np.stack(np.unravel_index(np.arange(tokens.shape[1]), grid), -1)
    q, k, v = (
        (tokens @ proj.weight.T).reshape(batch, -1, net.heads, dim // net.heads)
        for proj in (net.q_proj, net.k_proj, net.v_proj)
    )
    out = torch.zeros_like(q)
    for b in range(batch):
        for i in range(len(at)):
            offset = at - at[i]
            near = (abs(offset) < windows).all(1) & real[b].numpy()
            if causal:
                near &= offset[:, 0] <= 0
            seen = np.flatnonzero(near)
            if not len(seen):
                continue
            for h in range(net.heads):
                bias = net.bias[h, torch.from_numpy(offset[seen]) + net.bias.shape[1] // 2].sum(-1)
                scores = k[b, seen, h] @ q[b, i, h] / (dim // net.heads) ** 0.5 + bias
                out[b, i, h] = scores.softmax(0) @ v[b, seen, h]
    return (out.reshape(batch, -1, dim) @ net.o_proj.weight.T).reshape(x.shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_against_all_pairs(close, grid, masked, causal):
    net = WindowAttention(DIM, HEADS, window=GRIDS[grid]).double()
    x = torch.randn(2, *grid, DIM, dtype=torch.float64)
    mask = torch.rand(2, *grid) < 0.6 if masked else None
    given = x if mask is None else x.masked_fill(~mask[..., None], torch.nan)  # is never read
    with torch.no_grad():
        found, expected = net(given, mask=mask, causal=causal), plainly(net, x, mask, causal)
    real = torch.ones(2, *grid, dtype=torch.bool) if mask is None else mask
    close(found[real], expected[real], 1e-12)
    assert found.isfinite().all()


def test_what_is_out_of_reach_changes_nothing():
    net = WindowAttention(DIM, HEADS, window=(3, 1)).double()
    x = torch.randn(1, 9, 4, DIM, dtype=torch.float64, requires_grad=True)
    seen = torch.autograd.grad(net(x)[0, 4, 2].sum(), x)[0][0].abs().sum(-1) > 0
    expected = torch.zeros(9, 4, dtype=torch.bool)
    expected[2:7, 2] = True
    assert torch.equal(seen, expected)


def test_windows_that_are_none():
    for window in (0, -1, (), (3, 0)):
        with pytest.raises(ValueError, match="window="):
            WindowAttention(DIM, HEADS, window=window)
    with pytest.raises(ValueError, match=r"window=\(3, 3\)"):
        WindowAttention(DIM, HEADS, window=(3, 3))(torch.zeros(1, 4, 4, 4, DIM))

"""WindowAttention against softmax over all pairs in float64, the others masked away; streams."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ndlightnet.layout import Grid
from ndlightnet.nn.mixers import WindowAttention
from ndlightnet.ops.position import groups

from .mixer_cases import WINDOWS

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
    if net.lrpe:
        theta = net.lrpe(tuple(grid)).theta.double()
        sizes = groups(theta.shape[1], len(grid))
        column = torch.from_numpy(at).repeat_interleave(torch.tensor(sizes), 1)
        turn = torch.polar(torch.ones(()).double(), column[:, None] * theta)
        q, k = (torch.complex(*y.chunk(2, -1)) * turn for y in (q, k))
        q, k = (torch.cat([y.real, y.imag], -1) for y in (q, k))
    out = torch.zeros_like(q)
    for b in range(batch):
        for i in range(len(at)):
            offset = at - at[i]
            near = (abs(offset) < windows).all(1) & real[b].numpy()
            if causal:
                near &= offset[:, 0] <= 0
            read = np.flatnonzero(near)
            if not len(read):
                continue
            for h in range(net.heads):
                scores = k[b, read, h] @ q[b, i, h] / (dim // net.heads) ** 0.5
                if net.bias is not None:
                    columns = torch.from_numpy(offset[read]) + net.bias.shape[1] // 2
                    scores = scores + net.bias[h, columns].sum(-1)
                out[b, i, h] = scores.softmax(0) @ v[b, read, h]
    return (out.reshape(batch, -1, dim) @ net.o_proj.weight.T).reshape(x.shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("grid", WINDOWS)
def test_against_all_pairs(close, grid, rotary, masked, causal):
    if rotary and len(grid) > 3:
        pytest.skip("six channels a head turn by three angles")
    net = WindowAttention(DIM, HEADS, window=WINDOWS[grid], rotary=rotary).double()
    for scale in [net.lrpe.log_factor] if rotary else []:
        torch.nn.init.normal_(scale, std=0.1)
    x = torch.randn(2, *grid, DIM, dtype=torch.float64)
    mask = torch.rand(2, *grid) < 0.6 if masked else None
    poisoned = x if mask is None else x.masked_fill(~mask[..., None], torch.nan)  # is never read
    with torch.no_grad():
        y, expected = net(poisoned, mask=mask, causal=causal), plainly(net, x, mask, causal)
    real = torch.ones(2, *grid, dtype=torch.bool) if mask is None else mask
    close(y[real], expected[real], 1e-12)
    assert y.isfinite().all()


def test_what_is_out_of_reach_changes_nothing():
    net = WindowAttention(DIM, HEADS, window=(3, 1)).double()
    x = torch.randn(1, 9, 4, DIM, dtype=torch.float64, requires_grad=True)
    reads = torch.autograd.grad(net(x)[0, 4, 2].sum(), x)[0][0].abs().sum(-1) > 0
    assert reads.nonzero().tolist() == [[row, 2] for row in range(2, 7)]


def test_frames_of_another_shape_than_the_state():
    net = WindowAttention(DIM, HEADS, window=(4, 2))
    with pytest.raises(ValueError, match=r"frames of \(3,\): expected \(4,\), as in init_state"):
        net.advance(torch.randn(2, 1, 3, DIM), net.init_state(2, space=(4,)), 9)


@pytest.mark.parametrize("rotary", [False, True])
def test_only_distances_matter_at_any_position(close, rotary):
    """At 131,072 as at 0. Angles are float64 products of float32 frequencies up to 1: a position of
    2^17 rounds them by 2^-36."""
    net = WindowAttention(DIM, HEADS, window=5, rotary=rotary).double()
    x = torch.randn(1, 30, DIM, dtype=torch.float64)
    far, _ = net.step(x, Grid((30,)).after(131072), net.init_state(1))
    close(far, net(x, causal=True), 1e-9)


def test_parameters_and_what_runs():
    for rotary, more in ((False, 2 * (2 * 7 - 1)), (True, 64 // 2)):
        net = WindowAttention(64, 2, window=(7, 3), rotary=rotary)
        assert sum(p.numel() for p in net.parameters()) == 4 * 64**2 + more
    text, video = torch.randn(1, 5, 64), torch.randn(1, 5, 2, 64)
    net = WindowAttention(64, 2, rotary=True)
    assert net.implementation(text) == "torch (tensors on cpu: expected cuda)"
    assert net.implementation(video) == "torch (2 axes: expected one)"
    assert WindowAttention(64).implementation(text) == "torch (biases: expected none)"

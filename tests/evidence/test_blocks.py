"""Memory in blocks: equal weights are global attention; the formula; masks, odd sizes, causal."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import axis_causal_attention, global_attention
from ndlightnet_evidence.blocks import BlockAttention, block_attention, from_blocks, to_blocks

# grids and blocks that do and do not divide them
SHAPES = [((7,), (3,)), ((4, 6), (2, 3)), ((5, 6), (2, 4)), ((3, 4, 5), (2, 2, 2)),
          ((2, 3, 2, 4), (1, 2, 2, 3))]  # fmt: skip
HEADS, DIM = 2, 6


def inputs(shape, batch=2):
    torch.manual_seed(0)
    grid = Grid(shape)
    q, k, v = torch.randn(3, batch, grid.length, HEADS, DIM, dtype=torch.float64)
    return grid, q, 3 * k, v


def position(grid):
    torch.manual_seed(1)
    lrpe = MDLRPE(HEADS, DIM, "cosine").double()
    torch.nn.init.normal_(lrpe.log_factor, std=0.3)
    return lrpe(grid)


@pytest.mark.parametrize("shape, sizes", SHAPES)
def test_blocks_are_cut_and_joined(shape, sizes):
    grid = Grid(shape)
    x = torch.randn(2, grid.length, 3)
    cut = to_blocks(x, grid, sizes)
    assert torch.equal(from_blocks(cut, grid, sizes), x)
    first = grid.unflatten(x)[0][tuple(slice(s) for s in sizes)]
    assert torch.equal(cut[0], first.reshape(-1, 3))


@pytest.mark.parametrize("shape, sizes", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_equal_weights_are_global_attention(shape, sizes, masked):
    grid, q, k, v = inputs(shape)
    mask = torch.rand(2, grid.length) < 0.6 if masked else None
    logs = torch.full((len(shape), HEADS, 5), 1.5)
    found = block_attention(q, k, v, grid, sizes, logs, mask=mask, lrpe=position(grid))
    right = global_attention(q, k, v, mask=mask, lrpe=position(grid))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("shape, sizes", [s for s in SHAPES if s[1][0] == 1] + [((5, 3), (1, 2))])
def test_equal_weights_are_causal_attention(shape, sizes):
    grid, q, k, v = inputs(shape)
    logs = torch.full((len(shape), HEADS, 3), -0.5)
    found = block_attention(q, k, v, grid, sizes, logs, lrpe=position(grid), causal=True)
    right, _ = axis_causal_attention(q, k, v, grid, lrpe=position(grid))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("shape, sizes", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_formula(shape, sizes, causal):
    """Token by token: weights exp(k_u) w(block of t - block of u), normalised for each t."""
    grid, q, k, v = inputs(shape)
    sizes = (1, *sizes[1:]) if causal else sizes
    reach = 1
    logs = torch.randn(len(shape), HEADS, 2 * reach + 1, dtype=torch.float64, requires_grad=True)
    block = grid.coordinates() // torch.tensor(sizes)
    offset = block[:, None] - block  # (t, u, axes)
    each = logs[torch.arange(len(shape)), :, offset.clamp(-reach, reach) + reach]  # (t, u, axes, h)
    weight = each.sum(2).exp()
    if causal:
        weight = weight * (offset[..., :1] >= 0)
    p = torch.einsum("tuh,buhc->btuhc", weight, k.exp())
    right = torch.einsum("bthc,btuhc,buhd->bthd", torch.nn.functional.silu(q),
                         p / p.sum(2, keepdim=True), v)  # fmt: skip
    found = block_attention(q, k, v, grid, sizes, logs, causal=causal)
    torch.testing.assert_close(found, right)
    (dright,) = torch.autograd.grad(right.square().sum(), logs)
    (dfound,) = torch.autograd.grad(found.square().sum(), logs)
    torch.testing.assert_close(dfound, dright)


def test_the_layer():
    """A token far away weighs less than one of the same block; float32 agrees with float64."""
    torch.manual_seed(0)
    layer = BlockAttention(16, 2, dims=2, block=3)
    x = torch.randn(1, 9, 8, 16, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    torch.testing.assert_close(layer.double()(x.double()).float(), y, atol=1e-5, rtol=1e-4)
    (near,) = torch.autograd.grad(layer.float()(x)[0, 0, 0].square().sum(), x)
    assert near[0, :3, :3].norm() > 3 * near[0, 6:, 6:].norm()
    with pytest.raises(ValueError, match="blocks of one step"):
        block_attention(*torch.randn(3, 1, 4, 2, 4), Grid((4,)), (2,), layer.logs, causal=True)

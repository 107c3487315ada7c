"""FLOP formulas of the operators: against counts by hand, and those of the torch forms."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ndlightnet.ops.flops  # noqa: F401
from ndlightnet.ops import Position, causal_attention, global_attention, read, summarize
from ndlightnet.ops._operator import FORMULAS, LIBRARY
from ndlightnet.ops.lightnet import _triton
from ndlightnet_kernels.position import NO_POSITION

BATCH, N, HEADS, D, E = 2, 40, 3, 8, 16


def count(run) -> int:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


def tensors(**more):
    q, k = (torch.randn(BATCH, N, HEADS, D, **more) for _ in range(2))
    return q, k, torch.randn(BATCH, N, HEADS, E, **more)


def test_every_operator_has_one():
    defined = {name.split("::")[1].split(".")[0] for name in LIBRARY._op_defs}
    assert defined == set(FORMULAS)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "lrpe"])
def test_global_attention_is_what_torch_multiplies(rotated):
    """The kernels' operators, on meta tensors, and the einsums of the torch form."""
    theta = torch.rand(1, D)
    lrpe = Position(theta, (N,)) if rotated else None
    there = Position(theta.to("meta"), (N,)) if rotated else None
    where = _triton.of_grid(there)
    q, k, v = tensors()
    expected = count(lambda: global_attention(q, k, v, position=lrpe))
    ops = torch.ops.ndlightnet
    x, y, z = tensors(device="meta")
    assert count(lambda: ops.global_attention(x, y, z, None, *where)) == expected
    memory, halves = summarize(k, v, position=lrpe), 2 if rotated else 1
    parts = count(lambda: summarize(k, v, position=lrpe)), count(lambda: read(q, memory, position=lrpe))
    state = [part.to("meta") for part in memory]
    assert count(lambda: ops.summarize(y, z, None, *where)) == parts[0]
    assert count(lambda: ops.read(x, *state[1:], *where)) == parts[1]
    assert expected == 4 * BATCH * N * HEADS * halves * D * E == sum(parts)


def test_gradients_are_what_torch_multiplies():
    q, k, v = (x.requires_grad_() for x in tensors())
    both = count(lambda: global_attention(q, k, v).sum().backward())
    x, y, z = (x.requires_grad_() for x in tensors(device="meta"))
    run = torch.ops.ndlightnet.global_attention
    actual = count(lambda: run(x, y, z, None, *NO_POSITION)[0].sum().backward())
    assert actual == both == 3 * 4 * BATCH * N * HEADS * D * E


def test_causal_attention_counts_on_a_cpu_too():
    q, k, v = tensors()
    assert count(lambda: causal_attention(q, k, v)) == 4 * BATCH * N * HEADS * D * E
    ops = torch.ops.ndlightnet
    x, y, z = tensors(device="meta")
    forward = count(lambda: ops.window_attention(x, y, z, None, None, 7, *NO_POSITION))
    assert forward == 2 * BATCH * N * HEADS * 7 * (D + E)


@pytest.mark.parametrize("both", [False, True])
def test_operators_on_grids(both):
    ops = torch.ops.ndlightnet

    def empty(*shape):
        return torch.empty(shape, device="meta", requires_grad=True)

    x, coef, decay = empty(2, 5, 6, 8), empty(2, 8, 4), empty(2, 4)
    back = (empty(2, 8, 4), empty(2, 4)) if both else (None, None)
    forward = 4 * (2 * 5 * 6 * 8) * 2 * 4 * (1 + both)
    scan = (x, coef, decay, *back, None, False, torch.bfloat16, torch.float32, None, [])
    assert count(lambda: ops.axis_scan(*scan)) == forward
    assert count(lambda: ops.axis_scan(*scan).sum().backward()) == 3 * forward
    tokens, weight = empty(2, 30, 8), empty(3, 8)
    mixed = (tokens, weight, None, None, None, [5, 6], [1, 1], [1, 1], [0, 0, 0, 1, 1, 0])
    forward = 2 * (2 * 30 * 8) * 3
    assert count(lambda: ops.local_mixing(*mixed)) == forward
    assert count(lambda: ops.local_mixing(*mixed).sum().backward()) == 3 * forward


def test_a_layer_is_the_sum_of_its_operators():
    """Attention with angles, 7 taps, a gate of rank 4, and a map to 20 channels."""
    dim, rank, out = HEADS * D, 4, 20
    x = torch.randn(BATCH, N, 3 * dim + rank, device="meta", requires_grad=True)
    weight, bias = torch.empty(2, dim, device="meta")
    maps, taps = (torch.empty(n, device="meta") for n in ((dim, rank), (out, dim))), torch.empty(7, dim, device="meta")
    where = _triton.of_grid(Position(torch.rand(1, D, device="meta"), (N,)))
    nowhere = None, None, [N], [1], [1], [0] * 7
    run = torch.ops.ndlightnet.attention_layer
    forward = 2 * BATCH * N * (2 * HEADS * 2 * D * D + 7 * dim + rank * dim + dim * out)
    layer = run, x, weight, bias, *maps, taps, None, 1e-6, HEADS, *where, *nowhere
    assert count(lambda: layer[0](*layer[1:])) == forward
    assert count(lambda: layer[0](*layer[1:])[0].sum().backward()) == 3 * forward

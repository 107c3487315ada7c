"""Attention and MD-TPE on samples end to end: each sample gets what it gets alone."""

import pytest
import torch

from ndlightnet import Ragged
from ndlightnet.ops import Position, axis_causal_attention, axis_scan, global_attention

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan

BATCHES = (((3, 4, 5), (1, 2, 3), (6, 7, 4)), ((70,), (3,), (0,), (150,)), ((2, 3, 2, 4), (1, 1, 5, 2)))


def alone(layout, function, *xs):
    """`function` of every sample by itself, on tensors (1, length, ...)."""
    cuts = [slice(a, b) for a, b in zip(layout.offsets, layout.offsets[1:], strict=False)]
    return torch.cat([function(i, *(x[None, now] for x in xs))[0] for i, now in enumerate(cuts)])


@pytest.mark.parametrize("shapes", BATCHES, ids=str)
@pytest.mark.parametrize("kind", [None, "cosine", "rotary"])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_attention(close, close_grads, shapes, kind, impl):
    layout = Ragged(shapes)
    q, k = (torch.randn(layout.length, 2, 8).double().requires_grad_() for _ in "qk")
    v = torch.randn(layout.length, 2, 3).double().requires_grad_()
    leaves, theta = [q, k, v], None
    if kind is not None:
        theta = torch.rand(2, 8 if kind == "cosine" else 4).double().requires_grad_()
        leaves.append(theta)
    mask = torch.rand(layout.length) < 0.7
    lrpe = None if theta is None else Position(theta, shapes[0], kind)

    def one(i, q, k, v, keep):
        place = None if lrpe is None else lrpe._replace(layout=shapes[i])
        return global_attention(q, k, v, mask=keep, position=place, impl="torch")

    actual = packed_attention(q, k, v, layout, mask=mask, position=lrpe, impl=impl)
    expected = alone(layout, one, q, k, v, mask)
    close(actual, expected, 1e-12)
    close_grads(actual, expected, leaves, 1e-10)


@pytest.mark.parametrize("shapes", BATCHES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 2, "forget": 0.3}], ids=str)
def test_axis_causal(close, close_grads, shapes, options):
    layout = Ragged(shapes)
    q, k, v = (torch.randn(layout.length, 2, 8).double().requires_grad_() for _ in "qkv")
    theta = torch.rand(2, 8).double().requires_grad_()
    mask = torch.rand(layout.length) < 0.7

    def one(i, q, k, v, keep):
        place = Position(theta, shapes[i])
        if shapes[i][0] == 0:
            return v
        frames = shapes[i][0]
        return axis_causal_attention(q, k, v, frames, mask=keep, position=place, **options)[0]

    place = Position(theta, shapes[0])
    actual = packed_axis_causal_attention(q, k, v, layout, mask=mask, position=place, **options)
    expected = alone(layout, one, q, k, v, mask)
    close(actual, expected, 1e-12)
    close_grads(actual, expected, (q, k, v, theta), 1e-10)


@pytest.mark.parametrize("shapes", BATCHES, ids=str)
@pytest.mark.parametrize("two_ways", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_axis_scan(close, close_grads, shapes, two_ways, residual):
    layout, dim, states = Ragged(shapes), 4, 3
    x = torch.randn(layout.length, dim).double().requires_grad_()
    weights = [
        (
            torch.randn(layout.ndim, dim, states).double().requires_grad_(),
            (-torch.rand(layout.ndim, states).double()).requires_grad_(),
        )
        for _ in range(2)
    ]
    (coef, decay), back = weights[0], weights[1] if two_ways else None
    mask = torch.rand(layout.length) < 0.7

    def one(i, x, keep):
        grid = shapes[i]
        y = axis_scan(x.reshape(1, *grid, dim), coef, decay, back, keep.reshape(1, *grid), residual=residual)
        return y.reshape(1, -1, dim)

    actual = packed_axis_scan(x, layout, coef, decay, back, mask, residual=residual)
    expected = alone(layout, one, x, mask)
    leaves = [x, coef, decay, *(back or ())]
    close(actual, expected, 1e-12)
    close_grads(actual, expected, leaves, 1e-10)


def test_nothing_at_all():
    layout = Ragged(((0, 4), (3, 0)))
    q, v = torch.randn(0, 1, 4), torch.randn(0, 1, 5)
    for function in (packed_attention, packed_axis_causal_attention):
        assert function(q, q, v, layout).shape == v.shape


def test_nan_in_one_sample_stays_there():
    layout = Ragged(((4, 4), (5, 3)))
    q, k, v = (torch.randn(layout.length, 1, 4) for _ in "qkv")
    k[20] = torch.nan
    out = packed_attention(q, k, v, layout)
    assert out[:16].isfinite().all() and out[16:].isnan().any()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"q": torch.randn(15, 1, 4)}, r"q \(1, 15, 1, 4\)"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask \(1, 3\)"),
        ({"position": Position(torch.rand(1, 4), (4, 4), offset=(1, 0))}, "offset"),
        ({"impl": "nonsense"}, "impl='nonsense'"),
    ],
)
def test_errors_name_the_values(change, named):
    layout = Ragged(((4, 4),))
    q, k, v = (torch.randn(16, 1, 4) for _ in "qkv")
    with pytest.raises(ValueError, match=named):
        packed_attention(**({"q": q, "k": k, "v": v, "layout": layout} | change))
    for past, what in (({"window": 0}, "window=0"), ({"forget": -1.0}, "forget=-1.0")):
        with pytest.raises(ValueError, match=what):
            packed_axis_causal_attention(q, k, v, layout, **past)
    with pytest.raises(ValueError, match="axes"):
        packed_axis_scan(torch.randn(16, 4), layout, torch.randn(1, 4, 2), torch.randn(1, 2))

"""Samples end to end: the specification of local mixing, NaN, nothing, and errors."""

import pytest
import torch

from ndlightnet import Ragged
from ndlightnet.ops import Position, dense, local_mixing

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan


@pytest.mark.parametrize("shapes", [((3, 4, 5), (1, 2, 3), (6, 7, 4)), ((70,), (3,), (0,), (150,))], ids=str)
def test_the_specification_of_local_mixing_is_its_torch_form(close, close_grads, shapes):
    layout = Ragged(shapes)
    taps = dense(layout.ndim, 1)
    x = torch.randn(1, layout.length, 16).double().requires_grad_()
    weight = torch.randn(len(taps), 16).double().requires_grad_()
    mask = torch.rand(1, layout.length) < 0.7
    actual, expected = (
        local_mixing(x, weight, taps, mask=mask, layout=layout, impl=impl) for impl in ("torch", "reference")
    )
    close(actual, expected, 1e-12)
    close_grads(actual, expected, (x, weight), 1e-10)


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

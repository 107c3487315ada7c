"""Samples end to end: nothing, and errors. What they give, tests/layout shows."""

import pytest
import torch

from ndlightnet import Ragged
from ndlightnet.ops import Position, dense, local_mixing

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan


def test_the_specification_of_local_mixing_takes_packs(close):
    layout, taps = Ragged(((3, 4, 5), (1, 2, 3), (6, 7, 4))), dense(3, 1)
    x, weight = torch.randn(1, layout.length, 8), torch.randn(len(taps), 8)
    close(*(local_mixing(x, weight, taps, layout=layout, impl=impl) for impl in ("torch", "reference")), 1e-5)


def test_nothing_at_all():
    layout = Ragged(((0, 4), (3, 0)))
    q, v = torch.randn(0, 1, 4), torch.randn(0, 1, 5)
    for function in (packed_attention, packed_axis_causal_attention):
        assert function(q, q, v, layout).shape == v.shape


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

"""One choice of implementation: an explicit wish is served or refused, never replaced."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.ops import Position, causal_attention, dispatch, supported, tables


@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_every_operation_has_a_torch_form_and_refuses_what_it_has_not(operation):
    x = torch.randn(1, 4, 1, 8)
    given = (x, x, None) if "gated" in operation else (x,)
    has = dispatch.OPERATIONS[operation].implementations
    assert dispatch.resolve(operation, "torch", *given) == "torch"
    assert dispatch.resolve(operation, "auto", *given) == "torch"
    for impl in {"triton", "reference", "fla"} - set(has):
        with pytest.raises(ValueError, match=f"impl='{impl}': expected 'auto', .* {operation}"):
            dispatch.resolve(operation, impl, *given)
    if "fla" in has:
        with pytest.raises(ValueError, match=r"impl='fla': no .*cpu"):
            dispatch.resolve(operation, "fla", *given)


def test_kernels_that_are_asked_about_have_to_exist():
    with pytest.raises(ValueError, match=r"operation='gated_delta_rule': expected one of .*summarize"):
        supported("gated_delta_rule", torch.zeros(1))


def test_an_offset_may_be_the_layouts(close):
    theta, grid = torch.rand(1, 8), Grid((2, 3))
    apart = Position(theta, (2, 3), offset=(5, 0))
    later = Position(theta, grid.after(5))
    for a, b in zip(tables(apart, 8, torch.float64), tables(later, 8, torch.float64), strict=True):
        assert torch.equal(a, b)
    q = torch.randn(1, 6, 1, 8)
    (y, a), (z, b) = (causal_attention(q, q, q, position=place) for place in (apart, later))
    assert torch.equal(y, z) and torch.equal(a.memory, b.memory)
    assert not torch.equal(a.memory, causal_attention(q, q, q, position=Position(theta, grid))[1].memory)

"""Nothing to compute: no sample, no token, no head, no channel. Every operator gives empty results
or an empty State, and zero gradients, with kernels as without."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet import ops
from ndlightnet.layout import Ragged

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan
from .kernel_cases import DEVICE

SIZES = {  # batch, length, heads, dim, value_dim
    "no sample": (0, 8, 2, 4, 4),
    "no token": (2, 0, 2, 4, 4),
    "no head": (2, 8, 0, 4, 4),
    "no key channel": (2, 8, 2, 0, 4),
    "no value channel": (2, 8, 2, 4, 0),
    "nothing": (0, 0, 0, 4, 4),
}


def results(size, kind, impl):
    """Outputs and States of every form that takes such angles, by name."""
    batch, n, heads, dim, wide = size

    def draw(*shape):
        return torch.zeros(shape, device=DEVICE).requires_grad_()

    q, k, v = draw(batch, n, heads, dim), draw(batch, n, heads, dim), draw(batch, n, heads, wide)
    rows = dim if kind is None else 2 * dim
    total, memory = draw(batch, heads, dim), draw(batch, heads, rows, wide)
    state = ops.State(torch.full_like(total, -torch.inf), total, memory)
    theta = draw(max(1, heads), dim if kind == "cosine" else dim // 2)
    mask = torch.ones(batch, n, dtype=torch.bool, device=DEVICE)

    def place(*shape, start=None):
        return None if kind is None else ops.Position(theta, shape, kind, offset=start)

    how = {"position": place(n, start=(3,)), "impl": impl}
    yield "global", [ops.global_attention(q, k, v, mask=mask, **how)]
    yield "summarize", ops.summarize(k, v, **how)
    yield "read", [ops.read(q, state, **how)]
    if kind != "rotary":
        for name, before in (("causal", None), ("from a State", state)):
            out, after = ops.causal_attention(q, k, v, mask=mask, state=before, **how)
            yield name, [out, *after]
        frames = {"impl": impl, "position": place(4 if n else 0, 2), "forget": 0.1}
        for window, past in ((None, state), (3, ops.State(*(x[:, None].expand(-1, 2, *x.shape[1:]) for x in state)))):
            for before in (None, past):
                out, after = ops.axis_causal_attention(q, k, v, 4, mask=mask, window=window, state=before, **frames)
                yield f"frames {window} {before is None}", [out, *after]
        if n:
            token = [x[:, 0].detach() for x in (q, k, v)]
            with torch.no_grad():
                out, after = ops.attention_step(*token, state, position=place(1, start=(3,)), impl=impl)
            yield "step", [out, *after]
    if batch == 2:
        flat, keep = [x.flatten(0, 1) for x in (q, k, v)], mask.flatten()
        layout, grids = Ragged([(n,), (0,), (n,)]), Ragged([(n // 2, 2), (0, 2), (n // 2, 2)])
        how["position"] = place(n)
        yield "packed", [packed_attention(*flat, layout, mask=keep, **how)]
        if kind != "rotary":
            how["position"] = place(n, 2)
            out = packed_axis_causal_attention(*flat, grids, mask=keep, window=2, **how)
            yield "packed frames", [out]


@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("kind", ["cosine", "rotary", None])
def test_attention(size, kind):
    if kind and size[3] == 0:  # angles need channels
        pytest.skip("no angles without channels")
    ours, torchs = (dict(results(size, kind, impl)) for impl in ("triton", "torch"))
    for name, tensors in torchs.items():
        for a, b in zip(ours[name], tensors, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), name
    sum(x.sum() for tensors in ours.values() for x in tensors if x.requires_grad).backward()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (2, 3, 0, 3)], ids=str)
def test_position_and_gate(shape):
    x = torch.zeros(shape, device=DEVICE).requires_grad_()
    axes, dim = len(shape) - 2, shape[-1]
    coef = torch.zeros(axes, dim, 4, device=DEVICE).requires_grad_()
    decay = torch.full((axes, 4), -1.0, device=DEVICE).requires_grad_()
    y = ops.axis_scan(x, coef, decay, (coef, decay), residual=True, impl="triton")
    weight, bias = torch.ones(dim, device=DEVICE), torch.zeros(dim, device=DEVICE)
    z = ops.norm_gate(x, x, weight, bias, impl="triton")
    assert y.shape == z.shape == shape
    for g in grad(y.sum() + z.sum(), (x,)):
        assert g.shape == shape
    if shape[0] == 0:
        ones = torch.ones(shape[1], device=DEVICE)
        assert ops.instance_norm_silu(x, ones, ones, x, impl="triton").shape == shape
    flat = x.flatten(0, -2)
    if len(flat) == 0:
        layout = Ragged([(0,) * axes])
        assert packed_axis_scan(flat, layout, coef, decay, impl="triton").shape == flat.shape

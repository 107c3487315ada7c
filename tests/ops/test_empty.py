"""Every operator takes an empty batch, or no tokens: a result without numbers, and gradients of
zeros for all inputs."""

import pytest
import torch

from ndlightnet import ops
from ndlightnet.layout import Grid
from ndlightnet.ops import Position, State

HEADS, DIM = 2, 4
WITHOUT_TOKENS = {"Position", "State", "Support", "dense", "frequencies", "star", "supported", "tables"}


def draw(*shape):
    return torch.rand(shape).requires_grad_()


def calls(name, b, n):
    """Return the arguments of an operator for a batch of b and n tokens."""
    place = Position(draw(HEADS, DIM), (n,))
    frames = Position(place.theta, (n // 2, 2))
    state = State(torch.zeros(b, HEADS, DIM), draw(b, HEADS, DIM), draw(b, HEADS, 2 * DIM, DIM))
    q, k, v = (draw(b, n, HEADS, DIM) for _ in "qkv")
    one = (draw(b, HEADS, DIM), draw(b, HEADS, DIM), draw(b, HEADS, DIM))
    plain = State(state.max, state.sum, draw(b, HEADS, DIM, DIM))
    x, coef, decay = draw(b, n, DIM), draw(1, DIM, 3), draw(1, 3)
    memory = draw(b, HEADS, DIM, DIM)
    weight, bias = draw(DIM), draw(DIM)
    taps = draw(3, DIM)
    wide = HEADS * DIM
    layer = draw(b, n, 3 * wide + 2), HEADS, draw(wide), draw(wide), 1e-6, draw(wide, 2), draw(wide, wide)
    known = {
        "add_norm": ((x, draw(b, n, DIM), weight, bias), {}),
        "attention_layer": ((*layer, draw(3, wide), ops.star(1, 1)), {"layout": Grid((n,)), "position": place}),
        "attention_step": ((*one, plain), {}),
        "axis_causal_attention": ((q, k, v, n // 2), {"position": frames, "state": state, "forget": 0.1}),
        "axis_scan": ((x, coef, decay, (draw(1, DIM, 3), draw(1, 3))), {"residual": True}),
        "causal_attention": ((q, k, v), {"position": place, "state": state}),
        "elementwise_memory": ((q, k, draw(1, 1, 1, DIM, 1), v, memory), {}),
        "gated_delta_rule": ((q, k, v, draw(b, n, HEADS), draw(b, n, HEADS, 1), memory), {}),
        "gated_linear_attention": ((q, k, v, draw(b, n, HEADS, 1), memory), {}),
        "global_attention": ((q, k, v), {"position": place}),
        "instance_norm_silu": ((draw(b, DIM, 5), weight, bias, draw(b, DIM, 5)), {}),
        "lightnet_attention": (tuple(draw(b, HEADS, n, DIM) for _ in "qkv"), {}),
        "line_scan": ((x, coef[0], decay[0], draw(b, DIM, 3)), {}),
        "line_state": ((x, decay[0], draw(b, DIM, 3)), {}),
        "line_step": ((draw(b, DIM), coef[0], decay[0], draw(b, DIM, 3)), {}),
        "local_mixing": ((x, taps, ops.star(1, 1)), {}),
        "local_mixing_step": ((x, taps, ops.star(1, 1, True), draw(b, 2, 1, DIM)), {"layout": Grid((n,))}),
        "matrix_memory": ((q, k, draw(1, 1, 1, DIM, DIM), v, memory), {}),
        "merge": ((plain, state._replace(memory=draw(b, HEADS, DIM, DIM))), {}),
        "norm_gate": ((x, draw(b, n, DIM), weight, bias, 1e-6, "auto", draw(b, n, DIM)), {}),
        "read": ((q, state), {"position": place}),
        "rotate": ((q, draw(n, 1, DIM), draw(n, 1, DIM)), {}),
        "scan": ((draw(1, n, DIM), x, draw(b, DIM)), {}),
        "summarize": ((k, v), {"position": place}),
        "swiglu": ((x, draw(3, DIM // 2)), {}),
        "toeplitz": ((x, draw(3, DIM)), {}),
    }
    assert name in known, f"{name}: expected its arguments here, for {b} samples of {n} tokens"
    return known[name]


def leaves(x):
    if isinstance(x, torch.Tensor):
        return [x]
    items = x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else []
    return [leaf for item in items for leaf in leaves(item)]


@pytest.mark.parametrize("batch, tokens", [(0, 6), (2, 0)])
@pytest.mark.parametrize("name", sorted(set(ops.__all__) - WITHOUT_TOKENS))
def test_gradients_are_zeros_and_not_missing(name, batch, tokens):
    if name == "local_mixing_step" and not tokens:
        pytest.skip("a step has a frame")
    positional, named = calls(name, batch, tokens)
    results = [y for y in leaves(getattr(ops, name)(*positional, **named)) if y.requires_grad]
    assert results and all(y.isfinite().all() for y in results)
    inputs = [x for x in leaves([positional, named]) if x.requires_grad]
    total = sum(y.sum() for y in results)
    grads = torch.autograd.grad(total, inputs, allow_unused=True)
    missing = [tuple(x.shape) for x, g in zip(inputs, grads, strict=True) if g is None]
    assert not missing
    if batch == 0:
        assert not any(g.any() for g in grads)

"""LongShortAttention: one softmax over neighbours and projected keys, token by token in float64."""

from itertools import product

import pytest
import torch
from torch import Tensor

from ndlightnet.nn.mixers import ABCAttention, LongShortAttention

HEADS, SLOTS = 2, 3


def token_by_token(m: LongShortAttention, x: Tensor, mask: Tensor, causal: bool) -> Tensor:
    """Of each token the keys that it sees, one after the other, then the projected ones."""
    rows, size, window = [], x.shape[-1] // HEADS, m.windows(x.ndim - 2)
    places = list(product(*map(range, x.shape[1:-1])))
    for sample, real in zip(x, mask, strict=True):
        q, k, v = (
            {at: (proj.weight @ sample[at]).view(HEADS, size) for at in places}
            for proj in (m.q_proj, m.k_proj, m.v_proj)
        )
        logits = {at: (m.control.weight @ sample[at]).view(HEADS, SLOTS) for at in places}
        for at in places:
            seen = [j for j in places if real[j] and not (causal and j[0] > at[0])]
            if not seen:
                rows.append(x.new_zeros(x.shape[-1]))
                continue
            heads = []
            for h in range(HEADS):
                keys, values, scores = [], [], []
                for j in seen:
                    if all(abs(b - a) < w for a, b, w in zip(at, j, window, strict=True)):
                        keys.append(k[j][h])
                        values.append(v[j][h])
                        center = m.bias.shape[1] // 2
                        scores.append(sum(m.bias[h, center + b - a] for a, b in zip(at, j, strict=True)))
                for slot in range(SLOTS):
                    p = torch.stack([logits[j][h, slot] for j in seen]).softmax(0)
                    for ends, source in ((keys, k), (values, v)):
                        ends.append(sum(weight * source[j][h] for weight, j in zip(p, seen, strict=True)))
                    scores.append(x.new_zeros(()))
                weights = (torch.stack(scores) + torch.stack(keys) @ q[at][h] / size**0.5).softmax(0)
                heads.append(weights @ torch.stack(values))
            rows.append(m.o_proj.weight @ torch.cat(heads))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid, window", [((7,), 3), ((5, 6), 2), ((4, 3, 2), (2, 1, 3)), ((2, 2, 2, 3), 2)], ids=str)
def test_against_all_tokens(close, close_grads, grid, window, masked, causal):
    """Logits up to a hundred."""
    m = LongShortAttention(8, HEADS, window=window, slots=SLOTS).double()
    m.control.weight.data *= 100
    x = torch.randn(2, *grid, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, *grid) < 0.6 if masked else torch.ones(2, *grid, dtype=torch.bool)
    mask[:, 0] &= not masked  # nothing to see at first
    poisoned = torch.where(mask[..., None], x, torch.nan)
    y, expected = m(poisoned, mask=mask if masked else None, causal=causal), token_by_token(m, x, mask, causal)
    close(y[mask], expected[mask], 1e-12)
    close_grads(y[mask], expected[mask], [x, *m.parameters()], 1e-11)


def test_slots_without_a_neighbourhood_are_a_bounded_memory(close):
    """The cross form; and all of it where the neighbour is far behind in the softmax."""
    m, abc = LongShortAttention(8, HEADS, window=1, slots=SLOTS).double(), ABCAttention(8, HEADS, slots=SLOTS).double()
    abc.load_state_dict({key: value for key, value in m.state_dict().items() if key != "bias"})
    x, source = torch.randn(2, 6, 8).double(), torch.randn(2, 9, 8).double()
    mask = torch.rand(2, 9) < 0.7
    close(m(x, context=source, mask=mask), abc(x, context=source, mask=mask), 1e-12)
    torch.nn.init.constant_(m.bias, -1e4)
    for causal in (False, True):
        close(m(x, causal=causal), abc(x, causal=causal), 1e-12)


def test_a_cross_layer_has_gradients_of_all_parameters():
    """DDP waits for each, also for the biases of the neighbourhood, which another source has not."""
    m = LongShortAttention(8, HEADS, slots=SLOTS)
    m(torch.randn(2, 4, 8), context=torch.randn(2, 5, 8)).sum().backward()
    assert all(p.grad is not None for p in m.parameters()) and not m.bias.grad.any()

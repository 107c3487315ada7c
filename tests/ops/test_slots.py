"""Attention to the rows of a memory, against one softmax after the other in float64."""

import pytest
import torch
from torch import Tensor

from ndlightnet.ops.lightnet.slots import operator, read_slots_so_far
from ndlightnet.ops.lightnet.state import State

DIM, HEADS = 6, 2


def token_by_token(q: Tensor, logits: Tensor, rows: Tensor, frame: int, mask: Tensor) -> tuple[Tensor, Tensor]:
    values, totals = [], []
    for t in range(q.shape[1]):
        seen = (t // frame + 1) * frame
        hidden = ~mask[:, :seen, None, None]
        empty = hidden.all(1, keepdim=True)
        weights = logits[:, :seen].masked_fill(hidden & ~empty, -torch.inf).softmax(1).masked_fill(empty, 0)
        k, v = torch.einsum("blhm,blhd->bhmd", weights, rows[:, :seen]).chunk(2, -1)
        scores = torch.einsum("bhd,bhmd->bhm", q[:, t], k) / DIM**0.5
        values.append(torch.einsum("bhm,bhmd->bhd", scores.softmax(-1), v))
        totals.append(scores.logsumexp(-1).masked_fill(empty[:, 0, :, 0], -torch.inf))
    return torch.stack(values, 1), torch.stack(totals, 1)


def inputs(length: int, slots: int, scale: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = ((DIM, 1.0), (slots, scale), (2 * DIM, 1.0))
    draws = (factor * torch.randn(2, length, HEADS, size, dtype=dtype) for size, factor in sizes)
    return [x.requires_grad_() for x in draws]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1, 500])  # 500: a chunk's first weights are 0 beside its last ones
@pytest.mark.parametrize("frame, slots", [(1, 5), (2, 40), (2, 3)])  # the last in a state for each frame
def test_against_all_tokens(close, close_grads, frame, slots, scale, masked):
    """Also in two parts: the state carries the first one."""
    xs = inputs(150, slots, scale)
    mask = torch.rand(2, 150) < 0.7 if masked else torch.ones(2, 150, dtype=torch.bool)
    mask[0, :10] &= not masked
    first = State.empty(2, HEADS, slots, 2 * DIM, dtype=torch.float64)
    expected, total = token_by_token(*xs, frame, mask)
    padding = mask if masked else None
    y, score, last = read_slots_so_far(*xs, first, frame, padding)
    seen = total.isfinite()
    assert torch.equal(score.isfinite(), seen) and (bool(seen.all()) is not masked)
    close(y, expected, 1e-12)
    close(score[seen], total[seen], 1e-12)
    parts, state = [], first
    for piece in (slice(0, 70), slice(70, 150)):
        part = None if padding is None else padding[:, piece]
        *outputs, state = read_slots_so_far(*(x[:, piece] for x in xs), state, frame, part)
        parts.append(outputs)
    values, scores = (torch.cat(pair, 1) for pair in zip(*parts, strict=True))
    close(values, expected, 1e-12)
    close_grads((y, score[seen], values, scores[seen]), (expected, total[seen]) * 2, xs, 1e-10)
    for ours, theirs in zip(state, last, strict=True):
        close(ours, theirs, 1e-12)


def test_half_precision(close):
    """Sums are float32: errors are those of 16-bit inputs, which both have."""
    xs = [x.detach().bfloat16() for x in inputs(150, 8, 3)]
    first = State.empty(2, HEADS, 8, 2 * DIM)
    exact = token_by_token(*(x.double() for x in xs), 1, torch.ones(2, 150, dtype=torch.bool))
    for ours, theirs in zip(read_slots_so_far(*xs, first, 1), exact, strict=False):
        close(ours.double(), theirs, 1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_and_registration(size):
    q, k, v = (x[:1, :6] for x in inputs(6, 3, 2))
    v = v[..., :DIM]
    state = State(
        torch.zeros(1, HEADS, 3).double(), torch.rand(1, HEADS, 3).double(), torch.randn(1, HEADS, 3, DIM).double()
    )
    xs = [x.detach().requires_grad_() for x in (q, k, v, *state[1:])]
    assert torch.autograd.gradcheck(lambda q, k, v, *sums: operator(q, k, v, state.max, *sums, size), xs)
    torch.library.opcheck(operator.overload, (*xs[:3], state.max, *xs[3:], size))

"""MD-LRPE: scores see the offset vector between two tokens, on any number of axes, exactly."""

import itertools

import numpy as np
import pytest
import torch

from ndlightnet import Grid, ops

from . import framed
from .framed import angles

GRIDS = ((7,), (6, 1), (4, 6), (3, 4, 5), (2, 3, 2, 4))
grids = pytest.mark.parametrize("shape", GRIDS, ids=str)
kinds = pytest.mark.parametrize("kind", ["cosine", "rotary"])


def turn(x, angle):
    """Pairs (j, j + dim // 2) as complex numbers times e^(i angle); an odd last channel stays."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag, x[..., 2 * half :]], -1)


def sample(length, dim=9):
    """q, k, v"""
    return framed.sample((length,), dim)[:3]


def random_theta(slots, heads=2):
    return (3 * torch.rand(heads, slots, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("shape, dim", [((5,), 6), ((3, 4), 8), ((2, 3, 3), 9), ((2, 1, 3, 2), 8)])
def test_angles_are_the_oracles(oracle, float64, close, shape, dim):
    expected, _, _ = oracle.md_angles(shape, dim)
    cos, sin = ops.tables(ops.Position(ops.frequencies(dim, len(shape))[None], shape), dim, torch.float64)
    close(cos[:, 0], expected.cos(), 1e-6)  # frequencies are float32
    close(sin[:, 0], expected.sin(), 1e-6)


@pytest.mark.parametrize("slots, axes", [(8, 1), (8, 2), (9, 3), (7, 3), (5, 4), (4, 4)])
def test_every_axis_gets_the_same_bank(slots, axes):
    bank = ops.frequencies(slots, axes)
    assert bank.shape == (slots,) and bank.dtype == torch.float32
    width = -(-slots // axes)
    for part in torch.tensor_split(bank, axes):
        expected = 10000.0 ** (-2 * np.arange(len(part)) / width)
        np.testing.assert_allclose(part.numpy(), expected, rtol=1e-6)


@grids
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_cosine_kind_is_the_dense_sum(dense, close, close_grads, shape, causal, impl):
    length = Grid(shape).length
    q, k, v = sample(length)
    theta = random_theta(9)
    place = ops.Position(theta, shape)
    if causal:
        actual, _ = ops.causal_attention(q, k, v, position=place, impl=impl)
    else:
        actual = ops.global_attention(q, k, v, position=place, impl=impl)
    expected = dense(q, k, v, causal=causal, angles=angles(shape, theta))
    close(actual, expected, 1e-10)
    close_grads(actual, expected, (q, k, v, theta), 1e-9)


@grids
@pytest.mark.parametrize("dim", [8, 9])
def test_rotary_kind_turns_queries_and_normalised_keys(close, close_grads, shape, dim):
    """maths.md 5.7: the memory holds the cosine form; it reads as if p and SiLU(q) were rotated."""
    q, k, v = sample(Grid(shape).length, dim=dim)
    theta = random_theta(dim // 2)
    angle = angles(shape, theta)
    actual = ops.global_attention(q, k, v, position=ops.Position(theta, shape, "rotary"))
    phi, p = turn(q * q.sigmoid(), angle), turn(k.softmax(1), angle)
    expected = torch.einsum("bthd,bshd,bshe->bthe", phi, p, v)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, (q, k, v, theta), 1e-9)


@pytest.mark.parametrize("dim", [6, 7])
def test_rotate_is_a_rotation_of_pairs(close, dim):
    theta = random_theta(dim // 2).detach()
    x = torch.randn(2, 12, 2, dim, dtype=torch.float64)
    cos, sin = ops.tables(ops.Position(theta, (3, 4), "rotary"), dim, torch.float64)
    close(ops.rotate(x, cos, sin), turn(x, angles((3, 4), theta)), 1e-12)


def scores(shape, kind, start=None):
    """(target, source) scores of one and the same query and key everywhere, by one-hot values."""
    n = Grid(shape).length
    q, k = torch.linspace(-2, 3, 18, dtype=torch.float64).reshape(2, 9)
    theta = ops.frequencies(9 if kind == "cosine" else 4, len(shape))[None]
    ones = torch.ones(1, n, 1, 1, dtype=torch.float64)
    eye = torch.eye(n, dtype=torch.float64)[None, :, None]
    return ops.global_attention(q * ones, k * ones, eye, position=ops.Position(theta, shape, kind, 0, start))[0, :, 0]


@grids
@kinds
def test_scores_depend_on_the_offset_vector_and_on_every_axis(close, shape, kind):
    score, place = scores(shape, kind), Grid(shape).coordinates()
    offsets = {}
    for t, s in itertools.product(range(len(place)), repeat=2):
        offsets.setdefault(tuple((place[t] - place[s]).tolist()), []).append(score[t, s].item())
    for values in offsets.values():
        assert max(values) - min(values) < 1e-12
    zero = (0,) * len(shape)
    steps = [tuple(int(a == axis) for a in range(len(shape))) for axis in range(len(shape))]
    for step in offsets.keys() & {*steps}:
        assert abs(offsets[step][0] - offsets[zero][0]) > 1e-6
    moved = scores(shape, kind, tuple(range(5, 5 + len(shape))))
    close(moved, score, 1e-11)  # a start moves all tokens alike


@kinds
@pytest.mark.parametrize("at", [0, 1, 5, 64, 69, 70])
def test_start_places_a_segment(close, at, kind):
    q, k, v = sample(70)
    theta = random_theta(9 if kind == "cosine" else 4)
    expected, final = ops.causal_attention(q, k, v, position=ops.Position(theta, (70,), kind))
    state, outputs = None, []
    for part in (slice(0, at), slice(at, 70)):
        place = ops.Position(theta, (part.stop - part.start,), kind, offset=(torch.tensor(part.start),))
        y, state = ops.causal_attention(q[:, part], k[:, part], v[:, part], position=place, state=state)
        outputs.append(y)
    close(torch.cat(outputs, 1), expected, 1e-10)
    close(state.memory, final.memory, 1e-10)
    assert state.memory.shape[-2] == 18 and state.sum.shape[-1] == 9


def test_step_places_one_token(close):
    q, k, v = sample(20)
    theta = random_theta(9)
    expected, _ = ops.causal_attention(q, k, v, position=ops.Position(theta, (20,)))
    state, outputs = ops.State.empty(2, 2, 9, 3, rotated=True, dtype=torch.float64), []
    for t in range(20):
        place = ops.Position(theta, (1,), offset=(t,))
        y, state = ops.attention_step(q[:, t], k[:, t], v[:, t], state, position=place)
        outputs.append(y)
    close(torch.stack(outputs, 1), expected, 1e-10)


def test_prefix_tokens_have_no_position(dense, close):
    q, k, v = sample(2 + 12)
    theta = random_theta(9)
    place = ops.Position(theta, (3, 4), prefix=2)
    by_hand = angles((3, 4), theta, prefix=2)
    close(ops.global_attention(q, k, v, position=place), dense(q, k, v, angles=by_hand), 1e-10)
    for kind, slots in (("cosine", 9), ("rotary", 4)):
        cos, sin = ops.tables(ops.Position(random_theta(slots), (3, 4), kind, prefix=2), 9, torch.float64)
        assert (cos[:2] == 1).all() and (sin[:2] == 0).all() and sin[2:].any()


def test_a_source_on_another_grid(dense, close):
    """Queries of (2, 3) read a source of (4, 5): both lie in the same coordinates."""
    q, (_, k, v), theta = sample(6)[0], sample(20), random_theta(9)
    actual = ops.read(
        q, ops.summarize(k, v, position=ops.Position(theta, (4, 5))), position=ops.Position(theta, (2, 3))
    )
    close(actual, dense(q, k, v, angles=(angles((2, 3), theta), angles((4, 5), theta))), 1e-10)


@kinds
def test_angles_are_exact_far_out(kind):
    """A float32 angle at 10^6 is off by 0.03 radians (6e-8 * 10^6 / 2)."""
    slots = 9 if kind == "cosine" else 4
    theta = torch.rand(1, slots) * 3
    cos, sin = ops.tables(ops.Position(theta, (2, 3), kind, offset=(10**6, 10**6 - 7)), 9, torch.float32)
    angle = angles((2, 3), theta, start=[10**6, 10**6 - 7]).numpy()
    assert cos.dtype == torch.float32
    for table, expected in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert np.abs(table[..., :slots].numpy() - expected).max() < 1e-6


def test_errors_show_the_values():
    q, k, v = sample(16)
    with pytest.raises(ValueError, match=r"5 axes .* 4"):
        ops.global_attention(q, k, v, position=ops.Position(random_theta(4), (2, 2, 2, 2, 1), "rotary"))
    with pytest.raises(ValueError, match=r"10 axes .* 9"):
        ops.frequencies(9, 10)
    with pytest.raises(ValueError, match=r"kind='turning'"):
        ops.global_attention(q, k, v, position=ops.Position(random_theta(9), (16,), "turning"))
    with pytest.raises(ValueError, match=r"theta of shape \(2, 8\)"):
        ops.global_attention(q, k, v, position=ops.Position(random_theta(8), (16,)))

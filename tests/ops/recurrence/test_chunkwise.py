"""Gated linear attention and the delta rules: chunkwise against token by token, the oracles, and
what must not overflow."""

import pytest
import torch
from torch.nn.functional import normalize

from ndlightnet.ops.recurrence import chunks, delta, gated
from ndlightnet.ops.recurrence.chunks import _times, inverse, pieces, to_chunks
from ndlightnet.ops.recurrence.delta import gated_delta_rule
from ndlightnet.ops.recurrence.gated import gated_linear_attention

from ..largest_tensor import LargestTensor

LENGTHS = [1, 64, 65, 131]
DECAYS = ["none", "scalar", "row"]


def given(n, decay, dtype=torch.float64, dim=6, wide=5):
    """q, k of length 1, v, beta to 2, log decay (0 to -3), memory."""
    q, k = torch.randn(2, 2, n, 2, dim, dtype=dtype)
    v, beta = torch.randn(2, n, 2, wide, dtype=dtype), 2 * torch.rand(2, n, 2, dtype=dtype)
    rows = {"none": 0, "scalar": 1, "row": dim}[decay]
    log = -3 * torch.rand(2, n, 2, rows, dtype=dtype) if rows else None
    m = torch.randn(2, 2, dim, wide, dtype=dtype)
    xs = [q, normalize(k, dim=-1), v, beta, log, m]
    return [None if x is None else x.requires_grad_() for x in xs]


def run(rule, q, k, v, beta, log, m, **how):
    if rule == "gated":
        return gated_linear_attention(q, k, v, log, m, **how)
    return gated_delta_rule(q, k, v, beta, log, m, **how)


def used(rule, inputs):
    return [x for i, x in enumerate(inputs) if x is not None and (rule == "delta" or i != 3)]


rules = pytest.mark.parametrize("rule", ["gated", "delta"])
decays = pytest.mark.parametrize("decay", DECAYS)


@rules
@decays
@pytest.mark.parametrize("n", LENGTHS)
def test_chunkwise_is_token_by_token(close, close_grads, rule, decay, n):
    """With the first memory, the last one, and all gradients, by the explicit backward."""
    inputs = given(n, decay)
    ours, theirs = run(rule, *inputs), run(rule, *inputs, impl="reference")
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-11)
    close_grads(ours, theirs, used(rule, inputs), 1e-11)


@rules
@decays
@pytest.mark.parametrize("chunk", [1, 2, 16, 64])
def test_the_size_of_a_chunk_does_not_matter(close, monkeypatch, rule, decay, chunk):
    inputs = given(70, decay)
    expected = run(rule, *inputs)
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    for a, b in zip(run(rule, *inputs), expected, strict=True):
        close(a, b, 1e-11)


@rules
@decays
def test_pieces_are_one_sequence(close, close_grads, monkeypatch, rule, decay):
    """Three pieces of whole chunks, and behind them one of 16 tokens and one of 3."""
    monkeypatch.setattr(chunks, "SEGMENT", 4 * 64**2)
    monkeypatch.setattr(chunks, "PIECE", 4 * 64)
    inputs = given(3 * 64 + 19, decay)
    assert lengths(2, inputs[2], inputs[5]) == [64, 64, 64, 16, 3]
    ours, theirs = run(rule, *inputs), run(rule, *inputs, impl="reference")
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-11)
    close_grads(ours, theirs, used(rule, inputs), 1e-11)


def lengths(batch, v, memory):
    """Of the pieces of so many samples."""
    cut = pieces(v[:1].expand(batch, -1, -1, -1), memory[:1].expand(batch, -1, -1, -1))
    return [piece.stop - piece.start for piece in cut]


def test_pieces_waste_little_and_fit_a_cache():
    """Tokens that are computed, over those that there are: at most 1.6 in a large batch, where they decide."""
    memory = torch.zeros(1, 4, 64, 64)
    for n in [*range(14, 200), 1000]:
        v = torch.zeros(1, n, 4, 64)
        computed = [to_chunks(v[:, :m], v.dtype).shape[1:3].numel() for m in lengths(32, v, memory)]
        assert n <= sum(computed) <= 1.6 * n
    assert [to_chunks(torch.zeros(1, n, 1, 1), v.dtype).shape[2] for n in (1, 2, 3, 16, 17, 65)] == [
        1,
        2,
        4,
        16,
        32,
        64,
    ]
    long = torch.zeros(1, 1025, 4, 64)
    assert lengths(1, long, memory) == [512, 512, 1]
    assert lengths(1, long.to("meta"), memory) == [1025]


@rules
def test_a_long_sequence_makes_no_tensor_larger_than_its_tokens(rule):
    q, k, v, beta, log, _ = (None if x is None else x.detach() for x in given(4096, "row", torch.float32, 64, 64))
    q.requires_grad_()
    with LargestTensor() as made:
        y, _ = run(rule, q, k, v, beta, log, None)
        y.sum().backward()
    assert made.numel == v.numel()


@rules
@pytest.mark.parametrize("depth", [0.0, 1.0, 40.0, 1e4])
def test_deep_decays_stay_finite_and_right_in_float32(close, rule, depth):
    """Errors are those of rounding: some 64 terms a score, 6e-8 each. Decays are floored at -30,
    whose weight float32 keeps only beside smaller ones."""
    inputs = [None if x is None else x.detach() for x in given(131, "row")]
    inputs[4] = -depth * torch.rand_like(inputs[4])
    exact = run(rule, *inputs, impl="reference")
    small = [x.float().requires_grad_() for x in inputs]
    ours = run(rule, *small)
    for a, b in zip(ours, exact, strict=True):
        close(a.double(), b, 1e-5)
    grads = torch.autograd.grad(ours[0].square().sum() + ours[1].sum(), used(rule, small))
    assert all(g.isfinite().all() for g in grads)


def test_inverse_of_a_triangle_is_stable(close):
    """Equal keys and beta = 2: the powers of the triangle reach 1e18, its inverse does not exceed 2."""
    lower = torch.randn(3, 64, 64, dtype=torch.float64).tril(-1) / 8
    eye = torch.eye(64, dtype=torch.float64)
    close(inverse(lower) @ (eye + lower), eye.expand(3, -1, -1), 1e-12)
    worst = 2 * torch.ones(64, 64).tril(-1)
    expected = torch.linalg.inv(eye + worst.double())
    close(inverse(worst).double(), expected, 1e-5)


def test_against_the_oracle(load_oracle, close, float64):
    """The verified recurrence of one head of Kimi Delta Attention."""
    oracle = load_oracle("verify_delta_kda")
    q, k, v, beta, log, m = (x.detach() for x in given(70, "row"))
    y, last = gated_delta_rule(q, k, v, beta, log, m)
    for b in range(2):
        for h in range(2):
            theirs = oracle.kda_recurrent(*(x[b, :, h] for x in (q, k, v, beta, log)), m[b, h])
            close(y[b, :, h], theirs[0], 1e-11)
            close(last[b, h], theirs[1], 1e-11)


def test_errors_show_the_shapes():
    q, k, v, beta, log, m = given(5, "row")
    with pytest.raises(ValueError, match=r"q \(2, 5, 2, 6\), k \(2, 4, 2, 6\).*expected"):
        gated_linear_attention(q, k[:, 1:], v)
    with pytest.raises(ValueError, match=r"log_decay \(2, 5, 2, 3\): expected"):
        gated_linear_attention(q, k, v, log[..., :3])
    with pytest.raises(ValueError, match=r"state \(2, 2, 6\): expected"):
        gated_linear_attention(q, k, v, log, m[..., 0])
    with pytest.raises(ValueError, match=r"beta \(2, 5\): expected"):
        gated_delta_rule(q, k, v, beta[..., 0], log, m)
    with pytest.raises(ValueError, match=r"impl='triton': expected"):
        gated_linear_attention(q, k, v, impl="triton")
    with pytest.raises(ValueError, match=r"impl='fla': no gated_delta_rule for tensors on cpu"):
        gated_delta_rule(q, k, v, beta, impl="fla")


@rules
@decays
def test_products_in_sixteen_bits(monkeypatch, rule, decay):
    """As on a card: 2^-9 a rounding, up to eight in a row, twice that; decays and memories stay in float32."""
    for module in (gated, delta):
        monkeypatch.setattr(module, "work_dtype", lambda v: v.dtype)
    inputs = given(131, decay)
    small = [
        x if x is None else x.detach().to(torch.float32 if i > 2 else torch.bfloat16) for i, x in enumerate(inputs)
    ]
    small = [x if x is None else x.requires_grad_() for x in small]
    exact = [x if x is None else x.detach().double().requires_grad_() for x in small]
    ours, theirs = run(rule, *small), run(rule, *exact, impl="reference")
    assert ours[0].dtype == torch.bfloat16 and ours[1].dtype == torch.float32
    pulls = [torch.randn_like(x) for x in theirs]
    grads = torch.autograd.grad(ours, used(rule, small), [p.to(y.dtype) for p, y in zip(pulls, ours, strict=True)])
    expected = torch.autograd.grad(theirs, used(rule, exact), pulls)
    for a, b in zip((*ours, *grads), (*theirs, *expected), strict=True):
        assert (a.double() - b).norm() < 8 * 2**-8 * b.norm()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_products_of_16_bits_are_rounded_once(size):
    """However small the matrices are: products rounded before the sum show where they cancel."""
    a, b = torch.randn(500, size, 64).bfloat16(), torch.randn(500, 64, size).bfloat16()
    out, exact = _times(a, b), a.double() @ b.double()
    single = 64 * 2.0**-24 * (a.double().abs() @ b.double().abs())  # the sum in float32
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + single).all()

"""The causal form, and one token at a time: values, gradients and States against float64."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops import Position, State, attention_step, axis_causal_attention, causal_attention, summarize
from ndlightnet_kernels import attention, causal, causal_backward

from .kernel_cases import BRAIN, CASES, DEVICE, FULL, HALF, LOGITS, Case, Problem, in_order, on_gpu
from .yardstick import check


@pytest.mark.slow
@pytest.mark.parametrize("case", [in_order(c) for i, c in enumerate(CASES) if i not in (0, 2, 11, 12)], ids=str)
def test_values_and_gradients(case):
    check(case, "causal")


LINE = Case((1,), 5, 3, past=True, batch=1, heads=1)
TURNED = LINE._replace(dim=16, value_dim=16, kind="cosine")


@pytest.mark.parametrize(
    "case",
    [
        *(LINE._replace(shape=(n,)) for n in (32, 33)),
        Case((150,), 5, 3, mask="late", logits="wide", batch=1, heads=1),  # several programs
        *on_gpu(*(TURNED._replace(shape=(n,)) for n in (1, 15, 16, 17, 63, 64, 65, 129, 200))),
        *on_gpu(*(LINE._replace(shape=(n,), dtype=BRAIN) for n in (63, 64, 65, 129, 600))),
    ],
    ids=str,
)
def test_lengths_around_the_edges_of_chunks(case):
    check(case, "causal")


@pytest.mark.parametrize(
    "case",
    [Case((37,), 5, 3, mask="holes", past=True, heads=1), Case((20,), 5, 3, "cosine", dtype=BRAIN, batch=1, heads=1)],
    ids=str,
)
def test_a_state_carried_from_part_to_part(case):
    check(case, "segments")


def test_a_state_does_not_depend_on_the_dtype_of_queries():
    q, k, v = (torch.randn(1, 20, 1, 5, device=DEVICE) for _ in "qkv")
    states = [causal_attention(x, k, v, impl="triton")[1] for x in (q, q.to(BRAIN))]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize(
    "case", [Case((9,), 5, 3, past=True, heads=1), Case((5,), 16, 16, "cosine", dtype=BRAIN)], ids=str
)
def test_token_by_token(case):
    check(case, "steps", grads=False)


ROW = Case((38,), 5, 3, batch=1, heads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(ROW._replace(logits=name) for name in ("up", "climb", "holes")),
        *(ROW._replace(logits=name, past=True) for name in ("wide", "offset", "jumps")),
        *on_gpu(*(ROW._replace(kind="cosine", logits=name, dtype=HALF) for name in LOGITS)),
        # several rows: where one token's gradient is all that counts, the error of one row is luck
        *on_gpu(*(Case((600,), 5, 3, logits=name, dtype=BRAIN) for name in LOGITS)),
        *on_gpu(*(Case((200,), 64, 64, logits=n, dtype=BRAIN) for n in ("wide", "jumps"))),
    ],
    ids=str,
)
def test_extreme_logits(case):
    """Jumps lie within chunks; a first State is as high as the first token."""
    check(case, "causal")


FADED = Case((70,), 5, 3, past=True, batch=1, heads=1, forget=0.3)


@pytest.mark.parametrize(
    "case",
    [
        FADED._replace(heads=2, forget=(0.0, 0.02), mask="holes"),
        Case((65,), 6, 4, "cosine", "right", BRAIN, start=(5,), batch=1, heads=1, forget=0.5),
        FADED._replace(forget=2.0),  # too steep for one anchor: by the careful form
    ],
    ids=str,
)
def test_decay(case):
    check(case, "causal")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        FADED._replace(shape=(260,), mask="late", logits="wide", past=False),
        FADED._replace(dtype=HALF, mask="left"),
        FADED._replace(batch=2, heads=2, forget=(0.5, 5.0), mask="left"),  # whole rows
        *(FADED._replace(shape=(38,), logits=n) for n in ("offset", "up", "jumps", "holes")),
        FADED._replace(shape=(38,), logits="climb", forget=2.0),
        *on_gpu(
            *(
                Case((600,), 64, 64, kind, dtype=dtype, past=True, heads=2, forget=(0.02, f))
                for kind in (None, "cosine")
                for dtype in (BRAIN, HALF, torch.float32)
                for f in (0.0, 0.7, 3.0)
            )
        ),
        *on_gpu(*(Case((600,), 24, 40, logits=n, dtype=BRAIN, forget=0.2) for n in LOGITS)),
        *on_gpu(
            *(
                Case((300,), dim, dim, mask="holes", dtype=BRAIN, forget=0.2, heads=3)
                for dim in (16, 32, 48, 128, 192, 256)
            )
        ),
        *on_gpu(Case((300,), 64, 64, dtype=BRAIN, batch=32, heads=12, forget=0.1)),
    ],
    ids=str,
)
def test_decay_of_other_kinds(case):
    check(case, "causal")


@pytest.mark.parametrize("length, window", [(40, None), (9, 3)])
def test_a_strong_decay_is_a_window_of_one(length, window):
    """With padding and a State before, and gradients."""
    q, k, v = (torch.randn(1, length, 2, 5, device=DEVICE, requires_grad=True) for _ in "qkv")
    mask = torch.rand(1, length, device=DEVICE) < 0.8
    forget = torch.tensor([1e6, 3e38], device=DEVICE)
    options = {"mask": mask, "return_state": True}
    past = axis_causal_attention(q, k, v, length, window=window, impl="torch", **options)[1]
    past = State(*(x.detach() for x in past))
    decays = {"window": window, "forget": forget, "state": past, "impl": "triton"}
    y, state = axis_causal_attention(q, k, v, length, **decays, **options)
    assert all(x.isfinite().all() for x in state[1:])
    alone, _ = axis_causal_attention(q, k, v, length, window=1, impl="torch", **options)
    pull = torch.randn_like(y) * mask[..., None, None]
    torch.testing.assert_close(y * mask[..., None, None], alone * mask[..., None, None])
    grads = (grad(x, (q, k, v), pull) for x in (y, alone))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_decay_from_part_to_part():
    check(FADED._replace(shape=(37,), mask="holes"), "segments")


@pytest.mark.slow
def test_decay_over_many_segments(monkeypatch):
    """Of several parts each, the last of them empty."""
    for module in (causal, causal_backward):
        monkeypatch.setattr(module, "plan_segments", lambda k, *_: (-(-k.shape[1] // 128), 128))
    monkeypatch.setattr(attention, "split_count", lambda *_: 3)
    check(FADED._replace(shape=(64 * 19 - 5,), forget=0.01), "causal")
    check(FADED._replace(shape=(400,), forget=0.5, mask="left", logits="down"), "causal")


@pytest.mark.gpu
@pytest.mark.parametrize("forget", [0.02, 0.5])
def test_decay_does_not_drift(forget):
    """At 131,072 tokens the error is that of 4,096, in units of float32."""
    q, k, v = (torch.randn(1, 2**17, 2, 64, device=DEVICE) for _ in "qkv")
    out = causal_attention(q, k, v, forget=forget, impl="triton")[0]
    exact = causal_attention(*(x.double() for x in (q, k, v)), forget=forget, impl="torch")[0]
    error = (out - exact).abs().amax((0, 2, 3)).unflatten(0, (32, -1)).amax(1)
    assert error.max() < 1e-5 * exact.abs().max() and error[-1] < 2 * error[:4].max()


MANY = Case((70,), 5, 3)  # rows enough for every program to have a whole one
CROWD = Case((300,), 64, 64, dtype=BRAIN, batch=32, heads=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        MANY._replace(mask="left", past=True),
        MANY._replace(mask="holes", kind="cosine"),
        *(MANY._replace(logits=name) for name in ("climb", "leap", "jumps")),
        *on_gpu(*(MANY._replace(shape=(200,), logits=n, heads=120, dtype=HALF) for n in LOGITS)),
        *on_gpu(CROWD, CROWD._replace(mask="right", past=True), CROWD._replace(logits="jumps")),
    ],
    ids=str,
)
def test_as_many_rows_as_programs(case):
    check(case, "causal")


@pytest.mark.parametrize("batch", [1, 4])
def test_gradients_of_the_output_alone(close_grads, batch):
    """Nothing comes before or after the tokens; four rows fill the interpreter's card."""
    problem = Problem.random(Case((70,), 5, 3, batch=batch, heads=1))
    leaves = [problem.leaves[name].requires_grad_() for name in "qkv"]
    ours, exact = (causal_attention(*leaves, impl=impl)[0] for impl in ("triton", "torch"))
    close_grads(ours, exact, leaves, 2e-6)


def test_padding_in_front_of_tokens_that_have_a_past(close, close_grads):
    """Rows without a token of their own, in channels beyond the head's too, which have no past."""
    problem = Problem.random(Case((70,), 5, 3, mask="left", past=True, batch=1, heads=1))
    problem.top.zero_()  # so the padding is within reach of the first State
    leaves = [problem.leaves[name].requires_grad_() for name in "qkv"]
    past = State(problem.top, problem.leaves["sum"] + 1, problem.leaves["memory"])
    ours, exact = (
        causal_attention(*leaves, mask=problem.mask, state=past, impl=impl)[0] for impl in ("triton", "torch")
    )
    close(ours, exact, 2e-6)
    close_grads(ours, exact, leaves, 2e-6)


@pytest.mark.slow
def test_more_segments_than_are_joined_at_once(monkeypatch):
    for module in (causal, causal_backward):
        monkeypatch.setattr(module, "plan_segments", lambda k, *_: (-(-k.shape[1] // 64), 64))
    check(Case((64 * 33 - 5,), 5, 3, past=True, batch=1, heads=1), "causal")


@pytest.mark.slow
def test_segments_summarised_in_pieces(monkeypatch):
    """Three for the four tiles of a segment: the last one is empty. What it holds must not count
    beside logits that lie far below 0."""
    for module in (causal, causal_backward):
        monkeypatch.setattr(module, "plan_segments", lambda k, *_: (-(-k.shape[1] // 128), 128))
    monkeypatch.setattr(attention, "split_count", lambda *_: 3)
    check(Case((400,), 5, 3, mask="left", logits="down", batch=1, heads=1), "causal")
    check(Case((400,), 5, 3, mask="holes", past=True, batch=1, heads=1), "causal")


def test_later_tokens_get_a_gradient_of_exactly_zero():
    problem = Problem.random(Case((35,), 5, 3, batch=1, heads=1))
    q, k, v = (x.requires_grad_() for x in problem.leaves.values())
    out, _ = causal_attention(q, k, v, impl="triton")
    for t in (0, 15, 32):
        grads = grad(out[:, t].square().sum(), (q, k, v), retain_graph=True)
        for name, x in zip("qkv", grads, strict=True):
            assert not x[:, t + 1 :].any()
            assert x[:, t].any() or (name, t) == ("k", 0)  # the first key weighs 1 in any case


@pytest.mark.gpu
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_size(case):
    check(case, "causal", full=True)


@pytest.mark.gpu
def test_one_long_text():
    case = Case((2**18,), 64, 64, "cosine", dtype=BRAIN, past=True, batch=1, heads=8)
    check(case, "causal", full=True, grads=False)


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    """As nine samples and as one: the last 1000 rows against float64, from a State before them."""
    batch, length, heads, dim = 9, 2**18, 16, 64
    assert batch * length * heads * dim > 2**31
    q, k, v = (torch.randn(batch, length, heads, dim, dtype=BRAIN, device=DEVICE) for _ in range(3))
    for first in (8, 0):
        x, y, z = (t if first else t.reshape(1, -1, heads, dim) for t in (q, k, v))
        out = causal_attention(x, y, z, impl="triton")[0].flatten(0, 1)[-1000:, -1:]
        x, y, z = (t[first:].reshape(1, -1, heads, dim)[:, :, -1:].double() for t in (q, k, v))
        past = summarize(y[:, :-1000], z[:, :-1000], impl="torch")
        last = (t[:, -1000:] for t in (x, y, z))
        expected = causal_attention(*last, state=past, impl="torch")[0][0]
        error = (out - expected).square().mean().sqrt()
        assert error <= 2 * torch.finfo(BRAIN).eps * expected.square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_a_step_of_many_heads(dim):
    """Against the causal form of one token in float64, at the size of decoding."""
    q, k, v = (torch.randn(64, 12, dim, dtype=BRAIN, device=DEVICE) for _ in range(3))
    theta = torch.rand(12, dim, device=DEVICE)
    before = State(
        torch.randn(64, 12, dim, device=DEVICE),
        1 + torch.rand(64, 12, dim, device=DEVICE),
        torch.randn(64, 12, 2 * dim, dim, device=DEVICE),
    )
    at = torch.tensor(12345, device=DEVICE)
    out, after = attention_step(q, k, v, before, position=Position(theta, (1,), offset=(at,)), impl="triton")
    place = Position(theta.double(), (1,), offset=(at,))
    exact = (x.double() for x in (q, k, v))
    y, state = attention_step(*exact, State(*(x.double() for x in before)), position=place, impl="torch")
    assert torch.equal(after.max.double(), state.max)
    for a, b, unit in (
        (out, y, torch.finfo(BRAIN).eps / 2),
        (after.sum, state.sum, 1e-6),
        (after.memory, state.memory, 1e-6),
    ):
        assert (a - b).square().mean().sqrt() <= 2 * unit * b.square().mean().sqrt()


def least_exact() -> torch.Tensor:
    """A logit in bfloat16 whose exponential lies as far as any from those that bfloat16 has."""
    logits = torch.linspace(-0.69, 0, 2000).to(BRAIN)
    p = logits.double().exp()
    return logits[((p.to(BRAIN).double() - p) / p).abs().argmax()]


def stored(x: torch.Tensor) -> torch.Tensor:
    """Numbers as a kernel stores them in bfloat16: rounded by a card, cut off by the interpreter."""
    if DEVICE.type == "cuda":
        return x.to(BRAIN).double()
    return (x.float().view(torch.int32) & -0x10000).view(torch.float32).double()


def test_sums_are_of_the_weights_that_the_products_see():
    """Keys are exp(k) rounded to bfloat16, and so are those in the sums. Otherwise all outputs are off by
    the rounding of one number, up to 0.39 %, where the roundings of different queries cancel.

    The first token lies so far below the others that only the careful form serves it. Chunks are of 32
    tokens; the interpreter rounds in products alone, and would not round the sums of a State.
    """
    length, heads, dim = 256 if DEVICE.type == "cuda" else 32, 16, 16
    q = torch.randn(1, length, heads, dim, device=DEVICE).to(BRAIN)
    far = torch.rand(q.shape, device=DEVICE) < 0.3  # so that no two sums are rounded alike
    k = torch.where(far, -64, least_exact().to(DEVICE))
    k[:, 0], k[:, 1] = -64, 0
    out, _ = causal_attention(q, k, torch.ones_like(q), impl="triton")
    expected = stored(torch.nn.functional.silu(q.double()).sum(-1, keepdim=True).expand_as(q))
    later = slice(length // 2, length)  # of many tokens of that logit
    a, b = out.double()[:, later].flatten(), expected[:, later].flatten()
    ratio = (a @ b) / (b @ b)
    assert abs(ratio - 1) < 1.5e-3, f"weights add up to {ratio:.5f}"

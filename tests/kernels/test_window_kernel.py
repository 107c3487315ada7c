"""Windows over single tokens: values, gradients and States against float64."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops import axis_causal_attention
from ndlightnet.ops.lightnet import _triton_window
from ndlightnet_kernels.position import NO_POSITION

from .kernel_cases import BRAIN, DEVICE, HALF, LOGITS, Case, on_gpu
from .test_kernel_operators import CHECKS
from .yardstick import check

LINE = Case((70,), 5, 3, batch=1, heads=1, window=3)


@pytest.mark.parametrize(
    "case",
    [
        LINE._replace(shape=(5,), window=4),
        LINE._replace(window=33, mask="holes", forget=0.3),
        LINE._replace(shape=(33,), window=20, dtype=HALF, mask="left"),
        Case((70,), 6, 4, "cosine", "right", BRAIN, start=(5,), batch=1, window=30, forget=(0.3, 0.0)),
    ],
    ids=str,
)
def test_values_and_gradients(case):
    check(case, "frames")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        LINE._replace(window=1),
        LINE._replace(shape=(66,), window=32, forget=4.0),
        LINE._replace(shape=(40,), window=12, past=True),
        LINE._replace(shape=(8,), window=12, past=True),  # fewer tokens than a State has
        LINE._replace(shape=(71,), window=69, dtype=BRAIN, mask="late"),
        *(LINE._replace(shape=(40,), window=9, logits=n) for n in ("wide", "up", "jumps", "holes")),
        LINE._replace(shape=(75,), window=50, kind="cosine", logits="wide", dtype=BRAIN, forget=0.5),
        # a last chunk that only part of the careful form's chunks reach
        LINE._replace(kind="cosine", dtype=BRAIN, logits="up", window=9),
        *on_gpu(
            *(
                Case((150,), dim, dim, kind, "holes", BRAIN, batch=1, window=40, forget=0.02)
                for dim in (16, 32, 48, 64, 128, 192, 256)
                for kind in (None, "cosine")
            )
        ),
        *on_gpu(
            *(
                Case((150,), dim, dim, "cosine", None, dtype, batch=1, window=37)
                for dim in (24, 64, 128)
                for dtype in (HALF, torch.float32)
            )
        ),
        *on_gpu(
            *(
                Case((140,), 64, 64, kind, logits=n, dtype=dtype, batch=1, window=40, forget=(0.0, 0.3))
                for n in LOGITS
                for kind, dtype in (("cosine", BRAIN), (None, torch.float32))
            )
        ),
    ],
    ids=str,
)
def test_other_cases(case):
    check(case, "frames")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [64, 512])
def test_full_size(window):
    """Against float64, of one sample and head: a few roundings of the inputs' dtype."""
    leaves = [torch.randn(4, 16384, 12, 64, dtype=BRAIN, device=DEVICE) for _ in "qkvg"]
    *leaves, pull = (x.requires_grad_(i < 3) for i, x in enumerate(leaves))
    exact = [x[-1:, :, -1:].detach().double().requires_grad_() for x in leaves]
    results = []
    for inputs, g in ((leaves, pull), (exact, pull[-1:, :, -1:].double())):
        out, _ = axis_causal_attention(*inputs, 16384, window=window, return_state=False)
        results.append([out.detach(), *grad(out, inputs, g)])
    for x, y in zip(*results, strict=True):
        error = (x[-1:, :, -1:] - y).square().mean().sqrt()
        assert error <= 4 * torch.finfo(BRAIN).eps * y.square().mean().sqrt()


@pytest.mark.slow
def test_opcheck():
    """Schema, fake implementation, autograd and dynamic shapes."""
    q, k, v = (torch.randn(1, 9, 2, 5, device=DEVICE, requires_grad=True) for _ in "qkv")
    forget = torch.tensor([0.1, 0.0], device=DEVICE)
    given = (q, k, v, None, forget, 4, *NO_POSITION)
    operator = torch.ops.ndlightnet.window_attention.default
    torch.library.opcheck(operator, given, test_utils=CHECKS)
    _, top, flag = _triton_window.window_operator(*given)
    plain = [x.detach() for x in (q, k, v)]
    given = (*plain, None, forget, top, flag, torch.randn_like(plain[2]), 4, False, *NO_POSITION)
    operator = torch.ops.ndlightnet.window_attention_backward.default
    torch.library.opcheck(operator, given, test_utils=CHECKS)


@pytest.mark.slow
def test_compile_without_a_graph_break(close, close_grads):
    torch._dynamo.reset()

    def function(q, k, v):
        return axis_causal_attention(q, k, v, q.shape[1], window=4, forget=0.1, return_state=False, impl="triton")[0]

    backend = "aot_eager" if DEVICE.type == "cpu" else "inductor"
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for length in (9, 40):
        leaves = [torch.randn(1, length, 1, 8, device=DEVICE, requires_grad=True) for _ in "qkv"]
        actual, expected = compiled(*leaves), function(*leaves)
        close(actual, expected, 1e-5)
        close_grads(actual, expected, leaves, 1e-5)


@pytest.mark.parametrize("steep", [False, True])
@pytest.mark.parametrize("window", [2, 34])
def test_the_oldest_token_of_a_window(close, close_grads, dense, window, steep):
    """Chunks are of 32 tokens. steep: logits that only the careful form can sum."""
    length = 70
    q, k, v = (torch.randn(1, length, 1, 3, device=DEVICE) for _ in "qkv")
    if steep:
        k = k + 70 * torch.randint(2, k.shape, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = axis_causal_attention(*leaves, length, window=window, return_state=False, impl="triton")
    token = torch.arange(length, device=DEVICE)
    age = token[:, None] - token
    see = ((age >= 0) & (age < window)).double()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = dense(*exact, see=see)
    close(out.double(), expected, 1e-5)
    close_grads(out, expected, leaves, 1e-5, exact)

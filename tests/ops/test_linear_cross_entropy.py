"""The chunked cross-entropy of a linear head: torch's, value and gradients, from fewer saved bytes."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from ndlightnet.ops import linear_cross_entropy as module
from ndlightnet.ops.linear_cross_entropy import linear_cross_entropy

CLASSES, DIM = 11, 6


@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr(module, "MOST", 4 * CLASSES)
    monkeypatch.setattr(module, "LEAST", 1)


def drawn(dtype=torch.float32, tokens=(3, 5), bias=True):
    x, weight, b = (torch.randn(*shape, dtype=dtype) for shape in ((*tokens, DIM), (CLASSES, DIM), (CLASSES,)))
    target = torch.randint(CLASSES, tokens)
    return [y.requires_grad_() for y in ((x, weight, b) if bias else (x, weight))], target


def both(inputs, target, factor=1.0):
    """Value and gradients of ours and of torch's."""
    x, weight, *bias = inputs
    ours = linear_cross_entropy(x, weight, target, *bias)
    logits = linear(x, weight, *bias)
    exact = torch.promote_types(logits.dtype, torch.float32)
    plain = cross_entropy(logits.to(exact).flatten(0, -2), target.flatten())
    return [(loss, *torch.autograd.grad(factor * loss, inputs)) for loss in (ours, plain)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torchs(chunks_of_four, dtype, bias):
    """Of fifteen tokens, some of which do not count: three whole chunks and a rest."""
    inputs, target = drawn(dtype, bias=bias)
    torch.testing.assert_close(*both(inputs, target, 3.0))
    target[0, 2:] = target[2, 1] = -100
    torch.testing.assert_close(*both(inputs, target))
    target[:] = -100
    ours, plain = both(inputs, target)
    assert ours[0].isnan() and plain[0].isnan()


def test_one_token_and_the_head_alone(chunks_of_four):
    inputs, target = drawn(tokens=(1,))
    torch.testing.assert_close(*both(inputs, target))
    x, weight, bias = inputs
    loss = linear_cross_entropy(x.detach(), weight, target, bias.detach())
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(grad, both(inputs, target)[1][2])
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, target, bias).requires_grad


@pytest.mark.parametrize("kind, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_under_autocast_it_is_a_linear_layers(chunks_of_four, kind, tolerance):
    inputs, target = drawn()
    with torch.autocast("cpu", kind):
        ours, plain = both(inputs, target)
    assert [y.dtype for y in ours] == [torch.float32] * 4
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1:], plain[1:], rtol=tolerance, atol=tolerance / 10)


def test_small_gradients_of_many_tokens_stay_in_float16(monkeypatch):
    """Those of the mean are below float16's least number until a loss scale multiplies them."""
    x, weight = torch.randn(4096, DIM).requires_grad_(), torch.randn(CLASSES, DIM).div(1e3).requires_grad_()
    target = torch.randint(CLASSES, (4096,))
    exact = torch.autograd.grad(cross_entropy(linear(x, weight), target), x)[0]
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(x, weight, target)
    scaled = torch.autograd.grad(2.0**16 * loss, x)[0] / 2**16
    torch.testing.assert_close(scaled, exact, rtol=2e-2, atol=1e-9)


def test_sums_over_many_tokens_stay_in_float16():
    """Here -128,000, of which the mean is -6.4."""
    x, weight = torch.full((20_000, DIM), 8.0), torch.zeros(5, DIM).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = linear_cross_entropy(x, weight, torch.zeros(20_000, dtype=torch.int64))
    (actual,) = torch.autograd.grad(loss, weight)
    expected = torch.tensor([-6.4, 1.6, 1.6, 1.6, 1.6])[:, None].expand(5, DIM)
    torch.testing.assert_close(actual, expected, rtol=4e-3, atol=0)


def test_a_token_without_a_batch_and_tensors_without_numbers():
    (x, weight, bias), target = drawn(tokens=())
    torch.testing.assert_close(*both((x[None], weight, bias), target[None]))
    batch = linear_cross_entropy(x[None], weight, target[None], bias)
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, bias), batch)
    assert linear_cross_entropy(x.to("meta"), weight.to("meta"), target.to("meta")).shape == ()


def saved_bytes(function) -> int:
    """Bytes of the tensors that a forward saves, parameters included."""
    saved = {}

    def keep(y):
        saved[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        loss = function()
    assert loss.requires_grad
    return sum(saved.values())


def test_no_logits_are_saved():
    """Of 4,096 tokens and 4,000 words: the gradients of the inputs and a number, where torch's saves 32 kB a token."""
    tokens, words, dim = 4096, 4000, 8
    x, weight = torch.randn(tokens, dim).requires_grad_(), torch.randn(words, dim).requires_grad_()
    target = torch.randint(words, (tokens,))
    assert saved_bytes(lambda: linear_cross_entropy(x, weight, target)) == 4 * dim * (tokens + words) + 8
    assert saved_bytes(lambda: cross_entropy(linear(x, weight), target)) > 4 * words * tokens


def test_only_a_chunk_of_logits_exists(chunks_of_four, monkeypatch):
    rows = []
    monkeypatch.setattr(module, "linear", lambda x, *rest: rows.append(len(x)) or linear(x, *rest))
    (x, weight, bias), target = drawn(tokens=(15,))
    linear_cross_entropy(x, weight, target, bias)
    assert rows == [4, 4, 4, 3]


def test_compiled_it_is_one_graph(chunks_of_four):
    inputs, target = drawn()
    x, weight, bias = inputs
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(x, weight, target, bias)
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, inputs)), both(inputs, target)[1])


def test_what_it_refuses(chunks_of_four):
    (x, weight, bias), target = drawn()
    for wrong in (target[:, 1:], target.int()):
        with pytest.raises(ValueError, match=r"target .*: expected \(3, 5\) torch.int64"):
            linear_cross_entropy(x, weight, wrong, bias)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, target, bias), x, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_token_that_is_nearly_certain_has_a_gradient(chunks_of_four, dtype):
    """Its probability is 1 in 16 bits; the gradient is not 0 for that."""
    x, target = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype), torch.tensor([0, 1])
    weight = torch.tensor([[9.0, 0.0], [0.0, 8.0]], dtype=dtype, requires_grad=True)
    exact = weight.detach().double().requires_grad_()
    cross_entropy(x.double() @ exact.T, target).backward()
    linear_cross_entropy(x, weight, target).backward()
    assert weight.grad.dtype == dtype and weight.grad.diagonal().abs().min() > 0
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=0.01, atol=0)

"""Cross-entropy and its slope in one kernel, against float64, beside torch in the inputs' own precision."""

import pytest
import torch

from ndlightnet.ops.linear_cross_entropy import cross_entropy, linear_cross_entropy

from .kernel_cases import DEVICE, DTYPES

pytestmark = pytest.mark.usefixtures("poison")


def exact(logits, labels):
    """Losses and slopes in float64."""
    x = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(x, labels, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


def check(logits, labels):
    losses, slope = cross_entropy(logits, labels, True, "triton")
    true_losses, true_slope = exact(logits, labels)
    assert losses.dtype == torch.float32 and slope.dtype == logits.dtype
    # logits enter a sum of exponentials in float32, whose exponent is rounded to 2^-24 of their size
    size = logits.double().abs().nan_to_num(0, 0, 0).amax().clamp(min=1)
    torch.testing.assert_close(losses.double(), true_losses, rtol=4e-6, atol=float(size) * 2**-21)
    eps = torch.finfo(logits.dtype).eps  # that of the label is exp(-loss) - 1, of the loss's absolute error
    torch.testing.assert_close(slope.double(), true_slope, rtol=eps + float(size) * 2**-20, atol=float(size) * 2**-22)
    alone, empty = cross_entropy(logits, labels, False, "triton")
    assert torch.equal(alone, losses) and empty.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, classes", [(1, 1), (3, 2), (5, 129), (2, 8193), (3, 20001)])
def test_losses_and_slopes(rows, classes, dtype):
    logits = (4 * torch.randn(rows, classes, device=DEVICE)).to(dtype)
    check(logits, torch.randint(classes, (rows,), device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sure_rows_and_impossible_classes(dtype):
    """A loss of nearly 0, one of thousands, and classes of -inf, in the first block too."""
    logits = torch.randn(4, 9000, device=DEVICE)
    logits[0, 7], logits[1, 7] = 30.0, 3000.0
    logits[2, :8500] = logits[3, 8000:] = -torch.inf
    check(logits.to(dtype), torch.tensor([7, 8999, 8600, 5], device=DEVICE))


def test_a_label_out_of_range_is_nan():
    logits = torch.randn(3, 5, device=DEVICE)
    losses, _ = cross_entropy(logits, torch.tensor([-1, 5, 2], device=DEVICE), True, "triton")
    assert losses.isnan().tolist() == [True, True, False]


def test_strided_logits_and_no_rows():
    logits, labels = torch.randn(7, 5, device=DEVICE).T, torch.tensor([0, 6, 3, 3, 1], device=DEVICE)
    check(logits, labels)
    losses, slope = cross_entropy(logits[:0], labels[:0], True, "triton")
    assert losses.shape == (0,) and slope.shape == (0, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_of_a_head_on_a_gpu(dtype):
    """The kernel runs there, under torch.compile too, and tokens that do not count have no gradient."""
    # in bfloat16 operands and results are rounded; in float32 the sums count, of up to 5003 terms, in an order of their
    # own: as many roundings of eps / 2 at most, of either sign
    bound = torch.finfo(dtype).eps * (4 if dtype == torch.bfloat16 else 5003**0.5 / 2)
    x, weight = torch.randn(3000, 64, device="cuda"), torch.randn(5003, 64, device="cuda") / 8
    target = torch.randint(5003, (3000,), device="cuda")
    target[::3] = -100
    results = []
    for call in (linear_cross_entropy, torch.compile(linear_cross_entropy), None):
        inputs = [y.to(dtype).requires_grad_() for y in (x, weight)]
        if call is None:
            doubles = [y.double() for y in inputs]
            loss = torch.nn.functional.cross_entropy(doubles[0] @ doubles[1].mT, target)
        else:
            loss = call(*inputs, target)
        results.append([loss.double(), *(g.double() for g in torch.autograd.grad(loss, inputs))])
        assert not results[-1][1][::3].any()
    for ours in results[:2]:
        for a, b in zip(ours, results[2], strict=True):
            assert (a - b).norm() <= bound * b.norm()

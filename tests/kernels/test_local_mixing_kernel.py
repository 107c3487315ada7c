"""The kernels of local mixing against float64, beside the torch form in the inputs' precision."""

import pytest
import torch

from ndlightnet.layout import Grid, Ragged
from ndlightnet.ops import dense, local_mixing, star
from ndlightnet.ops.local_mixing import _triton
from ndlightnet_kernels import local_mixing as kernels

from .kernel_cases import DEVICE, DTYPES
from .yardstick import with_gradients

GRIDS = [(7,), (70,), (5, 9), (3, 4, 5), (2, 3, 2, 4), (1, 6), (2, 1, 2, 1, 2, 1, 2, 3)]


pytestmark = pytest.mark.usefixtures("poison")


def run(impl, x, weight, pull, offsets, layout, mask):
    return with_gradients(
        lambda x, weight: local_mixing(x, weight, offsets, layout=layout, mask=mask, impl=impl), pull, x, weight
    )


def check(x, weight, offsets, layout, mask=None):
    """u and dx are sums of float32 products, rounded once; dweight is a sum over all tokens."""
    pull = torch.randn_like(x)
    actual = run("triton", x, weight, pull, offsets, layout, mask)
    exact = run("reference", x.double(), weight.double(), pull, offsets, layout, mask)
    absolute = (t.double().abs() for t in (x, weight, pull))
    size = run("reference", *absolute, offsets, layout, mask)
    step = torch.finfo(torch.float32).eps
    for i, (a, b, total) in enumerate(zip(actual, exact, size, strict=True)):
        assert a.shape == b.shape and a.isfinite().all()
        assert a.dtype == (weight if i == 2 else x).dtype
        # Triton's interpreter cuts bfloat16 where a card rounds
        rounding = 0 if i == 2 else torch.finfo(x.dtype).eps * b.abs()
        terms = x.shape[0] * x.shape[1] if i == 2 else len(offsets)
        assert ((a.double() - b).abs() <= rounding + step * terms * total + 1e-30).all()


def case(form, radius, grid, dtype, dim, batch=2, causal=False):
    offsets = form(len(grid), radius, causal)
    x = torch.randn(batch, Grid(grid).length, dim, device=DEVICE).to(dtype)
    return x, torch.randn(len(offsets), dim, device=DEVICE), offsets, Grid(grid)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", GRIDS)
def test_star(grid, dtype):
    check(*case(star, 1, grid, dtype, 20))


@pytest.mark.parametrize(
    ("form", "radius", "grid", "causal"),
    [
        (star, 2, (9, 5), False),
        (star, 1, (6, 3, 4), True),
        (star, 3, (5,), True),
        (dense, 1, (5, 6), False),
        (dense, 1, (3, 4, 5), False),
        (dense, 1, (4, 3, 2), True),
        (dense, 2, (5, 5), False),
        (star, (0, 1), (4, 6), False),
    ],
)
def test_forms(form, radius, grid, causal):
    check(*case(form, radius, grid, torch.float32, 12, causal=causal))


@pytest.mark.parametrize(("grid", "form"), [((5, 4, 7), star), ((3, 4, 9), dense), ((90,), star)])
def test_a_program_walks_through_boxes(grid, form):
    """Of three axes two boxes of three of a sample: also from one sample to the next; the last program has one."""
    check(*case(form, 1, grid, torch.float32, 4, batch=3))


def test_taps_of_a_box_take_one_pass():
    """27 taps: the kernel of the weights' gradient also returns dx; 81 taps: three passes, and dx from that of u."""
    for grid, one in (((2, 3, 5), True), ((1, 2, 2, 3), False)):
        x, weight, offsets, layout = case(dense, 1, grid, torch.float32, 4)
        at = _triton.where(layout, offsets, x.device)
        dx, dweight = kernels.backward(x, x, weight, None, at.shape, None, at.back_box, offsets)
        assert (dx is not None) == one and dweight.shape == weight.shape
    for mask in (None, torch.rand(x.shape[:2], device=DEVICE) > 0.3):
        check(x, weight, offsets, layout, mask)


def test_any_offsets():
    """Also far ones, and those of one sign."""
    x, _, _, layout = case(star, 1, (6, 7), torch.float32, 8)
    offsets = ((2, -3), (5, 0), (0, 0), (0, 1), (-9, 1), (1, 6))
    check(x, torch.randn(6, 8, device=DEVICE), offsets, layout)


@pytest.mark.parametrize("dim", [1, 3, 64, 130])
def test_widths(dim):
    check(*case(star, 1, (4, 5), torch.float32, dim))


@pytest.mark.parametrize("form", [star, dense])
def test_a_grid_of_one_token(form):
    """The stride of an axis of size 1 may be any, and says nothing about the samples'."""
    _, weight, offsets, layout = case(form, 1, (1, 1, 1), torch.float32, 16, batch=3)
    for x in (torch.randn(1, 3, 16).transpose(0, 1), torch.randn(3, 1, 48)[..., :16]):
        check(x.to(DEVICE), weight, offsets, layout)


@pytest.mark.parametrize("form", [star, dense])
def test_padding_counts_as_zero(form):
    x, weight, offsets, layout = case(form, 1, (6, 7), torch.float32, 8)
    mask = torch.rand(x.shape[:2], device=DEVICE) > 0.3
    check(x, weight, offsets, layout, mask)
    u = local_mixing(x, weight, offsets, layout=layout, mask=mask, impl="triton")
    hidden = x.masked_fill(~mask[..., None], torch.nan)
    again = run("triton", hidden, weight, torch.ones_like(x), offsets, layout, mask)
    assert torch.equal(again[0], u)
    assert again[1][~mask].abs().max() == 0 and again[2].isfinite().all()


@pytest.mark.parametrize("form", [star, dense])
@pytest.mark.parametrize(
    "shapes", [[(3,), (40,), (1,), (17,)], [(3, 4), (1, 5), (2, 2), (0, 3), (9, 1)], [(2, 3, 4), (1, 2, 9)]]
)
def test_packs(form, shapes):
    layout = Ragged(shapes)
    offsets = form(layout.ndim, 1)
    x = torch.randn(1, layout.length, 10, device=DEVICE)
    weight = torch.randn(len(offsets), 10, device=DEVICE)
    check(x, weight, offsets, layout)
    check(x, weight, offsets, layout, torch.rand(1, layout.length, device=DEVICE) > 0.2)


def test_strided_inputs_and_no_tokens():
    x, weight, offsets, layout = case(star, 1, (4, 5), torch.float32, 16)
    check(x.movedim(-1, 0).contiguous().movedim(0, -1), weight, offsets, layout)
    empty = local_mixing(x[:0], weight, offsets, layout=layout, impl="triton")
    assert empty.shape == (0, 20, 16)


def test_values_of_a_joint_projection():
    """Tokens at a distance, also at an odd address, are read where they lie."""
    for first, dtype in ((16, torch.float32), (16, torch.bfloat16), (3, torch.bfloat16)):
        x, weight, offsets, layout = case(star, 1, (4, 5), dtype, 16)
        joint = torch.randn(2, 20, 48, device=DEVICE).to(dtype)
        joint[..., first : first + 16] = x
        check(joint[..., first : first + 16], weight, offsets, layout)


def at_odd_address(x):
    """Return a contiguous copy of x that begins one number after an aligned address."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].copy_(x.flatten()).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_addresses_and_transposed_weights(dtype):
    """A short convolution stores its weights as (dim, taps). Odd addresses can fail on a card only,
    where two numbers are read as one."""
    x, weight, offsets, layout = case(star, 1, (4, 5), dtype, 16)
    check(at_odd_address(x), weight, offsets, layout)
    check(x, at_odd_address(weight), offsets, layout)
    check(x, weight.mT.contiguous().mT, offsets, layout)
    inputs = x.requires_grad_(), weight.requires_grad_()
    u = local_mixing(x, weight, offsets, layout=layout, impl="triton")
    pull = torch.randn_like(u)
    aligned, odd = (torch.autograd.grad(u, inputs, p, retain_graph=True) for p in (pull, at_odd_address(pull)))
    assert all(torch.equal(a, b) for a, b in zip(aligned, odd, strict=True))


@pytest.mark.parametrize("form", [star, dense])
def test_a_program_of_the_backward_pass_sums_many_boxes(monkeypatch, form):
    """Also from the last box of a line or a sample to the next one's first; the same bits twice."""
    plan, scratch, parts = kernels.plan, kernels.scratch, []
    few = lambda *a, **k: plan(*a, **k)._replace(programs=3)  # noqa: E731
    monkeypatch.setattr(kernels, "plan", few)
    monkeypatch.setattr(kernels, "scratch", lambda *a: parts.append(a[1]) or scratch(*a))
    x, weight, offsets, layout = case(form, 1, (2, 5, 9), torch.float32, 6, batch=2)
    mask = torch.rand(x.shape[:2], device=DEVICE) > 0.3
    check(x, weight, offsets, layout, mask)
    assert parts and max(parts) <= 3
    first, second = (run("triton", x, weight, x, offsets, layout, mask) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operator_is_traced():
    x, weight, offsets, layout = case(star, 1, (4, 5), torch.float32, 8)
    pull = torch.randn_like(x)

    def loss(x, weight):
        return local_mixing(x, weight, offsets, layout=layout, impl="triton").sin()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, loss):
        inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = function(*inputs)
        found.append((y, *torch.autograd.grad(y, inputs, pull)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_opcheck():
    x, weight, offsets, layout = case(star, 1, (4, 5), torch.float32, 8)
    rest = _triton.where(layout, offsets, x.device)
    inputs = x.requires_grad_(), weight.requires_grad_(), None, *rest
    torch.library.opcheck(torch.ops.ndlightnet.local_mixing.default, inputs)


def test_too_many_taps_run_in_torch():
    x, weight, offsets, layout = case(star, 40, (2, 2), torch.float32, 4)
    with pytest.raises(ValueError, match="161 taps"):
        local_mixing(x, weight, offsets, layout=layout, impl="triton")


@pytest.mark.gpu
def test_more_than_two_to_the_31_numbers():
    """Offsets are 64 bits wide."""
    x = torch.randn(1, 2**24 + 8, 136, device="cuda", dtype=torch.bfloat16)
    offsets = star(1, 1)
    weight = torch.randn(3, 136, device="cuda")
    u = local_mixing(x, weight, offsets, layout=Grid((x.shape[1],)))
    end = local_mixing(x[:, -50:], weight, offsets, layout=Grid((50,)))
    torch.testing.assert_close(u[:, -40:], end[:, -40:], rtol=0, atol=0)


MARGIN = 4096  # numbers before and after a tensor, more than a program's box
UNTOUCHED = -1234.5


def fenced(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x between margins of NaN: what is read there shows in the results."""
    memory = x.new_full((2 * MARGIN + x.numel(),), torch.nan)
    return memory[MARGIN:-MARGIN].view(x.shape).copy_(x)


class Outputs:
    """Memory of outputs, which starts as NaN, between margins that nothing may write."""

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        memory = like.new_full((2 * MARGIN + like.numel(),), UNTOUCHED)
        self.memories.append(memory)
        return memory[MARGIN:-MARGIN].view(like.shape).fill_(torch.nan)

    def check(self) -> None:
        for memory in self.memories:
            assert (memory[:MARGIN] == UNTOUCHED).all() and (memory[-MARGIN:] == UNTOUCHED).all()
            assert memory[MARGIN:-MARGIN].isfinite().all()


@pytest.mark.parametrize(("grid", "form"), [((5,), star), ((2, 6), dense), ((2, 2, 9), star), ((1, 2, 1, 5), star)])
def test_the_last_tile(monkeypatch, grid, form):
    """Sizes that are no multiples of a patch or a box, and numbers of boxes that are none of a program's."""
    outputs, offsets = Outputs(), form(len(grid), 1)
    monkeypatch.setattr(kernels, "dense_empty", outputs.empty)
    x, pull = (fenced(torch.randn(1, Grid(grid).length, 3, device=DEVICE)) for _ in "xp")
    weight = fenced(torch.randn(len(offsets), 3, device=DEVICE))
    results = []
    for impl in ("triton", "reference"):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        u = local_mixing(*leaves, offsets, layout=Grid(grid), impl=impl)
        results.append((u, *torch.autograd.grad(u, leaves, pull)))
    assert len(outputs.memories) == 2  # u, dx
    outputs.check()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)

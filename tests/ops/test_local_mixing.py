"""Local mixing in torch against the specification and torch's convolutions."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.ops import dense, local_mixing, local_mixing_step, star
from ndlightnet.ops.local_mixing import shifts

GRIDS = [(7,), (4, 6), (3, 4, 5), (2, 3, 2, 4), (1, 5), (2, 1, 3)]
FORMS = [(star, 1), (star, 2), (dense, 1)]


def case(form, radius, grid, causal=False, dim=5, batch=2):
    offsets = form(len(grid), radius, causal)
    x = torch.randn(batch, *grid, dim, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(offsets), dim, dtype=torch.float64, requires_grad=True)
    return x, weight, offsets


def test_offsets():
    assert star(2, 1) == ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
    assert star(2, 1, causal=True) == ((0, 0), (1, 0), (2, 0), (0, -1), (0, 1))
    assert dense(1, 1, causal=True) == ((0,), (1,), (2,))
    assert dense(2, 1)[:4] == ((-1, -1), (0, -1), (1, -1), (-1, 0))
    assert len(star(5, 2)) == 21
    assert len(dense(4, 1)) == len(dense(4, 1, causal=True)) == 81
    assert star(2, (0, 1)) == ((0, 0), (0, -1), (0, 1))
    for form in (star, dense):
        for radius in (-1, (1,), 1.5, (1, 0.5), "1", None):
            with pytest.raises(ValueError, match=r"radius=.*: expected an int >= 0 or 2 of them"):
                form(2, radius)
        with pytest.raises(ValueError, match="ndim=0: expected an int >= 1"):
            form(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("form", "radius"), FORMS)
@pytest.mark.parametrize("grid", GRIDS)
def test_torch_form_matches_reference(close, close_grads, form, radius, grid, causal):
    x, weight, offsets = case(form, radius, grid, causal)
    ours, theirs = (local_mixing(x, weight, offsets, impl=impl) for impl in ("torch", "reference"))
    close(ours, theirs, 1e-12)
    close_grads(ours, theirs, (x, weight), 1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("form", "radius"), [(star, 1), (star, 3), (dense, 1), (dense, 2)])
@pytest.mark.parametrize("grid", [(9,), (5, 6), (3, 2), (3, 4, 5), (2, 1, 3), (2, 3, 2, 4)], ids=str)
def test_float32_matches_float64(close_grads, form, radius, grid, causal):
    """On a CPU torch's convolutions compute it, and gradients of its weights; second derivatives too."""
    if len(grid) == 4 and radius > 1:
        grid, radius = grid[:3], (1, 3, 2)
    x, weight, offsets = case(form, radius, grid, causal)
    low = [t.detach().float().requires_grad_() for t in (x, weight)]
    u, exact = local_mixing(*low, offsets), local_mixing(x, weight, offsets)
    assert (u - exact).norm() <= 1e-6 * exact.norm()
    # sums of at most 125 products, or of all cells for the weights
    close_grads(u, exact, low, 1e-6, other=(x, weight))
    sums = []
    for inputs in (low, (x, weight)):
        first = torch.autograd.grad(local_mixing(*inputs, offsets).pow(3).sum(), inputs, create_graph=True)
        sums.append(sum(one.square().sum() for one in first))
    close_grads(*sums, low, 1e-5, other=(x, weight))


@pytest.mark.parametrize("form", [star, dense])
@pytest.mark.parametrize("grid", [(300,), (20, 20), (8, 8, 8), (4, 4, 4, 4)], ids=str)
def test_kernels_have_three_columns_where_their_gradient_is_sought(form, grid, monkeypatch):
    """oneDNN takes many times as long for wider ones, and for the gradient of x from its own form."""
    shapes, real = [], torch.ops.aten.convolution_backward

    def noted(du, x, weight, *args):
        shapes.append(weight.shape)
        assert args[-1] == [False, True, False]
        return real(du, x, weight, *args)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", noted)
    offsets = form(len(grid), 1 if len(grid) == 4 else 2)
    x, weight = torch.randn(1, *grid, 8, requires_grad=True), torch.randn(len(offsets), 8, requires_grad=True)
    u = local_mixing(x, weight, offsets)
    nodes = [u.grad_fn]
    for node in nodes:
        nodes += [parent for parent, _ in node.next_functions if parent]
    assert "ConvolutionBackward0" not in [node.name() for node in nodes]
    u.sum().backward()
    assert shapes and max(shape[-1] for shape in shapes) <= 3


@pytest.mark.parametrize(
    "shape, radius, expanded, convolved",
    [((1, 3, 64), 1, False, False), ((64, 64, 64), 1, False, True), ((64, 64, 64), 1, True, False)],
    ids=["few tokens", "many", "the gradient of a sum"],
)
def test_a_convolution_is_taken_where_it_is_faster(shape, radius, expanded, convolved):
    x = torch.ones(()).expand(1, *shape) if expanded else torch.randn(1, *shape)
    assert shifts._convolves(x, star(2, radius)) == convolved


def test_under_autocast_sums_are_float32(close, close_grads):
    x, weight, offsets = case(star, 1, (4, 6))
    low = [t.detach().float().requires_grad_() for t in (x, weight)]
    expected = local_mixing(x, weight, offsets)
    with torch.autocast("cpu", torch.bfloat16):
        u = local_mixing(*low, offsets)
        assert u.dtype == torch.float32
        close(u.double(), expected, 1e-6)
        close_grads(u, expected, low, 1e-6, other=(x, weight))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_dense_is_torch_convolution(ndim):
    x, weight, offsets = case(dense, 1, (6, 5, 4)[:ndim])
    conv = getattr(torch.nn.functional, f"conv{ndim}d")
    # torch correlates: its tap +1 reads the next cell, which is the offset -1
    order = sorted(range(len(offsets)), key=lambda tap: offsets[tap], reverse=True)
    kernel = weight[order].T.reshape(5, 1, *[3] * ndim)
    y = conv(x.movedim(-1, 1), kernel, padding=1, groups=5).movedim(1, -1)
    torch.testing.assert_close(local_mixing(x, weight, offsets), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid", [(5,), (3, 4)])
def test_gradients_of_gradients(grid):
    x, weight, offsets = case(star, 1, grid, dim=2, batch=1)

    def run(x, w):
        return local_mixing(x, w, offsets, impl="torch")

    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradgradcheck(run, (x, weight))


def test_masked_tokens_count_as_zero():
    x, weight, offsets = case(star, 1, (4, 5))
    mask = torch.rand(2, 4, 5) > 0.3
    hidden = x.detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    u = local_mixing(hidden, weight, offsets, mask=mask)
    expected = local_mixing(x * mask[..., None], weight, offsets)
    torch.testing.assert_close(u, expected, rtol=1e-12, atol=1e-12)
    dx, dweight = torch.autograd.grad(u.square().sum(), (hidden, weight))
    assert dx[~mask].abs().max() == 0
    assert dweight.isfinite().all()


@pytest.mark.parametrize("form", [star, dense])
@pytest.mark.parametrize("space", [(), (3,), (2, 3)])
def test_stream_is_whole(form, space):
    x, weight, offsets = case(form, 1, (7, *space), causal=True)
    expected = local_mixing(x, weight, offsets)
    tokens = Grid(space).length
    state, outputs = x.new_zeros(2, 2, tokens, 5), []
    for frames in x.split([1, 3, 1, 2], 1):
        grid = Grid.of(frames)
        u, state = local_mixing_step(grid.flatten(frames), weight, offsets, state, layout=grid)
        outputs.append(u.view_as(frames))
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-12, atol=1e-12)


def test_later_frames_are_not_read():
    x, weight, offsets = case(dense, 1, (5, 3, 2), causal=True)
    u = local_mixing(x, weight, offsets)
    (dx,) = torch.autograd.grad(u[:, 2].sum(), x)
    assert dx[:, 3:].abs().max() == 0
    assert (dx[:, :3].abs().sum((0, 2, 3, 4)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype):
    x, weight, offsets = case(dense, 1, (4, 6), dim=64)
    low, exact = x.detach().to(dtype), local_mixing(x.to(dtype).double(), weight, offsets)
    u = local_mixing(low, weight.float(), offsets)
    assert u.dtype == dtype
    # half a unit in the last place of the result, and float32 sums of 9 products
    size = local_mixing(low.double().abs(), weight.abs(), offsets)
    allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 20 * torch.finfo(torch.float32).eps * size
    assert ((u.double() - exact).abs() <= allowed * 1.01).all()


def test_traced_form(close, close_grads):
    x, weight, offsets = case(star, 1, (4, 6))
    compiled = torch.compile(lambda x, w: local_mixing(x, w, offsets), fullgraph=True, backend="aot_eager")
    u, expected = compiled(x, weight), local_mixing(x, weight, offsets)
    close(u, expected, 1e-12)
    close_grads(u, expected, (x, weight), 1e-12)


@pytest.mark.parametrize("form", [False, True])
def test_module_streams_and_counts(form):
    layer = LocalMixing(2, 6, radius=2, dense=form).double()
    assert layer.weight.shape == (25 if form else 9, 6)
    x = torch.randn(2, 6, 3, 6, dtype=torch.float64)
    grid = Grid.of(x)
    expected = grid.unflatten(layer(grid.flatten(x), grid, causal=True))
    state, outputs = layer.init_state(2, space=(3,)), []
    for frames in x.split([1, 2, 3], 1):
        u, state = layer.step(frames.flatten(1, 2), Grid.of(frames), state)
        outputs.append(u.view_as(frames))
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="dims=2"):
        layer(torch.randn(1, 4, 6), Grid((4,)))


BAD = {  # a part of the message -> what it says, beside a right call
    "offsets": {"offsets": star(1, 1)},
    "none twice": {"offsets": (*star(2, 1)[:4], (0, 0))},
    "weight": {"weight": torch.zeros(2, 5)},
    r"expected \(batch, 24, dim\)": {"layout": Grid((4, 6))},
    r"mask \(2, 4\) torch.bool: expected bool": {"mask": torch.ones(2, 4, dtype=torch.bool)},
    r"mask \(1, 24\) torch.bool: expected bool": {
        "x": torch.zeros(2, 24, 5),
        "layout": Grid((4, 6)),
        "mask": torch.ones(1, 24, dtype=torch.bool),  # no broadcasting
    },
    r"mask \(2, 4, 6\) torch.float32: expected bool": {"mask": torch.ones(2, 4, 6)},
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message):
    x, weight, offsets = case(star, 1, (4, 6))
    with pytest.raises(ValueError, match=message):
        local_mixing(**({"x": x, "weight": weight, "offsets": offsets} | BAD[message]))
    with pytest.raises(ValueError, match="below 0"):
        local_mixing_step(x.flatten(1, 2), weight, offsets, x[:, :1], layout=Grid((4, 6)))

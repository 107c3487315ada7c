"""A layer of attention as one operator, against float64, beside the operators that it is made of."""

import pytest
import torch
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode

from ndlightnet.layout import Boxes, Grid, Ragged
from ndlightnet.ops import Position, attention_layer, dense, global_attention, local_mixing, norm_gate, star
from ndlightnet.ops.lightnet import _triton
from ndlightnet.ops.lightnet import layer as layers
from ndlightnet.ops.local_mixing import _triton as local
from ndlightnet.parallel import Slab
from ndlightnet_kernels.tiles import dense_empty
from tests.layout.slab_threads import on_threads

from .kernel_cases import BRAIN, DEVICE, DTYPES
from .yardstick import compare_with_torch, largest

pytestmark = pytest.mark.usefixtures("poison")

HEADS, DIM, RANK, EPS = 2, 24, 3, 1e-6
GRID = Grid((2, 3, 4))
NAMES = ("out", "dx", "dweight", "dbias", "dup", "dproj", "dtheta", "dtaps")


def apart(x, heads, weight, bias, eps, up, proj, taps=None, offsets=(), *, layout, mask, position, impl):
    """Operator after operator."""
    dim, rank = up.shape
    *qkv, gate = x.split([dim, dim, dim, rank], -1)
    q, k, v = (y.unflatten(-1, (heads, dim // heads)) for y in qkv)
    near = None
    if taps is not None:
        near = local_mixing(v.flatten(2), taps, offsets, layout=layout, mask=mask, impl=impl)
    y = global_attention(q, k, v, mask=mask, position=position, layout=layout, impl=impl)
    return norm_gate(y.flatten(2), gate, weight, bias, eps, impl, near, up, proj)


def results(layer, impl, dtype, inputs, pull, offsets, layout, kind, mask):
    """inputs: x, weight, bias, up, proj, theta or None, taps or None; all but x, up and proj in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    narrow = (0, 3, 4)
    leaves = [
        z if z is None else z.detach().to(dtype if i in narrow else wide).requires_grad_() for i, z in enumerate(inputs)
    ]
    x, weight, bias, up, proj, theta, taps = leaves
    position = None if theta is None else Position(theta, layout, kind)
    options = {"layout": layout, "mask": mask, "position": position, "impl": impl}
    out = layer(x, HEADS, weight, bias, EPS, up, proj, taps, offsets, **options)
    return [out.detach(), *grad(out, [z for z in leaves if z is not None], pull.to(out.dtype))]


def random(layout, batch=2, kind="cosine", offsets=(), rank=RANK, dim=DIM, out=5):
    def normal(*shape):
        return torch.randn(shape, device=DEVICE)

    slots = dim // HEADS // (2 if kind == "rotary" else 1)
    theta = torch.rand(HEADS, slots, device=DEVICE) if kind else None
    taps = normal(len(offsets), dim) if offsets else None
    x, pull = normal(batch, layout.length, 3 * dim + rank), normal(batch, layout.length, out)
    params = 1 + normal(dim) / 4, normal(dim) / 4, normal(dim, rank) / 2, normal(out, dim) * dim**-0.5
    return (x, *params, theta, taps), pull


def check(layout, dtype=torch.float32, kind="cosine", offsets=(), mask=False, **sizes):
    inputs, pull = random(layout, kind=kind, offsets=offsets, **sizes)
    inputs = tuple(z if z is None or i not in (0, 3, 4) else z.to(dtype) for i, z in enumerate(inputs))
    hidden = torch.rand(inputs[0].shape[:2], device=DEVICE) < 0.7 if mask else None
    if hidden is not None:  # padding may hold anything that its own query and gate survive
        inputs[0][..., DIM : 3 * DIM][~hidden] = 1e4
    common = (pull, offsets, layout, kind, hidden)
    names = [name for name, z in zip(NAMES, (1, *inputs), strict=True) if z is not None]
    actual = results(attention_layer, "triton", dtype, inputs, *common)
    low = results(apart, "triton", dtype, inputs, *common)
    exact = results(apart, "torch", torch.float64, inputs, *common)
    compare_with_torch(names, actual, low, exact, largest(inputs[0][..., DIM : 2 * DIM]) if not mask else 4)
    if hidden is not None:
        assert not actual[1][..., DIM : 3 * DIM][~hidden].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offsets", [(), star(3, 1)], ids=["alone", "local"])
def test_values_and_gradients(dtype, offsets):
    check(GRID, dtype, offsets=offsets)


@pytest.mark.parametrize("kind", [None, "rotary"])
def test_other_angles(kind):
    check(GRID, kind=kind, offsets=star(3, 1))


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_padding(dtype):
    """It is not read, and its keys and values have the gradient 0."""
    check(GRID, dtype, offsets=star(3, 1), mask=True)


@pytest.mark.parametrize("mask", [False, True])
def test_a_pack(mask):
    check(Ragged([(2, 3), (1, 4), (5, 2)]), BRAIN, offsets=star(2, 1), mask=mask, batch=1)


def test_taps_of_several_passes():
    """Of the gradient of taps; that of values then is a pass of its own."""
    check(Grid((1, 2, 2, 3)), offsets=dense(4, 1), batch=1)


def test_whole_vectors():
    """All strides are multiples of 8 numbers."""
    check(Grid((70,)), BRAIN, offsets=star(1, 1), rank=8, dim=32, out=16, kind=None)


CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # roundings of 6e-8 that a few hundred operations grow


def both(layout, change=lambda x: x, dtype=torch.float32, **sizes):
    """Compare results with those of contiguous tokens, operator after operator."""
    taps = star(3, 1)
    inputs, pull = random(layout, offsets=taps, **sizes)
    results = []
    for run, form in ((attention_layer, change), (apart, torch.Tensor.contiguous)):
        leaves = [z.detach().to(dtype).requires_grad_() for z in inputs]
        x, weight, bias, up, proj, theta, w = leaves
        options = {"layout": layout, "mask": None, "position": Position(theta, layout, "cosine"), "impl": "triton"}
        out = run(form(x), HEADS, weight, bias, EPS, up, proj, w, taps, **options)
        results.append([out.detach(), *grad(out, leaves, pull.to(dtype))])
    return results


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_tokens_of_any_strides(order):
    """The gradient is written as rows all the same."""
    for a, b in zip(*both(GRID, lambda x: x.permute(order).contiguous().permute(order)), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_no_samples_and_no_tokens():
    for layout, batch in ((GRID, 0), (Grid((0, 3, 4)), 2)):
        for a, b in zip(*both(layout, batch=batch), strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_boxes_of_a_sample_share_a_state():
    layout = Boxes((2, 3, 4), count=2)
    for a, b in zip(*both(layout, batch=2), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_parameters_of_16_bits():
    """Taps too: sums are of both forms' own order, of values that both round to 8 bits."""
    for a, b in zip(*both(GRID, dtype=BRAIN), strict=True):
        assert a.dtype == b.dtype == BRAIN
        assert (a - b).abs().max() <= 2**-5 * b.abs().max()


class Calls(TorchDispatchMode):
    """Operators that were called, and the shapes of what they returned."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if torch.is_tensor(out):
            self.outputs.append((op, tuple(out.shape)))
        return out


def slabs_and_whole(shape, axis, sizes, kind, offsets, frozen=(), batch=2):
    """Return the outputs of slabs, on threads, and of the whole, the leaves that need a gradient, and random weights of
    the outputs. frozen: the numbers of inputs that need none."""
    grid = Grid(shape)
    leaves, pull = random(grid, kind=kind, offsets=offsets, batch=batch)
    for i, z in enumerate(leaves):
        if z is not None:
            z.requires_grad_(i not in frozen)
    x, *params, theta, taps = leaves

    def layer(x, layout):
        position = None if theta is None else Position(theta, layout, kind)
        options = {"layout": layout, "position": position, "impl": "triton"}
        return attention_layer(x, HEADS, *params[:2], EPS, *params[2:], taps, offsets, **options)

    def slab(exchange):
        part = grid.unflatten(x).split(sizes, 1 + axis)[exchange.rank]
        layout = Slab(tuple(part.shape[1:-1]), axis=axis, sizes=sizes, exchange=exchange)
        return layout.unflatten(layer(layout.flatten(part), layout))

    joined = grid.flatten(torch.cat(on_threads(len(sizes), slab), 1 + axis))
    return joined, layer(x, grid), [z for z in leaves if z is not None and z.requires_grad], pull


def close_gradients(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * b.abs().max().item() if b.numel() else 0)


@pytest.mark.parametrize(
    "axis, sizes, kind, offsets",
    [(0, (2, 1, 1), "cosine", star(3, 2)), (2, (1, 2), None, dense(3, 1)), (1, (1, 1), "rotary", ())],
    ids=["star", "dense", "alone"],
)
def test_slabs_of_a_grid(axis, sizes, kind, offsets):
    """Outputs, and gradients of all slabs, are those of the whole. A slab's is one tensor, too."""
    shape = tuple(sum(sizes) if i == axis else n for i, n in enumerate((2, 3, 2)))
    actual, expected, leaves, pull = slabs_and_whole(shape, axis, sizes, kind, offsets)
    torch.testing.assert_close(actual, expected, **CLOSE)
    calls = Calls()
    with calls:
        grads = grad(actual, leaves, pull)
    close_gradients(grads, grad(expected, leaves, pull))
    rows = [(2, size * actual.shape[1] // sum(sizes)) for size in sizes]  # of the tokens of slabs
    joining = torch.ops.aten.cat.default, torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert not [shape for op, shape in calls.outputs if op in joining and len(shape) == 3 and shape[:2] in rows]


@pytest.mark.parametrize("frozen", [(0,), (0, 5, 6), (1, 2, 3, 4), (0, 1, 2, 3, 4, 6), (0, 1, 2, 3, 4, 5)], ids=str)
def test_slabs_of_which_some_inputs_need_no_gradient(frozen):
    actual, expected, leaves, pull = slabs_and_whole((1, 2), 1, (1, 1), "cosine", star(2, 1), frozen, batch=1)
    close_gradients(grad(actual, leaves, pull), grad(expected, leaves, pull))


def test_slabs_of_no_samples():
    actual, expected, leaves, pull = slabs_and_whole((2, 2), 0, (1, 1), "cosine", star(2, 1), batch=0)
    close_gradients(grad(actual, leaves, pull), grad(expected, leaves, pull))


@pytest.mark.parametrize("forward, backward", [(False, False), (False, True), (True, True)])
def test_gradients_of_slabs_are_searched_for_nan_and_not_differentiated_again(forward, backward):
    with torch.autograd.set_detect_anomaly(forward):
        actual, expected, leaves, pull = slabs_and_whole((2, 2), 0, (1, 1), "cosine", star(2, 1), batch=1)
    with torch.autograd.set_detect_anomaly(backward):
        grads = grad(actual, leaves, pull, create_graph=True)
    close_gradients(grads, grad(expected, leaves, pull))
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(grads[0].sum(), leaves[0])


def test_taps_that_do_not_fit():
    """A kernel would read beyond them."""
    (x, weight, bias, up, proj, _, taps), _ = random(GRID, offsets=star(3, 1))
    for wrong, offsets in ((taps[1:], star(3, 1)), (taps[:, 1:], star(3, 1)), (taps, star(2, 1))):
        with pytest.raises(ValueError, match="expected"):
            attention_layer(x, HEADS, weight, bias, EPS, up, proj, wrong, offsets, layout=GRID, impl="triton")


def test_what_aotinductor_compiles(monkeypatch):
    """It has no kernel of local mixing."""
    (x, *params, theta, taps), _ = random(GRID, offsets=star(3, 1))
    places = *_triton.of_grid(Position(theta, GRID, "cosine")), *local.where(GRID, star(3, 1), x.device)
    inputs = x, *params, taps, None, EPS, HEADS, *places
    expected = layers._forward(*inputs)
    monkeypatch.setattr("ndlightnet_kernels.local_mixing.mix", None)
    for a, b in zip(layers._lowered(*inputs), expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_what_is_written_where():
    """The gradient of x is one tensor that all kernels write into: nothing is put together."""
    (x, weight, bias, up, proj, theta, taps), pull = random(GRID, offsets=star(3, 1))
    x.requires_grad_()
    options = {"layout": GRID, "position": Position(theta, GRID, "cosine"), "impl": "triton"}
    out = attention_layer(x, HEADS, weight, bias, EPS, up, proj, taps, star(3, 1), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        grad(out, x, pull)
    assert not {"aten::cat", "aten::add", "aten::add_"} & {event.name for event in profiled.events()}


def test_a_source_in_place():
    """Kernels that add to gradients of values leave those of other tensors alone."""
    from ndlightnet_kernels import attention_backward as kernels
    from ndlightnet_kernels.position import NO_POSITION

    k, v = torch.randn(2, 1, 6, 2, 8, device=DEVICE)
    top, total, memory = (torch.randn(1, 2, *n, device=DEVICE) for n in ((8,), (8,), (8, 8)))
    dk, dv, _ = kernels.summarize_backward(k, v, None, top, total, memory, NO_POSITION, False)
    rows = torch.zeros(1, 6, 40, device=DEVICE)
    at_k, at_v = (rows[..., first : first + 16].unflatten(-1, (2, 8)) for first in (3, 20))
    before = at_v.copy_(torch.randn_like(at_v)).clone()
    kernels.summarize_backward(k, v, None, top, total, memory, NO_POSITION, False, at_k, at_v, add=True)
    torch.testing.assert_close(at_k, dk, atol=0, rtol=0)
    torch.testing.assert_close(at_v, dv + before)
    assert not rows[..., [*range(3), 19, *range(36, 40)]].any()
    assert dense_empty(at_k).is_contiguous()


def test_operator():
    (x, weight, bias, up, proj, theta, taps), _ = random(GRID, offsets=star(3, 1), batch=1)
    leaves = [z.requires_grad_() for z in (x, weight, bias, up, proj, theta, taps)]

    def layer(x):
        options = {"layout": GRID, "position": Position(theta, GRID, "cosine"), "impl": "triton"}
        return attention_layer(x, HEADS, weight, bias, EPS, up, proj, taps, star(3, 1), **options)

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "ndlightnet":
                calls.append((op, args))
            return op(*args, **(kwargs or {}))

    with Recorder():
        grad(layer(x).sum(), leaves)
    for i, (op, args) in enumerate(calls):  # the second is that of the gradient
        args = [
            z.detach().clone().requires_grad_(i == 0 and z.requires_grad) if torch.is_tensor(z) else z for z in args
        ]
        torch.library.opcheck(
            op, tuple(args), test_utils=["test_schema", "test_autograd_registration", "test_faketensor"]
        )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    for a, b in zip(grad(compiled(x).sum(), leaves), grad(layer(x).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)

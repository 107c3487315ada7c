"""The global form: values, gradients and States against float64."""

import pytest
import torch

from ndlightnet.ops import Position, global_attention, merge, read, summarize
from ndlightnet.ops.position import slots_of
from ndlightnet.parallel import Slab
from ndlightnet.parallel.turns import Turns

from .kernel_cases import BRAIN, CASES, DEVICE, FULL, HALF, LOGITS, Case, on_gpu
from .yardstick import check


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    check(case, "global")


@pytest.mark.parametrize("form, row", [("state", 5), ("state", 7), ("merged", 10), ("read", 5), ("read", 9)])
def test_states(form, row):
    """A source's State, that of its parts joined, and queries on a State."""
    case = CASES[row]
    if form == "merged":  # along one axis
        case = case._replace(shape=(case.length,), prefix=0, start=None)
    check(case._replace(past=form == "read"), form)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case((7,), 24, 9, target=(70,), batch=1, heads=1),
        Case((4, 5), 5, 3, "cosine", "holes", target=(2, 3), dtype=BRAIN),
        Case((11, 7), 10, 8, "rotary", "left", target=(1, 5), prefix=2, start=(3, 8), heads=1),
    ],
    ids=str,
)
def test_queries_of_another_grid(case):
    check(case, "cross")


@pytest.mark.parametrize(
    "case",
    [
        Case((5, 16), 5, 3, "cosine", "holes", BRAIN, start=(5, 100_000), heads=1),
        Case((2, 1, 48), 16, 8, "cosine", dtype=HALF, batch=1, heads=1),
        *on_gpu(Case((3, 5, 32), 64, 64, "cosine", "left", BRAIN), Case((7, 16), 96, 96, "cosine", dtype=BRAIN)),
    ],
    ids=str,
)
def test_angles_turned_from_neighbour_to_neighbour(case):
    """On grids whose last axis is a multiple of 16."""
    check(case, "global")


ROW = Case((75,), 5, 3, batch=1, heads=1)


@pytest.mark.parametrize(
    "case",
    [
        *(ROW._replace(logits=name) for name in ("offset", "up", "climb", "jumps", "holes")),
        ROW._replace(kind="cosine", logits="jumps", dtype=HALF),
        *on_gpu(*(ROW._replace(kind="cosine", logits=name, dtype=BRAIN) for name in LOGITS)),
    ],
    ids=str,
)
def test_extreme_logits(case):
    check(case, "global")


@pytest.mark.parametrize("kind", ["cosine", "rotary"])
def test_slabs_of_a_grid(kind, close):
    """Their States, merged, read by each: the angles are those of the whole grid."""
    shape, sizes = (7, 3, 4), (5, 2)
    q, k, v = (torch.randn(2, 84, 2, 8, device=DEVICE) for _ in range(3))
    theta = torch.rand(2, slots_of(8, kind), device=DEVICE)
    inputs = [x.requires_grad_() for x in (q, k, v, theta)]
    turns = Turns(2, q.device)

    def slab(rank):
        turns.begin(rank)
        layout = Slab((sizes[rank], *shape[1:]), sizes=sizes, exchange=turns)
        rows = slice(12 * layout.starts[rank], 12 * layout.starts[rank + 1])
        return rows, {"position": Position(theta, layout, kind), "impl": "triton"}

    places = [slab(rank) for rank in (0, 1)]
    state = merge(*(summarize(k[:, rows], v[:, rows], **place) for rows, place in places))
    out = torch.cat([read(q[:, rows], state, **place) for rows, place in places], 1)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = global_attention(*exact[:3], position=Position(exact[3], shape, kind), impl="torch")
    close(out, expected.float(), 1e-5)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOGITS)
def test_sums_are_float32_whatever_the_inputs(name):
    check(Case((600,), 5, 3, logits=name, dtype=BRAIN), "state", grads=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_size(case):
    check(case, "global", full=True)


@pytest.mark.gpu
def test_one_long_volume():
    check(Case((64, 64, 64), 64, 64, "cosine", "holes", BRAIN, batch=1, heads=8), "global", True)


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements():
    """As nine samples and as one: the last rows against float64, from the last sample alone."""
    batch, length, heads, dim = 9, 2**18, 16, 64
    assert batch * length * heads * dim > 2**31
    q, k, v = (torch.randn(batch, length, heads, dim, dtype=BRAIN, device=DEVICE) for _ in range(3))
    for source in (slice(8, 9), slice(0, 9)):
        x, y, z = (t if source.start else t.reshape(1, -1, heads, dim) for t in (q, k, v))
        out = global_attention(x, y, z, impl="triton").flatten(0, 1)[-1000:]
        y, z = (t[source].reshape(-1, heads, dim)[:, -1].double() for t in (k, v))
        query = q[-1, -1000:, -1].double()
        expected = (query * query.sigmoid()) @ (y.softmax(0).mT @ z)
        # the memory averages over many values: the rounding of operands and output is what counts
        error = (out[:, -1] - expected).square().mean().sqrt()
        assert error <= 2 * torch.finfo(BRAIN).eps * expected.square().mean().sqrt()

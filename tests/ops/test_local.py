"""Local attention by tiles is softmax attention over all pairs that are close."""

import itertools
from functools import partial

import pytest
import torch
from torch.autograd import grad

from ndlightnet.layout import Ragged
from ndlightnet.nn.mixers import SoftmaxAttention, WindowAttention
from ndlightnet.ops import local
from ndlightnet.ops.dispatch import Support
from ndlightnet.ops.local import local_attention

CASES = [  # grid, windows: ragged tiles, one tile, windows wider than the grid, single tokens
    ((7,), (3,)),
    ((131,), (5,)),
    ((64,), (16,)),
    ((65,), (1,)),
    ((9,), (9,)),
    ((5,), (20,)),
    ((5, 7), (2, 3)),
    ((19, 23), (3, 2)),
    ((4, 4), (8, 8)),
    ((1, 40), (2, 3)),
    ((40, 3), (3, 1)),
    ((3, 4, 5), (2, 2, 3)),
    ((9, 10, 7), (2, 3, 1)),
    ((2, 3, 2, 4), (2, 1, 2, 3)),
]
cases = pytest.mark.parametrize("shape, windows", CASES, ids=str)
both = pytest.mark.parametrize("causal", [False, True])


def sample(shape, windows, *, heads=2, dim=5, batch=2, dtype=torch.float64):
    q, k, v = (torch.randn(batch, *shape, heads, dim, dtype=dtype) for _ in "qkv")
    tables = [torch.randn(heads, 2 * w - 1, dtype=dtype) for w in windows]
    return [x.requires_grad_() for x in (q, k, v, *tables)]


def dense(q, k, v, windows, tables=(), mask=None, causal=False, order=1):
    """Over all pairs of tokens; `order` -1 looks biases up at i - j."""
    shape, past = k.shape[1:-2], k.shape[1] - q.shape[1]
    place = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape))
    offset = place - place[place[:, 0] >= past][:, None]  # (target, source, axes): j - i
    near = (offset.abs() < torch.tensor(windows)).all(-1)
    if causal:
        near &= offset[..., 0] <= 0
    q, k, v = (x.flatten(1, -3) for x in (q, k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    for axis, table in enumerate(tables):
        centre = table.shape[1] // 2
        at = (order * offset[..., axis] + centre).clamp(0, 2 * centre)
        score = score + table[:, at]
    near = near.expand_as(score)
    if mask is not None:
        near = near & mask.flatten(1)[:, None, None]
    weights = score.masked_fill(~near, -1e300).softmax(-1) * near
    y = torch.einsum("bhts,bshd->bthd", weights, v)
    return y.reshape(y.shape[0], shape[0] - past, *shape[1:], *y.shape[2:])


@both
@cases
def test_is_the_formula(close, close_grads, shape, windows, causal):
    inputs = sample(shape, windows)
    q, k, v, *tables = inputs
    mask = torch.rand(2, *shape) < 0.7
    for keep in (None, mask):
        y = local_attention(q, k, v, windows, tables, mask=keep, causal=causal)
        expected = dense(q, k, v, windows, tables, keep, causal)
        close(y, expected, 1e-12)
        close_grads(y, expected, inputs, 1e-12)
    assert y.shape == q.shape


@both
@pytest.mark.parametrize("window", [1, 2, 16, 33, 70])
def test_lengths_that_tiles_do_not_divide(close, window, causal):
    for n in (1, 2, window, window + 1, 2 * window, 63, 64, 65, 97, 200):
        q, k, v, table = sample((n,), (window,), heads=1, batch=1)
        y = local_attention(q, k, v, window, [table], causal=causal)
        close(y, dense(q, k, v, (window,), [table], causal=causal), 1e-12)


@cases
def test_earlier_frames_of_keys(close, shape, windows):
    """What the last frames read, if they alone are asked."""
    q, k, v, *tables = sample(shape, windows)
    whole = local_attention(q, k, v, windows, tables, causal=True)
    for first in {0, 1, shape[0] // 2, shape[0] - 1} - {shape[0]}:
        start = max(0, first - windows[0] + 1)  # no more frames than a window needs
        last = local_attention(q[:, first:], k[:, start:], v[:, start:], windows, tables, causal=True)
        close(last, whole[:, first:], 1e-12)


def test_a_wider_table_is_read_around_its_centre(close):
    q, k, v, table = sample((30,), (7,))
    close(local_attention(q, k, v, 4, [table]), local_attention(q, k, v, 4, [table[:, 3:-3]]), 1e-14)


@both
@cases
def test_later_frames_and_far_tokens_have_no_gradient(shape, windows, causal):
    q, k, v, *tables = sample(shape, windows, batch=1, heads=1)
    y = local_attention(q, k, v, windows, tables, causal=causal)
    for place in ((0,) * len(shape), tuple(n // 2 for n in shape)):
        pulled = grad(y[0][place].square().sum(), [q, k, v], retain_graph=True)
        for other in itertools.product(*map(range, shape)):
            offset = [j - i for i, j in zip(place, other, strict=True)]
            near = all(abs(o) < w for o, w in zip(offset, windows, strict=True))
            near = near and (not causal or offset[0] <= 0)
            assert bool(pulled[2][0][other].any()) == near
            assert near or not pulled[1][0][other].any()
            assert other == place or not pulled[0][0][other].any()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, windows", [((9,), (3,)), ((70,), (5,)), ((6, 19), (2, 3))])
def test_tokens_that_see_only_padding_read_zero(shape, windows, dtype, causal):
    inputs = sample(shape, windows, dtype=dtype)
    q, k, v, *tables = inputs
    mask = torch.zeros(2, *shape, dtype=torch.bool)
    mask[1, 0] = True
    y = local_attention(q, k, v, windows, tables, mask=mask, causal=causal)
    assert y.dtype == dtype and not y[0].any() and not y[1, windows[0] :].any()
    assert y[1, 0].any(-1).all()  # a channel may be 0 by chance
    for x, g in zip(inputs, grad(y.float().square().sum(), inputs), strict=True):
        assert g.isfinite().all() and g.dtype == x.dtype
        if x.shape == mask.shape + x.shape[-2:]:
            assert x is q or not g[~mask].any()


def test_content_of_padding_does_not_matter():
    """Even where keys are huge, and with half precision's small range."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v, table = sample((50,), (4,), dtype=dtype)
        mask = torch.rand(2, 50) < 0.6
        junk = [torch.where(mask[..., None, None], x, 30 * x.abs()) for x in (k, v)]
        y = local_attention(q, k, v, 4, [table], mask=mask)
        assert torch.equal(local_attention(q, *junk, 4, [table], mask=mask), y)


def test_large_scores(close):
    """Of some hundreds. A weight is off by the rounding of its score relative to 1: dim * eps times
    the largest, for each of two scores that compete."""
    q, k, v = (x.detach() for x in sample((90,), (), dim=8))
    q = 300 * q
    rounding = 8 * torch.finfo(torch.float32).eps * (q.abs().max() * k.abs().max() / 8**0.5).item()
    assert rounding < 3e-3
    y = local_attention(q.float(), k.float(), v.float(), 5)
    close(y.double(), dense(q, k, v, (5,)), 2 * rounding)


@pytest.mark.parametrize("shape, windows", [((24, 24), (6, 6)), ((9, 9, 12), (2, 2, 2))])
def test_tiles_of_a_grid_are_made_again(close_grads, shape, windows):
    """In the backward pass: what is kept for it is less than the inputs and the output."""
    inputs = sample(shape, windows, dim=8, batch=1)
    q, k, v, *tables = inputs
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = local_attention(q, k, v, windows, tables)
    assert sum(kept.values()) < 4 * q.untyped_storage().nbytes()
    close_grads(y, dense(q, k, v, windows, tables), inputs, 1e-12)


def test_bfloat16(close):
    q, k, v, table = sample((200,), (9,), dim=16)
    y = local_attention(*(x.bfloat16() for x in (q, k, v)), 9, [table], causal=True)
    exact = dense(*(x.bfloat16().double() for x in (q, k, v)), (9,), [table], causal=True)
    close(y.double(), exact, 2e-2)


def test_nothing_in_nothing_out():
    for shape in ((0,), (0, 3), (3, 0)):
        q = torch.randn(2, *shape, 1, 4, requires_grad=True)
        y = local_attention(q, q, q, 2, causal=True)
        assert y.shape == q.shape and grad(y.sum(), q)[0].shape == q.shape


def test_errors():
    x = torch.randn(1, 6, 2, 4)
    table = torch.randn(2, 5)
    for bad in (0, (2, 2), (-1,)):
        with pytest.raises(ValueError, match=r"window="):
            local_attention(x, x, x, bad)
    for tables in ([table, table], [table[:, 1:]], [table[:1]], [table[:, :3]]):
        with pytest.raises(ValueError, match=r"bias \[.*2 \* window - 1"):
            local_attention(x, x, x, 3, tables)
    with pytest.raises(ValueError, match=r"k with 7 frames, q with 6"):
        local_attention(x, torch.randn(1, 7, 2, 4), torch.randn(1, 7, 2, 4), 3)
    with pytest.raises(ValueError, match=r"k with 5 frames"):
        local_attention(x, x[:, 1:], x[:, 1:], 3, causal=True)
    with pytest.raises(ValueError, match=r"same grid"):
        local_attention(x, x, x[:, 1:], 3)
    for shapes in ([(1, 6, 2), (1, 6, 2, 3)], [(1, 6, 2, 4), (1, 6, 2)], [(1, 6, 2)]):
        with pytest.raises(ValueError, match=r"beside .*: expected \(1, 6, 2\) and \(1, 6, 2, 4\)$"):
            local_attention(x, x, x, 3, beside=[torch.randn(shape) for shape in shapes])
    for mask in (torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 6)):
        with pytest.raises(ValueError, match=r"mask .*bool \(1, 6\)"):
            local_attention(x, x, x, 3, mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.bfloat16, 2**-7)])
def test_a_further_key_of_each_query(close, causal, dtype, tol):
    """Its score is about 30, of which bfloat16 would lose a tenth; some queries have none. The scale is exact."""
    q, k, v, extra = (torch.randn(2, 150, 2, 16).to(dtype) for _ in range(4))
    score = 30 + torch.randn(2, 150, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    k = k + 30 * q / q.square().sum(-1, keepdim=True) * 4  # neighbours' scores, a token's own above all
    k = k.to(dtype)
    score[:, ::7] = -torch.inf
    near = torch.arange(150)[:, None] - torch.arange(150)
    far = (near.abs() >= 5) | (causal & (near < 0))
    pairs = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) / 4
    pairs = pairs.masked_fill(far[:, None], -torch.inf)
    weights = torch.cat([pairs, score.double()[..., None]], -1).softmax(-1)
    expected = torch.einsum("bqhk,bkhd->bqhd", weights[..., :-1], v.double()) + weights[..., -1:] * extra.double()
    y = local_attention(q, k, v, 5, causal=causal, beside=(score, extra))
    close(y, expected.to(dtype), tol)


def attend_end_to_end(q, k, v, of_queries, of_keys, most_q, most_k, *, scale, window_size):
    """What torch.nn.attention.varlen.varlen_attn computes, sample by sample."""
    assert (most_q, most_k) == (int(of_queries.diff().max()), int(of_keys.diff().max()))
    left, right = (len(k) if side < 0 else side for side in window_size)
    scale, out = scale or q.shape[-1] ** -0.5, []
    for sample in range(len(of_queries) - 1):
        rows = slice(*of_queries[sample : sample + 2])
        columns = slice(*of_keys[sample : sample + 2])
        score = scale * torch.einsum("thd,shd->hts", q[rows], k[columns])
        targets, sources = score.shape[1:]
        offset = torch.arange(sources) - torch.arange(sources - targets, sources)[:, None]
        score = score.masked_fill((offset < -left) | (offset > right), -torch.inf)
        out.append(torch.einsum("hts,shd->thd", score.softmax(-1), v[columns]))
    return torch.cat(out)


@both
def test_flash_attention_gets_the_same_windows(close, close_grads, monkeypatch, causal):
    """Here by its definition; below by itself."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_end_to_end)
    monkeypatch.setattr(local, "flash_support", lambda *_: Support())
    for n, window, past in ((31, 4, 0), (9, 1, 0), (5, 20, 0), *[(7, 4, 3), (1, 6, 5)] * causal):
        q, k, v = sample((n + past,), ())
        y = local_attention(q[:, past:], k, v, window, causal=causal)
        expected = dense(q[:, past:], k, v, (window,), causal=causal)
        close(y, expected, 1e-12)
        close_grads(y, expected, [q, k, v], 1e-12)


@both
@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_of_a_pack(close, close_grads, monkeypatch, window, causal):
    """All samples of one axis at once, even empty ones; more axes too if all tokens are read."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_end_to_end)
    monkeypatch.setattr(local, "flash_support", lambda *_: Support())
    reads = []

    def attend(grid, q, k, v, mask):
        reads.append(grid.shape)
        far = [max(grid.shape)] * grid.ndim
        windows = far if window is None else [window] * grid.ndim
        y = dense(*(grid.unflatten(x) for x in (q, k, v)), windows, causal=causal)
        return grid.flatten(y)

    for shapes in ([(5,), (0,), (2,), (9,), (2,)], [(2, 3), (4, 1)]):
        pack = Ragged(shapes)
        q, k, v = sample((pack.length,), (), batch=1)
        expected = pack.map_samples(lambda grid, *xs: attend(grid, *xs, None) if grid.length else xs[0], q, k, v)
        reads.clear()
        y = local.attend_in_samples(attend, q, k, v, None, pack, causal, window)
        assert bool(reads) == (pack.ndim == 2 and (causal or window is not None))
        close(y, expected, 1e-12)
        close_grads(y, expected, [q, k, v], 1e-12)


def test_when_flash_attention_runs():
    q = torch.empty(1, 5, 2, 16, device="meta")
    for given, reason in (
        ((q[:, None], (), None), "2 axes: expected one"),
        ((q, [q], None), "biases: expected none"),
        ((q, (), q), "a mask: expected none"),
        ((q, (), None), "tensors on meta: expected cuda"),
    ):
        assert not local.flash_support(*given) and local.flash_support(*given).reason == reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_on_a_card(close, close_grads, dtype, causal):
    """Rounding of 16 bits: of q, k, v, of the weights and of the result."""
    for n, window, past in ((300, 64, 0), (129, 1, 0), (70, 90, 0), *[(130, 64, 63)] * causal):
        given = [x.detach().to("cuda", dtype) for x in sample((n + past,), (), dim=32)]
        q, k, v = (x.requires_grad_() for x in given)
        assert local.flash_support(q, (), None)
        y = local_attention(q[:, past:], k, v, window, causal=causal)
        exact = [x.detach().double().cpu().requires_grad_() for x in given]
        expected = dense(exact[0][:, past:], *exact[1:], (window,), causal=causal)
        close(y.double().cpu(), expected, 2e-2)
        upstream = torch.randn_like(expected)
        grads = grad(y, [q, k, v], upstream.to("cuda", dtype))
        exact_grads = grad(expected, exact, upstream)
        # those of q and k are differences of terms as large as that of v, with window=1 all 0
        largest = max(b.norm() for b in exact_grads)
        for a, b in zip(grads, exact_grads, strict=True):
            assert (a.double().cpu() - b).norm() < 8 * torch.finfo(dtype).eps * largest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
@pytest.mark.parametrize("mixer", [SoftmaxAttention, partial(WindowAttention, window=20, rotary=True)])
def test_a_pack_on_a_card(mixer, causal):
    """At once what each sample is alone, values and gradients: to the rounding of 16 bits."""
    net, pack = mixer(64, 2).to("cuda", torch.bfloat16), Ragged([(70,), (3,), (129,), (1,)])
    x = torch.randn(pack.length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    calls, attend = [], local._flash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_flash", lambda *inputs: calls.append(inputs) or attend(*inputs))
        packed = net(x, layout=pack, causal=causal)
    assert len(calls) == 1
    alone = torch.cat([net(part, causal=causal)[0] for part in pack.split(x)])
    for a, b in zip(*([y, grad(y.square().sum(), x)[0]] for y in (packed, alone)), strict=True):
        assert (a - b).norm() < 8 * torch.finfo(x.dtype).eps * b.norm()

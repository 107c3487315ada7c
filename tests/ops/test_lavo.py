"""The orthogonal memory and the means that fill it, against memories that are formed."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops import lavo
from ndlightnet.ops.lavo import amounts, past_means, token_mean
from ndlightnet.ops.local import local_attention

from .largest_tensor import LargestTensor


def memory_read(q, basis, mean, scale=None):
    """Of contexts with these means."""
    return lavo.memory_read(q, basis, amounts(basis, mean), scale)


def orthonormal(heads, rows, dim, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(heads, dim, rows, dtype=dtype))[0].mT.contiguous()


def sample(length, groups, *, heads=2, rows=3, dim=5, dtype=torch.float64):
    q = torch.randn(2, length, heads, dim, dtype=dtype)
    mean = torch.randn(2, groups, heads, dim, dtype=dtype)
    return [x.requires_grad_() for x in (q, orthonormal(heads, rows, dim, dtype), mean)]


def formed(q, basis, mean, scale=None):
    """With a memory (rows, dim) for every query."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mean = mean.repeat_interleave(q.shape[1] // mean.shape[1], 1)
    memory = torch.einsum("hrd,blhd->blhr", basis, mean)[..., None] * basis
    weights = (scale * torch.einsum("blhrd,blhd->blhr", memory, q)).softmax(-1)
    return torch.einsum("blhr,blhrd->blhd", weights, memory)


READS = pytest.mark.parametrize("length, groups", [(1, 1), (7, 1), (7, 7), (12, 3), (12, 12), (66, 11)])


@READS
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_read_is_attention_to_the_memory(close, close_grads, length, groups, rows, scale):
    inputs = sample(length, groups, rows=rows)
    y, expected = memory_read(*inputs, scale), formed(*inputs, scale)
    close(y, expected, 1e-13)
    close_grads(y, expected, inputs, 1e-12)


def test_nothing_seen_is_read_as_zero():
    for dtype in (torch.float32, torch.bfloat16):
        q, basis, mean = sample(8, 4, dtype=torch.float32)
        y = memory_read(q.to(dtype), basis, 0 * mean)
        assert y.dtype == dtype and not y.any()
        assert all(g.isfinite().all() for g in grad(y.float().sum(), [q, basis, mean]))


def test_memory_is_linear_in_the_length():
    """No memory of a query's own is made, forwards or backwards, and weights are not kept."""
    q, basis, mean = sample(64, 64, heads=2, rows=16, dim=16)
    kept = []
    h = amounts(basis, mean)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        lavo.memory_read(q, basis, h)
    assert sum(kept) == q.numel() + basis.numel() + h.numel()
    with LargestTensor() as made:
        memory_read(q, basis, mean).square().sum().backward()
    assert made.numel == q.numel()
    with LargestTensor() as made:
        formed(q, basis, mean)
    assert made.numel == 16 * q.numel()


def test_bfloat16_read(close):
    q, basis, mean = sample(40, 8, rows=16, dim=16)
    half = q.bfloat16()
    y = memory_read(half, basis.float(), mean.float())
    assert y.dtype == torch.bfloat16
    close(y.double(), formed(half.double(), basis, mean), 2e-2)
    with torch.autocast("cpu", torch.bfloat16):  # what is float32 stays so
        inputs = q.float(), basis.float(), mean.float()
        close(memory_read(*inputs).double(), formed(q, basis, mean), 1e-5)


def test_means_have_the_true_count(close):
    x, mask = torch.randn(3, 10, 2, 4), torch.rand(3, 10) < 0.6
    mask[0], mask[1, :5] = False, True
    y = token_mean(x, mask)
    close(y[1], x[1, mask[1]].mean(0), 1e-6)
    assert not y[0].any() and (y[1] - (x[1] * mask[1, :, None, None]).mean(0)).abs().max() > 1e-2
    close(token_mean(x), x.mean(1), 1e-6)
    assert token_mean(x.bfloat16()).dtype == torch.float32
    assert token_mean(x.double(), mask).dtype == torch.float64
    assert torch.equal(token_mean(x[:, :0]), torch.zeros(3, 2, 4))


def frames(n, tokens=3, batch=2):
    return torch.randn(batch, n, tokens, 2, 4, dtype=torch.float64)


def one_by_one(x, window, mask=None, first=(0, 0)):
    """Means for frames from first[row] on, of x that begins at 0."""
    mask = torch.ones(x.shape[:3], dtype=torch.bool) if mask is None else mask
    rows = []
    for row, start in zip(range(len(x)), first, strict=True):
        for f in range(start, start + x.shape[1] - max(first)):
            real = mask[row].any(1).int().argmax()  # the first frame that is
            end = f + 1 if window is None else (f - real) // window * window + real
            end = max(0, int(end))
            seen = x[row, :end][mask[row, :end]]
            rows.append(seen.mean(0) if len(seen) else torch.zeros_like(x[0, 0, 0]))
    return torch.stack(rows).reshape(len(x), -1, *x.shape[3:])


windows = pytest.mark.parametrize("window", [None, 1, 2, 5, 16])


@windows
@pytest.mark.parametrize("n", [1, 4, 5, 13, 20])
@pytest.mark.parametrize("tokens", [1, 3])
def test_past_means(close, close_grads, window, n, tokens):
    x = frames(n, tokens).requires_grad_()
    mask = torch.rand(x.shape[:3]) < 0.4
    mask[0, :2] = False  # before its first window begins
    for keep in (None, mask):
        y, expected = past_means(x, window, mask=keep)[0], one_by_one(x, window, keep)
        close(y, expected, 1e-13)
        if expected.requires_grad:
            close_grads(y, expected, [x], 1e-13)


@windows
def test_past_means_in_pieces_and_rows_of_their_own(close, window):
    """Whatever the pieces, and with rows that are elsewhere in their window."""
    x = frames(40)
    means, end = past_means(x, window)
    for _ in range(5):
        sums, got, at = None, [], 0
        while at < 40:
            n = int(torch.randint(0, 12, ()))
            y, sums = past_means(x[:, at : at + n], window, past=sums)
            got, at = [*got, y], at + n
        close(torch.cat(got, 1), means, 1e-12)
        for a, b in zip(sums, end, strict=True):
            assert a.dtype == b.dtype and (a - b).abs().max() < 1e-12
    first = (3, 10)
    each = [past_means(x[i : i + 1, :f], window)[1] for i, f in enumerate(first)]
    sums = type(end)(*(torch.cat(part) for part in zip(*each, strict=True)))
    y, _ = past_means(torch.stack([x[0, 3:33], x[1, 10:]]), window, past=sums)
    close(y, one_by_one(x, window, first=first), 1e-12)


def test_windows_of_padding_have_mean_zero():
    x, mask = frames(12), torch.ones(2, 12, 3, dtype=torch.bool)
    mask[:, :8] = False
    y, _ = past_means(x.requires_grad_(), 4, mask=mask)
    assert not y.any() and y.shape == (2, 12, 2, 4)
    assert not grad(y.sum(), x)[0].any()


@pytest.mark.usefixtures("float64")
def test_oracles(load_oracle, close):
    """One head at a time: the read, both local forms, the dissected causal form and its steps."""
    oracle = load_oracle("verify_lavo")
    n, d, r, scale = 37, 6, 4, 0.4
    q, k, v, f = torch.randn(4, n, d)
    basis, context = oracle.ortho(r, d), torch.randn(11, d)
    h = basis @ context.mean(0)

    def head(*xs):
        return [x[None, :, None] for x in xs]

    y = memory_read(*head(q), basis[None], context.mean(0)[None, None, None], scale)
    close(y[0, :, 0], oracle.read_dense(q, basis, h, scale), 1e-12)
    running = f.cumsum(0) / torch.arange(1.0, n + 1)[:, None]
    close(past_means(f[None, :, None, None], None)[0][0, :, 0], running, 1e-12)
    for w in (1, 5, 40):
        table = torch.randn(2 * w - 1)
        for causal in (False, True):
            y = local_attention(*head(q, k, v), w, [table[None]], causal=causal, scale=scale)
            close(y[0, :, 0], oracle.local_blocks(q, k, v, table, w, causal, scale), 1e-12)
        means, _ = past_means(y[:, :, None], w)
        y = (y + memory_read(*head(q), basis[None], means, scale)) / 2
        expected, _ = oracle.dissected_causal(q, k, v, basis, table, w, scale)
        close(y[0, :, 0], expected, 1e-12)
        nothing = torch.zeros(0, d)
        state = dict(K=nothing, V=nothing, done=torch.zeros(d), pending=torch.zeros(d), t=0)
        for t in range(n):
            step = oracle.dissected_step(state, q[t], k[t], v[t], basis, table, w, scale)
            close(step, y[0, t, 0], 1e-12)


def test_errors():
    q, basis, mean = sample(12, 4)
    h = amounts(basis, mean)
    for bad in (basis[:1], basis[..., 1:], basis[0]):
        with pytest.raises(ValueError, match=r"basis .*expected \(2, memories, 5\)"):
            lavo.memory_read(q, bad, h)
    for bad in (torch.cat([h, h], 1)[:, :5], h[:1], h[:, :0]):
        with pytest.raises(ValueError, match=r"h .*divide length=12"):
            lavo.memory_read(q, basis, bad)
    with pytest.raises(ValueError, match=r"mean \(2, 4, 1, 5\): expected \(batch, groups, 2, 5\)"):
        amounts(basis, mean[:, :, :1])

"""LAVO as a mixer: its definition token by token, streams, padding, the basis."""

import itertools
from functools import partial

import pytest
import torch

from ndlightnet.nn.mixers.lavo import LAVO

from .mixer_cases import LAVO_WINDOWS

cases = pytest.mark.parametrize("shape, window", LAVO_WINDOWS.items(), ids=str)
both = pytest.mark.parametrize("causal", [False, True])
small = partial(LAVO, heads=2)


def layer(window="auto", dim=8, **options):
    """With biases that matter."""
    m = small(dim, window=window, **options).double()
    for table in m.bias:
        torch.nn.init.normal_(table)
    return m


def tokens(*shape, dim=8, batch=2):
    return torch.randn(batch, *shape, dim, dtype=torch.float64)


def windows_of(window, ndim):
    if window == "auto":
        return [{1: 16, 2: 8, 3: 5, 4: 4}[ndim]] * ndim
    return [window] * ndim if isinstance(window, int) else list(window)


def read(q, basis, mean):
    memory = (basis @ mean)[:, None] * basis
    return (memory @ q / len(q) ** 0.5).softmax(0) @ memory


def definition(m, x, window, mask=None, causal=False):
    """Query by query, with every memory formed."""
    batch, *shape, dim = x.shape
    places = list(itertools.product(*map(range, shape)))
    keep = torch.ones(batch, len(places), dtype=torch.bool) if mask is None else mask.flatten(1)
    x = x.reshape(batch, len(places), dim)
    out = torch.zeros(batch, len(places), m.heads, m.head_dim, dtype=x.dtype)
    for b, h in itertools.product(range(batch), range(m.heads)):
        q, k, v = (
            None if p is None else p(x[b]).unflatten(-1, (m.heads, -1))[:, h] for p in (m.q_proj, m.k_proj, m.v_proj)
        )
        local = v
        if window is not None:
            sizes = windows_of(window, len(shape))
            rows = []
            for t, i in enumerate(places):
                near, bias = [], []
                for s, j in enumerate(places):
                    off = [c - a for a, c in zip(i, j, strict=True)]
                    within = all(abs(o) < w for o, w in zip(off, sizes, strict=True)) and keep[b, s]
                    if within and not (causal and off[0] > 0):
                        tables = list(m.bias) * (len(sizes) if len(m.bias) == 1 else 1)
                        near.append(s)
                        pairs = zip(tables, off, strict=bool(tables))
                        bias.append(sum((table[h, table.shape[1] // 2 + o] for table, o in pairs), q[0, 0] * 0))
                score = k[near] @ q[t] / m.head_dim**0.5 + torch.stack([*bias, q[0, 0] * 0])[:-1]
                rows.append(score.softmax(0) @ v[near])
            local = torch.stack(rows)
        dissected = window is not None and m.dissect
        for t, i in enumerate(places):
            past = [s for s, j in enumerate(places) if keep[b, s]]
            if causal:
                first = places[past[0]][0] if past else 0  # windows begin with what is real
                end = i[0] + 1
                if dissected:
                    end = (i[0] - first) // sizes[0] * sizes[0] + first
                past = [s for s in past if places[s][0] < end]
            mean = (local if dissected else v)[past].mean(0) if past else torch.zeros_like(v[0])
            y = read(q[t], m.basis[h], mean)
            out[b, t, h] = y if window is None else (local[t] + y) / 2
    return m.o_proj(out.flatten(2)).reshape(batch, *shape, dim)


@both
@cases
def test_is_its_definition(close, shape, window, causal):
    m, x = layer(window), tokens(*shape)
    y = m(x, causal=causal)
    close(y, definition(m, x, window, causal=causal), 1e-12)
    mask = torch.rand(2, *shape) < 0.6
    mask[0] = True
    close(m(x, mask=mask, causal=causal)[mask], definition(m, x, window, mask, causal)[mask], 1e-12)


@both
@pytest.mark.parametrize("options", [{"position": False}, {"dissect": False}, {"position": False, "dissect": False}])
@pytest.mark.parametrize("shape, window", [((23,), 5), ((6, 4), (4, 2))])
def test_the_ablations_are_their_definition(close, shape, window, options, causal):
    m, x = layer(window, **options), tokens(*shape)
    assert len(m.bias) == (0 if "position" in options else 2 if isinstance(window, tuple) else 1)
    y = m(x, causal=causal)
    close(y, definition(m, x, window, causal=causal), 1e-12)
    mask = torch.rand(2, *shape) < 0.6
    mask[0] = True
    close(m(x, mask=mask, causal=causal)[mask], definition(m, x, window, mask, causal)[mask], 1e-12)
    if causal:  # frame by frame
        state, frames = m.init_state(2, space=shape[1:]), []
        for number in range(shape[0]):
            frame, state = m.advance(x[:, number : number + 1], state, number)
            frames.append(frame)
        close(torch.cat(frames, 1), y, 1e-12)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_axes_are_alike(close, order):
    """The non-causal form, with windows (and their biases) in the order of the axes."""
    view = (0, *[1 + a for a in order], 4)
    x = tokens(5, 6, 9)
    m = layer(3)
    close(m(x.permute(view)), m(x).permute(view), 1e-12)
    m, turned = layer((2, 4, 3)), layer([(2, 4, 3)[a] for a in order])
    m.bias, tables = torch.nn.ParameterList(m.bias[a] for a in order), list(m.bias)
    turned.load_state_dict(m.state_dict())
    m.bias = torch.nn.ParameterList(tables)
    close(turned(x.permute(view)), m(x).permute(view), 1e-12)


def test_the_memory_ignores_the_layout(close):
    m, x, context = layer(None), tokens(3, 4), tokens(12)
    order = torch.randperm(12)
    close(m(x).flatten(1, 2), m(x.flatten(1, 2)), 1e-13)
    close(m(x.flatten(1, 2)[:, order]), m(x).flatten(1, 2)[:, order], 1e-13)
    close(m(x, context=context[:, order]), m(x, context=context), 1e-13)


@pytest.mark.parametrize("dim", [None, 5])
def test_cross_form_reads_the_mean_of_the_source(close, dim):
    m = layer(3, context_dim=dim)
    x, context, mask = tokens(3, 4), tokens(7, 2, dim=dim or 8), torch.rand(2, 7, 2) < 0.5
    mask[0], mask[1, 0] = False, True
    mean = m.v_proj(context[1, mask[1]].mean(0)).unflatten(-1, (2, -1))
    q = m.q_proj(x[1]).flatten(0, 1).unflatten(-1, (2, -1))
    y = torch.stack([torch.cat([read(q[t, h], m.basis[h], mean[h]) for h in range(2)]) for t in range(12)])
    got = m(x, context=context, mask=mask)
    close(got[1], m.o_proj(y).view(3, 4, 8), 1e-12)
    assert not got[0].any()  # a source of nothing
    if dim is None:  # its memory is what the layer without the local branch makes of x
        alone = layer(None)
        alone.load_state_dict({k: v for k, v in m.state_dict().items() if k[0] not in "bk"} | {"basis": m.basis})
        close(alone(x), m(x, context=x), 1e-14)
    else:
        assert m.k_proj is None and not m.bias


def test_wrong_inputs():
    m, x = layer((3, 2)), tokens(5, 4)
    for call, message in (
        (lambda: m(tokens(5)), r"window=\(3, 2\)"),
        (lambda: m(x, mask=torch.ones(2, 5, 3, dtype=torch.bool)), r"mask .*bool"),
        (lambda: m(x, context=tokens(5, dim=7)), r"7 channels: expected 8"),
        (lambda: layer(context_dim=5)(x), r"8 channels: expected 5"),
        (lambda: m.advance(x, m.init_state(2, space=(3,)), 0), r"frames of \(4,\): expected \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_memory_vectors_are_orthonormal_at_first():
    """They learn freely from there, as in the paper."""
    m = LAVO(8, heads=2, window=4)
    assert (m.basis @ m.basis.mT - torch.eye(4)).abs().max() < 1e-6
    m(torch.randn(2, 12, 8)).square().sum().backward()
    assert m.basis.grad.any()


def test_parameters():
    def count(**options):
        return sum(p.numel() for p in LAVO(128, **options).parameters())

    projections, bases = 4 * 128**2, 64 * 128
    assert count() == projections + bases + 2 * 31
    assert count(window=8) == projections + bases + 2 * 15
    assert count(window=(4, 8, 8)) == projections + bases + 2 * (7 + 15 + 15)
    assert count(window=None) == count(context_dim=128) == 3 * 128**2 + bases
    assert count(context_dim=40) == 2 * 128**2 + 40 * 128 + bases
    assert LAVO(96, heads=4).basis.shape == (4, 24, 24)
    # what the paper's memory adds to 12 layers of GPT-2: 0.59 M
    added = 12 * LAVO(768).basis.numel()
    assert round(added / 1e6, 2) == 0.59

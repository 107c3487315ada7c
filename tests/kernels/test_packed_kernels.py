"""Samples end to end: the kernels give each sample what they give it alone, whatever lies in its neighbours.

Every sample of a pack is compared with the same sample alone, by values and by gradients, where the
logits of samples differ by up to 10^4 and one of them holds NaN. Both run the same kernels (or the
same torch form), which the other tests hold to float64: an error against float64 may be twice as large,
and by the band of yardstick.judge: a rounding, and 4 sqrt(n) float32 roundings, for sums of n terms in
another order. The parameters of MD-LRPE and MD-TPE are shared by the samples, so their gradients are
compared where nothing is NaN.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ndlightnet import Ragged
from ndlightnet.ops import Position, axis_causal_attention, axis_scan, global_attention
from ndlightnet.ops.axis_scan import _triton as scan
from ndlightnet.ops.lightnet import _triton as lightnet
from ndlightnet_kernels import plans

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan
from .kernel_cases import BRAIN, DEVICE, HALF

FULL, EXACT = torch.float32, torch.float64
SOLID = ((3, 4, 5), (1, 2, 3), (6, 7, 4), (1, 1, 1))
LONG = ((70,), (3,), (200,))
LARGE = ((8, 8, 8), (24, 20, 28), (40, 36, 44), (5, 64, 64))
grids = st.integers(1, 3).flatmap(
    lambda axes: st.lists(st.tuples(*[st.integers(1, {1: 64, 2: 12, 3: 5}[axes])] * axes), min_size=2, max_size=3)
)
# what is added to all logits of a sample
raised = st.sampled_from([0.0, 30.0, 88.0, 200.0, 1e4, -88.0, -200.0, -1e4])
raises, bads = st.lists(raised, min_size=3, max_size=3), st.none() | st.integers(0, 2)
both = pytest.mark.parametrize("impl", ["torch", "triton"])


def examples(check, impl, **drawn):
    """Calls check(impl, ...) with what is drawn; a few times only where kernels are interpreted."""
    most = 40 if impl == "torch" or torch.cuda.is_available() else 4
    checks = settings(deadline=None, max_examples=most, suppress_health_check=list(HealthCheck))

    @checks
    @given(masked=st.booleans(), bad=bads, seed=st.integers(0, 99), **drawn)
    def run(**arguments):
        torch.manual_seed(arguments.pop("seed"))
        check(impl, **arguments)

    run()


class Pack:
    """Random tokens of samples, one of which (`bad`, if any) holds a NaN in each tensor."""

    def __init__(self, shapes, widths, masked, bad=None, dtype=FULL):
        self.layout, self.shapes, self.dtype = Ragged(shapes), shapes, dtype
        self.tokens = [torch.randn(self.layout.length, *width) for width in widths]
        self.mask = torch.rand(self.layout.length) < 0.7 if masked else None
        self.bad = bad if bad is not None and bad < len(shapes) else None
        if self.bad is not None:
            first = self.layout.offsets[self.bad]
            for x in self.tokens:
                x[first] = torch.nan
            if masked:
                self.mask[first] = True

    def rows(self, i):
        return slice(self.layout.offsets[i], self.layout.offsets[i + 1])

    def judge(self, packed, alone, shared=()):
        """packed(leaves, mask), alone(i, leaves of sample i, mask of sample i, whether in float64): tokens first."""
        mask, n = None if self.mask is None else self.mask.to(DEVICE), len(self.tokens)

        def single(leaves, exact=False):
            outs = []
            for i in range(len(self.shapes)):
                sample = [*(x[None, self.rows(i)] for x in leaves[:n]), *leaves[n:]]
                outs.append(alone(i, sample, None if mask is None else mask[None, self.rows(i)], exact)[0])
            return torch.cat(outs)

        results = []
        for exact, function in (
            (False, lambda xs: packed(xs, mask)),
            (False, single),
            (True, lambda xs: single(xs, True)),
        ):
            leaves = [*(x.to(self.dtype) for x in self.tokens), *shared]
            leaves = [x.to(DEVICE, EXACT if exact else x.dtype, copy=True).requires_grad_() for x in leaves]
            out = function(leaves)
            torch.manual_seed(1)
            pull = torch.randn(out.shape).to(self.dtype).to(DEVICE, out.dtype)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, pull)])
        tokens = [self.rows(i) for i in range(len(self.shapes)) if i != self.bad]
        for slices, group in (
            (tokens, range(1)),  # the output
            (tokens, range(1, n + 1)),  # the tokens' gradients
            ([slice(None)] * (self.bad is None), range(n + 1, len(results[0]))),
        ):
            for rows in slices:
                triples = [[xs[j][rows] for xs in results] for j in group]
                # dk is a difference of terms of the size of all gradients, 0 for a single token
                scale = max((exact.abs().max() for _, _, exact in triples), default=0)
                for j, (ours, theirs, exact) in zip(group, triples, strict=True):
                    assert ours.isfinite().all() and ours.dtype == theirs.dtype, (j, rows)
                    lost = torch.finfo(ours.dtype).eps + 2 * self.layout.length**0.5 * torch.finfo(FULL).eps
                    error, bound = ((x.double() - exact).abs().max() for x in (ours, theirs))
                    assert error <= 2 * bound + lost * scale, f"{j}, {rows}: {error}, {bound}"


def check_attention(impl, shapes, masked, kind, up=(), bad=None, dtype=FULL, heads=2, dims=(6, 5)):
    pack = Pack(shapes, ((heads, dims[0]), (heads, dims[0]), (heads, dims[1])), masked, bad, dtype)
    for i, by in zip(range(len(shapes)), up, strict=False):
        pack.tokens[1][pack.rows(i)] += by

    def place(theta, shape):
        return Position(*theta, shape, kind) if kind else None

    def packed(leaves, mask):
        q, k, v, *theta = leaves
        return packed_attention(q, k, v, pack.layout, mask=mask, position=place(theta, shapes[0]), impl=impl)

    def alone(i, leaves, mask, exact):
        q, k, v, *theta = leaves
        form = "torch" if exact else impl
        return global_attention(q, k, v, mask=mask, position=place(theta, shapes[i]), impl=form)

    slots = {None: 0, "cosine": dims[0], "rotary": dims[0] // 2}[kind]
    pack.judge(packed, alone, [3 * torch.rand(heads, slots)] if kind else ())


@pytest.mark.slow
@both
def test_attention(impl):
    examples(check_attention, impl, shapes=grids, up=raises, kind=st.sampled_from([None, "cosine", "rotary"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes, kind, dtype, masked",
    [
        (SOLID, None, FULL, True),
        (SOLID, "cosine", BRAIN, False),
        (SOLID, "rotary", FULL, False),
        (LONG, "cosine", HALF, True),
        (LONG, None, BRAIN, False),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_attention_in_splits(monkeypatch, poison, shapes, kind, dtype, masked, cut):
    if cut:  # into splits, as on a card, where splits are many
        monkeypatch.setattr(plans, "tokens_per_split", lambda *_: 64)
    check_attention("triton", shapes, masked, kind, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "cosine", "rotary"])
def test_full_size(poison, kind):
    check_attention("triton", LARGE, False, kind, dtype=BRAIN, heads=12, dims=(64, 64))


def check_axis_causal(impl, shapes, window, forget, masked, up=(), bad=None, kind=None, heads=1):
    pack = Pack(shapes, ((heads, 6), (heads, 6), (heads, 5)), masked, bad)
    for i, by in zip(range(len(shapes)), up, strict=False):
        pack.tokens[1][pack.rows(i)] += by
    past = {"window": window, "forget": forget}

    def place(theta, shape):
        return Position(*theta, shape) if kind else None

    def packed(leaves, mask):
        q, k, v, *theta = leaves
        at = place(theta, shapes[0])
        return packed_axis_causal_attention(q, k, v, pack.layout, mask=mask, position=at, impl=impl, **past)

    def alone(i, leaves, mask, exact):
        q, k, v, *theta = leaves
        how = {"mask": mask, "position": place(theta, shapes[i]), "impl": "torch" if exact else impl}
        return axis_causal_attention(q, k, v, shapes[i][0], **how, **past)[0]

    pack.judge(packed, alone, [3 * torch.rand(heads, 6)] if kind else ())


@pytest.mark.slow
@both
def test_axis_causal(impl):
    """Frames of 20 tokens: the kernels make no States of much smaller ones."""
    shapes = st.lists(st.integers(1, 3).map(lambda n: (n, 4, 5)), min_size=2, max_size=3)
    windows, forgets = st.none() | st.just(2), st.sampled_from([0.0, 0.2])
    examples(check_axis_causal, impl, shapes=shapes, window=windows, forget=forgets, up=raises)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2])
def test_axis_causal_with_angles(poison, window):
    """Frames of 40 tokens and more: smaller ones have no States of their own."""
    check_axis_causal("triton", ((3, 4, 10), (1, 6, 8), (4, 5, 9)), window, 0.2, True, kind="cosine", heads=2)


@pytest.mark.slow
@both
@pytest.mark.parametrize("jump", [88.0, 1e4, torch.nan])
def test_later_frames_do_not_reach_earlier_ones(impl, jump):
    """Frames are samples of a pack of their own: frame 3 after a jump, frames 0 to 2 before it."""
    layout = Ragged([(5, 40), (2, 40)])
    q, k, v = (torch.randn(layout.length, 1, 8, device=DEVICE) for _ in "qkv")
    raised = k.clone()
    raised[3 * 40 : 5 * 40] += jump
    before, after = (packed_axis_causal_attention(q, x, v, layout, impl=impl) for x in (k, raised))
    assert torch.equal(before[:120], after[:120])
    assert torch.equal(before[200:], after[200:])


def check_axis_scan(impl, shapes, masked, scale=(), ways=True, residual=True, bad=None, dtype=FULL):
    pack, axes, dim = Pack(shapes, ((6,),), masked, bad, dtype), len(shapes[0]), 6
    for i, by in zip(range(len(shapes)), scale, strict=False):
        pack.tokens[0][pack.rows(i)] *= by
    weights = [torch.randn(axes, dim, 3), -torch.rand(axes, 3)] * (2 if ways else 1)

    def packed(leaves, mask):
        x, coef, decay, *back = leaves
        return packed_axis_scan(x, pack.layout, coef, decay, tuple(back) or None, mask, residual=residual, impl=impl)

    def alone(i, leaves, mask, exact):
        x, coef, decay, *back = leaves
        x, keep = x.reshape(1, *shapes[i], dim), None if mask is None else mask.reshape(1, *shapes[i])
        how = {"residual": residual, "impl": "torch" if exact else impl}
        return axis_scan(x, coef, decay, tuple(back) or None, keep, **how).flatten(1, -2)

    pack.judge(packed, alone, weights)


@pytest.mark.slow
@both
def test_axis_scan(impl):
    scales = st.lists(st.sampled_from([1.0, 1e4]), min_size=3, max_size=3)
    examples(check_axis_scan, impl, shapes=grids, scale=scales, ways=st.booleans(), residual=st.booleans())


@pytest.mark.slow
@pytest.mark.parametrize("dtype, masked, longest", [(FULL, False, 128), (BRAIN, True, 128), (FULL, True, 32)])
def test_axis_scan_of_longer_lines(monkeypatch, poison, dtype, masked, longest):
    """The last ones in tiles of 16 tokens."""
    monkeypatch.setattr("ndlightnet_kernels.axis_scan.LONGEST", longest)
    check_axis_scan("triton", ((3, 4, 5), (20, 1, 3), (2, 40, 2)), masked, dtype=dtype)


def test_splits_follow_the_schedule_of_a_card(monkeypatch):
    """Measured on one H200, 132 processors: samples of 512 to 1,800 tokens, 12 heads, are not cut (0.145 ms, of at most
    1,536 tokens 0.149), of 512 to 262,144 tokens are, into 4,096 (1.09 ms, of 8,192 1.11)."""
    monkeypatch.setattr(plans, "processors", lambda _: 132)
    k = torch.empty(1, 1, 12, 64, dtype=BRAIN)
    small = [(8 + i % 8) * (8 + i // 8) * 8 for i in range(64)]
    large = [512, 1920, 13440, 32768, 63360, 110592, 168000, 262144]
    assert plans.tokens_per_split(small, k, 64, "none") >= max(small)
    assert plans.tokens_per_split(large, k, 64, "none") == 4096
    assert plans.tokens_per_split([], k, 64, "none") > 0


def test_splits_cover_every_token_once():
    lengths = (5, 0, 700, 64, 1)
    for span in (64, 128, 1024):
        splits, first = plans.split_table(lengths, span)
        seen = sorted((begin, end) for _, _, begin, end, _ in splits)
        assert [t for begin, end in seen for t in range(begin, end)] == list(range(sum(lengths)))
        assert all(0 < end - begin <= span for begin, end in seen)
        assert sorted(split[1] for split in splits) == list(range(len(splits))) and first[-1] == len(splits)
        for row, slot, begin, end, base in splits:
            assert first[row] <= slot < first[row + 1]
            assert base == sum(lengths[:row]) <= begin and end <= base + lengths[row]


@pytest.mark.slow
def test_operators():
    """The operators of dense tensors are those of samples end to end."""
    layout = Ragged(SOLID)
    q, k, v = (torch.randn(1, layout.length, 2, 6, device=DEVICE).requires_grad_() for _ in "qkv")
    place = Position(torch.rand(2, 6, device=DEVICE), layout)
    where = lightnet.of_samples(place, layout, k, 6)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    _, total, memory = lightnet.summarize(k, v, None, *where)
    for operator, arguments in (
        (lightnet.global_attention, (q, k, v, None)),
        (lightnet.summarize, (k, v, None)),
        (lightnet.read, (q, total.detach(), memory.detach())),
    ):
        torch.library.opcheck(operator.overload, (*arguments, *where), test_utils=checks)
    x = torch.randn(1, layout.length, 6, device=DEVICE, requires_grad=True)
    coef, decay = torch.randn(3, 6, 4, device=DEVICE), -torch.rand(3, 4, device=DEVICE)
    inputs = x, coef, decay, None, None, None, True, BRAIN, FULL, *scan.of_samples(layout, x.device)
    torch.library.opcheck(scan.scan.overload, inputs, test_utils=checks)

"""What a sample of a pack gets does not depend on its neighbours, whatever lies in them.

Every sample of a pack is compared with the same sample alone, by values and by gradients, where the
logits of samples differ by up to 10^4 and one of them holds NaN. Both run the same kernels (or the
same torch form): an error against float64 may be twice as large, and by the band of test_packed, of
that sample. The parameters of MD-LRPE and MD-TPE are shared by the samples, so their gradients are
compared where nothing is NaN.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ndlightnet import Ragged
from ndlightnet.ops import Position, axis_causal_attention, axis_scan, global_attention

from ..packs import packed_attention, packed_axis_causal_attention, packed_axis_scan
from .kernel_cases import DEVICE

HEADS, DIM, VALUE = 2, 6, 5
EXACT = torch.float64
grids = st.integers(1, 3).flatmap(
    lambda axes: st.lists(st.tuples(*[st.integers(1, {1: 64, 2: 12, 3: 5}[axes])] * axes), min_size=2, max_size=3)
)
# what is added to all logits of a sample
raised = st.sampled_from([0.0, 30.0, 88.0, 200.0, 1e4, -88.0, -200.0, -1e4])
raises, bads = st.lists(raised, min_size=3, max_size=3), st.none() | st.integers(0, 2)


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

    def __init__(self, shapes, widths, bad):
        self.layout, self.shapes = Ragged(shapes), shapes
        self.tokens = [torch.randn(self.layout.length, *width) for width in widths]
        self.mask = torch.rand(self.layout.length) < 0.7
        self.bad = bad if bad is not None and bad < len(shapes) else None
        if self.bad is not None:
            self.mask[self.layout.offsets[self.bad]] = True
            for x in self.tokens:
                x[self.layout.offsets[self.bad]] = torch.nan

    def part(self, i):
        return slice(self.layout.offsets[i], self.layout.offsets[i + 1])

    def leaves(self, shared, dtype):
        xs = [*self.tokens, *shared]
        return [x.to(DEVICE, dtype, copy=True).requires_grad_() for x in xs]

    def judge(self, packed, alone, shared=()):
        """packed(leaves, mask), alone(i, leaves of sample i, mask of sample i): tokens first."""
        mask, n = self.mask.to(DEVICE), len(self.tokens)

        def single(leaves):
            outs = []
            for i in range(len(self.shapes)):
                now = [*(x[None, self.part(i)] for x in leaves[:n]), *leaves[n:]]
                outs.append(alone(i, now, mask[None, self.part(i)])[0])
            return torch.cat(outs)

        found = []
        for dtype, function in (
            (torch.float32, lambda leaves: packed(leaves, mask)),
            (torch.float32, single),
            (EXACT, single),
        ):
            leaves = self.leaves(shared, dtype)
            out = function(leaves)
            torch.manual_seed(1)
            pull = torch.randn(out.shape).to(DEVICE, dtype)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, pull)])
        tokens = [self.part(i) for i in range(len(self.shapes)) if i != self.bad]
        for parts, which in (
            (tokens, range(1)),  # the output
            (tokens, range(1, n + 1)),  # the tokens' gradients
            ([slice(None)] * (self.bad is None), range(n + 1, len(found[0]))),
        ):
            for part in parts:
                results = [[one[j][part].double() for one in found] for j in which]
                # dk is a difference of terms of the size of all gradients, 0 for a single token
                scale = max((exact.abs().max() for _, _, exact in results), default=0)
                lost = (1 + 2 * self.layout.length**0.5) * torch.finfo(torch.float32).eps
                for j, (ours, theirs, exact) in zip(which, results, strict=True):
                    assert ours.isfinite().all(), (j, part)
                    error, other = ((x - exact).abs().max() for x in (ours, theirs))
                    assert error <= 2 * other + lost * scale, f"{j}, {part}: {error}, {other}"


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_attention(impl):
    kinds = st.sampled_from([None, "cosine", "rotary"])
    examples(check_attention, impl, shapes=grids, up=raises, kind=kinds)


def check_attention(impl, shapes, up, masked, kind, bad):
    pack = Pack(shapes, ((HEADS, DIM), (HEADS, DIM), (HEADS, VALUE)), bad)
    for i, by in zip(range(len(shapes)), up, strict=False):
        pack.tokens[1][pack.part(i)] += by
    slots = {None: 0, "cosine": DIM, "rotary": DIM // 2}[kind]

    def place(theta, shape):
        return Position(theta, shape, kind) if kind else None

    def packed(leaves, mask):
        q, k, v, *theta = leaves
        where = place(*theta, shapes[0]) if kind else None
        keep = mask if masked else None
        return packed_attention(q, k, v, pack.layout, mask=keep, position=where, impl=impl)

    def alone(i, leaves, mask):
        q, k, v, *theta = leaves
        where = place(*theta, shapes[i]) if kind else None
        form = "torch" if q.dtype == EXACT else impl
        return global_attention(q, k, v, mask=mask if masked else None, position=where, impl=form)

    pack.judge(packed, alone, [3 * torch.rand(HEADS, slots)] if kind else ())


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_axis_causal(impl):
    """Frames of 20 tokens: the kernels make no States of much smaller ones."""
    examples(
        check_axis_causal,
        impl,
        frames=st.lists(st.integers(1, 3), min_size=2, max_size=3),
        window=st.none() | st.just(2),
        forget=st.sampled_from([0.0, 0.2]),
        up=raises,
    )


def check_axis_causal(impl, frames, window, forget, up, masked, bad):
    shapes = [(n, 4, 5) for n in frames]
    pack = Pack(shapes, ((1, DIM), (1, DIM), (1, VALUE)), bad)
    for i, by in zip(range(len(shapes)), up, strict=False):
        pack.tokens[1][pack.part(i)] += by
    past = {"window": window, "forget": forget}

    def packed(leaves, mask):
        keep = mask if masked else None
        return packed_axis_causal_attention(*leaves, pack.layout, mask=keep, impl=impl, **past)

    def alone(i, leaves, mask):
        form = "torch" if leaves[0].dtype == EXACT else impl
        keep = mask if masked else None
        return axis_causal_attention(*leaves, shapes[i][0], mask=keep, impl=form, **past)[0]

    pack.judge(packed, alone)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("jump", [88.0, 1e4, torch.nan])
def test_later_frames_do_not_reach_earlier_ones(impl, jump):
    """Frames are samples of a pack of their own: frame 3 after a jump, frames 0 to 2 before it."""
    layout = Ragged([(5, 40), (2, 40)])
    q, k, v = (torch.randn(layout.length, 1, 8, device=DEVICE) for _ in "qkv")
    raised = k.clone()
    raised[3 * 40 : 5 * 40] += jump
    before = packed_axis_causal_attention(q, k, v, layout, impl=impl)
    after = packed_axis_causal_attention(q, raised, v, layout, impl=impl)
    assert torch.equal(before[:120], after[:120])
    assert torch.equal(before[200:], after[200:])


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_axis_scan(impl):
    scales = st.lists(st.sampled_from([1.0, 1e4]), min_size=3, max_size=3)
    examples(check_axis_scan, impl, shapes=grids, scale=scales, ways=st.booleans(), residual=st.booleans())


def check_axis_scan(impl, shapes, scale, ways, residual, masked, bad):
    pack, axes = Pack(shapes, ((DIM,),), bad), len(shapes[0])
    for i, by in zip(range(len(shapes)), scale, strict=False):
        pack.tokens[0][pack.part(i)] *= by
    weights = [torch.randn(axes, DIM, 3), -torch.rand(axes, 3)] * (2 if ways else 1)

    def packed(leaves, mask):
        x, coef, decay, *back = leaves
        keep = mask if masked else None
        return packed_axis_scan(x, pack.layout, coef, decay, tuple(back) or None, keep, residual=residual, impl=impl)

    def alone(i, leaves, mask):
        x, coef, decay, *back = leaves
        form = "torch" if x.dtype == EXACT else impl
        x, keep = x.reshape(1, *shapes[i], DIM), mask.reshape(1, *shapes[i]) if masked else None
        y = axis_scan(x, coef, decay, tuple(back) or None, keep, residual=residual, impl=form)
        return y.flatten(1, -2)

    pack.judge(packed, alone, weights)

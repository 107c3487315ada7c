"""MD-LRPE angles from a token's flat index, against float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from ndlightnet import ops
from ndlightnet_kernels import phases
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.tiles import angle_arguments

from .kernel_cases import BRAIN, DEVICE, Case
from .yardstick import check


@triton.jit(do_not_specialize=["length", "per_head", *phases.SIZES])
def _angles(
    cos_out,
    sin_out,
    count_out,
    theta,
    start,
    length,
    per_head,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    prefix,
    each,
    BL: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
    ANGLES: tl.constexpr,
):
    h, b, c = tl.program_id(1), tl.program_id(2), tl.arange(0, BK)
    t = tl.program_id(0) * BL + tl.arange(0, BL)
    if FORM == "tile":
        t = phases.tile_tokens(tl.program_id(0) * BL, BL, 4)
    angles = (theta, start, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    turns = phases.slot_frequencies(angles, None, b, prefix, c, ANGLES)
    place = phases.coordinates(turns, t, ANGLES)
    count = phases.from_origin(turns, place)
    if FORM == "once":
        cos, sin = phases.cos_sin_once(turns, t, ANGLES)
    elif FORM == "tile":
        cos, sin = phases.tile_cos_sin(turns, tl.program_id(0) * BL, BL, 4, ANGLES)
    else:
        cos, sin = phases.cos_sin(turns, place, ANGLES)
    SLOTS: tl.constexpr = ANGLES[2]
    at = ((b * tl.num_programs(1) + h) * length + t)[:, None] * SLOTS + c[None, :]
    here = (t < length)[:, None] & (c < SLOTS)[None, :]
    tl.store(cos_out + at, cos, here)
    tl.store(sin_out + at, sin, here)
    tl.store(count_out + at, count, here)


@pytest.mark.parametrize(
    "shape, slots, prefix, start, window",
    [
        ((7,), 5, 0, None, None),
        ((3, 5), 8, 2, (4, 1000), None),
        ((2, 1, 9), 10, 0, (-3, 100_000, -70), None),
        ((2, 3, 1, 5), 4, 1, None, None),
        ((2, 2, 3, 2, 2), 17, 0, (0, 1, 2, 3, 2**20), None),
        ((3, 4, 5), 6, 0, None, (0, 16)),  # a part of all slots
        ((3, 4, 5), 10, 0, (1, 2, 3), (6, 16)),
        ((3, 4), 6, 2, ((0, 100_000, -7), 5), None),  # three samples
        ((3, 40), 6, 0, ((10**9, 2**30 + 1, 5 * 10**7), -(10**9)), None),
        ((3, 4), 6, 2, (5 * 10**7, 2**30), None),
        ((40,), 5, 0, None, None),
        ((3, 32), 6, 0, ((10**9, 2**30 + 1, 5 * 10**7), -(10**9)), None),
        ((2, 3, 16), 10, 0, (1, 2, 3), (6, 17)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "once", "tile"])
def test_angles(shape, slots, prefix, start, window, dtype, form):
    """Off by what the fixed point drops (of what comes after the first cell), and by what the
    functions and float32 (kept in two layouts of 16-bit inputs: float16) round. The gradient counts
    from an origin, here that of an axis-causal call of which the first axis is at its 11th step."""
    length, heads, batch = prefix + math.prod(shape), 2, 3
    theta = 4 * torch.rand(heads, slots, device=DEVICE) - 2
    columns = [torch.tensor(s).reshape(-1) for s in start or (0,) * len(shape)]
    starts = torch.stack(torch.broadcast_tensors(*columns), 1).to(DEVICE)  # (1 or batch, axes)
    origins = starts - 11 * (torch.arange(len(shape), device=DEVICE) == 0) * (start is not None)
    first = None if start is None else torch.cat([starts, origins], 1)
    sizes = (prefix, 0, *(window or (0, 0)), *shape)
    place = FlatPosition(theta, first, kind="cosine", sizes=sizes)
    like = torch.empty(1, 1, heads, slots, dtype=dtype)
    cos, sin = torch.full((2, batch, heads, length, slots), torch.nan, device=DEVICE)
    at = torch.full((batch, heads, length, slots), torch.nan, device=DEVICE)
    _angles[(triton.cdiv(length, 16), heads, batch)](
        cos, sin, at, *place.angles, length=length, BL=16, BK=32, FORM=form, **angle_arguments(place, like)
    )

    grid = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).to(DEVICE)
    grid = grid + starts[:, None]  # (1 or batch, cells, axes)
    offset, total = window or (0, slots)
    groups = torch.arange(total).tensor_split(len(shape))

    def by_slot(x):  # (1 or batch, cells, axes) -> (1 or batch, 1, cells, slots)
        x = torch.cat([x[..., [a] * len(g)] for a, g in enumerate(groups)], 2)
        return x[:, None, :, offset : offset + slots]

    ahead = grid.new_zeros(len(grid), prefix, len(shape))
    places = by_slot(torch.cat([ahead, grid], 1))
    counts = places - by_slot(origins[:, None])
    assert torch.equal(at, counts.float().expand(at.shape))
    exact = places * theta.double()[:, None]
    far = by_slot(torch.cat([ahead, grid - starts[:, None]], 1))
    wide = dtype == torch.float32 or (prefix > 0 and start is not None)
    unit = 2.0**-11 if form == "once" and not wide and DEVICE.type == "cuda" else 2.0**-20
    if form == "tile" and not wide:  # up to three turns, each off by as much as the first angle
        unit *= 4
    dropped = 2 * math.pi * (2.0 ** (-64 if wide else -32) * far.abs() + 2.0**-53 * places.abs())
    for actual, expected in ((cos, exact.cos()), (sin, exact.sin())):
        assert ((actual - expected).abs() <= unit + dropped).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, case",
    [
        ("global", Case((4, 6), 5, 3, "cosine", "holes", start=((5, 100_000), 7), heads=1)),
        ("global", Case((3, 2), 6, 4, "rotary", prefix=2, start=(3, (-4, 1000)), shared=True)),
        ("causal", Case((4, 3), 5, 3, "cosine", dtype=BRAIN, start=((0, 70), (9, 1)), past=True)),
        ("segments", Case((20,), 5, 3, "cosine", start=((3, 50_000),), heads=1)),
        ("steps", Case((4,), 16, 16, "cosine", dtype=BRAIN, start=((3, 50_000),))),
    ],
    ids=str,
)
def test_every_sample_may_start_at_a_place_of_its_own(form, case):
    check(case, form, grads=form != "steps")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["global", *(pytest.param(f, marks=pytest.mark.slow) for f in ("causal", "frames"))])
@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_gradients_of_angles_far_out_are_those_at_the_origin(form, dtype):
    """Nothing but the order of sums differs: the first cell's own angle is in all of them."""
    q, k, v, pull = (torch.randn(2, 6, 1, 8, device=DEVICE).to(dtype) for _ in range(4))
    found = []
    for start in ((0, 0), (torch.tensor([2**30, 7]), 10**9)):
        theta = (torch.arange(1, 9, device=DEVICE) / 8)[None].requires_grad_()
        if form == "frames":
            place = ops.Position(theta, (2, 3), offset=start)
            out = ops.axis_causal_attention(q, k, v, 2, position=place, impl="triton")[0]
        else:
            place = ops.Position(theta, (6, 1), offset=start)
            attend = ops.causal_attention if form == "causal" else ops.global_attention
            out = attend(q, k, v, position=place, impl="triton")
            out = out[0] if form == "causal" else out
        found.append((out, torch.autograd.grad(out, theta, pull)[0]))
    # of what is rounded: features to the dtype, sums of 6 coordinates x twists to float32
    unit = 6 * (2.0**-8 if dtype == BRAIN else 6 * 2.0**-24)
    for near, far in zip(*found, strict=True):
        assert (near - far).abs().max() <= unit * near.abs().max()


def test_a_prefill_far_out_and_its_steps_agree(close):
    """Both give a State whose keys turned by the same angles, at 5e7 and beyond, in 16 bits too."""
    q, k, v = (torch.randn(1, 6, 1, 16, device=DEVICE).to(BRAIN) for _ in range(3))
    theta = (torch.arange(1, 17, device=DEVICE) / 5)[None]
    for start in (5 * 10**7, 2**30 + 1):
        state = ops.State.empty(1, 1, 16, 16, True, device=DEVICE)
        outs = []
        for t in range(6):
            place = ops.Position(theta, (1,), offset=(start + t,))
            token = (x[:, t] for x in (q, k, v))
            out, state = ops.attention_step(*token, state, position=place, impl="triton")
            outs.append(out)
        place = ops.Position(theta, (6,), offset=(start,))
        expected, after = ops.causal_attention(q, k, v, position=place, impl="triton")
        source = ops.summarize(k, v, position=place, impl="triton")
        exact = ops.summarize(k.double(), v.double(), position=place)
        for one in (state, after, source):  # keys and features are rounded to 16 bits
            scale = (one.max.double() - exact.max).exp()
            scale = torch.cat([scale, scale], -1)[..., None]
            close(scale * one.memory, exact.memory, 2 * 2.0**-8)
        close(torch.stack(outs, 1), expected, 4 * 2.0**-8)

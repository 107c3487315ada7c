"""A padded sample gives what it gives alone, by every mixer: values and gradients, on one to three
axes, in all ways that a grid is covered. In float64: nothing but the order of sums may differ."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from .mixer_cases import CATALOGUE, CAUSAL, CROSS, LOCAL, build, having, without_angles

SCANS = having("scan")
LONGEST = {1: 80, 2: 12, 3: 6}  # axes by number of axes: beyond a chunk of 64 tokens
TOLERANCE = 2**12 * torch.finfo(torch.float64).eps  # 12 of 52 bits, for sums in another order


def sizes(axes: int, most: tuple[int, ...] | None = None) -> tuple[int, ...]:
    most = most or (LONGEST[axes],) * axes
    return tuple(int(torch.randint(1, n + 1, ())) for n in most)


def padded(axes: int, corner: bool = False) -> tuple[Tensor, Tensor, list[tuple]]:
    """Three samples of any sizes in one batch, anywhere in it or in its corner, with huge numbers
    around them; the mask; where each one lies."""
    grid = sizes(axes)
    mask, boxes = torch.zeros(3, *grid, dtype=torch.bool), []
    for row in range(3):
        shape = sizes(axes, grid)
        room = zip(grid, shape, strict=True)
        first = (0 if corner else int(torch.randint(n - size + 1, ())) for n, size in room)
        box = (row, *(slice(at, at + size) for at, size in zip(first, shape, strict=True)))
        mask[box] = True
        boxes.append(box)
    x = torch.randn(3, *grid, 16, dtype=torch.float64)
    return torch.where(mask[..., None], x, 1e3 * x), mask, boxes


def agree(actual, expected) -> None:
    """Tensors, to within the tolerance of the largest number in all of them."""
    scale = max(x.abs().max().item() for x in expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.isfinite().all() and b.isfinite().all()
        error = (a - b).abs().max().item()
        assert error <= TOLERANCE * scale, f"error {error / scale:.1e}"


def learnt(m: nn.Module) -> list[Tensor]:
    """Without angles, whose gradients are float32, whatever the network is."""
    named = m.named_parameters()
    return [p for name, p in named if p.requires_grad and "log_factor" not in name]


def check(run, x: Tensor, mask: Tensor, boxes: list[tuple], m: nn.Module) -> None:
    """run(x, mask) of the batch against run(x of one sample, None): what comes out, and the
    gradients of the input and of all parameters."""
    x.requires_grad_()
    alone = [x[box].detach()[None].requires_grad_() for box in boxes]
    y, outputs = run(x, mask), [run(one, None) for one in alone]
    agree([y[box] for box in boxes], [out[0] for out in outputs])
    pulls = [torch.randn_like(out[0]) for out in outputs]
    both = zip(boxes, outputs, pulls, strict=True)
    losses = [((y[box] * pull).sum(), (out[0] * pull).sum()) for box, out, pull in both]
    padded, single = (sum(loss) for loss in zip(*losses, strict=True))
    dx, *dp = grad(padded, [x, *learnt(m)])
    agree([dx[box] for box in boxes], [g[0] for g in grad(single, alone, retain_graph=True)])
    if dp:
        agree(dp, grad(single, learnt(m)))
    broken = x.detach().masked_fill(~mask[..., None], torch.nan)
    assert torch.equal(run(broken, mask)[mask], y[mask])


CASES = [*((name, axes) for name in CATALOGUE for axes in (1, 2, 3)), *((name, 2) for name in LOCAL)]


@pytest.mark.parametrize(
    "name, axes, causal",
    [(*case, causal) for case in CASES for causal in (False, True)[: 1 + (case[0].split()[0] in CAUSAL)]],
)
def test_a_padded_sample_is_the_sample_alone(name, axes, causal):
    scans = ["raster", "both", "axes"][: 1 if causal else None] if name in SCANS else [None]
    for scan in scans:
        m = build(name, dims=axes, **({"scan": scan} if scan else {})).double()
        x, mask, boxes = padded(axes)
        check(lambda x, mask, m=m: m(x, mask=mask, causal=causal), x, mask, boxes, m)


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_padded_source_is_the_source_alone(name, axes):
    """Its coordinates count from the corner, as those of its readers do."""
    m, (x, mask, boxes) = build(name).double(), padded(axes, corner=True)
    queries = torch.randn(3, *sizes(axes), 16, dtype=torch.float64)
    y = m(queries, context=x, mask=mask)
    agree(y, [m(queries[b[:1]][None], context=x[b][None])[0] for b in boxes])


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_within_a_sequence_is_stepped_over(name, causal):
    """By decays, convolutions, shifts and linear systems: what is seen is a shorter sequence."""
    m, x = without_angles(build(name)).double(), torch.randn(2, 80, 16, dtype=torch.float64)
    mask = torch.rand(2, 80) < 0.5
    y = m(x, mask=mask, causal=causal)
    alone = [m(one[keep][None], causal=causal)[0] for one, keep in zip(x, mask, strict=True)]
    agree([one[keep] for one, keep in zip(y, mask, strict=True)], alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CosformerAttention", "RWKV4"])
def test_a_mask_can_be_compiled_and_exported(name):
    torch.compiler.reset()
    m, (x, mask, _) = build(name).double().eval(), padded(2)
    expected = m(x, mask=mask)[mask]
    for run in (
        torch.compile(m, backend="aot_eager", fullgraph=True),
        torch.export.export(m, (x,), {"mask": mask}).module(),
    ):
        agree([run(x, mask=mask)[mask]], [expected])

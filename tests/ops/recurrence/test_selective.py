"""Mamba's selective scan: against steps, as a memory with a full forget, in segments."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops.recurrence import selective
from ndlightnet.ops.recurrence.selective import selective_scan

from ..largest_tensor import LargestTensor

LENGTHS = (1, 2, 5, 64, 67)


def sample(n, batch=2, channels=3, state=4, grads=False, dtype=torch.float64):
    """u, delta, A, B, C, memory"""
    u, delta = torch.randn(batch, n, channels), torch.rand(batch, n, channels)
    a, (b, c) = -3 * torch.rand(channels, state) - 0.1, torch.randn(2, batch, n, state)
    m = torch.randn(batch, channels, state)
    return [x.to(dtype).requires_grad_(grads) for x in (u, delta, a, b, c, m)]


def step_by_step(u, delta, a, b, c, m):
    outputs = []
    for t in range(u.shape[1]):
        added = (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
        m = (delta[:, t, :, None] * a).exp() * m + added
        outputs.append((m * c[:, t, None]).sum(-1))
    return torch.stack(outputs, 1), m


@pytest.fixture(params=[24, 7 * 24, 2**19], ids=["1 token", "7 tokens", "all"])
def segment(request, monkeypatch):
    """Of how many numbers the memories of `sample` are held."""
    monkeypatch.setattr(selective, "SEGMENT_CPU", request.param)
    return request.param


@pytest.mark.parametrize("n", LENGTHS)
def test_segments_are_step_by_step(close, close_grads, segment, n):
    inputs = sample(n, grads=True)
    ours, theirs = selective_scan(*inputs), step_by_step(*inputs)
    for x, y in zip(ours, theirs, strict=True):
        close(x, y, 1e-12)
    close_grads(ours, theirs, inputs, 1e-12)


@pytest.mark.parametrize("step", [1e-42, 1e-20, 1e4, 1e20])
def test_extreme_steps_stay_finite_and_right_in_float32(close, step):
    """From those that underflow to those after which nothing is left of what was."""
    inputs = sample(70)
    inputs[1] = (step * inputs[1]).float().double()
    inputs[0] = inputs[0] / max(1.0, step)
    single = [x.float().requires_grad_() for x in inputs]
    ours, theirs = selective_scan(*single), step_by_step(*inputs)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == torch.float32
        close(x.double(), y, 1e-5)
    assert all(g.isfinite().all() for g in grad(sum(x.sum() for x in ours), single))


def test_low_precision_inputs_and_autocast(close):
    inputs = sample(100, dtype=torch.bfloat16)
    inputs[2], inputs[5] = inputs[2].float(), inputs[5].float()
    for x in inputs:
        x.requires_grad_()
    exact = step_by_step(*(x.double() for x in inputs))
    y, last = selective_scan(*inputs)
    assert y.dtype == torch.bfloat16 and last.dtype == torch.float32
    close(y.double(), exact[0], 2**-8)
    close(last.double(), exact[1], 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        single = [x.detach().float().requires_grad_() for x in inputs]
        y, last = selective_scan(*single)
        close(y.double(), exact[0], 1e-5)
        grads = grad(y.sum(), single)
    expected = grad(step_by_step(*single)[0].sum(), single)
    for x, y in zip(grads, expected, strict=True):
        close(x, y, 1e-4)


def test_what_is_held_and_kept(monkeypatch):
    """Memories of a segment at a time; of those, one before each segment is kept."""
    inputs = sample(64, batch=1, channels=8, state=16, grads=True)
    one, all_memories = 8 * 16, 64 * 8 * 16
    monkeypatch.setattr(selective, "SEGMENT_CPU", 8 * one)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        selective_scan(*inputs)
    assert sum(kept) == sum(x.numel() for x in inputs[:5]) + 8 * one
    with LargestTensor() as made:
        y, _ = selective_scan(*inputs)
        y.square().sum().backward()
    assert made.numel <= max(8 * one, 64 * 16) < all_memories


def test_errors_show_the_shapes():
    u, delta, a, b, c, m = sample(5)
    with pytest.raises(ValueError, match=r"A \(4, 4\)"):  # the note's shape
        selective_scan(u, delta, torch.zeros(4, 4), b, c)
    with pytest.raises(ValueError, match=r"delta \(2, 5, 1\)"):
        selective_scan(u, delta[..., :1], a, b, c)
    with pytest.raises(ValueError, match=r"memory \(2, 4, 3\)"):
        selective_scan(u, delta, a, b, c, m.mT)

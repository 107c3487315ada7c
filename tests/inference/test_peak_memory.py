"""What predict_labels takes on the host, counted by torch's profiler, and what it costs."""

import math

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ndlightnet.inference import labels as labels_module
from ndlightnet.inference import predict_labels, windows

SPACE, CLASSES, CHUNK = (28, 20, 24), 8, 2**13


def peak(run):
    """The most bytes that tensors made within `run` held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top


class Counted(nn.Conv3d):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_the_counter_sees_a_peak():
    assert peak(lambda: torch.zeros(1000).double().sum()) == pytest.approx(12000, rel=0.05)


@pytest.mark.parametrize("fraction", [1, 0.5])
@pytest.mark.parametrize("onto", [False, True])
def test_the_peak_is_what_the_docstring_says(fraction, onto, monkeypatch):
    """`fraction`: of the bytes that the sums take where the image is not cut into columns."""
    monkeypatch.setattr(labels_module, "CHUNK", CHUNK)
    net, image, w = Counted(1, CLASSES, 1), torch.randn(1, *SPACE), 8
    shape = (30, 18, 40) if onto else SPACE
    grid = (shape, torch.diag(torch.tensor([0.9, 1.1, 0.6, 1]))) if onto else None
    uncut = 4 * (CLASSES + 1) * (w + 1) * SPACE[1] * SPACE[2]
    memory = int(fraction * uncut)
    took = peak(lambda: predict_labels(net, image, (w, w, w), onto=grid, memory=memory))
    # beside the sums: a window, its weights and its logits; labels, once more on the device; the
    # copy while sums of one class are shifted; what is interpolated at a time, a few times
    window = 4 * w**3 * (CLASSES + 2)
    row = max(CHUNK, 4 * shape[1] * shape[2])
    shifted = uncut // (CLASSES + 1)
    rest = window + 2 * math.prod(shape) + shifted + 32 * sum(shape) + 6 * row
    assert took <= memory + rest
    assert memory + rest < 4 * CLASSES * math.prod(SPACE)  # the logits of the image
    once = math.prod((n - w) // 4 + 1 for n in SPACE)
    assert net.calls == once if fraction == 1 else once < net.calls <= 4 * once


def test_the_default_on_a_host_is_the_size_of_the_image(monkeypatch):
    image = torch.zeros(1, *SPACE)
    assert windows._allowance(image, torch.device("cpu")) == 2**29
    monkeypatch.setattr(windows, "HOST", 0)
    assert windows._allowance(image, torch.device("cpu")) == image.nbytes

"""Scores by hand, times by a clock of ours, sizes of states."""

import lightning
import numpy as np
import pytest
import torch
from ndlightnet.training.core.measures import MeasuredTask

from ndlightnet import NDLightNet
from ndlightnet.nn import mixers
from ndlightnet.training.classification.metrics import scores
from ndlightnet.training.core.costs import median_seconds, state_size


def test_scores_by_hand():
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3], [0.3, 0.7]])
    labels = torch.tensor([0, 1, 1, 0, 0])
    found = scores(probabilities, labels, ["no", "yes"])
    assert found["confusion"] == [[2, 1], [1, 1]]
    assert found["recall"] == pytest.approx({"no": 2 / 3, "yes": 1 / 2})
    expected = {"top1": 3 / 5, "balanced_accuracy": 7 / 12, "majority_class": 3 / 5}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    # of the 6 pairs of a yes (0.8, 0.4) and a no (0.1, 0.3, 0.7), 5 are in order
    assert found["auc"] == pytest.approx(5 / 6)


def test_scores_where_a_class_does_not_occur():
    probabilities = torch.eye(3)[[0, 1, 2, 0]]
    found = scores(probabilities, torch.tensor([0, 1, 1, 1]), ["a", "b", "c"])
    assert found["balanced_accuracy"] == pytest.approx((1 + 1 / 3) / 2) and "auc" not in found
    assert np.isnan(found["recall"]["c"])
    assert scores(torch.eye(2), torch.zeros(2, dtype=torch.int64), ["a", "b"])["auc"] is None


@pytest.mark.parametrize(
    "seconds, expected, calls",
    [([9, 9, 1, 2, 6], 2, 5), ([9, 9, *[0.25] * 30], 0.25, 11), ([9, 9, *[0.01] * 30], 0.01, 32)],
)
def test_median_after_warm_up(monkeypatch, seconds, expected, calls):
    """Two calls do not count; it ends after 30, or sooner when they last 2 seconds, but not
    before 3."""
    clock, done = [0.0], []

    def call():
        clock[0] += seconds[len(done)]
        done.append(None)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert median_seconds(call, torch.device("cpu")) == pytest.approx(expected)
    assert len(done) == calls


def test_latency_is_that_of_tests_of_a_batch_and_of_one():
    seen = set()

    class Net(torch.nn.Module):
        def forward(self, x):
            seen.add((tuple(x.shape), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return x

    task = MeasuredTask()
    task.net = Net()
    task.trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False
    )
    found = task.latencies(torch.zeros(4, 2))
    assert set(found) == {"latency_ms", "latency_one_ms"}
    assert seen == {((4, 2), True, False), ((1, 2), True, False)}


def test_state_size():
    class Sized(mixers.Identity):
        def __init__(self, dim: int, size: int = 40) -> None:
            super().__init__(dim)
            self.size = size

        @property
        def state_size(self) -> int:
            return self.size

    net = NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=2, mixer=Sized)
    assert state_size(net) == 40
    net.blocks[1].mixer.size = 41
    assert state_size(net) is None and state_size(torch.nn.Linear(2, 2)) is None

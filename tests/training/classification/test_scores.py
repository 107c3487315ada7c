"""Scores of classifiers by hand."""

import numpy as np
import pytest
import torch

from ndlightnet.training import ImageTask
from ndlightnet.training.classification.scores import scores


def test_scores_by_hand():
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3], [0.3, 0.7]])
    labels = torch.tensor([0, 1, 1, 0, 0])
    measured = scores(probabilities, labels, ["no", "yes"])
    assert measured["confusion"] == [[2, 1], [1, 1]]
    assert measured["recall"] == pytest.approx({"no": 2 / 3, "yes": 1 / 2})
    expected = {"top1": 3 / 5, "balanced_accuracy": 7 / 12, "majority_class": 3 / 5}
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    # bins of width 1 / 15 hold one answer each but for 0.7 and 0.7: |right - sure| by their shares
    assert measured["ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 2 * abs(1 / 2 - 0.7)) / 5)
    # of the 6 pairs of a yes (0.8, 0.4) and a no (0.1, 0.3, 0.7), 5 are in order
    assert measured["auc"] == pytest.approx(5 / 6)


def test_scores_where_a_class_does_not_occur():
    probabilities = torch.eye(3)[[0, 1, 2, 0]]
    measured = scores(probabilities, torch.tensor([0, 1, 1, 1]), ["a", "b", "c"])
    assert measured["balanced_accuracy"] == pytest.approx((1 + 1 / 3) / 2)
    assert measured["auc"] is None and measured["ece"] == pytest.approx(0.5)
    assert np.isnan(measured["recall"]["c"])
    assert scores(torch.eye(2), torch.zeros(2, dtype=torch.int64), ["a", "b"])["auc"] is None


def test_five_answers_are_counted_by_samples_not_by_classes():
    """Of eight samples of class 0 each is among five answers, the only one of class 5 is not."""
    probabilities = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.06, 0.04]]).repeat(9, 1)
    labels = torch.tensor([0] * 8 + [5])
    assert scores(probabilities, labels, "abcdef")["top5"] == pytest.approx(8 / 9)


def test_the_first_five_of_many_classes():
    probabilities = torch.arange(7.0).expand(2, 7) / 21  # the first five answers are classes 2 to 6
    names = [str(n) for n in range(7)]
    assert scores(probabilities, torch.tensor([2, 1]), names)["top5"] == 0.5
    assert "top5" not in scores(probabilities[:, :5], torch.tensor([2, 1]), names[:5])


def test_the_loss_takes_mixed_labels():
    """Of one class each, they give the loss of their numbers; smoothing is in addition."""
    task = ImageTask(torch.nn.Identity(), label_smoothing=0.2)
    task.log = lambda *_, **__: None
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    hard, soft = (
        task.training_step((logits, target, labels), 0)
        for target in (labels, torch.nn.functional.one_hot(labels, 3).float())
    )
    assert torch.allclose(hard, soft)
    half = torch.full((4, 3), 1 / 3)
    expected = -logits.log_softmax(1).mean()
    assert torch.allclose(task.training_step((logits, half, labels), 0), expected)

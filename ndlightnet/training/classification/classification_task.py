"""Classification of samples of any kind: cross-entropy, accuracy, the page of a test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, printable
from ndlightnet.training.classification.answer_figures import (
    answer_caption,
    save_attributions,
    save_confusion,
    save_curves,
    views,
    worst_to_best,
)
from ndlightnet.training.classification.answer_page import write_page, write_table
from ndlightnet.training.classification.attribution import attribution
from ndlightnet.training.classification.scores import BINS, scores
from ndlightnet.training.core.options import check
from ndlightnet.training.core.task import Task
from ndlightnet.training.report.results import write_metrics

ATTRIBUTED = 6  # samples in attribution.png


class ClassificationTask(Task, ABC):
    """Trains `net`, inputs -> `(batch, classes)` logits. Batches are `(*inputs, labels, numbers)`; the number of a
    sample identifies it.

    Args:
        net, lr, weight_decay: as in Task.
        label_smoothing: of the cross-entropy.
        others: as in Task.
    """

    monitor = "val_accuracy"
    samples = "samples"  # the samples' name in metrics.json
    has_frames = False  # whether the first axis of a sample is time
    grid_parallel = True  # every process gets the logits of whole samples

    def __init__(
        self, net: nn.Module, lr: float = 1e-3, weight_decay: float = 0.05, label_smoothing: float = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        check("model.label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "a fraction from 0 to 1")
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        *inputs, labels, _numbers = batch
        loss: Tensor = self.loss(self(*inputs).float(), labels)
        self.log("loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def probabilities(self, *inputs: Any) -> Tensor:
        """Return (batch, classes) float32, for validation, test and prediction."""
        logits: Tensor = self.predictor(*inputs).to(self.device)
        return logits.float().softmax(-1)

    def validation_step(self, batch: tuple[Any, ...], _: int) -> None:
        *inputs, labels, _numbers = batch
        self.log_validation(self.probabilities(*inputs), labels)

    def log_validation(self, probabilities: Tensor, labels: Tensor) -> None:
        right = (probabilities.argmax(-1) == labels).float().mean()
        self.log("val_accuracy", right, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.tested: dict[int, tuple[Tensor, int]] = {}  # probabilities and label of each sample

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        *inputs, labels, numbers = batch
        self.keep(self.probabilities(*inputs), labels, numbers)

    def keep(self, probabilities: Tensor, labels: Tensor, numbers: Tensor) -> None:
        """Store the result of a test batch."""
        pairs = zip(probabilities.cpu(), labels.tolist(), strict=True)
        self.tested |= dict(zip(numbers.tolist(), pairs, strict=True))

    def on_test_epoch_end(self) -> None:
        tested = self.gathered(self.tested)
        if not tested:
            raise DataError(f"{self.data().root}: no file of the test could be read")
        probabilities = torch.stack([row for row, _ in tested.values()])
        labels = torch.tensor([label for _, label in tested.values()])
        names, numbers, out = self.data().classes, list(tested), self.out()
        more = self.more_metrics(probabilities, labels)
        metrics = {**scores(probabilities, labels, names), self.samples: len(labels), **more}
        self.log("test_accuracy", metrics["top1"], rank_zero_only=True)
        if not self.trainer.is_global_zero:
            return
        write_metrics(out, metrics)
        files = [self.data().sample_name(number) for number in numbers]
        write_table(out / "test.csv", files, probabilities, labels, names)
        captions = self.figure_names(names)
        save_confusion(out / "confusion.png", torch.tensor(metrics["confusion"]), captions)
        save_curves(out / "curves.png", probabilities, labels, captions, metrics["ece"], BINS)
        self.save_samples(numbers, probabilities, labels)
        self.save_attributions(numbers, probabilities, labels)
        summary = f"held-out accuracy {metrics['top1']:.3f} over {len(labels)} {self.samples}"
        title = f"Test: {printable(self.data().root)}"
        write_page(out / "index.html", title, summary, metrics, probabilities, labels, names, self.failures)
        self.summary = f"{summary}; see {out / 'index.html'}"

    def save_attributions(self, numbers: list[int], probabilities: Tensor, labels: Tensor) -> None:
        """Write attribution.png: what decided the answers, of some samples from the worst answer to the best; called
        in one process."""
        captions, rows = self.figure_names(self.data().classes), []
        for row in worst_to_best(probabilities.gather(1, labels[:, None])[:, 0], ATTRIBUTED):
            sample = self.sample(numbers[row])
            if sample is None:
                return
            x, picture = sample
            heat = attribution(self._logits, x.to(self.device), int(probabilities[row].argmax()))
            caption = answer_caption(probabilities[row], int(labels[row]), captions)
            rows.append((*caption, views(picture, heat, self.has_frames)))
        save_attributions(self.out() / "attribution.png", rows)

    def _logits(self, x: Tensor) -> Tensor:
        """Call the network in the precision of the trainer."""
        plugin = self.trainer.precision_plugin
        with plugin.forward_context():
            logits: Tensor = self.net(plugin.convert_input(x)).float()
        return logits

    @abstractmethod
    def sample(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return a test sample as the network sees it, (channels, *space), and as a picture, (1 or 3 channels,
        *space) uint8; None for samples without cells, of which no attribution can be drawn."""

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return what metrics.json has beside `scores`; called in every process."""
        return self.costs()

    def save_samples(self, numbers: list[int], probabilities: Tensor, labels: Tensor) -> None:
        """Write pictures of the test samples of these numbers; called in one process."""


class FileClassificationTask(ClassificationTask):
    """Base of tasks whose `predict` writes predictions.csv, a line for each file: its name, class and probabilities."""

    def on_predict_start(self) -> None:
        self.predicted: dict[int, list[float]] = {}

    def predict_step(self, batch: tuple[Any, ...], _: int) -> None:
        *inputs, _labels, numbers = batch
        if len(numbers):  # 0: no file of the batch could be read
            self.predicted |= dict(zip(numbers.tolist(), self.probabilities(*inputs).tolist(), strict=True))

    def on_predict_end(self) -> None:
        self.gather_lines()
        predicted, data = self.gathered(self.predicted), self.data()
        file = self.out() / "predictions.csv"
        if self.trainer.is_global_zero:
            probs = torch.tensor(list(predicted.values())).reshape(len(predicted), len(data.classes))
            write_table(file, [data.sample_name(number) for number in predicted], probs, None, data.classes)
            if predicted:
                self.save_predicted(list(predicted), probs)
        self.summary = f"{len(predicted)} predictions are in {file}"

    def save_predicted(self, numbers: list[int], probabilities: Tensor) -> None:
        """Write pictures of the predicted samples of these numbers; called in one process."""

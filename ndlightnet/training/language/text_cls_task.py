"""Classification of texts and of pairs of texts, and regression of values of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torchmetrics.functional.classification import binary_f1_score, multiclass_f1_score, multiclass_matthews_corrcoef
from torchmetrics.functional.regression import pearson_corrcoef, spearman_corrcoef

from ndlightnet.data.errors import printable
from ndlightnet.layout import Packed
from ndlightnet.training.classification.answer_figures import save_confusion, save_curves
from ndlightnet.training.classification.answer_page import write_page
from ndlightnet.training.classification.scores import BINS, scores
from ndlightnet.training.core.options import check
from ndlightnet.training.language.tokenized import TokenizedTask
from ndlightnet.training.report.results import write_csv, write_metrics

OfClasses = Literal["accuracy", "f1", "matthews"]
OfValues = Literal["pearson", "spearman"]
Batch = tuple[Packed, Tensor, Tensor]  # texts, labels, numbers


def measure(metric: str, outputs: Tensor, labels: Tensor) -> float:
    """Return a metric of `outputs`, probabilities (samples, classes) or values (samples,), and `labels` (samples,).

    "f1" is of the second of two classes, of more the mean over them; "matthews" is Matthews' correlation coefficient.
    Correlations of equal values are NaN or 0.
    """
    if metric in get_args(OfValues):
        correlation = pearson_corrcoef if metric == "pearson" else spearman_corrcoef
        return float(correlation(outputs.float(), labels.float()))
    answers, classes = outputs.argmax(-1), outputs.shape[-1]
    if metric == "accuracy":
        return float((answers == labels).double().mean())
    if metric == "matthews":
        return float(multiclass_matthews_corrcoef(answers, labels, classes))
    return float(binary_f1_score(answers, labels) if classes == 2 else multiclass_f1_score(answers, labels, classes))


class TextClsTask(TokenizedTask):
    """Trains `net`, packed texts -> (batch, classes) logits, by the cross-entropy, or -> (batch, 1) values, by the mean
    squared error. `test` writes metrics.json, with `metrics` under "scores", test.csv and, of classes, index.html;
    `predict` writes predictions.csv.

    Args:
        net, lr, weight_decay: as in Task.
        metrics: what is measured, see `measure`; of the first one the best checkpoint has the highest value. Default:
            accuracy, of a regression pearson.
        regression: labels are numbers; `net` has num_classes=1.
        others: as in Task.
    """

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        metrics: list[OfClasses | OfValues] | None = None,
        regression: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        possible = get_args(OfValues if regression else OfClasses)
        self.metrics: Sequence[str] = metrics or possible[:1]
        fitting = {*self.metrics} <= {*possible}
        check("model.metrics", metrics, fitting, f"{', '.join(possible)} with regression={regression}")
        self.regression = regression

    def setup(self, stage: str) -> None:
        super().setup(stage)
        count = 1 if self.regression else len(self.data().classes)
        self.expect(per_token=False, **({"num_classes": count} if count else {}))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        texts, labels, _numbers = batch
        outputs = self(texts).float()
        loss = mse_loss(outputs[:, 0], labels.float()) if self.regression else cross_entropy(outputs, labels)
        self.log("loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def on_validation_epoch_start(self) -> None:
        # of each sample: probabilities (classes,), or a value (), and the label
        self.results: dict[int, tuple[Tensor, Tensor]] = {}

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, _: int) -> None:
        texts, labels, numbers = batch
        outputs = self.predictor(texts).to(self.device).float()
        outputs = outputs[:, 0] if self.regression else outputs.softmax(-1)
        pairs = zip(outputs.cpu(), labels.cpu(), strict=True)
        self.results |= dict(zip(numbers.tolist(), pairs, strict=True))

    test_step = predict_step = validation_step

    def _gather(self) -> tuple[list[int], Tensor, Tensor]:
        """Return numbers, outputs and labels of the samples of all processes."""
        results = self.gathered(self.results)
        outputs, labels = (torch.stack(column) for column in zip(*results.values(), strict=True))
        return list(results), outputs, labels

    def on_validation_epoch_end(self) -> None:
        _, outputs, labels = self._gather()
        values = {metric: measure(metric, outputs, labels) for metric in self.metrics}
        for metric, value in values.items():
            self.log(f"val_{metric}", value, prog_bar=True, sync_dist=True)
        self.log("val_score", values[self.metrics[0]], sync_dist=True)

    def on_test_epoch_end(self) -> None:
        numbers, outputs, labels = self._gather()
        if not self.trainer.is_global_zero:
            return
        data, out = self.data(), self.out()
        values = {metric: measure(metric, outputs, labels) for metric in self.metrics}
        more = {} if self.regression else scores(outputs, labels, data.classes)
        metrics = {"scores": values, **more, "texts": len(labels), **self.costs()}
        write_metrics(out, metrics)
        self._write_table("test", numbers, outputs, labels)
        summary = ", ".join(f"{metric} {value:.3f}" for metric, value in values.items())
        summary = f"held-out {summary} over {len(labels)} texts"
        self.summary = f"{summary}; see {out / 'test.csv'}"
        if self.regression:
            return
        captions = self.figure_names(data.classes)
        save_confusion(out / "confusion.png", torch.tensor(metrics["confusion"]), captions)
        save_curves(out / "curves.png", outputs, labels, captions, metrics["ece"], BINS)
        title = f"Test: {printable(data.root)}"
        write_page(out / "index.html", title, summary, metrics, outputs, labels, data.classes, self.failures)
        self.summary = f"{summary}; see {out / 'index.html'}"

    def on_predict_epoch_end(self) -> None:
        """Write predictions.csv: a line for each row of the input."""
        numbers, outputs, _ = self._gather()
        if self.trainer.is_global_zero:
            self._write_table("predictions", numbers, outputs)
            self.summary = f"{len(numbers)} texts; see {self.out() / 'predictions.csv'}"

    def _write_table(self, name: str, numbers: list[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Write a CSV: the texts of each sample, its truth if there are labels, prediction and probabilities."""
        data, truth, lines = self.data(), [] if labels is None else ["truth"], []
        for number, output in zip(numbers, outputs, strict=True):
            row = data.rows[number]
            answer = [] if self.regression else [data.classes[int(output.argmax())]]
            values = [f"{value:.6f}" for value in output.reshape(-1).tolist()]
            lines.append([*row.texts, *([row.label] if truth else []), *answer, *values])
        write_csv(self.out() / f"{name}.csv", [*data.columns, *truth, "prediction", *data.classes], lines)

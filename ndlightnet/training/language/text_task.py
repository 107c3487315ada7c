"""Language models of bytes: trained at one length, tested at others and as streams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.data.errors import DataError
from ndlightnet.models import NDLightNet
from ndlightnet.ops.linear_cross_entropy import linear_cross_entropy
from ndlightnet.training.core.costs import training_costs
from ndlightnet.training.core.task import Task
from ndlightnet.training.language.curves import draw, write_table
from ndlightnet.training.language.measures import file_bits, means, token_nll
from ndlightnet.training.report.results import write_csv, write_metrics

BYTES = 256  # size of the vocabulary


class TextLoss(nn.Module):
    """Mean negative log-likelihood of all bytes but the first, in nats, of windows (batch, length + 1) uint8. Of an
    NDLightNet with a linear head, the logits of all bytes are never held at once."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, windows: Tensor) -> Tensor:
        net, head = self.net, getattr(self.net, "head", None)
        if type(net) is not NDLightNet or type(head) is not nn.Linear:
            return token_nll(net, windows).mean()
        windows = windows.long()
        features = net.forward_head(net.forward_features(windows[:, :-1]), pre_logits=True)
        return linear_cross_entropy(features, head.weight, windows[:, 1:], head.bias)


class TextTask(Task):
    """Trains `net`, bytes (batch, length) -> logits (batch, length, 256) of the byte after each.

    `test` gives bits per byte for each of the data's `lengths`: the same text in windows of that
    many bytes, each from an empty context, and by position in the longest windows. A length for
    which the memory of the device does not suffice is left out, with the reason. `predict` writes
    the bits per byte of each file of `data.input`, read as a stream: how likely the text is.

    Args:
        net: the causal network.
        others: as in Task.
    """

    saved = (*Task.saved, "cost")
    measures = "step"
    monitor = "val_score"

    def __init__(self, net: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1, **kwargs: Any) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        vars(self)["called"] = TextLoss(net)

    def setup(self, stage: str) -> None:
        for name, expected in (("causal", True), ("vocab_size", BYTES), ("per_token", True)):
            value = getattr(self.net, name, expected)
            if value != expected:
                raise DataError(f"model.net: expected a network with {name}={expected}, got {value}")

    def example_inputs(self) -> tuple[Tensor, ...]:
        shape = (self.data().batch_size, self.data().length + 1)
        return (torch.zeros(shape, dtype=torch.uint8, device=self.device),)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self(batch)
        bits = loss.detach() / math.log(2)
        self.log("bits_per_byte", bits, prog_bar=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        windows, _index = batch
        bits = token_nll(self.net, windows).mean() / math.log(2)
        self.log("val_bits_per_byte", bits, prog_bar=True, batch_size=len(windows), sync_dist=True)
        self.log("val_score", -bits, batch_size=len(windows), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        # bits of each window's bytes, by its length and number; the reason where a length has none
        self.tested: dict[tuple[int, int], Tensor] = {}
        self.missing: dict[int, str] = {}

    def test_step(self, batch: tuple[Tensor, Tensor], _: int, dataloader_idx: int = 0) -> None:
        windows, numbers = batch
        length = windows.shape[1] - 1
        if length in self.missing:
            return
        try:
            bits = (token_nll(self.net, windows) / math.log(2)).cpu()
        except torch.OutOfMemoryError as error:
            self.missing[length] = str(error)
            return
        self.tested |= {(length, n): row for n, row in zip(numbers.tolist(), bits, strict=True)}

    def on_test_epoch_end(self) -> None:
        data, missing, tested = self.data(), self.gathered(self.missing), self.gathered(self.tested)
        if not self.trainer.is_global_zero:
            return
        bits = {
            length: torch.cat([row for (n, _), row in tested.items() if n == length])
            for length in data.lengths
            if length not in missing
        }
        metrics = {
            **means(bits, data.lengths, data.length),
            "not_measured": missing,
            "train_length": data.length,
            "test_bytes": data.tested,
            **training_costs(self.net, self.cost),
        }
        values = [f"{b.double().mean():.3f} at {length}" for length, b in bits.items()]
        self.summary = f"bits per byte {', '.join(values) or 'not measured'}; see {self.out()}"
        write_metrics(self.out(), metrics)
        write_table(self.out() / "bits_per_byte.csv", metrics)
        draw({self.out().name: metrics}, self.out() / "bits_per_byte.png")

    def on_predict_start(self) -> None:
        self.predicted: dict[Path, tuple[int, float]] = {}  # bytes and bits of each file

    def predict_step(self, batch: dict[str, Any], _: int) -> None:
        path = batch["path"]
        with self.one_input(path):
            if "error" in batch:
                raise DataError(batch["error"])
            text = batch["text"]
            if len(text) < 2:
                raise DataError(f"{path}: 1 byte, expected 2 or more: the first is not predicted")
            bits = file_bits(self.net, text.to(self.device), self.data().length)
            self.predicted[path] = (len(text), bits)

    def on_predict_end(self) -> None:
        """Write predictions.csv: a line for each file, its bytes and bits per byte."""
        predicted, file = self.gathered(self.predicted), self.out() / "predictions.csv"
        if not self.trainer.is_global_zero or not predicted:
            return
        rows = [(str(path), count, f"{bits / (count - 1):.6f}") for path, (count, bits) in predicted.items()]
        write_csv(file, ("file", "bytes", "bits_per_byte"), rows)
        count, bits = (sum(column) for column in zip(*predicted.values(), strict=True))
        mean = bits / (count - len(predicted))
        self.summary = f"{len(predicted)} files, {mean:.3f} bits per byte; see {file}"

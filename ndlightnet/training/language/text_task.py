"""Language models: trained at one length, tested at others and as streams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokens import read_tokens
from ndlightnet.ops.linear_cross_entropy import linear_cross_entropy
from ndlightnet.training.core.options import check
from ndlightnet.training.language.curves import draw, write_table
from ndlightnet.training.language.measures import Extent, calls_head, extent, file_bits, means, token_nll
from ndlightnet.training.language.tokenized import TokenizedTask
from ndlightnet.training.report.results import write_csv, write_metrics


class TextLoss(nn.Module):
    """Mean negative log-likelihood of tokens, in nats. Of an NDLightNet with a linear head, the logits of all tokens
    are never held at once."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Any, places: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """tokens: windows (batch, length + 1) of integers, of which all but the first are predicted. With labels,
        int64, what each of the tokens predicts, (batch, length) or a pack; with places, only those at these places of
        all tokens of the batch, (labels,)."""
        net, head = self.net, getattr(self.net, "head", None)
        if not calls_head(net) or type(head) is not nn.Linear:
            check("model.net", type(net).__name__, labels is None, "NDLightNet with documents or hidden tokens")
            return token_nll(net, tokens).mean()
        if labels is None:
            tokens = tokens.long()
            tokens, labels = tokens[:, :-1], tokens[:, 1:]
        features = net.forward_head(net.forward_features(tokens), pre_logits=True)
        if places is not None:
            features = features.flatten(0, -2)[places]
        return linear_cross_entropy(features, head.weight, labels, head.bias)


class TextTask(TokenizedTask):
    """Trains `net`, tokens (batch, length) -> logits (batch, length, vocabulary) of the token after each.

    `test` gives bits per byte, which are comparable for all vocabularies that give a text back, and perplexities per
    token and per word (by WikiText's rule: ends of lines count), for each of the data's `lengths`: the same text in
    windows of that many tokens, each from an empty context, and by position in the longest windows. A length for which
    the memory of the device does not suffice is left out, with the reason. `predict` writes the bits per byte of each
    file of `data.input`, read as a stream: how likely the text is.

    With the strategy of configs/lm_3b.yaml each process holds a share of the parameters, for networks that do not fit
    on one device with their gradients and the optimizer's state.

    Args:
        net: the causal network.
        step_tokens: tokens of a step, over all batches that are accumulated and all processes; default: those of the
            batches.
        others: as in Task.
    """

    shards = True

    def __init__(
        self, net: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1, step_tokens: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        check("model.step_tokens", step_tokens, (step_tokens or 1) > 0, "1 or more tokens")
        self.step_tokens = step_tokens
        vars(self)["called"] = TextLoss(net)

    def setup(self, stage: str) -> None:
        self.expect(causal=True, per_token=True)
        super().setup(stage)
        if stage == "fit" and self.step_tokens is not None:
            data = self.data()
            batch = data.batch_size * data.length * self.trainer.world_size
            steps, rest = divmod(self.step_tokens, batch)
            expected = f"a multiple of {batch}, those of the batches of all processes"
            check("model.step_tokens", self.step_tokens, steps > 0 and not rest, expected)
            self.trainer.accumulate_grad_batches = steps

    def example_inputs(self) -> tuple[Tensor, ...] | None:
        data = self.data()
        shape = (data.batch_size, data.length + 1)
        return None if data.documents else (torch.zeros(shape, dtype=torch.int64, device=self.device),)

    def training_step(self, batch: Any, _: int) -> Tensor:
        packed = isinstance(batch, list | tuple)
        loss: Tensor = self(batch[0], labels=batch[1]) if packed else self(batch)
        count = len(batch[0]) if packed else len(batch)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=count)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        windows, _index = batch
        nll = token_nll(self.net, windows).mean()
        self.log("val_loss", nll, prog_bar=True, batch_size=len(windows), sync_dist=True)
        self.log("val_score", -nll, batch_size=len(windows), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        # bits of each window's tokens, by its length and number; the reason where a length has none
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
            if isinstance(self.net, FSDPModule):  # the other processes would wait for this one
                raise
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
        text = extent(data.test_text[1:], data.tokenizer)
        metrics = {
            **means(bits, data.lengths, data.length, text),
            "not_measured": missing,
            "train_length": data.length,
            **{f"test_{name}": count for name, count in text._asdict().items()},
            **self.costs(),
        }
        at = metrics["bits_per_byte_at"]
        values = [f"{at[length]:.3f} at {length}" for length in bits]
        self.summary = f"bits per byte {', '.join(values) or 'not measured'}; see {self.out()}"
        write_metrics(self.out(), metrics)
        write_table(self.out() / "bits_per_byte.csv", metrics)
        draw({self.out().name: metrics}, self.out() / "bits_per_byte.png")

    def on_predict_start(self) -> None:
        self.predicted: dict[str, tuple[Extent, float]] = {}  # what is predicted of each file, and its bits

    def predict_step(self, path: str, _: int) -> None:
        data = self.data()
        with self.one_input(path):
            text = read_tokens(Path(path), data.tokenizer)[:]
            if len(text) < 2:
                raise DataError(f"{path}: 1 token, expected 2 or more: the first is not predicted")
            bits = file_bits(self.net, text.to(self.device), data.length)
            self.predicted[path] = (extent(text[1:], data.tokenizer), bits)

    def on_predict_end(self) -> None:
        """Write predictions.csv: a line for each file, its tokens and bytes but for the first token, and its bits."""
        self.gather_lines()
        predicted, file = self.gathered(self.predicted), self.out() / "predictions.csv"
        if not self.trainer.is_global_zero or not predicted:
            return
        rows = [
            (path, text.tokens, text.bytes, f"{bits / max(1, text.bytes):.6f}")
            for path, (text, bits) in predicted.items()
        ]
        write_csv(file, ("file", "tokens", "bytes", "bits_per_byte"), rows)
        texts, bits = zip(*predicted.values(), strict=True)
        mean = sum(bits) / max(1, sum(text.bytes for text in texts))
        self.summary = f"{len(predicted)} files, {mean:.3f} bits per byte; see {file}"

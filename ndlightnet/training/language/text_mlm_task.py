"""Masked language models: networks that read in both directions and predict hidden tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.inference.likelihood import score_tokens
from ndlightnet.training.language.measures import power_of_2
from ndlightnet.training.language.text_task import TextLoss
from ndlightnet.training.language.tokenized import TokenizedTask
from ndlightnet.training.report.results import write_metrics


class MaskedTextTask(TokenizedTask):
    """Trains `net`, tokens (batch, length) -> logits (batch, length, vocabulary) of the token at each place, to predict
    the hidden tokens of MaskedTextData. `test` gives the mean loss in nats, the perplexity and the accuracy of those.

    Args:
        net: the network, which is not causal.
        others: as in Task.
    """

    def __init__(self, net: nn.Module, lr: float = 1e-3, weight_decay: float = 0.01, **kwargs: Any) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        vars(self)["called"] = TextLoss(net)

    def setup(self, stage: str) -> None:
        self.expect(causal=False, per_token=True)
        super().setup(stage)

    def example_inputs(self) -> tuple[Tensor, ...] | None:
        data = self.data()
        if data.documents:
            return None
        items = [data.train_set[number % len(data.train_set)] for number in range(data.batch_size)]
        return tuple(x.to(self.device) for x in data.collate(items)[:3])

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        loss: Tensor = self(*batch[:3])
        self.log("loss", loss.detach(), prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: tuple[Tensor, ...], _: int) -> None:
        losses, right = self._hidden(*batch[:3])
        loss, count = losses.mean(), len(losses)
        self.log("val_loss", loss, prog_bar=True, batch_size=count, sync_dist=True)
        self.log("val_accuracy", right.mean(), batch_size=count, sync_dist=True)
        self.log("val_score", -loss, batch_size=count, sync_dist=True)

    def _hidden(self, tokens: Tensor, places: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each hidden token, and whether the likeliest one is right, (hidden,) float32 each."""
        net: Any = self.net
        scores, right = score_tokens(net, net.forward_features(tokens).flatten(0, -2)[places], labels)
        return -scores, right.float()

    def on_test_epoch_start(self) -> None:
        self.tested: dict[int, Tensor] = {}  # of each window the losses of its hidden tokens, and which are right

    def test_step(self, batch: tuple[Tensor, ...], _: int) -> None:
        numbers = batch[3].tolist()
        results = torch.stack(self._hidden(*batch[:3])).double().cpu().view(2, len(numbers), -1)  # as many of each
        self.tested |= dict(zip(numbers, results.unbind(1), strict=True))

    def on_test_epoch_end(self) -> None:
        tested = self.gathered(self.tested)
        if not self.trainer.is_global_zero:
            return
        results = torch.cat([*tested.values()], 1)
        loss, accuracy = results.mean(1).tolist()
        metrics = {"loss": loss, "perplexity": power_of_2(loss / math.log(2)), "accuracy": accuracy}
        write_metrics(self.out(), {**metrics, "hidden_tokens": results.shape[1], **self.costs()})
        self.summary = (
            f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f} of hidden tokens; see {self.out()}"
        )

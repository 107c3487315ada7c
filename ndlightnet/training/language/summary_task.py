"""Summaries: a Seq2Seq that writes a text of another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics.functional.text import rouge_score

from ndlightnet.data.errors import printable
from ndlightnet.data.sampling import linspace_indices
from ndlightnet.inference.beam_search import beam_search
from ndlightnet.training.core.options import check
from ndlightnet.training.language.summary_data import NOT_COUNTED, Pairs
from ndlightnet.training.language.tokenized import TokenizedTask
from ndlightnet.training.report.page import number, write_html
from ndlightnet.training.report.results import mean_scores, write_csv, write_metrics

ROUGES = ("rouge1", "rouge2", "rougeL")
SHOWN = 30  # samples on the page, evenly spaced from the worst on
PAGE = """
{% extends "base" %}
{% block content %}
{{ table(["", "ROUGE-1", "ROUGE-2", "ROUGE-L"], scores) }}
{% for one in samples %}
<h2>ROUGE-L {{ one.score }}: {{ one.written }} <span class="soft">{{ one.place }}</span></h2>
<p>Reference: {{ one.reference }}</p>
<p class="soft">{{ one.source }}</p>
{% endfor %}
{% endblock %}
"""


def rouge(written: str, references: Sequence[str]) -> dict[str, float]:
    """Return ROUGE-1, 2 and L (Lin, 2004) of a text, the F of stemmed words: the best over the references. As in its
    other implementations a word has letters a to z and digits: of other scripts it is 0."""
    scores = rouge_score(written, [list(references)], "best", use_stemmer=True, rouge_keys=ROUGES)
    return {name: float(scores[f"{name}_fmeasure"]) for name in ROUGES}


def first_sentence(text: str) -> str:
    """Return a text up to the first space or end of a line after a full stop, question mark or exclamation mark."""
    return re.split(r"(?<=[.!?])\s", text.strip(), maxsplit=1)[0]


class SummaryTask(TokenizedTask):
    """Trains `net`, a Seq2Seq, on the cross-entropy of each word of a summary after those before it. `test` writes
    ROUGE-1, 2 and L, with those of the first sentence of each text for comparison, into metrics.json, test.csv and
    index.html; `predict` writes predictions.csv.

    Args:
        net, lr, weight_decay: as in Task.
        label_smoothing: share of the probability that is spread over all words in training.
        beams, length_penalty: of the search for a summary, see ndlightnet.inference.beam_search. It has at most the
            data's `target_length` words, the end one of them.
        others: as in Task.
    """

    def __init__(
        self,
        net: nn.Module,
        lr: float = 5e-4,
        weight_decay: float = 0.05,
        label_smoothing: float = 0.1,
        beams: int = 4,
        length_penalty: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        check("model.label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "a fraction below 1")
        check("model.beams", beams, beams > 0, "1 or more")
        self.label_smoothing, self.beams, self.length_penalty = label_smoothing, beams, length_penalty

    def _loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        flat = logits.flatten(0, 1).float(), labels.flatten()
        return nn.functional.cross_entropy(*flat, ignore_index=NOT_COUNTED, label_smoothing=smoothing)

    def training_step(self, batch: Pairs, _: int) -> Tensor:
        loss = self._loss(self(batch.source, batch.inputs, batch.mask), batch.labels, self.label_smoothing)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch.source))
        return loss

    def validation_step(self, batch: Pairs, _: int) -> None:
        logits = self.net(batch.source, batch.inputs, batch.mask)
        loss, words = self._loss(logits, batch.labels), batch.labels != NOT_COUNTED
        right = (logits.argmax(-1) == batch.labels)[words].float().mean()
        size = int(words.sum())
        self.log("val_loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        self.log("val_accuracy", right, prog_bar=True, batch_size=size, sync_dist=True)
        self.log("val_score", -loss, batch_size=size, sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.written: dict[int, str] = {}  # of each sample, what was written
        self.losses: dict[int, tuple[float, int]] = {}  # and of its reference the loss of all words, and their number

    on_predict_epoch_start = on_test_epoch_start

    def test_step(self, batch: Pairs, _: int) -> None:
        logits = self.net(batch.source, batch.inputs, batch.mask)
        for row, index in enumerate(batch.numbers.tolist()):
            labels = batch.labels[row : row + 1]
            words = int((labels != NOT_COUNTED).sum())
            self.losses[index] = words * float(self._loss(logits[row : row + 1], labels)), words
        self.predict_step(batch, 0)

    def predict_step(self, batch: Pairs, _: int) -> None:
        tokenizer, length = self.data().loaded_tokenizer(), self.data().target_length
        ends: dict[str, int] = {"begin": tokenizer.end, "end": tokenizer.end}
        options: dict[str, Any] = {"beams": self.beams, "length_penalty": self.length_penalty}
        results = beam_search(self.net, batch.source, length, mask=batch.mask, **ends, **options)
        for index, words in zip(batch.numbers.tolist(), results, strict=True):
            self.written[index] = tokenizer.decode(words).strip()

    def on_test_epoch_end(self) -> None:
        written, losses = self.gathered(self.written), self.gathered(self.losses)
        if not self.trainer.is_global_zero:
            return
        data, out = self.data(), self.out()
        rows = [data.rows[index] for index in written]
        scores = [rouge(text, row.targets) for text, row in zip(written.values(), rows, strict=True)]
        means = mean_scores(scores)
        lead = mean_scores(rouge(first_sentence(row.source), row.targets) for row in rows)
        metrics = {
            **means,
            "first_sentence": lead,
            "loss": sum(loss for loss, _ in losses.values()) / sum(words for _, words in losses.values()),
            "texts": len(rows),
            "beams": self.beams,
            **self.costs(),
        }
        write_metrics(out, metrics)
        samples = [
            {"place": row.place, "source": row.source, "reference": " | ".join(row.targets), "written": text}
            for text, row in zip(written.values(), rows, strict=True)
        ]
        measures = [[f"{x:.6f}" for x in one.values()] for one in scores]
        lines = [[*sample.values(), *values] for sample, values in zip(samples, measures, strict=True)]
        write_csv(out / "test.csv", (*samples[0], *means), lines)
        order = sorted(range(len(rows)), key=lambda n: scores[n]["rougeL"])
        places = linspace_indices(min(SHOWN, len(order)), len(order))
        examples = [{**samples[n], "score": number(scores[n]["rougeL"])} for n in (order[place] for place in places)]
        table = [
            (name, *(number(values[x]) for x in ROUGES))
            for name, values in (("written", means), ("the first sentence", lead))
        ]
        values = ", ".join(f"{x.replace('rouge', 'ROUGE-')} {means[x]:.3f}" for x in ROUGES)
        summary = (
            f"{values} over {len(rows)} texts (their first sentences {', '.join(f'{x:.3f}' for x in lead.values())})"
        )
        title = f"Test: {printable(data.root)}"
        write_html(out / "index.html", PAGE, title=title, summary=summary, failures=[], scores=table, samples=examples)
        self.summary = f"{summary}; see {out / 'index.html'}"

    def on_predict_epoch_end(self) -> None:
        """Write predictions.csv: of each text its file, and line, and what was written of it."""
        data = self.data()
        self.gather_lines()
        written, file = self.gathered(self.written), self.out() / "predictions.csv"
        if not self.trainer.is_global_zero or not written:
            return
        write_csv(file, ("file", "written"), [(data.rows[index].place, text) for index, text in written.items()])
        self.summary = f"{len(written)} texts; see {file}"

"""Text to speech."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from scipy.spatial.distance import cdist
from torch import Tensor

from ndlightnet.data.errors import DataError, file_name, printable
from ndlightnet.data.signal.sound import FLOOR, write_audio
from ndlightnet.data.text.tokenizer import ByteTokenizer
from ndlightnet.training.core.options import check
from ndlightnet.training.core.task import Task
from ndlightnet.training.report.figures import panels_of, save_figure
from ndlightnet.training.report.page import number, write_html
from ndlightnet.training.report.results import mean_scores, write_csv, write_metrics
from ndlightnet.training.speech.speech_data import Spoken

SHOWN = 6  # recordings on the page and with an alignment, the first of the test
LONGEST = 20  # frames of a letter, on average, after which a synthesis is cut off
CEPSTRA = 13
PAGE = """
{% extends "base" %}
{% block content %}
{{ table(["", "MCD, dB", "MSD"], scores) }}
{% for one in samples %}
<h2>{{ one.text }} <span class="soft">{{ one.name }}, MCD {{ one.score }} dB</span></h2>
<p>synthesised <audio controls src="test/{{ one.file }}.wav"></audio>
recorded <audio controls src="test/recorded/{{ one.file }}.wav"></audio></p>
<p><img src="test/{{ one.file }}.png" alt="spectra and alignment"></p>
{% endfor %}
{% endblock %}
"""


def warped_distance(a: NDArray[np.floating[Any]], b: NDArray[np.floating[Any]]) -> float:
    """Return the mean distance of rows of a (n, d) and b (m, d) that dynamic time warping pairs: along the path from
    the first two rows to the last two, by steps of one in a, in b or in both, of the least sum."""
    costs = cdist(a, b)
    n, m = costs.shape
    total, count = np.full((n + 1, m + 1), np.inf), np.zeros((n + 1, m + 1))
    total[0, 0] = 0
    for diagonal in range(2, n + m + 1):  # cells of one do not depend on each other
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        before = np.array([(i - 1, j - 1), (i - 1, j), (i, j - 1)])
        best = total[before[:, 0], before[:, 1]].argmin(0), np.arange(len(i))
        rows, columns = before[:, 0][best], before[:, 1][best]
        total[i, j] = costs[i - 1, j - 1] + total[rows, columns]
        count[i, j] = count[rows, columns] + 1
    return float(total[n, m] / count[n, m])


def distortions(answer: Tensor, recorded: Tensor) -> dict[str, float]:
    """Return of log spectra (frames, bands) the mel cepstral distortion, in dB: 10 sqrt(2) / log(10) x the distance of
    cepstra 1 to 13, where the logarithm is the sum of cepstra x cosines, so that it is the root mean square difference
    of smoothed spectra of one loudness; and the mel spectral distortion, that of the logarithms as they are. Each is
    the mean over the frames that dynamic time warping pairs."""
    pair = [x.double().cpu().numpy() for x in (answer, recorded)]
    cepstra = [dct(x, axis=-1)[:, 1 : CEPSTRA + 1] / x.shape[1] for x in pair]
    return {
        "mcd": 10 * math.sqrt(2) / math.log(10) * warped_distance(*cepstra),
        "msd": warped_distance(*pair) / math.sqrt(answer.shape[1]),
    }


def alignment_scores(shares: Tensor) -> dict[str, float]:
    """Return of shares (frames, length) that frames take from letters: "focus", the mean of each frame's largest one
    (arXiv 1905.09263), and "order", the correlation between a frame's place and the mean place of what it takes: 1 if
    the text is read at one speed, 0 if in no order."""
    places = shares.double() @ torch.arange(shares.shape[1], dtype=torch.float64)
    frames = torch.arange(len(shares), dtype=torch.float64)
    order = torch.corrcoef(torch.stack([frames, places]))[0, 1].nan_to_num(0.0)
    return {"focus": float(shares.amax(1).mean()), "order": float(order)}


def save_spectra(path: Path, panels: list[tuple[str, Tensor]]) -> None:
    """Write a picture with a panel for each (title, values (frames, rows)), frames from left to right. Values of 0
    and more are shares, others logarithms of magnitudes, drawn from silence on."""
    figure, axes = panels_of(len(panels), 1, (9, 2.1 * len(panels)))
    for axis, (title, values) in zip(axes[:, 0], panels, strict=True):
        low, high = (0, float(values.max())) if values.min() >= 0 else (math.log(FLOOR), 1)
        picture = values.float().cpu().mT.numpy()
        axis.imshow(picture, aspect="auto", origin="lower", interpolation="nearest", vmin=low, vmax=high)
        axis.set_title(title, fontsize=9)
    save_figure(figure, path)


class TTSTask(Task):
    """Trains `net`, a ParallelTTS or an AutoregressiveTTS, by the sum of its losses. `test` speaks the texts of
    recordings and measures mel cepstral and spectral distortion, beside those of the mean frame, and the alignment, if
    the network learns it: metrics.json, test.csv and index.html with spectra, alignments and sounds; `predict` writes
    predictions/NAME.wav, by Griffin and Lim's algorithm, and its spectrum, a picture.

    Args: as in Task.
    """

    net: Any

    def setup(self, stage: str) -> None:
        self.expect(bands=self.data().scale.bands)
        letters, enough = getattr(self.net, "vocab_size", None), ByteTokenizer.vocab_size
        check(
            "model.net.vocab_size", letters, letters is None or letters >= enough, f"{enough} or more, those of bytes"
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        data, saved = self.data(), checkpoint["names"].get("options")
        if data.names() and data.options() != saved:
            raise DataError(
                f"{data.root}: rate, window, step, bands and test are {data.options()}, but the checkpoint was trained "
                f"with {saved}"
            )
        super().on_load_checkpoint(checkpoint)

    def _losses(self, network: Any, batch: Spoken) -> dict[str, Tensor]:
        predicted = network(batch.text, batch.spectra, batch.mask, batch.frame_mask)
        losses: dict[str, Tensor] = self.net.losses(predicted, batch.spectra, batch.mask, batch.frame_mask)
        return losses

    def training_step(self, batch: Spoken, _: int) -> Tensor:
        loss = torch.stack([*self._losses(self, batch).values()]).sum()
        self.log("loss", loss, prog_bar=True, batch_size=len(batch.text))
        return loss

    def validation_step(self, batch: Spoken, _: int) -> None:
        losses = self._losses(self.net, batch)
        options: dict[str, Any] = {"batch_size": int(batch.frame_mask.sum()), "sync_dist": True}
        for name, loss in losses.items():
            self.log(f"val_{name}", loss, **options)
        self.log("val_score", -losses["spectrum_loss"], **options)

    def _spectra(self, batch: Spoken) -> list[Tensor]:
        """Return the log spectrum (frames, bands) of each synthesised text."""
        most = LONGEST * batch.mask.sum(1)  # not that of the batch, or a text would depend on the others
        spectra, lengths = self.net.synthesize(batch.text, int(most.max()), batch.mask)
        if not spectra.isfinite().all():
            raise DataError("model.net: its spectra are not numbers; expected a training that ended with a finite loss")
        ends = torch.minimum(lengths, most).tolist()
        return [self._denormalised(x[:end]) for x, end in zip(spectra, ends, strict=True)]

    def _denormalised(self, spectrum: Tensor) -> Tensor:
        data = self.data()
        return spectrum.float().cpu() * data.deviation + data.mean

    def on_test_epoch_start(self) -> None:
        self.tested: dict[int, dict[str, dict[str, float]]] = {}  # of each recording, measures of two answers
        # of those shown: spectra, recorded and synthesised, and the alignment (frames or steps, length)
        self.examples: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def test_step(self, batch: Spoken, _: int) -> None:
        predicted = self.net(batch.text, batch.spectra, batch.mask, batch.frame_mask)
        answers, first = self._spectra(batch), len(self.data().lines) - self.data().test
        for row, index in enumerate(batch.numbers.tolist()):
            inside = batch.frame_mask[row]
            error = (predicted.spectra[row] - batch.spectra[row])[inside].abs().float().mean()
            recorded = self._denormalised(batch.spectra[row][inside])
            lengths = {"length": len(answers[row]) / len(recorded), "spectrum_error": float(error)}
            self.tested[index] = {
                "net": {**distortions(answers[row], recorded), **lengths},
                "mean_frame": distortions(self.data().mean[None], recorded),
            }
            if index - first < SHOWN:
                self.examples[index] = recorded, answers[row], self._alignment(batch, row)

    def _alignment(self, batch: Spoken, row: int) -> Tensor:
        one = Spoken(*(x[row : row + 1] for x in batch))
        text, spectrum = one.text[:, : int(one.mask.sum())], one.spectra[:, : int(one.frame_mask.sum())]
        with torch.inference_mode(False), torch.enable_grad():
            shares: Tensor = self.net.alignment(text.clone(), spectrum.clone())
        return shares[0].detach().float().cpu()

    def on_test_epoch_end(self) -> None:
        tested, examples = self.gathered(self.tested), self.gathered(self.examples)
        if not self.trainer.is_global_zero:
            return
        data, out = self.data(), self.out()
        ours, constant = (mean_scores(one[who] for one in tested.values()) for who in ("net", "mean_frame"))
        alignment = {}
        if self.net.learns_alignment:
            alignment = mean_scores(alignment_scores(shares) for *_, shares in examples.values())
        write_metrics(out, {**ours, "mean_frame": constant, **alignment, "recordings": len(tested), **self.costs()})
        rows = [(*data.lines[n], *(f"{x:.6f}" for x in one["net"].values())) for n, one in tested.items()]
        write_csv(out / "test.csv", ("name", "text", *ours), rows)
        samples = []
        for index, (recorded, answer, shares) in examples.items():
            line, file = data.lines[index], file_name(data.lines[index].name)
            for path, spectrum in ((f"test/{file}.wav", answer), (f"test/recorded/{file}.wav", recorded)):
                write_audio(out / path, data.scale.signal(spectrum), data.scale.rate)
            panels = [
                ("recorded: mel bands over frames", recorded),
                ("synthesised", answer),
                ("alignment of the recording: letters over frames or steps", shares),
            ]
            save_spectra(out / f"test/{file}.png", panels)
            score = number(tested[index]["net"]["mcd"], 2)
            samples.append({"text": line.text, "name": line.name, "score": score, "file": file})
        table = [
            (who, number(values["mcd"], 2), number(values["msd"]))
            for who, values in (("synthesised", ours), ("the mean frame", constant))
        ]
        summary = (
            f"mel cepstral distortion {ours['mcd']:.2f} dB over {len(tested)} recordings (the mean frame "
            f"{constant['mcd']:.2f}), of {ours['length']:.2f} times their length"
        )
        if alignment:
            summary += f"; alignment: focus {alignment['focus']:.2f}, order {alignment['order']:.2f}"
        title = f"Test: {printable(data.root)}"
        write_html(out / "index.html", PAGE, title=title, summary=summary, failures=[], scores=table, samples=samples)
        self.summary = f"{summary}; see {out / 'index.html'}"

    def on_predict_epoch_start(self) -> None:
        self.written: dict[int, str] = {}

    def predict_step(self, batch: Spoken, _: int) -> None:
        scale = self.data().scale
        for spectrum, index in zip(self._spectra(batch), batch.numbers.tolist(), strict=True):
            line = self.data().lines[index]
            path = self.out() / "predictions" / f"{file_name(line.name)}.wav"
            write_audio(path, scale.signal(spectrum), scale.rate)
            save_spectra(path.with_suffix(".png"), [(line.text[:100], spectrum)])
            self.written[index] = line.name

    def on_predict_epoch_end(self) -> None:
        self.gather_lines()
        self.summary = f"{len(self.gathered(self.written))} texts are spoken in {self.out() / 'predictions'}"

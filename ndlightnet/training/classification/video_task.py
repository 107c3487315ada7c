"""Classification of videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, file_name, printable
from ndlightnet.data.video.video_transforms import to_pixels
from ndlightnet.inference import predict_clips, predict_clips_early
from ndlightnet.training.classification.answer_figures import answer_caption, save_strips
from ndlightnet.training.classification.classification_task import ClassificationTask
from ndlightnet.training.classification.streaming import StreamTrainer
from ndlightnet.training.report.results import write_json

STRIPS = 8


class VideoTask(ClassificationTask):
    """Trains `net`, clips `(batch, 3, frames, height, width)` -> `(batch, classes)` logits.

    Args:
        net: the network.
        causal: the network's argument of this name; default: as the network has it. True: causal along time, as
            `stream` needs it.
        mirror: in validation, test and predict probabilities are means over each clip and its mirror image.
        others: as in ClassificationTask.
    """

    samples = "videos"
    has_frames = True
    trainer_class = StreamTrainer

    def __init__(self, net: nn.Module, *, causal: bool | None = None, mirror: bool = False, **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.causal: bool = getattr(net, "causal", False)
        self.mirror = mirror
        if causal not in (None, self.causal):  # the command line has built it accordingly
            raise ValueError(f"causal={causal}: expected {self.causal}, as the network is")

    def setup(self, stage: str) -> None:
        self.expect(in_chans=self.data().channels)
        if stage != "predict":
            self.expect(num_classes=len(self.data().classes))

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        shape = (data.batch_size, data.channels, data.frames, data.size, data.size)
        return (torch.zeros(shape, device=self.device),)

    def training_step(self, batch: tuple[Any, ...], number: int) -> Tensor:
        clips, *others = batch
        return super().training_step((self.data().network_input(clips), *others), number)

    def probabilities(self, *inputs: Any) -> Tensor:
        (clips,) = inputs
        return predict_clips(self.net, self._test_inputs(clips))

    def _test_inputs(self, clips: Tensor) -> Tensor:
        """Return what the network gets of the clips (batch, clips, ...) of a test, and of their mirror images."""
        clips = torch.cat([clips, clips.flip(-1)], 1) if self.mirror else clips
        inputs: Tensor = self.data().network_input(clips)
        return inputs

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self.early: dict[int, Tensor] = {}  # probabilities after each frame of tokens, if causal
        self.strips: dict[int, tuple[str, bool | None, Tensor]] = {}

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        clips, labels, numbers = batch
        if self.causal:
            early = predict_clips_early(self.net, self._test_inputs(clips))
            probabilities = early[:, -1]
            self.early |= dict(zip(numbers.tolist(), early.cpu(), strict=True))
        else:
            probabilities = self.probabilities(clips)
        self.keep(probabilities, labels, numbers)
        names, samples = self.figure_names(self.data().classes), self.data().test_set.samples
        # evenly spaced videos, so that the strips show all classes
        every = max(1, len(samples) // STRIPS)
        for row, number in enumerate(numbers.tolist()):
            if number % every or number // every >= STRIPS:
                continue
            caption, right = answer_caption(probabilities[row], int(labels[row]), names)
            caption = f"{printable(samples[number].path.name)}: {caption}"
            self.strips[number] = (caption, right, to_pixels(clips[row, 0].cpu()))

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        self.strips, early = self.gathered(self.strips), self.gathered(self.early)
        metrics = super().more_metrics(probabilities, labels)
        if early:
            right = torch.stack(list(early.values())).argmax(-1) == labels[:, None]
            metrics["top1_after_each_frame_of_tokens"] = right.float().mean(0).tolist()
        return metrics

    def save_samples(self, numbers: list[int], probabilities: Tensor, labels: Tensor) -> None:
        save_strips(self.out() / "test_clips.png", list(self.strips.values()))

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        clip = self.data().test_set[number][0][0]
        return self.data().network_input(clip), to_pixels(clip).movedim(-1, 0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["causal"] = self.causal

    def on_predict_start(self) -> None:
        self.predictions: dict[str, Any] = {}

    def predict_step(self, batch: dict[str, Any], _: int) -> None:
        path = Path(batch["path"])
        with self.one_input(path):
            if "error" in batch:
                raise DataError(batch["error"])
            probabilities = self.probabilities(batch["clips"][None].to(self.device))[0]
            names, guess = self.data().classes, int(probabilities.argmax())
            caption = f"{printable(path.name)}: {self.figure_names(names)[guess]}"
            # files in several folders may have the same name
            picture = file_name(f"{batch['number']:04d}_{path.stem}") + ".png"
            strip = (caption, None, to_pixels(batch["clips"][0].cpu()))
            save_strips(self.out() / "predictions" / picture, [strip])
            self.predictions[str(path)] = {
                "class": names[guess],
                "probabilities": dict(zip(names, probabilities.tolist(), strict=True)),
            }

    def on_predict_end(self) -> None:
        self.gather_lines()
        predictions = self.gathered(self.predictions)
        file = self.out() / "predictions" / "predictions.json"
        if self.trainer.is_global_zero:
            write_json(file, predictions)
        self.summary = f"{len(predictions)} predictions are in {file}"

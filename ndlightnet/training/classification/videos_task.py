"""Video classification: network + cross-entropy + accuracy, confusion matrix and film strips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from ndlightnet.data.errors import DataError, file_name, printable
from ndlightnet.data.video_transforms import to_pixels
from ndlightnet.inference import predict_clips, predict_clips_early
from ndlightnet.training.classification.streaming import StreamTrainer
from ndlightnet.training.core.measures import scores
from ndlightnet.training.core.report import save_confusion, save_strips, write_json
from ndlightnet.training.core.task import Task

STRIPS = 8


class VideoTask(Task):
    """Trains `net`, clips `(batch, 3, frames, height, width)` -> `(batch, classes)` logits.

    Args:
        net: the network.
        lr, weight_decay: of AdamW, with warm-up and a cosine.
        label_smoothing: of the cross-entropy.
        causal: the network's own argument of this name; default: as the network has it. True is
            along time, as `stream` needs it.
    """

    monitor = "val_accuracy"
    trainer_class = StreamTrainer

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        label_smoothing: float = 0.1,
        causal: bool | None = None,
    ) -> None:
        super().__init__()
        self.causal: bool = getattr(net, "causal", False)
        if causal not in (None, self.causal):  # the command line has built it as it was told
            raise ValueError(f"causal={causal}: expected {self.causal}, as the network is")
        self.net, self.lr, self.weight_decay = net, lr, weight_decay
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def setup(self, stage: str) -> None:
        channels = getattr(self.net, "in_chans", None)
        if channels not in (None, 3):
            raise DataError(f"in_chans={channels}: videos have 3 channels")
        outputs = getattr(self.net, "num_classes", None)
        if stage != "predict" and outputs not in (None, len(self.data().classes)):
            raise DataError(
                f"{self.data().root}: {len(self.data().classes)} classes, but the network has "
                f"num_classes={outputs}"
            )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        clips, labels = batch
        loss: Tensor = self.loss(self.net(clips).float(), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> None:
        clips, labels, _index = batch
        right = (predict_clips(self.net, clips).argmax(-1) == labels).float().mean()
        self.log("val_accuracy", right, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.seen: dict[int, tuple[Tensor, int]] = {}  # probabilities and label of each video
        self.early: dict[int, Tensor] = {}  # probabilities after each frame of tokens, if causal
        self.strips: dict[int, tuple[str, bool | None, Tensor]] = {}

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> None:
        clips, labels, index = batch
        if self.causal:
            early = predict_clips_early(self.net, clips)
            probabilities = early[:, -1]
            self.early |= dict(zip(index.tolist(), early.cpu(), strict=True))
        else:
            probabilities = predict_clips(self.net, clips)
        names, samples = self.data().classes, self.data().test_set.samples
        # every so many videos, so that the strips show all classes
        every = max(1, len(samples) // STRIPS)
        for row, number in enumerate(index.tolist()):
            guess, truth = int(probabilities[row].argmax()), int(labels[row])
            self.seen[number] = (probabilities[row].cpu(), truth)
            if number % every == 0 and number // every < STRIPS:
                caption = (
                    f"{printable(samples[number].path.name)}: {names[guess]} "
                    f"({probabilities[row, guess]:.2f})"
                )
                if guess != truth:
                    caption += f", truth: {names[truth]}"
                self.strips[number] = (caption, guess == truth, to_pixels(clips[row, 0].cpu()))

    def on_test_epoch_end(self) -> None:
        names, strips = self.data().classes, self.gathered(self.strips)
        seen = self.gathered(self.seen).values()
        probabilities = torch.stack([part for part, _ in seen])
        labels = torch.tensor([label for _, label in seen])
        most = min(5, len(names))
        top5 = multiclass_accuracy(probabilities, labels, len(names), "micro", top_k=most)
        metrics = {
            **scores(probabilities, labels, names),
            "top5": float(top5),
            "videos": len(labels),
            "parameters": sum(p.numel() for p in self.net.parameters()),
        }
        if early := self.gathered(self.early):
            right = torch.stack(list(early.values())).argmax(-1) == labels[:, None]
            metrics["top1_after_each_frame_of_tokens"] = right.float().mean(0).tolist()
        self.log("test_accuracy", metrics["top1"], rank_zero_only=True)
        if not self.trainer.is_global_zero:
            return
        write_json(self.out() / "metrics.json", metrics)
        save_confusion(self.out() / "confusion.png", torch.tensor(metrics["confusion"]), names)
        save_strips(self.out() / "test_clips.png", list(strips.values()))
        self.summary = (
            f"held-out accuracy {metrics['top1']:.3f} over {len(labels)} videos; see {self.out()}"
        )

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
            probabilities = predict_clips(self.net, batch["clips"][None].to(self.device))[0]
            names, guess = self.data().classes, int(probabilities.argmax())
            caption = f"{printable(path.name)}: {names[guess]}"
            # names of files in other folders may repeat
            picture = file_name(f"{batch['number']:04d}_{path.stem}") + ".png"
            strip = (caption, None, to_pixels(batch["clips"][0].cpu()))
            save_strips(self.out() / "predictions" / picture, [strip])
            self.predictions[str(path)] = {
                "class": names[guess],
                "probabilities": dict(zip(names, probabilities.tolist(), strict=True)),
            }

    def on_predict_end(self) -> None:
        self.failures = list(self.gathered({line: line for line in self.failures}))
        predictions = self.gathered(self.predictions)
        file = self.out() / "predictions" / "predictions.json"
        if self.trainer.is_global_zero:
            write_json(file, predictions)
        self.summary = f"{len(predictions)} predictions are in {file}"

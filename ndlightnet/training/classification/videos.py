"""Classification of videos: folders of class folders, and generated moving digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ndlightnet.data.digits import make_moving_digits
from ndlightnet.data.errors import DataError, file_name, fitting, printable
from ndlightnet.data.roots import find_root
from ndlightnet.data.video import (
    ClipDataset,
    check_videos,
    find_videos,
    load_for_clips,
    read_video_folder,
)
from ndlightnet.data.video_transforms import denormalized, eval_clips, normalized, to_pixels
from ndlightnet.data.visits import Visits
from ndlightnet.inference import predict_clips, predict_clips_early
from ndlightnet.training.classification.data import LabelledData, held_out
from ndlightnet.training.classification.pictures import save_strips
from ndlightnet.training.classification.streaming import StreamTrainer
from ndlightnet.training.classification.task import ClassificationTask
from ndlightnet.training.core.costs import parameter_count
from ndlightnet.training.core.loading import training_loader
from ndlightnet.training.core.report import say, write_json

STRIPS = 8


class VideoData(LabelledData):
    """A folder with `train/<class>/*.mp4` and `test/<class>/*.mp4`.

    Args:
        root: the folder.
        frames, size: frames per clip and their height and width (pixels). frames=1 is a
            single-frame model.
        batch_size: clips per batch.
        repeats: random clips per video in an epoch.
        clips: clips per video in validation, test and predict.
        hflip: mirror training clips at random: mirrored videos have the same class.
        augment: training clips are random parts of the videos in changed colours; False: the whole
            videos, for a network that generates them.
        validation: fraction of each class of `train` that chooses the best checkpoint; 0: none, the
            last checkpoint counts. `test` is not used for this.
        workers: processes that prepare batches.
        input: for predict: a video or a folder of them; for stream: a video, a named pipe, or -
            for standard input.
    """

    def __init__(
        self,
        root: str,
        frames: int = 16,
        size: int = 112,
        batch_size: int = 8,
        repeats: int = 1,
        clips: int = 3,
        hflip: bool = False,
        augment: bool = True,
        validation: float = 0.1,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__()
        self.root, self.frames, self.size = find_root(root), frames, size
        self.batch_size = batch_size
        self.repeats, self.clips, self.hflip, self.augment = repeats, clips, hflip, augment
        self.space = (frames, size, size)
        self.validation, self.workers, self.input = validation, workers, input

    channels = 3

    def to_pixels(self, x: Tensor) -> Tensor:
        return denormalized(x)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        return normalized(pixels)

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the classes' names come with the checkpoint
        notes: list[str] = []
        folder = read_video_folder(self.root, notes)
        say(notes)
        self.classes = folder.classes
        if stage in ("fit", "validate"):
            train, held = [], []
            for label in range(len(self.classes)):
                samples = [s for s in folder.train if s.label == label]
                chosen = held_out(self.validation, len(samples))
                held += [s for i, s in enumerate(samples) if i in chosen]
                train += [s for i, s in enumerate(samples) if i not in chosen]
            check_videos(folder.train)
            self.val_set = ClipDataset(held, self.frames, self.size, train=False, clips=self.clips)
            if stage == "fit":
                self.seed = torch.initial_seed()
                self.train_set = ClipDataset(
                    train, self.frames, self.size, train=True, hflip=self.hflip,
                    augment=self.augment,
                )  # fmt: skip
        else:
            check_videos(folder.test)
            self.test_set = ClipDataset(
                folder.test, self.frames, self.size, train=False, clips=self.clips
            )

    def train_dataloader(self) -> Any:
        clips, count = Visits(self.train_set, self.seed), self.repeats * len(self.train_set)
        return training_loader(clips, count, self.batch_size, self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=self.batch_size) if len(self.val_set) else []

    def test_dataloader(self) -> Any:
        return DataLoader(self.test_set, batch_size=self.batch_size)

    def predict_dataloader(self) -> Any:
        if self.input is None:
            raise DataError("data.input: expected a video or a folder to predict, got none")
        notes: list[str] = []
        paths = find_videos(self.input, notes)
        say(notes)
        if not self.classes:
            raise DataError("--ckpt_path: predict expects the checkpoint of a training, got none")
        return DataLoader(OpenedVideos(paths, self), batch_size=None)


class MovingDigits(VideoData):
    """Clips of moving digits, encoded under `root` if they do not exist yet, then read like any
    folder.

    videos: number of training and of test clips.
    """

    def __init__(self, root: str, videos: tuple[int, int] = (480, 120), **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.videos = videos

    def prepare_data(self) -> None:
        if self.trainer is not None and self.trainer.predicting:
            return
        # encoded at the size of real clips, resized for the network
        make_moving_digits(self.root, *self.videos, size=96)


class OpenedVideos(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset that decodes videos one at a time; {"path", "error"} for one it cannot read."""

    def __init__(self, paths: list[Path], data: VideoData) -> None:
        self.paths, self.data = paths, data

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, data = self.paths[index], self.data
        try:
            with fitting(path):
                video = load_for_clips(path, data.frames, data.size)
                return {
                    "path": str(path),
                    "number": index + 1,
                    "clips": eval_clips(video, data.frames, data.size, data.clips),
                }
        except DataError as error:
            return {"path": str(path), "error": str(error)}


class VideoTask(ClassificationTask):
    """Trains `net`, clips `(batch, 3, frames, height, width)` -> `(batch, classes)` logits.

    Args:
        net: the network.
        causal: the network's argument of this name; default: as the network has it. True: causal
            along time, as `stream` needs it.
        others: as in ClassificationTask.
    """

    samples = "videos"
    trainer_class = StreamTrainer

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        label_smoothing: float = 0.1,
        causal: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lr, weight_decay, label_smoothing, **kwargs)
        self.causal: bool = getattr(net, "causal", False)
        if causal not in (None, self.causal):  # the command line has built it accordingly
            raise ValueError(f"causal={causal}: expected {self.causal}, as the network is")

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

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        shape = (data.batch_size, 3, data.frames, data.size, data.size)
        return (torch.zeros(shape, device=self.device),)

    def probabilities(self, *inputs: Any) -> Tensor:
        (clips,) = inputs
        return predict_clips(self.net, clips)

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self.early: dict[int, Tensor] = {}  # probabilities after each frame of tokens, if causal
        self.strips: dict[int, tuple[str, bool | None, Tensor]] = {}

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        clips, labels, numbers = batch
        if self.causal:
            early = predict_clips_early(self.net, clips)
            probabilities = early[:, -1]
            self.early |= dict(zip(numbers.tolist(), early.cpu(), strict=True))
        else:
            probabilities = self.probabilities(clips)
        self.keep(probabilities, labels, numbers)
        names, samples = self.data().classes, self.data().test_set.samples
        # evenly spaced videos, so that the strips show all classes
        every = max(1, len(samples) // STRIPS)
        for row, number in enumerate(numbers.tolist()):
            if number % every or number // every >= STRIPS:
                continue
            guess, truth = int(probabilities[row].argmax()), int(labels[row])
            caption = (
                f"{printable(samples[number].path.name)}: {names[guess]} "
                f"({probabilities[row, guess]:.2f})"
            )
            if guess != truth:
                caption += f", truth: {names[truth]}"
            self.strips[number] = (caption, guess == truth, to_pixels(clips[row, 0].cpu()))

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        self.strips, early = self.gathered(self.strips), self.gathered(self.early)
        metrics: dict[str, Any] = {
            "parameters": parameter_count(self.net),
            "samples_per_second": self.cost.measured()["samples_per_second"],
        }
        if early:
            right = torch.stack(list(early.values())).argmax(-1) == labels[:, None]
            metrics["top1_after_each_frame_of_tokens"] = right.float().mean(0).tolist()
        return metrics

    def save_samples(self, numbers: list[int], probabilities: Tensor, labels: Tensor) -> None:
        save_strips(self.out() / "test_clips.png", list(self.strips.values()))

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
            # files in several folders may have the same name
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

"""Videos for training: folders of class folders, and moving digits made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from ndlightnet.data.digits import make_moving_digits
from ndlightnet.data.errors import DataError, fitting
from ndlightnet.data.video import (
    ClipDataset,
    check_videos,
    find_videos,
    load_for_clips,
    read_video_folder,
)
from ndlightnet.data.video_transforms import eval_clips
from ndlightnet.data.visits import Visits
from ndlightnet.training.core.loading import training_loader
from ndlightnet.training.core.report import say


class VideoData(L.LightningDataModule):
    """A folder with `train/<class>/*.mp4` and `test/<class>/*.mp4`.

    Args:
        root: the folder.
        frames, size: frames per clip and their height and width (pixels). frames=1 is a
            single-frame model.
        batch_size: clips per batch.
        repeats: random clips per video in an epoch.
        clips: clips per video when judging it.
        hflip: mirrored videos mean the same.
        validation: share of each class of `train` that chooses the best checkpoint; 0: none, the
            last checkpoint counts. `test` is not looked at.
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
        validation: float = 0.1,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__()
        self.root, self.frames, self.size, self.batch_size = Path(root), frames, size, batch_size
        self.repeats, self.clips, self.hflip = repeats, clips, hflip
        self.validation, self.workers, self.input = validation, workers, input
        self.classes: tuple[str, ...] = ()

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
                out = round(self.validation * len(samples))
                chosen = {round(i * len(samples) / out) for i in range(out)}
                held += [s for i, s in enumerate(samples) if i in chosen]
                train += [s for i, s in enumerate(samples) if i not in chosen]
            check_videos(folder.train)
            self.val_set = ClipDataset(held, self.frames, self.size, train=False, clips=self.clips)
            if stage == "fit":
                self.seed = torch.initial_seed()
                self.train_set = ClipDataset(
                    train, self.frames, self.size, train=True, hflip=self.hflip
                )
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

    def names(self) -> dict[str, list[str]]:
        """What a checkpoint keeps, so that predict does without the training data."""
        return {"classes": list(self.classes)}

    def set_names(self, names: dict[str, list[str]]) -> None:
        self.classes = tuple(names["classes"])


class MovingDigits(VideoData):
    """Clips of moving digits, encoded under `root` when they are not there yet, then read like any
    folder.

    videos: number of training and of test clips.
    """

    def __init__(self, root: str, videos: tuple[int, int] = (480, 120), **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.videos = videos

    def prepare_data(self) -> None:
        if self.trainer is not None and self.trainer.predicting:
            return
        # encoded at the size of real clips, shown to the network smaller
        make_moving_digits(self.root, *self.videos, size=96)


class OpenedVideos(torch.utils.data.Dataset[dict[str, Any]]):
    """Videos decoded one at a time. One that cannot be read gives {"path", "error"}."""

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

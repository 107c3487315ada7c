"""Data of video classification: folders of class folders, and generated moving digits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.tv_tensors import Video

from ndlightnet.data.errors import DataError, fitting
from ndlightnet.data.fold_assignment import assign_folds, first_of_each, read_groups
from ndlightnet.data.image.image_transforms import RandAugment, mixing, seeded
from ndlightnet.data.made.digits import make_moving_digits
from ndlightnet.data.sampling import mixed, replica
from ndlightnet.data.video import video_transforms
from ndlightnet.data.video.clips import ClipDataset, open_for_clips
from ndlightnet.data.video.video_decoders import TorchCodec, decoders
from ndlightnet.data.video.video_files import Sample, check_videos, find_videos, read_video_folder
from ndlightnet.data.video.video_transforms import CropMode, Framing, eval_clips, plain_clip, train_clip
from ndlightnet.training.core.data_module import LabelledData, limited
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log, log_rank_zero

Pixels = Literal["rgb", "differences", "both"]


class VideoData(LabelledData):
    """A folder with `train/<class>/*.mp4` and `test/<class>/*.mp4`. Names of arguments are those of torchvision and
    timm.

    Nothing is decoded before a batch needs it, so that 100,000 videos start within seconds. Random choices are made
    once per clip, for all of its frames; they follow from the seed and the number of a visit, with any number of
    workers.

    Args:
        root: the folder.
        frames, size: frames per clip and their height and width (pixels). frames=1 is a single-frame model.
        pixels: what the network gets. rgb: frames, 3 channels; differences: of each frame from the one before, 3
            channels; both: 6 channels.
        crop_mode: center: the sides of wide frames are cut off; squash: whole frames, resized to a square.
        batch_size: clips per batch.
        repeats: random clips per video in an epoch.
        clips: clips per video in validation, test and predict, staggered in time.
        crops: 1, or 3 for each of these: the middle and both ends of the long side.
        scale: least and largest area of the random crop of a training clip (fractions).
        hflip: mirror training clips at random: mirrored videos have the same class.
        rotation: largest random rotation of training clips (degrees).
        randaugment: {num_ops, magnitude, num_magnitude_bins} of torchvision's RandAugment.
        color_jitter: largest change of brightness, contrast and saturation (a fraction).
        grayscale: probability that a training clip loses its colours.
        random_erasing: probability that a rectangle of a training clip becomes grey.
        mixup: alpha of torchvision's MixUp of a training batch; 0: none.
        cutmix: alpha of its CutMix; 0: none. With both, each batch gets one of them at random.
        augment: training clips are random parts of the videos, changed as the arguments above say; False: the whole
            videos, for a network that generates them.
        balanced: videos of rare classes are visited more often, so that all classes come up alike.
        validation: fraction of each class of `train` that chooses the best checkpoint; 0: none, the last checkpoint
            counts. `test` is not used for this. Neighbours in the order of names stay together: they often were one
            recording.
        groups: column of a table `clips.csv` in `root`, which has another column `path`: what it names, such as
            patients, is not split between training and validation, or folds.
        train_limit: train on so many of the videos that are left for it, evenly spaced; default: all.
        folds: `train` is split into so many parts. fold: the part, from 0, that chooses the best checkpoint and is not
            trained on; default: no cross-validation.
        test_on: the videos of `test`, or of the part that is not trained on.
        cache_gb: decoded videos are held up to this size (GB), for all processes together, in the folder for temporary
            files; others are decoded again and again.
        workers: processes that prepare batches.
        nvdec: the GPU decodes, by torchcodec, H.264, VP8 and VP9 as it can. Workers are spawned, then, each with a CUDA
            context; colours differ by a few levels from those of a CPU.
        input: for predict: a video or a folder of them; for stream: a video, a named pipe, or - for standard input.
    """

    def __init__(
        self,
        root: str,
        frames: int = 16,
        size: int = 112,
        pixels: Pixels = "rgb",
        crop_mode: CropMode = "center",
        batch_size: int = 8,
        repeats: int = 1,
        clips: int = 3,
        crops: Literal[1, 3] = 1,
        scale: tuple[float, float] = (0.5, 1.0),
        hflip: bool = False,
        rotation: float = 0.0,
        randaugment: RandAugment | None = None,
        color_jitter: float = 0.2,
        grayscale: float = 0.0,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        augment: bool = True,
        balanced: bool = False,
        validation: float = 0.1,
        train_limit: int | None = None,
        groups: str | None = None,
        folds: int = 5,
        fold: int | None = None,
        test_on: Literal["test", "fold"] = "test",
        cache_gb: float = 4.0,
        workers: int = 2,
        nvdec: bool = False,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        for name, number in (("frames", frames), ("size", size), ("repeats", repeats), ("clips", clips)):
            check(f"data.{name}", number, number > 0, "1 or more")
        check("data.pixels", pixels, pixels == "rgb" or frames > 1, "rgb with data.frames=1")
        check("data.crops", crops, crops in (1, 3), "1 or 3")
        check("data.crops", crops, crops == 1 or crop_mode == "center", "1 with crop_mode=squash")
        for name, value in (("grayscale", grayscale), ("random_erasing", random_erasing), ("validation", validation)):
            check(f"data.{name}", value, 0 <= value <= 1, "a fraction from 0 to 1")
        for name, value in (("mixup", mixup), ("cutmix", cutmix), ("color_jitter", color_jitter)):
            check(f"data.{name}", value, value >= 0, "0 or more")
        for name, value in (("rotation", rotation), ("cache_gb", cache_gb)):
            check(f"data.{name}", value, value >= 0, "0 or more")
        check("data.scale", scale, 0 < scale[0] <= scale[1] <= 1, "two fractions above 0, the smaller one first")
        check("data.folds", folds, folds >= 2, "2 or more")
        check("data.fold", fold, fold is None or 0 <= fold < folds, f"0 to {folds - 1}")
        check("data.test_on", test_on, test_on == "test" or fold is not None, "test without data.fold")
        self.frames, self.size, self.pixels = frames, size, pixels
        self.framing, self.repeats = Framing(size, crop_mode), repeats
        self.clips, self.crops, self.hflip, self.augment = clips, crops, hflip, augment
        self.mixup, self.cutmix, self.balanced = mixup, cutmix, balanced
        self.space, self.groups = (frames, size, size), groups
        self.validation, self.train_limit = validation, train_limit
        self.folds, self.fold, self.test_on = folds, fold, test_on
        self.cache, self.nvdec, self.spawned = round(cache_gb * 1e9), nvdec, nvdec
        crop: Any = {"scale": scale, "hflip": hflip, "rotation": rotation}
        colours: Any = {"randaugment": randaugment, "color_jitter": color_jitter, "grayscale": grayscale}
        self.transform = video_transforms.training(size, **crop, **colours, random_erasing=random_erasing)

    @property
    def channels(self) -> int:
        """Number of channels that the network gets."""
        return 6 if self.pixels == "both" else 3

    @property
    def decoding(self) -> str:
        """The device that decodes: "cpu", or with `nvdec` the GPU of this process."""
        if not self.nvdec:
            return "cpu"
        good = torch.cuda.is_available() and TorchCodec in decoders()
        check("data.nvdec", True, good, "false without a GPU, or torchcodec and FFmpeg's libraries")
        return f"cuda:{torch.cuda.current_device()}"

    def to_pixels(self, x: Tensor) -> Tensor:
        return video_transforms.denormalized(x)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        return video_transforms.normalized(pixels)

    def network_input(self, clips: Tensor, before: Tensor | None = None) -> Tensor:
        """Return what a network gets of normalised clips (..., 3, frames, height, width), as `pixels` says. before:
        the frame before the first one, if it is known."""
        if self.pixels == "rgb":
            return clips
        changes = video_transforms.frame_differences(clips, before)
        return changes if self.pixels == "differences" else torch.cat([clips, changes], -4)

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the classes' names come with the checkpoint
        notes: list[str] = []
        folder = read_video_folder(self.root, notes)
        log_rank_zero(notes)
        self.classes = folder.classes
        if stage in ("fit", "validate"):
            train, held = self._split(folder.train)
            log_rank_zero(check_videos(folder.train))
            self.val_set = self._evaluated(held)
            if stage == "fit":
                super().setup(stage)
                self.train_set = self._training(evenly(train) if self.balanced else train)
                self.mixing = mixing(self.mixup, self.cutmix, len(self.classes))
        else:
            tested = folder.test if self.test_on == "test" else self._split(folder.train)[1]
            log_rank_zero(check_videos(tested))
            self.test_set = self._evaluated(tested)

    def _split(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Split samples into those to train on and those that choose the checkpoint."""
        labels = [sample.label for sample in samples]
        groups = None
        if self.groups is not None and (self.fold is not None or self.validation):
            groups = read_groups(self.root, self.groups, [sample.path for sample in samples])
        if self.fold is not None:
            is_held = [fold == self.fold for fold in assign_folds(labels, self.folds, groups)]
        else:
            is_held = first_of_each(labels, self.validation, groups)
        held = list(compress(samples, is_held))
        train = list(compress(samples, map(not_, is_held)))
        fitted = [sample.label for sample in train]
        if {*fitted} != {*labels}:
            counts = f"{len(held)} of {len(samples)} videos are held back"
            raise DataError(f"{self.root}: {counts}, no video of a class is left to train with")
        return [train[number] for number in limited(self, fitted)], held

    def _training(self, samples: Sequence[Sample]) -> ClipDataset:
        draw: Any = partial(train_clip, frames=self.frames, transform=self.transform)
        if not self.augment:
            draw = partial(plain_clip, frames=self.frames, framing=self.framing, hflip=self.hflip)
        return self._dataset(samples, draw=draw)

    def _evaluated(self, samples: Sequence[Sample]) -> ClipDataset:
        return self._dataset(samples, clips=self.clips, crops=self.crops)

    def _dataset(self, samples: Sequence[Sample], **options: Any) -> ClipDataset:
        return ClipDataset(samples, self.frames, self.framing, cache=self.cache, device=self.decoding, **options)

    def sample_name(self, number: int) -> str:
        return str(self.test_set.samples[number].path)

    def predict_dataloader(self) -> Any:
        notes: list[str] = []
        paths = find_videos(self.check_input("a video or a folder to predict", bool(self.classes)), notes)
        log_rank_zero(notes)
        return DataLoader(OpenedVideos(paths, self), batch_size=None)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (clips, labels, numbers). Training clips are mixed, when labels are (batch, classes) floats; videos
        that could not be read are named."""
        if isinstance(batch, dict):
            return batch
        clips, labels, numbers, problems = batch
        self.report_skipped(problems, "the next video replaces it")
        trainer = self.trainer
        if trainer is not None and trainer.training and self.mixing is not None:
            number = trainer.fit_loop.epoch_loop.total_batch_idx + 1  # of batches before this one
            draw = mixed(self.seed, 2, number, replica()[0])
            clips, labels = seeded(self.mixing, draw, Video(clips), labels)
            clips = clips.as_subclass(Tensor)
        return clips, labels, numbers


def evenly(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples with those of rare classes repeated, until all classes have as many."""
    classes = [[s for s in samples if s.label == label] for label in sorted({s.label for s in samples})]
    most = max(map(len, classes))
    return [members[number % len(members)] for members in classes for number in range(most)]


class MovingDigits(VideoData):
    """Clips of moving digits, encoded under `root` if they do not exist yet, then read like any folder.

    videos: number of training and of test clips.
    """

    def __init__(self, root: str, videos: tuple[int, int] = (480, 120), **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.videos = videos

    def make_data(self) -> None:
        # encoded at the size of real clips, resized for the network
        make_moving_digits(self.root, *self.videos, size=96)


class OpenedVideos(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset that decodes videos one at a time; {"path", "error"} for one it cannot read."""

    def __init__(self, paths: list[Path], data: VideoData) -> None:
        self.paths, self.data, self.device = paths, data, data.decoding

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, data = self.paths[index], self.data
        try:
            with fitting(path):
                video = open_for_clips(path, data.frames, data.framing, self.device)
                log(video.notes)
                clips = eval_clips(video, data.frames, data.framing, data.clips, data.crops)
                return {"path": str(path), "number": index + 1, "clips": clips}
        except DataError as error:
            return {"path": str(path), "error": str(error)}

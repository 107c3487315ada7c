"""Clouds of points, to complete or to classify, from files, from MedMNIST's masks, or made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import class_folders, class_names, list_files
from ndlightnet.data.image.image_sets import read_images
from ndlightnet.data.made.shapes import make_shapes
from ndlightnet.data.points.clouds import ENDINGS, LEAST, half_space, placed, read_cloud, some_points, surface
from ndlightnet.data.threads import in_threads
from ndlightnet.layout import pack_points
from ndlightnet.training.core.data_module import LabelledData, train_and_held_out
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log_rank_zero


def collate_clouds(items: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Pack the clouds of samples (cloud, ...), and stack what follows."""
    return pack_points([item[0] for item in items]), *default_collate([item[1:] for item in items])


NEAR = 0.01  # a part that is nearer together, in radii of the cloud, is not scaled up further


class Clouds(Dataset[tuple[Any, ...]]):
    """Clouds, and of each (points, label, number): `count` points at random of the cloud within a radius of 1, in
    training stretched by 0.8 to 1.25 along each axis. With `keep` (part, cloud, share, number): the part of the cloud
    within a radius of 1, the cloud in that frame, and the radius of the part / that of the cloud. Without training the
    draws follow from the number."""

    def __init__(
        self, clouds: Sequence[tuple[Tensor, int]], count: int, keep: float | None, train: bool = False
    ) -> None:
        self.clouds, self.count, self.keep, self.train = clouds, count, keep, train

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        rng = None if self.train else torch.Generator().manual_seed(number)
        cloud, label = self.clouds[number]
        if self.train:
            cloud = cloud * torch.empty(3).uniform_(0.8, 1.25)
        cloud = some_points(placed(cloud).points, self.count, rng)
        if self.keep is None:
            return cloud.float(), label, number
        part = placed(half_space(cloud, self.keep, rng), NEAR)
        return part.points.float(), ((cloud - part.centre) / part.radius).float(), part.radius.float(), number


class PointData(LabelledData):
    """Base of data of clouds: `train` and `test` below `root`, which are read at once; see
    ndlightnet.data.points.clouds for the files. Or an .npz of MedMNIST with masks, of which the surfaces are taken.

    Args:
        root: the folder or file.
        points: of a cloud, drawn anew for each visit in training; a smaller cloud has some of them again.
        batch_size: clouds per batch, without padding.
        validation: fraction of the training clouds that chooses the best checkpoint; 0: none. MedMNIST has some.
        workers: processes that prepare batches.
        input: for predict: a file, or a folder of files at any depth.

    A training or a test ends at the first file that cannot be read; `predict` leaves it out with a line.
    """

    keep: float | None = None
    collate = staticmethod(collate_clouds)

    def __init__(
        self,
        root: str,
        points: int = 1024,
        batch_size: int = 32,
        validation: float = 0.05,
        workers: int = 0,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        check("data.points", points, points >= LEAST, f"{LEAST} or more")
        check("data.validation", validation, 0 <= validation < 1, "a fraction below 1")
        self.points, self.validation = points, validation
        self.files: list[str] = []  # of the clouds that were read last, none for MedMNIST
        self.trained = False  # whether a checkpoint was loaded
        self.clouds_to_predict: list[Tensor] = []
        self.names_to_predict: list[str] = []

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            return
        splits, self.files = {} if self.root.is_dir() else read_images(self.root), []

        def clouds(split: str) -> list[tuple[Tensor, int]]:
            return _surfaces(self.root, split, splits[split]) if splits else self._read(split)

        if stage == "test":
            self.test_set = Clouds(clouds("test"), self.points, self.keep)
            return
        everything = clouds("train")
        learnt, kept = (
            (everything, clouds("val")) if "val" in splits else train_and_held_out(self.validation, everything)
        )
        if not learnt:
            raise DataError(f"{self.root}: validation={self.validation} leaves no cloud to train on")
        self.train_set = Clouds(learnt, self.points, self.keep, train=True)
        self.val_set = Clouds(kept, self.points, self.keep)

    def _read(self, split: str) -> list[tuple[Tensor, int]]:
        notes: list[str] = []
        files = self.find(split, notes)
        log_rank_zero(notes)
        self.files = [file for file, _ in files]
        return in_threads(lambda each: (read_cloud(Path(each[0])), each[1]), files, f"reading {split}", workers=1)

    def find(self, split: str, notes: list[str]) -> list[tuple[str, int]]:
        """Return the files of a split, each with its label."""
        return [(file, 0) for file in list_files(self.root / split, ENDINGS, notes)]

    def sample_name(self, number: int) -> str:
        return self.files[number] if self.files else str(number)

    def set_names(self, names: dict[str, list[Any]]) -> None:
        super().set_names(names)
        self.trained = True

    def predict_dataloader(self) -> Any:
        path = Path(self.check_input("a file or a folder to predict", self.trained))
        notes: list[str] = []
        files = list_files(path, ENDINGS, notes)
        log_rank_zero(notes)
        clouds = self.read_each(files, read_cloud)
        self.files, self.clouds_to_predict = [str(file) for file, _ in clouds], [cloud for _, cloud in clouds]
        self.names_to_predict = _short_names(path, self.files)
        return self.still_loader(Clouds([(cloud, 0) for cloud in self.clouds_to_predict], self.points, None))


def _short_names(path: Path, files: Sequence[str]) -> list[str]:
    """Return names of files for results: paths below the folder `path`, without the endings where they tell no two
    apart."""
    below = [os.path.relpath(file, path) if path.is_dir() else Path(file).name for file in files]
    endings = [next((end for end in ENDINGS[::-1] if name.lower().endswith(end)), "") for name in below]
    short = [name[: len(name) - len(end)] for name, end in zip(below, endings, strict=True)]
    short = [name if short.count(brief) > 1 else brief for name, brief in zip(below, short, strict=True)]
    return short if len({*short}) == len(short) else below


def _surfaces(path: Path, split: str, images: Any) -> list[tuple[Tensor, int]]:
    if images.images.ndim != 4:
        raise DataError(f"{path}: {split} has {images.images.ndim - 1} axes, expected masks with three")
    masks = zip(images.images.numpy() != 0, images.labels.tolist(), strict=True)
    clouds = [(torch.from_numpy(surface(mask)).float(), label) for mask, label in masks]
    small = [number for number, (cloud, _) in enumerate(clouds) if len(cloud) < LEAST]
    if small:
        raise DataError(f"{path}: {split} has masks of fewer than {LEAST} voxels at the surface: numbers {small[:3]}")
    return clouds


class PartialClouds(PointData):
    """Clouds to complete: of each sample the points to one side of a random plane are seen.

    keep: the fraction of the points that are.
    """

    def __init__(self, root: str, keep: float = 0.5, **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        check("data.keep", keep, 0 < keep <= 1, "a fraction above 0, at most 1")
        self.keep = keep


class CloudFolders(PointData):
    """Clouds to classify: `train/CLASS/*` and `test/CLASS/*`.

    classes: names of MedMNIST's classes, in order; those of folders are theirs.
    """

    def __init__(self, root: str, classes: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.classes = tuple(classes)

    def setup(self, stage: str) -> None:
        if stage != "predict" and self.root.is_dir():
            self.classes = class_names(self.root / "train")
        super().setup(stage)
        if stage != "predict":
            read = self.test_set if stage == "test" else self.train_set
            most = max(label for _, label in read.clouds)
            self.classes = self.classes or tuple(map(str, range(most + 1)))
            check("data.classes", self.classes, len(self.classes) > most, f"{most + 1} names or more")

    def find(self, split: str, notes: list[str]) -> list[tuple[str, int]]:
        folders = class_folders(self.root / split, self.classes, notes)
        return [(file, label) for folder, label in folders for file in list_files(folder, ENDINGS, notes)]


class _MadeClouds(PointData):
    """Shapes that are made.

    shapes: number of training and of test clouds.
    """

    def __init__(self, root: str, shapes: tuple[int, int] = (1000, 200), **kwargs: Any) -> None:
        super().__init__(root, **kwargs)
        self.shapes = shapes

    def make_data(self) -> None:
        make_shapes(self.root, *self.shapes, self.points)


class MadeShapes(_MadeClouds, PartialClouds):
    """Shapes to complete, which are made under `root` if they do not exist yet, see ndlightnet.data.made.shapes.

    shapes: number of training and of test clouds.
    """


class ShapeClasses(_MadeClouds, CloudFolders):
    """Shapes to classify, made as those of MadeShapes.

    shapes: number of training and of test clouds.
    """

"""Classification of volumes of any sizes, from class folders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.image.image_sets import ImageSet
from ndlightnet.data.volume.class_folders import largest_extent, list_classes, read_part, read_volume
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.training.classification.image_data import ImageData
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log_rank_zero


class VolumeFolders(ImageData):
    """`train/CLASS/*`, `test/CLASS/*` and perhaps `val/CLASS/*` under `root`: NIfTI, Analyze, NRRD and MetaImage files
    and DICOM series. All are held in memory, as bytes.

    Args:
        root: the folder. The classes have the names of their folders.
        size: cells along x, y and z of the network's input.
        spacing: mm per cell along x, y and z; larger volumes are cropped, smaller ones padded evenly. Default: no
            training volume is cropped; they are read once more for this.
        input: for predict: a file, or a folder of files and of DICOM series at any depth.
        modality: of these series, take those of this modality only (CT, MR, PT, ...).
        others: as in ImageData.
    """

    def __init__(
        self,
        root: str,
        size: list[int],
        spacing: list[float] | None = None,
        input: str | None = None,
        modality: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, **kwargs)
        self.size, self.spacing, self.input, self.modality = size, spacing, input, modality
        self.mean, self.std = 0.0, 0.0

    def setup(self, stage: str) -> None:
        size, spacing = self.size, self.spacing
        check("data.size", size, len(size) == 3 and min(size) > 0, "three numbers of cells above 0")
        good = spacing is None or (len(spacing) == 3 and min(spacing) > 0)
        check("data.spacing", spacing, good, "three numbers of mm above 0")
        if stage != "predict":  # predict: all comes with the checkpoint
            super().setup(stage)

    def read(self) -> dict[str, ImageSet]:
        notes: list[str] = []
        classes, splits = list_classes(self.root, notes)
        log_rank_zero(notes)
        if self.classes not in ((), classes):
            raise DataError(f"{self.root}: classes={list(self.classes)}, has {list(classes)}")
        self.classes = classes
        if self.spacing is None:
            extent = largest_extent([case for case, _ in splits["train"]])
            self.spacing = [mm / cells for mm, cells in zip(extent, self.size, strict=True)]
        if self.augment and self.augment.spacing is None:
            self.augment = replace(self.augment, spacing=tuple(self.spacing))
        self.files = [_source(case) for case, _ in splits["test"]]
        return {name: read_part(cases, self.size, self.spacing) for name, cases in splits.items()}

    def predict_dataloader(self) -> Any:
        notes: list[str] = []
        path = self.check_input("a file or a folder to predict", bool(self.std and self.spacing))
        cases = find_inputs(path, notes=notes, modality=self.modality)
        log_rank_zero(notes)
        task: Any = self.trainer and self.trainer.lightning_module
        images, self.files = [], []
        for case in cases:
            with task.one_input(case.images[0]):
                images.append(read_volume(case, self.size, self.spacing or ()))
                self.files.append(_source(case))
        if not images:
            return []
        self.test_set = ImageSet(torch.stack(images), torch.zeros(len(images), dtype=torch.int64))
        return self.still_loader(self.test_set)

    def sample_name(self, number: int) -> str:
        return self.files[number]

    def names(self) -> dict[str, list[Any]]:
        """Return what a checkpoint holds, so that `predict` does not need the training data."""
        scale = (self.mean, self.std)
        names = {"classes": self.classes, "size": self.size, "spacing": self.spacing or (), "scale": scale}
        return {name: list(value) if self.classes else [] for name, value in names.items()}

    def set_names(self, names: dict[str, list[Any]]) -> None:
        self.classes, self.size, self.spacing = tuple(names["classes"]), names["size"], names["spacing"]
        self.mean, self.std = names["scale"]


def _source(case: Case) -> str:
    """Return the file, with the name of a DICOM series that shares its folder with others."""
    path = case.images[0]
    return f"{path} ({case.name})" if case.slices and path.name != case.name else str(path)

"""Volumes for training: folders in the decathlon's layout, and phantoms made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from monai.data.dataloader import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.layouts import find_inputs, read_dataset
from ndlightnet.data.phantoms import make_phantoms
from ndlightnet.data.volume_transforms import augment, preprocess, volume_dataset
from ndlightnet.data.volumes import Case, check_cases, load_case
from ndlightnet.training.loading import training_loader


class VolumeData(L.LightningDataModule):
    """A folder in the decathlon's layout (`dataset.json`).

    Args:
        root: the folder.
        patch: shape of the training crops (voxels).
        batch_size: cases per batch. num_samples: crops taken from each.
        repeats: visits per case in an epoch (above 1 the cases are drawn at random).
        validation: share of the training cases that chooses the best checkpoint; `test` is not
            looked at.
        spacing: resample to this voxel size (mm) first; None trains on the files' own grids.
        flip_axes: axes (0 = x ...) along which a mirrored anatomy is as likely.
        workers: processes that prepare batches.
        input: for predict: a file, a DICOM folder, or a folder of them.
    """

    def __init__(
        self,
        root: str,
        patch: list[int],
        batch_size: int = 2,
        num_samples: int = 2,
        repeats: int = 1,
        validation: float = 0.1,
        spacing: list[float] | None = None,
        flip_axes: list[int] | None = None,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__()
        self.root, self.patch, self.batch_size, self.num_samples = (
            Path(root),
            patch,
            batch_size,
            num_samples,
        )
        self.repeats, self.validation, self.spacing = repeats, validation, spacing
        self.flip_axes, self.workers, self.input = flip_axes or [], workers, input
        self.labels: tuple[str, ...] = ()
        self.modalities: tuple[str, ...] = ()

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # names come with the checkpoint; the training data need not be here
        folder = read_dataset(self.root)
        self.labels, self.modalities = folder.labels, folder.channels
        if stage in ("fit", "validate"):
            labelled = [case for case in folder.training if case.label is not None]
            held_out = max(1, round(self.validation * len(labelled)))
            if len(labelled) <= held_out:
                raise DataError(
                    f"{self.root}: {len(labelled)} training cases, at least 2 are needed"
                )
            # every k-th case, so that the choice does not depend on a random state
            chosen = {round(i * len(labelled) / held_out) for i in range(held_out)}
            train = [case for i, case in enumerate(labelled) if i not in chosen]
            held = [case for i, case in enumerate(labelled) if i in chosen]
            check_cases(labelled, len(self.labels), len(self.modalities))
            steps = augment(self.patch, self.num_samples, len(self.labels), self.flip_axes)
            if stage == "fit":
                self.train_set = volume_dataset(train, self._prepare(), steps, self.workers)
            self.val_set = volume_dataset(held, self._prepare(), None, self.workers)
        else:
            self.test_cases = [case for case in folder.test if case.label is not None]
            if not self.test_cases:
                raise DataError(f"{self.root}: no test case has a label")
            check_cases(self.test_cases, len(self.labels), len(self.modalities))

    def _prepare(self) -> Any:
        return preprocess(self.modalities, self.spacing)

    def train_dataloader(self) -> Any:
        return training_loader(
            self.train_set, self.batch_size, self.repeats, self.workers, DataLoader
        )

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=1, num_workers=0)

    def test_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            Opened(self.test_cases, self.modalities, self.spacing), batch_size=None
        )

    def predict_dataloader(self) -> Any:
        if self.input is None:
            raise DataError("data.input: expected a file or a folder to predict, got none")
        cases = find_inputs(self.input, max(1, len(self.modalities)))
        if not self.labels:
            raise DataError("--ckpt_path: predict expects the checkpoint of a training, got none")
        opened = Opened(cases, self.modalities, self.spacing)
        return torch.utils.data.DataLoader(opened, batch_size=None)

    def names(self) -> dict[str, list[str]]:
        """What a checkpoint keeps, so that predict does without the training data."""
        return {"labels": list(self.labels), "modalities": list(self.modalities)}

    def set_names(self, names: dict[str, list[str]]) -> None:
        self.labels, self.modalities = tuple(names["labels"]), tuple(names["modalities"])


class PhantomVolumes(VolumeData):
    """CT phantoms, written under `root` as NIfTI when they are not there yet, then read like any
    folder.

    cases: number of training and of test phantoms.
    """

    def __init__(
        self, root: str, patch: list[int], cases: tuple[int, int] = (24, 6), **kwargs: Any
    ) -> None:
        super().__init__(root, patch, **kwargs)
        self.cases = cases

    def prepare_data(self) -> None:
        if self.trainer is None or not self.trainer.predicting:
            make_phantoms(self.root, *self.cases)


class Opened(torch.utils.data.Dataset[dict[str, Any]]):
    """Cases read and prepared one at a time. One that cannot be read gives {"case", "error"}."""

    def __init__(
        self, cases: Sequence[Case], modalities: Sequence[str], spacing: Sequence[float] | None
    ) -> None:
        self.cases, self.modalities = list(cases), modalities
        self.prepare = preprocess(modalities, spacing)

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> dict[str, Any]:
        case = self.cases[index]
        try:
            loaded = load_case(case)
            if len(loaded["image"]) != len(self.modalities):
                raise DataError(
                    f"{case.images[0]}: {len(loaded['image'])} channels, the network was trained "
                    f"on {len(self.modalities)} ({', '.join(self.modalities)})"
                )
            return {"case": case, "data": self.prepare(loaded)}
        except DataError as error:
            return {"case": case, "error": str(error)}

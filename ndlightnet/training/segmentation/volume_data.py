"""Volumes for training: folders with a dataset.json, and generated phantoms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError, fitting, one_line
from ndlightnet.data.made.moving_phantoms import make_moving_phantoms
from ndlightnet.data.made.phantoms import make_phantoms
from ndlightnet.data.sampling import mixed
from ndlightnet.data.volume.augment import Augment
from ndlightnet.data.volume.cache import CachedVolumes, cached_volumes
from ndlightnet.data.volume.crops import Crops
from ndlightnet.data.volume.datasets import find_inputs, read_dataset
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.data.volume.volume import Volume
from ndlightnet.training.core.data_module import DataModule
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log_rank_zero

SUV = "GML"  # DICOM's name of g/ml, the unit of the standardised uptake value


class VolumeData(DataModule):
    """A folder of volumes and labels with a `dataset.json`, the Decathlon's or nnU-Net's.

    Args:
        root: the folder.
        patch: shape of the training crops (voxels): x, y, z. With four sizes, frames, x, y, z, each file is a series of
            volumes over time: its fourth axis holds frames, not channels. With two sizes, x, y, each file is a picture:
            PNG, TIFF or JPEG, or a volume of one slice.
        intensities: how each channel is scaled; default: each volume by its mean and standard deviation.
        channels: which of a case's channels the network gets, by number; default: all.
        spacing: resample to this voxel size (mm) first; None trains on the files' own grids.
        batch_size: crops in a batch. batches: batches in an epoch.
        foreground: fraction of the crops that are centred on a labelled voxel.
        augment: how crops are rotated, mirrored, blurred and so on; None: not at all.
        folds: the training cases are split into so many parts. fold: the part, from 0, that chooses the best checkpoint
            and is not trained on; default: no cross-validation, a tenth does.
        test_on: the cases of `test`, those of dataset.json or the part that is not trained on.
        workers: processes that cut crops.
        cache: folder that stores prepared volumes for later runs; default: they are held in memory.
        input: for predict: a file, or a folder of files and of DICOM series at any depth.
        modality: of these series, take those of this modality only (CT, MR, PT, ...).
    """

    def __init__(
        self,
        root: str,
        patch: list[int],
        intensities: list[Intensity] | None = None,
        channels: list[int] | None = None,
        spacing: list[float] | None = None,
        batch_size: int = 2,
        batches: int = 250,
        foreground: float = 1 / 3,
        augment: Augment | None = Augment(),  # noqa: B008 (it is frozen)
        folds: int = 5,
        fold: int | None = None,
        test_on: Literal["test", "fold"] = "test",
        workers: int = 2,
        cache: str | None = None,
        input: str | None = None,
        modality: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        good = len(patch) in (2, 3, 4) and min(patch) > 0
        check("data.patch", patch, good, "3 sizes above 0, 4 for series over time, 2 for pictures")
        self.plane = len(patch) == 2
        good = spacing is None or (len(spacing) == 3 and all(0 < edge < float("inf") for edge in spacing))
        check("data.spacing", spacing, good, "3 edges of a voxel above 0 (mm)")
        check("data.spacing", spacing, not (self.plane and spacing), "null for pictures")
        check("data.batches", batches, batches > 0, "1 or more")
        check("data.foreground", foreground, 0 <= foreground <= 1, "a fraction, 0 to 1")
        check("data.folds", folds, folds >= 2, "2 or more")
        check("data.fold", fold, fold is None or 0 <= fold < folds, f"0 to {folds - 1}")
        flips = () if augment is None else augment.flip_axes
        good = all(0 <= axis < len(patch) for axis in flips)
        check("data.augment.flip_axes", list(flips), good, f"axes from 0 to {len(patch) - 1}")
        self.patch, self.spacing = patch, spacing
        self.intensities, self.channels = intensities, channels
        self.batches, self.foreground = batches, foreground
        if augment is not None and augment.spacing is None and spacing is not None:
            augment = replace(augment, spacing=tuple(spacing))
        self.augment = augment
        self.folds, self.fold, self.test_on = folds, fold, test_on
        self.cache, self.modality = cache, modality
        self.labels: tuple[str, ...] = ()
        self.modalities: tuple[str, ...] = ()
        self.value_units: tuple[str, ...] = ()  # of the training's channels, "" where not known

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # names come with the checkpoint; the training data need not exist
        notes: list[str] = []
        folder = read_dataset(self.root, notes)
        log_rank_zero(notes)
        self.labels, self.modalities = folder.labels, folder.channels
        training, test = map(self._over_time, (folder.training, folder.test))
        self._prepare()  # raises its errors before any volume is read
        if stage == "test":
            held = self._split(training)[1] if self.test_on == "fold" else test
            self.test_cases = [case for case in held if case.label is not None]
            if not self.test_cases:
                raise DataError(
                    f"{self.root}: no test case has a label, expected labelsTs (nnU-Net) or labels of cases under "
                    "'test' in dataset.json (decathlon); `folds` tests on training cases"
                )
            return
        train, held = self._split(training)
        if stage == "fit":
            super().setup(stage)
            patch = [*self.patch, 1] if self.plane else self.patch
            prepared = self._dataset(train, patch)
            self.crops = Crops(prepared, patch, self.batch_size, self.foreground, self.seed)
        self.val_set = self._dataset(held)
        if stage == "fit":
            sets = (prepared, self.val_set)
            self.value_units = self._shared_units([x[n]["value_units"] for x in sets for n in range(len(x))])

    def _shared_units(self, cases: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """Return for each channel the unit that all cases share, "" if there is none."""
        channels = [sorted(set(units)) for units in zip(*cases, strict=True)]
        for name, units in zip(self.modalities, channels, strict=True):
            if len(units) > 1:
                differ = ", ".join(unit or "not known" for unit in units)
                log_rank_zero([f"{self.root}: cases have {name} in different units: {differ}"])
        return tuple(units[0] if len(units) == 1 else "" for units in channels)

    def state_dict(self) -> dict[str, Any]:
        return {"value_units": self.value_units} if any(self.value_units) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value_units = tuple(state_dict["value_units"])

    @property
    def in_channels(self) -> int:
        """Number of channels that the network gets."""
        return len(self.modalities if self.channels is None else self.channels)

    def _over_time(self, cases: Iterable[Case]) -> list[Case]:
        """Return cases whose fourth axis is time if `patch` has four sizes."""
        return [case.as_series(len(self.patch) == 4) for case in cases]

    def _split(self, cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
        """Split cases into those to train on and those that choose the checkpoint. Folds are drawn from a fixed
        seed, so that they are the same in every run. A single case is in both."""
        if self.fold is None and len(cases) == 1:
            return list(cases), list(cases)
        count, fold = (max(2, min(10, len(cases))), 0) if self.fold is None else (self.folds, self.fold)
        if len(cases) < count:
            raise DataError(f"{self.root}: {len(cases)} training cases, expected at least {count}, one for each fold")
        order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(0)).tolist()
        held = sorted(order[fold::count])
        return [case for number, case in enumerate(cases) if number not in held], [cases[number] for number in held]

    def _prepare(self) -> Prepare:
        count, listed = len(self.modalities), ", ".join(self.modalities)
        scales = [Intensity()] * count if self.intensities is None else self.intensities
        channels = range(count) if self.channels is None else self.channels
        good = len(scales) == count
        check("data.intensities", f"{len(scales)} of them", good, f"one for each of the {count} channels: {listed}")
        good = bool(channels) and all(0 <= channel < count for channel in channels)
        check("data.channels", list(channels), good, f"some of 0 to {count - 1}: {listed}")
        return Prepare(scales, self.spacing, channels, self.plane)

    def _dataset(self, cases: list[Case], patch: list[int] | None = None) -> CachedVolumes:
        return cached_volumes(cases, self._prepare(), len(self.labels), patch, max(1, self.workers), self.cache)

    def train_dataloader(self) -> Any:
        return self.training_loader(self.crops, self.batches * self.batch_size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer is None or not self.trainer.training:
            return batch  # a whole case
        image, label, numbers = batch
        if self.plane:
            image, label = image.squeeze(-1), label.squeeze(-1)
        if self.augment is not None:
            # numbers stay on the host: reading them must not wait for the device
            rng = torch.Generator().manual_seed(mixed(self.seed, 2, int(numbers[0])))
            image, label = self.augment(image, label, rng)
        return image, label, numbers

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move crops; whole volumes with their geometry, and numbers, stay on the host."""
        if isinstance(batch, dict):
            return batch
        image, label, numbers = batch
        move = super().transfer_batch_to_device
        return *move((image, label), device, dataloader_idx), numbers

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=None)

    def test_dataloader(self) -> Any:
        return self._one_by_one(self.test_cases, len(self.modalities))

    def predict_dataloader(self) -> Any:
        path, notes = self.check_input("a file or a folder to predict", bool(self.labels)), list[str]()
        cases = find_inputs(path, max(1, len(self.modalities)), notes, self.modality, self.plane)
        log_rank_zero(notes)
        return self._one_by_one(self._over_time(cases))

    def _one_by_one(self, cases: Sequence[Case], channels: int | None = None) -> Any:
        dataset = PredictionCases(cases, self._prepare(), len(self.labels), channels, self.value_units)
        return DataLoader(dataset, batch_size=None)

    def names(self) -> dict[str, list[str]]:
        return {"labels": list(self.labels), "modalities": list(self.modalities)}

    def set_names(self, names: dict[str, list[str]]) -> None:
        self.labels, self.modalities = tuple(names["labels"]), tuple(names["modalities"])


class PhantomVolumes(VolumeData):
    """CT phantoms, written under `root` as NIfTI if they do not exist yet, then read like any folder.

    cases: number of training and of test phantoms.
    """

    make = staticmethod(make_phantoms)

    def __init__(self, root: str, patch: list[int], cases: tuple[int, int] = (24, 6), **kwargs: Any) -> None:
        super().__init__(root, patch, **kwargs)
        self.cases = cases

    def make_data(self) -> None:
        self.make(self.root, *self.cases)


class MovingPhantoms(PhantomVolumes):
    """Series of CT phantoms over time, as PhantomVolumes; `patch` is frames, x, y, z."""

    make = staticmethod(make_moving_phantoms)


class PredictionCases(torch.utils.data.Dataset[dict[str, Any]]):
    """Dataset that reads cases as `Volume.read` and prepares them one at a time: {"case", "volume", "image"}, or
    {"case", "error"} for one that cannot be read. value_units: of the training's channels; a volume in others gets a
    note."""

    def __init__(
        self,
        cases: Sequence[Case],
        prepare: Prepare,
        classes: int,
        channels: int | None = None,
        value_units: Sequence[str] = (),
    ) -> None:
        self.cases, self.prepare = list(cases), prepare
        self.classes, self.channels, self.value_units = classes, channels, value_units

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> dict[str, Any]:
        case, expected = self.cases[index], len(self.prepare.intensities)
        try:
            with fitting(case.images[0]):
                volume = Volume.read(case, self.classes, self.channels)
                if len(volume.image) != expected:
                    raise DataError(
                        f"{case.images[0]}: {len(volume.image)} channels, the network was trained on {expected}"
                    )
                notes = _other_units(volume, self.value_units)
                volume = replace(volume, notes=(*volume.notes, *notes))
                # measures are taken on the file's grid: no label is prepared
                image = self.prepare(replace(volume, label=None))["image"]
                if expected > 1:  # of a picture the mean is drawn, else the first one
                    drawn = volume.image if self.prepare.plane else volume.image[:1]
                    volume = replace(volume, image=drawn.mean(0, keepdim=True))
                return {"case": case, "volume": volume, "image": image}
        except DataError as error:
            return {"case": case, "error": str(error)}


def _other_units(volume: Volume, trained: Sequence[str]) -> list[str]:
    """Return a note for each channel of a volume whose unit is not that of the training. Where the training's is not
    known, as of NIfTI files, SUV is expected."""
    units, paths, notes = volume.value_units, volume.case.images, []
    if len(paths) != len(units):  # a file has several channels
        paths = paths[:1] * len(units)
    for path, unit, expected in zip(paths, units, trained or [""] * len(units), strict=True):
        if unit and unit != (expected or SUV):
            of_training = one_line(expected) if expected else f"not known (SUV is {SUV})"
            notes.append(f"{path}: its values are in {one_line(unit)}, the unit of the training is {of_training}")
    return notes

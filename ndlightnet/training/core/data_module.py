"""Bases of all data: loaders, workers, seeds, the names that a checkpoint holds, files that are skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import find_root
from ndlightnet.data.sampling import SeededSampler, SeededSamples, linspace_indices
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log

T = TypeVar("T")


class DataModule(L.LightningDataModule):
    """Base class of all data.

    A subclass sets `train_set`, `val_set` and `test_set` in `setup`, datasets whose samples end with their numbers, or
    overrides the loaders. One that makes its data does so in `make_data`; one that needs no file under `root`, or gets
    it in `setup`, says `source = None`. Random draws follow from the seed and the number of a visit, with any number of
    workers.

    Args:
        root: the folder or file; a relative one may lie in the folder that NDLIGHTNET_DATA names.
        batch_size: samples per batch and process.
        workers: processes that prepare batches.
        input: for predict: a file or a folder.
    """

    collate: Callable[..., Any] | None = None
    spawned = False  # whether workers use CUDA
    repeats = 1  # visits of each training sample in an epoch
    train_set: Any
    val_set: Any
    test_set: Any

    @property
    def source(self) -> Path | None:
        """The file or folder that has to exist for a training or a test, None for data that are made."""
        makes = (DataModule.make_data, DataModule.prepare_data)
        return self.root if (type(self).make_data, type(self).prepare_data) == makes else None

    def __init__(self, root: str, batch_size: int, workers: int = 0, input: str | None = None) -> None:
        super().__init__()
        check("data.batch_size", batch_size, batch_size > 0, "1 or more")
        check("data.workers", workers, workers >= 0, "0 or more processes")
        self.root, self.batch_size, self.workers, self.input = find_root(root), batch_size, workers, input
        self.seed = torch.initial_seed()
        self.skipped: set[str] = set()
        self.unreadable: list[str] = []  # a line for each file to predict that `read_each` leaves out

    def make_data(self) -> None:
        """Write the data under `root` if they do not exist yet; called before all but predictions, once a node."""

    def prepare_data(self) -> None:
        if self.trainer is None or not self.trainer.predicting:
            self.make_data()

    def setup(self, stage: str) -> None:
        self.seed = torch.initial_seed()

    def train_dataloader(self) -> Any:
        samples = SeededSamples(self.train_set, self.seed)
        return self.training_loader(samples, self.repeats * len(self.train_set))

    def training_loader(self, samples: Any, count: int) -> TimedLoader:
        """Return a loader of `samples[n]` for an epoch's `count` numbers n, in whole batches."""
        numbers = SeededSampler(count)
        return TimedLoader(samples, sampler=numbers, drop_last=len(numbers) >= self.batch_size, **self._options())

    def still_loader(self, samples: Any) -> DataLoader[Any]:
        """Return a loader of all samples in their order, for validation, test and prediction."""
        return DataLoader(samples, **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "collate_fn": self.collate,
            "persistent_workers": self.workers > 0,
            "pin_memory": torch.cuda.is_available(),
            "multiprocessing_context": "spawn" if self.spawned and self.workers else None,
            "generator": torch.Generator(),  # or starting workers would draw from the network's
        }

    def val_dataloader(self) -> Any:
        return self.still_loader(self.val_set) if len(self.val_set) else []

    def test_dataloader(self) -> Any:
        return self.still_loader(self.test_set)

    def check_input(self, expected: str, trained: bool) -> str:
        """Return `input`, the file or folder to predict. DataError without one, or if the names of
        the training were not loaded from a checkpoint (`trained`)."""
        if self.input is None:
            raise DataError(f"data.input: expected {expected}, got none")
        if not trained:
            raise DataError("--ckpt_path: predict expects the checkpoint of a training, got none")
        return self.input

    def read_each(self, files: Iterable[str], read: Callable[[Path], T]) -> list[tuple[Path, T]]:
        """Return the files to predict that can be read, each with what `read` makes of it. DataError if there is
        none."""
        self.unreadable, items = [], []
        for file in map(Path, files):
            try:
                items.append((file, read(file)))
            except DataError as error:
                self.unreadable.append(str(error))
        if not items:
            raise DataError("; ".join(self.unreadable))
        return items

    def report_skipped(self, problems: Sequence[str], consequence: str) -> None:
        """Print a note for each file that could not be read, once."""
        new = {problem for problem in problems if problem} - self.skipped
        log([f"{problem}; {consequence}" for problem in sorted(new)])
        self.skipped |= new

    def names(self) -> dict[str, list[Any]]:
        """Return what a checkpoint holds, so that `predict` does not need the training data."""
        return {}

    def set_names(self, names: dict[str, list[Any]]) -> None:
        """Take the names of a checkpoint."""


class LabelledData(DataModule):
    """Base class of data with names of classes.

    Data that a network can be trained to generate have `space`, the sizes of a sample, and `channels` after `setup`,
    `from_pixels`, which normalises (batch, channels, *space) uint8, and `to_pixels`, which undoes this and clips.
    """

    classes: tuple[str, ...] = ()

    def plain_train_dataloader(self) -> Any:
        """Return the training samples, each once, without augmentation if the data can do that."""
        return self.train_dataloader()

    def sample_name(self, number: int) -> str:
        """Return the file of a test sample, or its number."""
        return str(number)

    def names(self) -> dict[str, list[Any]]:
        return {"classes": list(self.classes)}

    def set_names(self, names: dict[str, list[Any]]) -> None:
        self.classes = tuple(names["classes"])


def held_out(fraction: float, count: int) -> set[int]:
    """Return which of `count` training samples choose the best checkpoint, evenly spaced."""
    out = round(fraction * count)
    return {round(i * count / out) for i in range(out)}


def train_and_held_out(fraction: float, samples: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return the samples to train with, and those of `held_out`."""
    held = held_out(fraction, len(samples))
    return [x for n, x in enumerate(samples) if n not in held], [x for n, x in enumerate(samples) if n in held]


def limited(data: Any, labels: Sequence[int]) -> list[int]:
    """Return the numbers of the samples to train with, of those with these labels:
    `data.train_limit` of them, evenly spaced; default: all."""
    total = len(labels)
    limit = total if data.train_limit is None else data.train_limit
    if not 0 < limit <= total:
        raise DataError(
            f"{data.root}: train_limit={data.train_limit}, validation={data.validation}: {limit} "
            f"samples to train with, expected 1 or more of {total}"
        )
    chosen = linspace_indices(limit, total)
    if {labels[number] for number in chosen} != {*labels}:
        raise DataError(f"{data.root}: train_limit={limit}, no sample of a class is left to train with")
    return chosen


class TimedLoader(DataLoader[Any]):
    """DataLoader that measures how long it is waited for: `waited`, in seconds.

    The sampler starts when the first batch is asked for: Lightning makes the iterator of a resumed
    training before it tells the sampler the epoch.
    """

    waited = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = None
        while True:
            begun = time.perf_counter()
            batches = super().__iter__() if batches is None else batches  # starts the workers
            batch = next(batches, None)
            self.waited += time.perf_counter() - begun
            if batch is None:
                return
            yield batch

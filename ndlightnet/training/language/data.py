"""Bytes of a text: windows to train with, and the held-out text cut into windows of any length."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import find_root
from ndlightnet.data.sampling import SeededSamples
from ndlightnet.data.text.text_files import RandomWindows, Texts, Windows, find_texts, read_bytes, split
from ndlightnet.training.core.loading import training_loader


class TextData(L.LightningDataModule):
    """A file of bytes, plain, .gz or .xz: its first part to train, the next to validate, the last
    to test.

    Args:
        root: the file.
        fractions: fractions of it to train, to validate (may be 0) and to test.
        length: bytes to predict in a training window, which holds one byte more.
        windows: training windows in an epoch, at random positions.
        batch_size: training windows in a batch.
        lengths: lengths of the windows that the test text is cut into, besides `length`.
        test_bytes: at most so many bytes of the test text are predicted, the same ones for every
            length: as many as fill whole windows of every length.
        workers: processes that prepare batches.
        input: for predict: a file, or a folder whose files are taken at any depth.
    """

    def __init__(
        self,
        root: str,
        fractions: tuple[float, float, float] = (0.9, 0.05, 0.05),
        length: int = 2048,
        windows: int = 8192,
        batch_size: int = 32,
        lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536, 131072),
        test_bytes: int = 2**20,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__()
        self.root, self.fractions, self.length = find_root(root), fractions, length
        self.windows, self.batch_size, self.workers = windows, batch_size, workers
        self.lengths, self.test_bytes = sorted({length, *lengths}), test_bytes
        self.input = input
        self.parts: tuple[Tensor, ...] = ()

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the training text need not exist
        if min(self.length, self.windows, self.batch_size, *self.lengths) < 1:
            raise DataError(
                f"length={self.length}, windows={self.windows}, batch_size={self.batch_size}, "
                f"lengths={self.lengths}: expected 1 or more of all"
            )
        self.seed = torch.initial_seed()
        self.parts = self.parts or split(read_bytes(self.root), self.fractions)
        train, val, test = self.parts
        for part, what in ((train, "train"), (val, "validate")):
            if len(part) <= self.length and (len(part) or what == "train"):
                raise DataError(
                    f"{self.root}: {len(part)} bytes to {what} on: expected length + 1 = {self.length + 1} or more"
                )
        whole = math.lcm(*self.lengths)
        self.tested = max(0, min(self.test_bytes, len(test) - 1)) // whole * whole
        if not self.tested:
            raise DataError(
                f"{self.root}: {len(test)} bytes to test on, test_bytes={self.test_bytes}: "
                f"expected more than {whole} for windows of lengths={self.lengths}"
            )

    @property
    def test_text(self) -> Tensor:
        """The whole part of the text that is held out to test, (bytes,) uint8."""
        return self.parts[2]

    def train_dataloader(self) -> Any:
        windows = SeededSamples(RandomWindows(self.parts[0], self.length, self.windows), self.seed)
        return training_loader(windows, self.windows, self.batch_size, self.workers)

    def val_dataloader(self) -> Any:
        windows = Windows(self.parts[1], self.length)
        return DataLoader(windows, batch_size=self.batch_size) if len(windows) else []

    def test_dataloader(self) -> Any:
        """Return a loader per length; a batch has at most the bytes of one longest window."""
        text, longest = self.test_text[: self.tested + 1], self.lengths[-1]
        return [DataLoader(Windows(text, n), batch_size=longest // n) for n in self.lengths]

    def predict_dataloader(self) -> Any:
        """Return a loader of the input's files, one at a time: {"path", "text" or "error"}."""
        if self.input is None:
            raise DataError("data.input: expected a file or a folder to predict, got none")
        return DataLoader(Texts(find_texts(self.input)), batch_size=None)

    def names(self) -> dict[str, list[str]]:
        return {}

    def set_names(self, names: dict[str, list[str]]) -> None:
        """Do nothing: bytes have no names."""

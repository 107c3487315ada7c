"""Bytes of a text: windows to train with, and the held-out text cut into windows of any length."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.text.text_files import RandomWindows, Texts, Windows, find_texts, read_bytes, split
from ndlightnet.training.core.data_module import DataModule


class TextData(DataModule):
    """A file of bytes, plain, .gz or .xz: its first part to train, the next to validate, the last to test.

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
        super().__init__(root, batch_size, workers, input)
        self.fractions, self.length, self.windows = fractions, length, windows
        self.lengths, self.test_bytes = sorted({length, *lengths}), test_bytes
        self.splits: tuple[Tensor, ...] = ()

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the training text need not exist
        super().setup(stage)
        if min(self.length, self.windows, *self.lengths) < 1:
            raise DataError(
                f"length={self.length}, windows={self.windows}, lengths={self.lengths}: expected 1 or more of all"
            )
        self.splits = self.splits or split(read_bytes(self.root), self.fractions)
        train, val, test = self.splits
        for text, use in ((train, "train"), (val, "validate")):
            if len(text) <= self.length and (len(text) or use == "train"):
                raise DataError(
                    f"{self.root}: {len(text)} bytes to {use} on: expected length + 1 = {self.length + 1} or more"
                )
        unit = math.lcm(*self.lengths)
        self.tested = max(0, min(self.test_bytes, len(test) - 1)) // unit * unit
        if not self.tested:
            raise DataError(
                f"{self.root}: {len(test)} bytes to test on, test_bytes={self.test_bytes}: "
                f"expected more than {unit} for windows of lengths={self.lengths}"
            )
        self.train_set, self.val_set = RandomWindows(train, self.length, self.windows), Windows(val, self.length)

    @property
    def test_text(self) -> Tensor:
        """The text that is held out to test, (bytes,) uint8."""
        return self.splits[2]

    def test_dataloader(self) -> Any:
        """Return a loader per length; a batch has at most the bytes of one longest window."""
        text, longest = self.test_text[: self.tested + 1], self.lengths[-1]
        return [DataLoader(Windows(text, n), batch_size=longest // n) for n in self.lengths]

    def predict_dataloader(self) -> Any:
        """Return a loader of the input's files, one at a time: {"path", "text" or "error"}."""
        return DataLoader(Texts(find_texts(self.check_input("a file or a folder to predict", True))), batch_size=None)

"""A file of bytes as text for a language model: reading, splitting, windows."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import DataError, readable
from ndlightnet.data.folders import list_files

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def read_bytes(path: str | Path) -> Tensor:
    """Read all bytes of a file, unpacked if its name ends in .gz or .xz: (bytes,) uint8. DataError
    if it is missing, damaged or empty."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with readable(path), OPENERS.get(path.suffix, open)(path, "rb") as file:
        content = bytearray(file.read())
    if not content:
        raise DataError(f"{path}: is empty")
    return torch.frombuffer(content, dtype=torch.uint8)


def split(text: Tensor, fractions: Sequence[float]) -> tuple[Tensor, ...]:
    """Split the text, in order, into training, validation and test text: (bytes,) each.

    DataError unless `fractions` are three shares that add up to 1.
    """
    if len(fractions) != 3 or min(fractions) < 0 or not math.isclose(sum(fractions), 1):
        raise DataError(
            f"fractions={tuple(fractions)}: expected shares to train, to validate and to test that add up to 1"
        )
    cuts = [round(share * len(text)) for share in accumulate(fractions, initial=0.0)]
    return tuple(text[start:end] for start, end in pairwise(cuts))


class RandomWindows(Dataset[Tensor]):
    """`count` windows (length + 1,) uint8. Item i starts at random in the i-th of `count` equal
    parts of the text: all positions are equally likely, and no two processes draw the same windows.

    It draws from torch's global generator, which `ndlightnet.data.sampling.SeededSamples` seeds per item.
    """

    def __init__(self, text: Tensor, length: int, count: int) -> None:
        self.text, self.length, self.count = text, length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        places = len(self.text) - self.length
        low, high = (i * places // self.count for i in (index, index + 1))
        start = int(torch.randint(low, max(low + 1, high), ()))
        return self.text[start : start + self.length + 1]


class Windows(Dataset[tuple[Tensor, int]]):
    """The text cut into windows: item i is (window (length + 1,) uint8, i).

    A window ends in the byte that the next one begins with: each has `length` bytes to predict, and every byte of the
    text but the first is predicted once. Bytes at the end that fill no window are left out.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start = index * self.length
        return self.text[start : start + self.length + 1], index


def find_texts(path: str | Path) -> list[Path]:
    """List the file `path`, or the files of a folder at any depth; hidden ones are left out. DataError if there are
    none."""
    return [Path(file) for file in list_files(Path(path))]


class Texts(Dataset[dict[str, Any]]):
    """Files read one at a time: item i is {"path", "text": (bytes,) uint8}, or {"path", "error"}
    for one that cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index]
        try:
            return {"path": path, "text": read_bytes(path)}
        except DataError as error:
            return {"path": path, "error": str(error)}

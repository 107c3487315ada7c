"""Token numbers of a text that may be larger than memory: files of them, splits, windows, documents."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import DataError, atomic_write, readable
from ndlightnet.data.text.text_files import Piece, ending, read_bytes, read_pieces
from ndlightnet.data.text.tokenizer import FILE, ByteTokenizer, Tokenizer, load_tokenizer

INDEX = "tokens.json"
SHARD = 2**26  # tokens of a file, 128 MiB or 256
BATCH = 2**22  # characters that are tokenised at once, by several threads


class Tokens:
    """A text as token numbers, in one or several arrays, which may be memory-mapped. A slice is (tokens,) int64."""

    def __init__(self, arrays: Sequence[np.ndarray], start: int = 0, stop: int | None = None) -> None:
        self.arrays = list(arrays)
        self.offsets = [0, *accumulate(map(len, self.arrays))]
        self.start, self.stop = start, self.offsets[-1] if stop is None else stop

    def __getstate__(self) -> dict[str, Any]:
        # worker processes that are not forked map the files again, and get no copy
        arrays = [array.filename if isinstance(array, np.memmap) else array for array in self.arrays]
        return vars(self) | {"arrays": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.arrays = [x if isinstance(x, np.ndarray) else np.load(x, mmap_mode="r") for x in self.arrays]

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, _ = place.indices(len(self))
        pieces = [piece.astype(np.int64) for piece in self._pieces(self.start + start, self.start + stop)]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *pieces]))

    def _pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        for number in range(max(0, bisect_right(self.offsets, start) - 1), len(self.arrays)):
            first, last = self.offsets[number], self.offsets[number + 1]
            if first >= stop:
                break
            yield self.arrays[number][max(start - first, 0) : min(stop, last) - first]

    def part(self, start: int, stop: int) -> Tokens:
        """Return the tokens from start to stop, not copied."""
        return Tokens(self.arrays, self.start + start, self.start + stop)

    def split(self, fractions: Sequence[float]) -> tuple[Tokens, ...]:
        """Split, in order, into training, validation and test text. DataError unless `fractions` are three shares that
        add up to 1."""
        if len(fractions) != 3 or min(fractions) < 0 or not math.isclose(sum(fractions), 1):
            expected = "shares to train, to validate and to test that add up to 1"
            raise DataError(f"fractions={tuple(fractions)}: expected {expected}")
        cuts = [round(share * len(self)) for share in accumulate(fractions, initial=0.0)]
        return tuple(self.part(start, stop) for start, stop in pairwise(cuts))

    def documents(self, end: int, length: int, overlap: int) -> np.ndarray:
        """Return the start and stop of each document, which ends in the token `end`, cut into pieces of at most
        `length` + `overlap` tokens: (pieces, 2) int64. With overlap 1 each begins with the last token of the one
        before, so that every token of the text but the first can be predicted."""
        arrays = zip(self.arrays, self.offsets, strict=False)
        places = [np.flatnonzero(array == end) + 1 + offset - self.start for array, offset in arrays]
        stops = np.concatenate([*places, [len(self)]])
        stops = np.unique(stops[(stops > 0) & (stops <= len(self))])
        starts = np.concatenate([[0], stops[:-1] - overlap])
        spans = [
            (begin, min(begin + length + overlap, stop))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            for begin in range(start, max(start + 1, stop - overlap), length)
        ]
        return np.array(spans, np.int64)


def tokenize(path: Path, tokenizer: Tokenizer, skipped: int = 0) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the tokens of the documents of a file, each document followed by the tokenizer's end token, in batches
    (tokens,), each with the fraction of the file that has been read. The first `skipped` batches are empty."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    for number, batch in enumerate(_batches(read_pieces(path))):
        pieces = [] if number < skipped else batch
        tokens = tokenizer.encode([piece.text for piece in pieces])
        rows = [ids + [tokenizer.end] * piece.last for ids, piece in zip(tokens, pieces, strict=True)]
        yield np.concatenate([np.empty(0, dtype), *(np.array(row, dtype) for row in rows)]), batch[-1].progress


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in groups of BATCH characters."""
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def is_token_folder(path: Path) -> bool:
    return (path / INDEX).is_file()


def read_tokens(path: Path, tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of a folder that `tokenize` has written, memory-mapped, or of a file as `read_pieces` reads it,
    in memory. The bytes of a file that is no .jsonl are read as they are, without an end. DataError for token files of
    another tokenizer."""
    if is_token_folder(path):
        index = read_index(path)
        if index["tokenizer"] != tokenizer.digest:
            raise DataError(f"{path}: has the tokens of another tokenizer, expected those of {tokenizer.digest}")
        if not index["done"]:
            raise DataError(f"{path}: is not complete, expected the command `tokenize` to be run to its end")
        with readable(path):
            return Tokens([np.load(path / shard["file"], mmap_mode="r") for shard in index["shards"]])
    if isinstance(tokenizer, ByteTokenizer) and path.is_file() and ending(path) != ".jsonl":
        return Tokens([read_bytes(path).numpy()])
    return Tokens([tokens for tokens, _ in tokenize(path, tokenizer)])


def read_index(path: Path) -> dict[str, Any]:
    """Return the description of a folder of token files. DataError if it is none."""
    try:
        index: dict[str, Any] = json.loads((path / INDEX).read_text("utf-8"))
        [index[key] for key in ("tokenizer", "files", "batches", "done")]
        [(shard["file"], shard["tokens"]) for shard in index["shards"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / INDEX}: not what `tokenize` writes") from error
    # another version of the library may write the same tokenizer differently, and so give another hash
    return index | {"tokenizer": load_tokenizer(path).digest}


class TokenWriter:
    """Writes token files into a folder, one when SHARD tokens are there, and after it an index, so that a writing that
    was stopped goes on: `written` batches of the same files are in it.

    The index has the tokenizer's hash and for each shard its file and tokens. Raises DataError for a folder of another
    tokenizer or other files, and when it cannot be written.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, files: Sequence[Path]) -> None:
        self.folder = folder
        self.index: dict[str, Any] = {"tokenizer": tokenizer.digest, "files": [str(file) for file in files]}
        self.index |= {"batches": 0, "done": False, "shards": []}
        if is_token_folder(folder):
            index = read_index(folder)
            for key in ("tokenizer", "files"):
                if index[key] != self.index[key]:
                    raise DataError(
                        f"{folder}: has {key} {index.get(key)}, expected {self.index[key]}, or a new folder"
                    )
            self.index = index
        self.buffer: list[np.ndarray] = []
        self.batches = self.written = int(self.index["batches"])
        if not is_token_folder(folder):
            tokenizer.save(folder / FILE)
            self._write_index()  # so that the next call knows the folder as one of tokens

    @property
    def done(self) -> bool:
        return bool(self.index["done"])

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return sum(shard["tokens"] for shard in self.index["shards"]) + sum(map(len, self.buffer))

    def add(self, tokens: np.ndarray) -> None:
        self.buffer.append(tokens)
        self.batches += 1
        if sum(map(len, self.buffer)) >= SHARD:
            self._write()

    def finish(self) -> None:
        if self.buffer:
            self._write()
        self.index["done"] = True
        self._write_index()

    def _write(self) -> None:
        name = f"{len(self.index['shards']):05d}.npy"
        tokens = np.concatenate(self.buffer)
        with atomic_write(self.folder / name) as draft:
            np.save(draft, tokens)
        self.index["shards"].append({"file": name, "tokens": len(tokens)})
        self.index["batches"], self.buffer = self.batches, []
        self._write_index()

    def _write_index(self) -> None:
        with atomic_write(self.folder / INDEX) as draft:
            draft.write_text(json.dumps(self.index, indent=1), "utf-8")


class RandomWindows(Dataset[Tensor]):
    """`count` windows (length + margin,) int64. Item i starts at random in the i-th of `count` equal
    parts of the text: all positions are equally likely, and no two processes draw the same windows.

    It draws from torch's global generator, which `ndlightnet.data.sampling.SeededSamples` seeds per item.
    """

    def __init__(self, text: Tokens, length: int, count: int, margin: int = 1) -> None:
        self.text, self.size, self.count = text, length + margin, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        places = len(self.text) - self.size + 1
        low, high = (i * places // self.count for i in (index, index + 1))
        start = int(torch.randint(low, max(low + 1, high), ()))
        return self.text[start : start + self.size]


class Windows(Dataset[tuple[Tensor, int]]):
    """The text cut into windows: item i is (window (length + margin,) int64, i).

    With margin 1 a window ends in the token that the next one begins with: each has `length` tokens to predict, and
    every token of the text but the first is predicted once. Tokens at the end that fill no window are left out.
    """

    def __init__(self, text: Tokens, length: int, margin: int = 1) -> None:
        self.text, self.length, self.margin = text, length, margin

    def __len__(self) -> int:
        return max(0, len(self.text) - self.margin) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start = index * self.length
        return self.text[start : start + self.length + self.margin], index


class Documents(Dataset[Tensor]):
    """The documents of a text, cut into pieces, see Tokens.documents: item i is (tokens,) int64, from 2 tokens on.
    lengths: tokens of each, (items,)."""

    def __init__(self, text: Tokens, end: int, length: int, overlap: int) -> None:
        spans = text.documents(end, length, overlap)
        self.text, self.spans = text, spans[spans[:, 1] - spans[:, 0] > 1]
        self.lengths = self.spans[:, 1] - self.spans[:, 0]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Tensor:
        start, stop = self.spans[index].tolist()
        return self.text[start:stop]

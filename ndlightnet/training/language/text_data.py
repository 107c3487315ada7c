"""Texts as tokens: windows or documents to train with, and the held-out text in windows of any length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import find_root, list_files
from ndlightnet.data.packing import TokenBudgetSampler
from ndlightnet.data.sampling import mixed, seeded_draws
from ndlightnet.data.text.tokenizer import BYTES, load_tokenizer
from ndlightnet.data.text.tokens import Documents, RandomWindows, Tokens, Windows, is_token_folder, read_tokens
from ndlightnet.layout import pack
from ndlightnet.training.core.data_module import TimedLoader
from ndlightnet.training.core.options import check
from ndlightnet.training.language.tokenized import TokenizedData
from ndlightnet.training.report.results import log_rank_zero


class TextData(TokenizedData):
    """A text, its first part to train, the next to validate, the last to test: a file (plain, .gz, .xz, .jsonl with a
    field text), a data set that Hugging Face's `datasets` has saved, or a folder of token files, which the command
    `tokenize` writes and which may be larger than memory.

    Args:
        root: the file or folder.
        val, test: files or folders of their own to validate and to test on, in place of parts of `root`.
        fractions: fractions of `root` to train, to validate (may be 0) and to test.
        tokenizer: a name, file or folder, see `load_tokenizer`; default: that of token files, "bytes" of others.
        length: tokens to predict in a training window, which holds one token more.
        windows: training windows in an epoch, at random positions.
        documents: train on documents of at most `length` tokens, end to end without padding, in place of windows: none
            sees another. An epoch has each once.
        batch_size: training windows in a batch; of documents as many tokens.
        lengths: lengths of the windows that the test text is cut into, besides `length`; those that do not fit it are
            left out, with a note.
        test_tokens: at most so many tokens of the test text are predicted, the same ones for every
            length: as many as fill whole windows of every length.
        workers: processes that prepare batches.
        input: for predict: a file, or a folder whose files are taken at any depth.
    """

    margin = 1  # tokens of a window that are not predicted

    def __init__(
        self,
        root: str,
        fractions: tuple[float, float, float] = (0.9, 0.05, 0.05),
        length: int = 2048,
        windows: int = 8192,
        batch_size: int = 32,
        lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536, 131072),
        test_tokens: int = 2**20,
        workers: int = 2,
        input: str | None = None,
        tokenizer: str | None = None,
        val: str | None = None,
        test: str | None = None,
        documents: bool = False,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        for name, value in (("length", length), ("windows", windows), ("lengths", min(lengths, default=1))):
            check(f"data.{name}", value, value > 0, "1 or more")
        self.fractions, self.length, self.windows, self.documents = fractions, length, windows, documents
        self.lengths, self.test_tokens = sorted({length, *lengths}), test_tokens
        self.tokenizer_source, self.files = tokenizer, (val, test)
        self.splits: tuple[Tokens, ...] = ()

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the training text need not exist
        super().setup(stage)
        self.splits = self.splits or self._read()
        train, val, test = self.splits
        for text, use in ((train, "train"), (val, "validate")):
            if len(text) <= self.length and (len(text) or use == "train"):
                raise DataError(
                    f"{self.root}: {len(text)} tokens to {use} on: expected length + 1 = {self.length + 1} or more"
                )
        self._choose_lengths(min(self.test_tokens, len(test) - 1))
        if self.documents:
            self.train_set = Documents(train, self.loaded_tokenizer().end, self.length, self.margin)
            self.train_lengths = self.train_set.lengths
        else:
            self.train_set = RandomWindows(train, self.length, self.windows, self.margin)
        self.val_set = Windows(val, self.length, self.margin)

    def _read(self) -> tuple[Tokens, ...]:
        """Read the texts to train, to validate and to test on."""
        if self.tokenizer is None:
            written = self.tokenizer_source is None and is_token_folder(self.root)
            self.tokenizer = load_tokenizer(self.root if written else self.tokenizer_source or BYTES)
        text = read_tokens(self.root, self.tokenizer)
        texts = [None if file is None else read_tokens(find_root(file), self.tokenizer) for file in self.files]
        train, *shares = self.fractions
        if math.isclose(sum(self.fractions), 1):  # what a part has a file for is trained on
            shares = [share if file is None else 0.0 for share, file in zip(shares, self.files, strict=False)]
            train = 1 - sum(shares)
        parts = text.split((train, *shares))
        held_out = (part if file is None else file for part, file in zip(parts[1:], texts, strict=True))
        return (parts[0], *held_out)

    def _choose_lengths(self, most: int) -> None:
        """Leave out lengths of windows for which the `most` tokens to test on do not suffice."""
        fitting = [n for n in self.lengths if n <= most]
        while self.length in fitting and math.lcm(*fitting) > most:
            fitting.remove(max(n for n in fitting if n != self.length))
        if missing := [n for n in self.lengths if n not in fitting]:
            note = f"{max(most, 0)} tokens to test on: windows of {missing} are left out"
            log_rank_zero([f"{self.root}: {note}"])
        if self.length not in fitting:
            raise DataError(
                f"{self.root}: {max(most, 0)} tokens to test on, test_tokens={self.test_tokens}: "
                f"expected length={self.length} or more"
            )
        self.lengths, unit = fitting, math.lcm(*fitting)
        self.tested = most // unit * unit

    @property
    def test_text(self) -> Tensor:
        """The tokens that are tested, and the one before them: (tested + 1,) int64."""
        return self.splits[2][: self.tested + 1]

    @staticmethod
    def pack_documents(documents: Sequence[Any]) -> tuple[Any, ...]:
        """Return documents (tokens,) end to end, Packed, without the last token of each, and what follows each token,
        (length,)."""
        return pack([tokens[:-1] for tokens in documents]), torch.cat([tokens[1:] for tokens in documents])

    def train_dataloader(self) -> Any:
        if not self.documents:
            return super().train_dataloader()
        batches = _Draws(self.train_lengths, self.batch_size * (self.length + self.margin), seed=self.seed)
        options = self._options() | {"batch_size": None, "collate_fn": self.pack_documents}
        return TimedLoader(_Packs(self.train_set, self.seed), sampler=batches, **options)

    def test_dataloader(self) -> Any:
        """Return a loader per length; a batch has at most the tokens of one longest window."""
        text, longest = self.splits[2].part(0, self.tested + 1), self.lengths[-1]
        return [DataLoader(Windows(text, n), batch_size=longest // n) for n in self.lengths]

    def predict_dataloader(self) -> Any:
        """Return a loader of the paths of the input's files, one at a time."""
        path = self.check_input("a file or a folder to predict", self.tokenizer is not None)
        return DataLoader(list_files(Path(path)), batch_size=None)  # type: ignore[arg-type]


class _Draws(TokenBudgetSampler):
    """Batches of numbers that differ from epoch to epoch: epoch * samples + sample."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield [self.epoch * len(self.lengths) + number for number in batch]


class _Packs(Dataset[list[Any]]):
    """Lists of samples, whose draws from torch's global generator follow from the seed and the numbers of _Draws."""

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __getitem__(self, numbers: list[int]) -> list[Any]:
        items = []
        for number in numbers:
            with seeded_draws(mixed(self.seed, 1, number)):
                items.append(self.samples[number % len(self.samples)])
        return items

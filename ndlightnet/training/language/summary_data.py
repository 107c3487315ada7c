"""Texts and their summaries, or any texts and what is to be written of them: .jsonl files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import find_root, list_files
from ndlightnet.data.made.notes import make_notes
from ndlightnet.data.text.tables import TextPair, read_pairs
from ndlightnet.data.text.text_files import ending, read_pieces
from ndlightnet.data.text.tokenizer import BYTES, FILE, load_tokenizer
from ndlightnet.layout.pack import pad_rows
from ndlightnet.training.core.data_module import train_and_held_out
from ndlightnet.training.core.options import check
from ndlightnet.training.language.tokenized import TokenizedData
from ndlightnet.training.report.results import log_rank_zero

NOT_COUNTED = -100  # torch's label of what a loss leaves out


class Pairs(NamedTuple):
    """A batch: sources (batch, source length) with mask, False = padding; of each target its words but the last,
    (batch, target length), and what follows each, with NOT_COUNTED behind its end; numbers (batch,). All int64."""

    source: Tensor
    mask: Tensor
    inputs: Tensor
    labels: Tensor
    numbers: Tensor


def collate_pairs(items: Sequence[tuple[Tensor, Tensor, int]]) -> Pairs:
    """Return the batch of samples (source (n,), target (m,), number)."""
    sources, targets, numbers = zip(*items, strict=True)
    return Pairs(
        *pad_rows(sources),
        pad_sequence([target[:-1] for target in targets], batch_first=True),
        pad_sequence([target[1:] for target in targets], batch_first=True, padding_value=NOT_COUNTED),
        torch.tensor(numbers),
    )


class SummaryData(TokenizedData):
    """Texts with summaries: .jsonl files, plain, .gz or .xz, of objects with two fields, see `read_pairs`. Of several
    references the first is learnt from. `rows` has the texts to test or predict.

    Args:
        root: the folder of the files.
        train, test: the files to train and to test on.
        val: the file to validate on, or the fraction of `train` that is held out for it; 0: none.
        source, target: names of the fields.
        tokenizer: of a training: a name, file, folder, or the checkpoint of another one, see `load_tokenizer`. Later
            it is that of the checkpoint.
        length, target_length: most tokens of a source and of a target, each with the one that ends it; what is longer
            is cut, with a note.
        batch_size: samples in a batch, padded to the longest of it.
        workers: processes that prepare batches.
        input: for predict: a .jsonl with the field `source`, or a text, or a folder of such files.
    """

    def __init__(
        self,
        root: str,
        train: str = "train.jsonl",
        val: float | str = 0.05,
        test: str = "test.jsonl",
        source: str = "document",
        target: str = "summary",
        tokenizer: str = BYTES,
        length: int = 512,
        target_length: int = 64,
        batch_size: int = 32,
        workers: int = 0,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        check("data.val", val, isinstance(val, str) or 0 <= val < 1, "a file, or a fraction below 1")
        for name, tokens in (("length", length), ("target_length", target_length)):
            check(f"data.{name}", tokens, tokens > 1, "2 or more tokens, one of them the end")
        self.train, self.val, self.test, self.source_field, self.target_field = train, val, test, source, target
        self.tokenizer_source, self.length, self.target_length = tokenizer, length, target_length
        self.collate = collate_pairs
        self.rows: list[TextPair] = []

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage in ("test", "predict"):
            return  # the tokenizer is that of the training before, or comes with the checkpoint
        self.tokenizer = self.tokenizer or load_tokenizer(self.tokenizer_source)
        samples = self._samples(self.root / self.train)
        if isinstance(self.val, str):
            self.train_set, self.val_set = samples, self._samples(self.root / self.val)
            return
        self.train_set, self.val_set = train_and_held_out(self.val, samples)
        if not self.train_set:
            raise DataError(f"{self.root / self.train}: val={self.val} leaves none of its rows to train on")

    def _samples(self, path: Path) -> list[tuple[Tensor, Tensor, int]]:
        return self._tokens(path, read_pairs(path, self.source_field, self.target_field))

    def _tokens(self, path: Path, rows: list[TextPair]) -> list[tuple[Tensor, Tensor, int]]:
        """Return the samples. A target begins and ends with the token that ends a text."""
        tokenizer, cut = self.loaded_tokenizer(), 0
        sources = tokenizer.encode([row.source for row in rows])
        targets = tokenizer.encode([row.targets[0] if row.targets else "" for row in rows])
        samples, end = [], tokenizer.end
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            cut += len(source) >= self.length or len(target) >= self.target_length
            words = torch.tensor([*source[: self.length - 1], end])
            samples.append((words, torch.tensor([end, *target[: self.target_length - 1], end]), number))
        if cut:
            limits = f"length={self.length}" + f" or target_length={self.target_length}" * bool(rows[0].targets)
            log_rank_zero([f"{path}: {cut} of {len(rows)} samples are cut to {limits} tokens"])
        return samples

    def test_dataloader(self) -> Any:
        path = self.root / self.test
        self.rows = read_pairs(path, self.source_field, self.target_field)
        return self.still_loader(self._tokens(path, self.rows))

    def predict_dataloader(self) -> Any:
        path = Path(self.check_input("a file or a folder to predict", self.tokenizer is not None))
        self.rows = [row for _, rows in self.read_each(list_files(path), self._sources) for row in rows]
        return self.still_loader(self._tokens(path, self.rows))

    def _sources(self, file: Path) -> list[TextPair]:
        if ending(file) == ".jsonl":
            return read_pairs(file, self.source_field, None)
        text = "".join(piece.text for piece in read_pieces(file))
        if not text.strip():
            raise DataError(f"{file}: is blank, expected a text")
        return [TextPair(text, (), str(file))]


class MadeNotes(SummaryData):
    """Notes and their news, which are made under `root` if they do not exist yet, with a tokenizer, see
    ndlightnet.data.made.notes.

    samples: number of training and of test notes. sentences: of a note.
    """

    def __init__(self, root: str, samples: tuple[int, int] = (6000, 500), sentences: int = 4, **kwargs: Any) -> None:
        super().__init__(root, tokenizer=str(find_root(root) / FILE), **kwargs)
        check("data.samples", samples, min(samples) > 0, "1 or more of each")
        check("data.sentences", sentences, sentences > 0, "1 or more")
        self.samples, self.sentences = samples, sentences

    def make_data(self) -> None:
        make_notes(self.root, *self.samples, self.sentences)

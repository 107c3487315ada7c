"""Tables of texts, or pairs of texts, with labels: the tokens of a sample, packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.list_ops import LEAST, make_list_ops
from ndlightnet.data.made.sentences import make_sentences
from ndlightnet.data.packing import PackCollate
from ndlightnet.data.text.tables import Row, number_of, read_table
from ndlightnet.data.text.tokenizer import BYTES, load_tokenizer
from ndlightnet.training.core.data_module import LabelledData, held_out
from ndlightnet.training.core.options import check
from ndlightnet.training.language.tokenized import TokenizedData
from ndlightnet.training.report.results import log_rank_zero


def join_texts(texts: Sequence[Sequence[int]], end: int, length: int) -> list[int]:
    """Return the tokens of each text, and `end` after it, `length` together at most: the longest text is cut first, at
    its end."""
    room, kept = length - len(texts), {}
    for place, number in enumerate(sorted(range(len(texts)), key=lambda number: len(texts[number]))):
        kept[number] = min(len(texts[number]), room // (len(texts) - place))
        room -= kept[number]
    return [token for number, text in enumerate(texts) for token in (*text[: kept[number]], end)]


class SentenceData(LabelledData, TokenizedData):
    """Tables of labelled texts, .tsv, .csv or .jsonl, see `read_table`. The classes are the labels in `train`, sorted;
    for a regression (`model.regression`) labels are numbers. Samples are (tokens (length,) int64, label, number), with
    the number of a class for a label, or a value; `rows` has the lines of those to test or predict.

    Args:
        root: the folder of the tables.
        train, test: the tables to train and to test on.
        val: the table to validate on, or the fraction of `train` that is held out for it; 0: none.
        text: the column of the text, or the two of a pair: its name, or its number from 0.
        label: that of the label.
        header: whether the first line of a table has the names of its columns.
        tokenizer: a name, file, folder, or the checkpoint of another training, see `load_tokenizer`.
        length: most tokens of a sample: those of each text and one that ends it. Of a pair, the longer text is cut.
        batch_size: samples in a batch, end to end without padding: none sees another.
        workers: processes that prepare batches.
        input: for predict: a table, which needs no labels.
    """

    def __init__(
        self,
        root: str,
        train: str = "train.tsv",
        val: float | str = 0.1,
        test: str = "test.tsv",
        text: str | int | list[str | int] = "text",
        label: str | int = "label",
        header: bool = True,
        tokenizer: str = BYTES,
        length: int = 128,
        batch_size: int = 32,
        workers: int = 0,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        self.columns = [str(column) for column in (text if isinstance(text, list) else [text])]
        check("data.text", text, len(self.columns) in (1, 2), "one column, or the two of a pair")
        check("data.length", length, length > len(self.columns), "more tokens than texts, which one ends each")
        check("data.val", val, isinstance(val, str) or 0 <= val < 1, "a table, or a fraction below 1")
        self.train, self.val, self.test, self.label = train, val, test, str(label)
        self.header, self.tokenizer_source, self.length = header, tokenizer, length
        self.collate = PackCollate(None)
        self.rows: list[Row] = []

    def setup(self, stage: str) -> None:
        super().setup(stage)
        task: Any = None if self.trainer is None else self.trainer.lightning_module
        self.regression = getattr(task, "regression", False)
        if stage in ("test", "predict"):
            return  # tokenizer and classes are those of the training before, or come with the checkpoint
        self.tokenizer = self.tokenizer or load_tokenizer(self.tokenizer_source)
        train = self.root / self.train
        rows = self._read(train)
        if not self.regression:
            self.classes = tuple(sorted({row.label for row in rows}))
            if len(self.classes) < 2:
                raise DataError(f"{train}: has the classes {list(self.classes)}, expected two or more labels")
        if isinstance(self.val, str):
            file, held = self.root / self.val, self._read(self.root / self.val)
        else:
            file, (rows, held) = train, self._split(rows, self.val)
        self.train_set, self.val_set = self._sentences(train, rows), self._sentences(file, held)

    def _split(self, rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
        """Return the rows without and with an evenly spaced `fraction`, of each class as much."""
        order = sorted(range(len(rows)), key=lambda n: "" if self.regression else rows[n].label)
        held = {order[place] for place in held_out(fraction, len(rows))}
        return [row for n, row in enumerate(rows) if n not in held], [rows[n] for n in sorted(held)]

    def _read(self, path: Path, labelled: bool = True) -> list[Row]:
        return read_table(path, self.columns, self.label if labelled else None, self.header)

    def _sentences(self, path: Path, rows: list[Row], labelled: bool = True) -> list[tuple[Tensor, float, int]]:
        tokenizer = self.loaded_tokenizer()
        texts = [tokenizer.encode([row.texts[number] for row in rows]) for number in range(len(self.columns))]
        pairs = list(zip(*texts, strict=True))
        if cut := sum(sum(map(len, pair)) + len(pair) > self.length for pair in pairs):
            log_rank_zero([f"{path}: {cut} of {len(rows)} samples are cut to length={self.length} tokens"])
        tokens = [torch.tensor(join_texts(pair, tokenizer.end, self.length)) for pair in pairs]
        labels = [self._label(path, row) if labelled else 0 for row in rows]
        return list(zip(tokens, labels, range(len(rows)), strict=True))

    def _label(self, path: Path, row: Row) -> float:
        if self.regression:
            return number_of(path, row)
        if row.label not in self.classes:
            lines = f"{path}, line {row.line}: the label {row.label!r}"
            raise DataError(f"{lines}, expected one of those in training: {', '.join(self.classes)}")
        return self.classes.index(row.label)

    def test_dataloader(self) -> Any:
        return self._table_loader(self.root / self.test)

    def predict_dataloader(self) -> Any:
        path = self.check_input("a table to predict", self.tokenizer is not None)
        return self._table_loader(Path(path), labelled=False)

    def _table_loader(self, path: Path, labelled: bool = True) -> Any:
        self.rows = self._read(path, labelled)
        return self.still_loader(self._sentences(path, self.rows, labelled))


class MadeSentences(SentenceData):
    """Sentences, acceptable or not, that are made under `root` if they do not exist yet, see
    ndlightnet.data.made.sentences.

    samples: number of training and of test sentences.
    """

    def __init__(self, root: str, samples: tuple[int, int] = (6000, 1000), **kwargs: Any) -> None:
        super().__init__(root, text="sentence", **kwargs)
        check("data.samples", samples, min(samples) > 0, "1 or more of each")
        self.samples = samples

    def make_data(self) -> None:
        make_sentences(self.root, *self.samples)


class ListOps(SentenceData):
    """Expressions of digits and their values, which are made under `root` if they do not exist yet, see
    ndlightnet.data.made.list_ops.

    samples: number of training and of test expressions. symbols: least and most of one.
    """

    def __init__(
        self, root: str, samples: tuple[int, int] = (96000, 2000), symbols: tuple[int, int] = (500, 2000), **kwargs: Any
    ) -> None:
        super().__init__(root, text="expression", label="value", length=symbols[1] + 1, **kwargs)
        check("data.samples", samples, min(samples) > 0, "1 or more of each")
        check("data.symbols", symbols, LEAST <= symbols[0] <= symbols[1], f"{LEAST} or more, in order")
        self.samples, self.symbols = samples, symbols

    def make_data(self) -> None:
        make_list_ops(self.root, *self.samples, self.symbols)

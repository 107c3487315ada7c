"""Tables of texts and labels, TSV, CSV and JSON Lines, and texts with their summaries, plain, .gz or .xz."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ndlightnet.data.errors import DataError, check_unique
from ndlightnet.data.text.text_files import ending, read_bytes

Cells = Iterator[tuple[int, list[str]]]  # of each row its line, and fields


class Row(NamedTuple):
    """A sample; its label is "" where none is asked for. line: its first line in the file, from 1."""

    texts: tuple[str, ...]
    label: str
    line: int


class TextPair(NamedTuple):
    """A text, and one or more that are written of it, none if they are not asked for. place: its file, and line."""

    source: str
    targets: tuple[str, ...]
    place: str


def read_table(path: Path, texts: Sequence[str], label: str | None, header: bool = True) -> list[Row]:
    """Return the rows of a table, .tsv, .csv or .jsonl, unpacked if its name ends in .gz or .xz, without empty lines.
    Quotation marks enclose a field of .csv, and are part of one of .tsv.

    Args:
        texts, label: columns, by the names in the first line, or by their numbers from 0; of .jsonl: fields.
        header: whether the first line has the names. Columns of a table without them have numbers only.

    Raises DataError, with the line, for another ending, a missing column, a line of more or fewer fields, no UTF-8, and
    a file that is missing, damaged or has no rows.
    """
    kind = ending(path)
    if kind not in (".tsv", ".csv", ".jsonl"):
        raise DataError(f"{path}: expected a table, .tsv, .csv or .jsonl, plain, .gz or .xz")
    text = _decoded(path)
    columns = [*texts, *([] if label is None else [label])]
    cells: Cells
    if kind == ".jsonl":
        cells = ((line, [_plain_text(value) for value in values]) for line, values in _objects(path, text, columns))
    else:
        lines = _quoted(path, text) if kind == ".csv" else _plain(text)
        cells = _columns(path, lines, columns, header)
    rows = [Row(tuple(row[: len(texts)]), "".join(row[len(texts) :]), line) for line, row in cells]
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def read_pairs(path: Path, source: str, target: str | None) -> list[TextPair]:
    """Return the texts of a .jsonl, unpacked if its name ends in .gz or .xz, and what is to be written of each. A
    source that is a list of texts, such as sentences, is joined; a target that is one has several references. Blank
    texts of a list are left out.

    Raises DataError as `read_table`, and for a target without a text.
    """
    if ending(path) != ".jsonl":
        raise DataError(f"{path}: expected .jsonl, plain, .gz or .xz")
    fields, rows = [source, *([] if target is None else [target])], []
    for line, values in _objects(path, _decoded(path), fields):
        texts = []
        for name, value in zip(fields, values, strict=True):
            several = value if isinstance(value, list) else [value]
            if not all(isinstance(text, str) for text in several):
                raise DataError(f"{path}, line {line}: the field {name}, expected a text, or a list of texts")
            texts.append(tuple(text for text in several if text.strip()))
            if not texts[-1]:
                raise DataError(f"{path}, line {line}: the field {name} is blank, expected a text")
        rows.append(TextPair(" ".join(texts[0]), () if target is None else texts[1], f"{path}, line {line}"))
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def number_of(path: Path, row: Row) -> float:
    """Return a row's label as a number. DataError, with the line, if it is none."""
    try:
        value = float(row.label)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}, line {row.line}: the label {row.label!r}, expected a number")
    return value


def _plain(text: str) -> Cells:
    for number, line in enumerate(text.split("\n"), 1):  # the csv module takes a carriage return for an end
        if line := line.removesuffix("\r"):
            yield number, line.split("\t")


def _quoted(path: Path, text: str) -> Cells:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    before = 0
    try:
        for fields in reader:
            if fields:
                yield before + 1, fields
            before = reader.line_num
    except csv.Error as error:
        raise DataError(f"{path}, line {before + 1}: {error}") from error


def _columns(path: Path, lines: Cells, columns: Sequence[str], header: bool) -> Cells:
    """Yield the line and the fields of `columns` of each row."""
    for row, (line, fields) in enumerate(lines):
        if not row:
            if header:
                check_unique(f"{path}, line {line}", fields)
            names = {str(number): number for number in range(len(fields))}
            names |= {name: number for number, name in enumerate(fields)} if header else {}
            for column in columns:
                if column not in names:
                    expected = f"one of {', '.join(fields)}" if header else f"a number from 0 to {len(fields) - 1}"
                    raise DataError(f"{path}, line {line}: has no column {column}, expected {expected}")
            numbers, count = [names[column] for column in columns], len(fields)
        if len(fields) != count:
            raise DataError(f"{path}, line {line}: {len(fields)} fields, expected {count}")
        if row or not header:
            yield line, [fields[number] for number in numbers]


def _objects(path: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    """Yield the line and the values of `columns` of each object of a .jsonl."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields: Any = json.loads(line)
            json.dumps(fields, ensure_ascii=False).encode()  # raises for a lone surrogate
        except (ValueError, RecursionError) as error:  # the latter of brackets, thousands deep
            raise DataError(f"{path}, line {number}: is not JSON ({error})") from error
        values = [fields.get(column) if isinstance(fields, dict) else None for column in columns]
        if None in values:
            raise DataError(f"{path}, line {number}: has no field {columns[values.index(None)]}")
        yield number, values


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _decoded(path: Path) -> str:
    content = read_bytes(path).numpy().tobytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: is not UTF-8, byte {content[error.start]:#04x}") from error

"""Files of text: their bytes, and the documents in them."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, readable

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
PIECE = 2**18  # characters that are tokenised at once
# where a text may be cut: before the spaces at the end of a line, which GPT-2's rule, ours and WordPiece's do not join
# with the word before them, so that no token changes; others may cut there differently
CUT = re.compile(r"(?<=\S)(?=[ \t\r]*\n)")


class Piece(NamedTuple):
    """A part of a document, whether it is the last one, and the fraction of the file that has been read."""

    text: str
    last: bool
    progress: float


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


def ending(path: Path) -> str:
    """Return the ending of a file's name, without that of its packing."""
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield the documents of a file: each "text" of a .jsonl, each row of a folder of Hugging Face `datasets`
    (`save_to_disk`), or the file, unpacked if its name ends in .gz or .xz, in pieces of about PIECE characters that
    end where a line does.

    Raises DataError for what is missing, damaged, empty or no UTF-8, with the line for one that is no such JSON.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    empty = True
    for piece in _rows(path) if path.is_dir() else _lines(path) if ending(path) == ".jsonl" else _cut(path):
        empty = False
        yield piece
    if empty:
        raise DataError(f"{path}: is empty")


@contextmanager
def open_text(path: Path) -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """Open a file, and yield it with a function that tells which fraction of it has been read."""
    size = path.stat().st_size
    with path.open("rb") as raw, OPENERS.get(path.suffix, lambda file, _: file)(raw, "rb") as file:
        yield io.TextIOWrapper(file, "utf-8-sig", newline="\n"), lambda: raw.tell() / size


def _cut(path: Path) -> Iterator[Piece]:
    rest = ""
    with readable(path), open_text(path) as (file, progress):
        while block := file.read(PIECE):
            before = len(rest)
            rest += block
            if cuts := [match.start() for match in CUT.finditer(rest, before)]:
                yield Piece(rest[: cuts[-1]], False, progress())
                rest = rest[cuts[-1] :]
        if rest:
            yield Piece(rest, True, 1.0)


def _lines(path: Path) -> Iterator[Piece]:
    with readable(path), open_text(path) as (file, progress):
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    text = _text_of(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(f"{path}, line {number}: expected JSON with a field text") from error
                yield Piece(text, True, progress())


def _rows(path: Path) -> Iterator[Piece]:
    with readable(path):
        from datasets import load_from_disk

        rows = load_from_disk(str(path))
        for number, row in enumerate(rows, 1):
            try:
                text = _text_of(row)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}: expected a data set of one split with a column text, row {number}") from error
            yield Piece(text, True, number / len(rows))


def _text_of(row: Any) -> str:
    """Return the text of a document. Raises ValueError, KeyError or TypeError if it has none."""
    text = row["text"]
    if not isinstance(text, str):
        raise TypeError(f"text={text!r}: expected a text")
    text.encode()  # raises for a lone surrogate
    return text

"""Vocabularies of text: its bytes, or the words and pieces of words of a tokenizer of Hugging Face's `tokenizers`."""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from ndlightnet.data.errors import DataError, atomic_write, one_line
from ndlightnet.data.folders import find_root

FILE = "tokenizer.json"
BYTES = "bytes"
ENDS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")  # tokens that end a document, in other people's vocabularies
MASKS = ("<|mask|>", "[MASK]", "<mask>")
# what a folder may have, the first of them counts: of any tokenizer, GPT-2's files by two names, WordPiece
FOLDER = ((FILE,), ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("vocab.txt",))
EXPECTED = (
    "'bytes', a tokenizer.json, a vocab.txt of WordPiece, a folder with one or with GPT-2's files, or a checkpoint of "
    "a training on text"
)


class Tokenizer(ABC):
    """Texts to token numbers, and back.

    vocab_size: numbers are below it. end: the token that ends a document, and that a text begins after. mask: the token
    of masked models, or None. text: all of it as JSON, for `load_tokenizer`.
    """

    vocab_size: int
    end: int
    mask: int | None
    text: str

    @property
    def digest(self) -> str:
        """A hash: equal for tokenizers that give the same numbers."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special ones: what looks like one in a text is text."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def decode_stream(self, tokens: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of tokens after those of a prompt as they come, in whole characters."""

    def save(self, path: Path) -> None:
        """Write a file for `load_tokenizer`. Raises DataError when it cannot be written."""
        with atomic_write(path) as draft:
            draft.write_text(self.text, "utf-8")


class ByteTokenizer(Tokenizer):
    """The bytes of a text in UTF-8. A document ends in byte 0, which no text has."""

    vocab_size, end, mask, text = 256, 0, None, json.dumps(BYTES)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def decode_stream(self, tokens: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            if text := decoder.decode(bytes([token])):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`. text: its JSON, which tokenizer.json has.

    Raises ValueError for one without a token that ends a document, one of ENDS, and plain Exceptions for other texts.
    """

    def __init__(self, text: str) -> None:
        from tokenizers import Tokenizer as Library

        tokenizer: Any = Library.from_str(text)
        ids = {name: tokenizer.token_to_id(name) for name in (*ENDS, *MASKS)}
        ends, masks = ([ids[name] for name in names if ids[name] is not None] for names in (ENDS, MASKS))
        if not ends:
            raise ValueError(f"has no token that ends a document, expected one of {', '.join(ENDS)}")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self.tokenizer, self.text = tokenizer, tokenizer.to_str()
        self.end, self.mask = ends[0], next(iter(masks), None)
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def decode_stream(self, tokens: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream, rest = DecodeStream([*prompt], skip_special_tokens=False), list[int]()
        for token in tokens:
            rest.append(token)
            if text := stream.step(self.tokenizer, token):
                yield text
                rest = []
        if text := self.decode(rest):  # the stream waits for the end of a character
            yield text


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer that a config names: "bytes", a file, a folder or a checkpoint, as EXPECTED says; relative
    paths may lie in the folder that NDLIGHTNET_DATA names. Raises DataError for anything else."""
    if str(source) == BYTES:
        return ByteTokenizer()
    path = find_root(source)
    choices = [[path / name for name in names] for names in FOLDER] if path.is_dir() else [[path]]
    files = next((files for files in choices if all(file.is_file() for file in files)), None)
    if files is None:
        raise DataError(f"tokenizer={source}: no such tokenizer, expected {EXPECTED}")
    return _parsed(path, lambda: _read(*files))


def parse_tokenizer(text: str, source: object) -> Tokenizer:
    """Return the tokenizer of a `text`, see Tokenizer. Raises DataError that names `source` for anything else."""
    return _parsed(source, lambda: text)


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a byte-level BPE of `size` tokens that is trained on texts; any text has an encoding in it. The library
    shows a progress bar. Raises DataError for fewer than the 256 bytes and two special tokens."""
    from tokenizers import ByteLevelBPETokenizer

    least = 256 + 2
    if size < least:
        raise DataError(f"train={size}: expected {least} tokens or more, those of single bytes and two special ones")
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(iter(texts), size, min_frequency=0, special_tokens=[ENDS[0], MASKS[0]])
    return SubwordTokenizer(model.to_str())


def _parsed(source: object, read: Callable[[], str]) -> Tokenizer:
    try:
        text = read()
        return ByteTokenizer() if text == ByteTokenizer.text else SubwordTokenizer(text)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{source}: not a tokenizer ({one_line(error)}), expected {EXPECTED}") from error


def _read(file: Path, merges: Path | None = None) -> str:
    """Return the text of the tokenizer in a file, or in GPT-2's two. Raises exceptions of any class."""
    if is_zipfile(file):
        checkpoint = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        if "tokenizer" not in checkpoint:
            raise ValueError("a checkpoint without one")
        return str(checkpoint["tokenizer"])
    if merges is None and file.suffix != ".txt":
        return file.read_text("utf-8")
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
    from tokenizers.models import WordPiece

    if merges is not None:
        return str(ByteLevelBPETokenizer.from_file(str(file), str(merges)).to_str())
    words = WordPiece.read_file(str(file))
    if "[UNK]" not in words:
        raise ValueError("has no [UNK]")
    lower = not any("A" <= x <= "Z" for word in words if not word.startswith("[") for x in word)
    return str(BertWordPieceTokenizer(words, lowercase=lower).to_str())

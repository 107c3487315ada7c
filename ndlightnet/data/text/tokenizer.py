"""Vocabularies of text: its bytes, or the words and pieces of words of a tokenizer of Hugging Face's `tokenizers`."""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ndlightnet.data.errors import DataError, atomic_write, one_line
from ndlightnet.data.folders import find_root

FILE = "tokenizer.json"
BYTES = "bytes"
ENDS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")  # tokens that end a document, in other people's vocabularies
MASKS = ("<|mask|>", "[MASK]", "<mask>")
GPT2 = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
EXPECTED = (
    "'bytes', a tokenizer.json, a vocab.txt of WordPiece, a folder with one or with GPT-2's files, or a checkpoint"
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
    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens as they come, in whole characters."""

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

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            if text := decoder.decode(bytes([token])):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`.

    Raises ValueError for one without a token that ends a document, one of ENDS.
    """

    def __init__(self, tokenizer: Any) -> None:
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

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream, rest = DecodeStream(skip_special_tokens=False), list[int]()
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
    if path.is_dir():
        names = [pair for pair in GPT2 if all((path / name).is_file() for name in pair)]
        files = [path / name for name in (FILE, "vocab.txt") if (path / name).is_file()]
        if names and not (path / FILE).is_file():
            return _made(path, lambda: _gpt2(*(path / name for name in names[0])))
        path = files[0] if files else path
    if not path.is_file():
        raise DataError(f"tokenizer={source}: no such tokenizer, expected {EXPECTED}")
    if path.suffix == ".txt":
        return _made(path, lambda: _word_pieces(path))
    if path.suffix == ".ckpt":
        return parse_tokenizer(saved_tokenizer(path), path)
    return parse_tokenizer(path.read_text("utf-8", errors="replace"), path)


def parse_tokenizer(text: str, source: object) -> Tokenizer:
    """Return the tokenizer of a `text`, see Tokenizer. Raises DataError that names `source` for anything else."""
    return ByteTokenizer() if text == ByteTokenizer.text else _made(source, lambda: _library().Tokenizer.from_str(text))


def saved_tokenizer(path: Path) -> str:
    """Return the text of the tokenizer in a checkpoint of a training on text. Raises DataError if it has none."""
    try:
        text = torch.load(path, map_location="meta", weights_only=True, mmap=True)["tokenizer"]
    except Exception as error:  # its class depends on what is in the file
        raise DataError(f"{path}: has no tokenizer, expected the checkpoint of a training on text") from error
    return str(text)


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a byte-level BPE of `size` tokens that is trained on texts; any text has an encoding in it. The library
    shows a progress bar. Raises DataError for fewer than the 256 bytes and two special tokens."""
    least = 256 + 2
    if size < least:
        raise DataError(f"train={size}: expected {least} tokens or more, those of single bytes and two special ones")
    tokenizers = _library()
    model = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[ENDS[0], MASKS[0]],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(texts, trainer)
    return SubwordTokenizer(model)


def _library() -> Any:
    import tokenizers

    return tokenizers


def _made(source: object, make: Any) -> Tokenizer:
    try:
        return SubwordTokenizer(make())
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the library raises plain exceptions
        raise DataError(f"{source}: not a tokenizer ({one_line(error)}), expected {EXPECTED}") from error


def _byte_level(model: Any) -> Any:
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _gpt2(vocabulary: Path, merges: Path) -> Any:
    return _byte_level(_library().models.BPE.from_file(str(vocabulary), str(merges)))


def _word_pieces(path: Path) -> Any:
    tokenizers = _library()
    model = tokenizers.models.WordPiece.from_file(str(path), unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = tokenizers.Tokenizer(model)
    lower = not any("A" <= x <= "Z" for word in tokenizer.get_vocab() if not word.startswith("[") for x in word)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer

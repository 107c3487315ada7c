"""The command `tokenize`: files of text become files of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import find_root
from ndlightnet.data.text.text_files import read_pieces
from ndlightnet.data.text.tokenizer import FILE, load_tokenizer, train_tokenizer
from ndlightnet.data.text.tokens import TokenWriter, is_token_folder, tokenize
from ndlightnet.training.core.options import WordsParser
from ndlightnet.training.report.results import log_rank_zero

TRAINED = 2**28  # characters, from the first text on, that a tokenizer is trained on


def tokenize_files(arguments: list[str]) -> int:
    """Write the tokens of texts into a folder, which `data.root` reads without loading all of it. A call that was
    stopped goes on when it is repeated. Returns the exit status.

    The folder has shards of numbers (.npy), tokens.json and tokenizer.json. Raises DataError for files that are missing
    or cannot be read, and for a folder of another tokenizer or other files.
    """
    parser = WordsParser("text_lm.py tokenize", description="Files of text become files of tokens.")
    texts = "plain texts, .gz, .xz, .jsonl with a field text, or folders that Hugging Face's `datasets` has saved"
    parser.add_argument("files", nargs="+", help=texts)
    parser.add_argument("--out", required=True, help="the folder to write")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--tokenizer", help="bytes, a file, or a folder such as one with GPT-2's files")
    choice.add_argument("--train", type=int, help="train a byte-level BPE of so many tokens on the texts instead")
    options = parser.parse_args(arguments)
    paths, folder = [find_root(file) for file in options.files], Path(options.out)
    if (folder / FILE).exists() and not is_token_folder(folder):
        raise DataError(f"{folder / FILE}: exists, and would be replaced; expected a new folder, or one with tokens")
    if missing := [path for path in paths if not path.exists()]:
        raise DataError(f"{missing[0]}: no such file or folder")
    if options.train is None:
        vocabulary = load_tokenizer(options.tokenizer)
    elif is_token_folder(folder):
        vocabulary = load_tokenizer(folder)  # that of the call that was stopped
        if vocabulary.vocab_size != options.train:  # of a short text there are fewer
            log_rank_zero([f"{folder}: goes on with its tokenizer of {vocabulary.vocab_size} tokens"])
    else:
        vocabulary = train_tokenizer(_beginning(paths), options.train)
    writer = TokenWriter(folder, vocabulary, paths)
    if writer.done:
        print(f"{folder}: is complete, with {writer.tokens:,} tokens")
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task, before = progress.add_task(str(folder), total=len(paths), tokens=writer.tokens), 0
        for number, path in enumerate(paths):
            for count, (batch, share) in enumerate(tokenize(path, vocabulary, writer.written - before), 1):
                if before + count > writer.written:
                    writer.add(batch)
                progress.update(task, completed=number + share, tokens=writer.tokens)
            before += count
    writer.finish()
    print(f"{folder}: {writer.tokens:,} tokens of {vocabulary.vocab_size}")
    return 0


def _beginning(paths: list[Path]) -> Iterator[str]:
    """Yield pieces of the texts, TRAINED characters of all."""
    total = 0
    for path in paths:
        for piece in read_pieces(path):
            yield piece.text
            total += len(piece.text)
            if total >= TRAINED:
                return

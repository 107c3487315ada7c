"""The error class of `ndlightnet.data`, names escaped so that they are harmless as text, and files that appear complete
or not at all."""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # and full-width forms
TRIES = 16  # files in a row that training tries in place of one that cannot be read
T = TypeVar("T")
NAME_BYTES = 160  # file systems allow 255; endings, and the prefix of a draft, need some


class DataError(ValueError):
    """Error for a file or folder that cannot be used. The message is one line: the path, then what is wrong. Its
    control characters are escaped here, and its middle is left out if it is longer than 1,000 characters."""

    def __init__(self, message: object) -> None:
        super().__init__(_cut(printable(message), 1000))


def printable(name: object) -> str:
    """Return a file name, a label or a whole message as one line that a terminal can show: control and format
    characters, line breaks and bytes that are not UTF-8 become escapes (`\\n`, `\\x1b`, `\\udcff`), all other
    characters stay. A second call changes nothing."""
    escaped = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Cf holds bidirectional overrides, Cs bare bytes
    return "".join(x.encode("unicode_escape").decode() if unicodedata.category(x) in escaped else x for x in str(name))


def cell(value: object) -> object:
    """Return a value as a cell of a CSV file. Text that a spreadsheet would take for a formula (OWASP, CSV injection)
    gets an apostrophe before it, other text is `printable`; numbers stay."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(FORMULA) else text
    return text


def check_unique(place: object, columns: Iterable[str]) -> None:
    """Raise DataError, which begins with `place`, if a table has two columns of one name."""
    if repeated := [name for name, count in Counter(columns).items() if count > 1]:
        raise DataError(f"{place}: has the column {repeated[0]} twice, expected each name once")


def file_name(name: str) -> str:
    """Return `name` as the start of file names: printable, without slashes, at most NAME_BYTES in UTF-8. A changed name
    ends in ~ and a hash of the original, an unchanged one never does: two different names stay different."""
    plain = printable(name).replace("/", "_")
    marked = re.search("~[0-9a-f]{16}$", name)
    if plain == name and len(name.encode()) <= NAME_BYTES and not marked:
        return name
    mark = "~" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
    return plain.encode()[: NAME_BYTES - len(mark)].decode(errors="ignore") + mark


def one_line(problem: object) -> str:
    """Return the text of an exception, or of any object, without line breaks, in at most 160 characters. Of a longer
    text both ends are left: some libraries say last what is wrong."""
    text = printable(" ".join(str(problem).split())) or type(problem).__name__
    return _cut(text, 160)


def _cut(text: str, most: int) -> str:
    half = most // 2 - 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


@contextmanager
def fitting(path: object) -> Iterator[None]:
    """Raise a DataError that names `path` if the block runs out of memory, the host's or a device's."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has an exception class for a device's memory only
        full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
        if not full:
            raise
        raise DataError(f"{path}: does not fit into memory ({one_line(error)})") from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn any exception of the block into a DataError that names `path`: decoders of gzip, NIfTI, DICOM and JPEG raise
    exceptions of many classes."""
    try:
        with fitting(path):
            yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)})") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an error of the disk in the block, such as a full disk, into a DataError that names `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save to an open file raises a RuntimeError after the disk's OSError
        disk_error = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(disk_error, OSError):
            raise
        raise DataError(f"{path}: cannot be written ({disk_error.strerror or disk_error})") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a draft beside `path`, with the same ending, that becomes `path` if the block raises nothing. The folder is
    made if needed. Raises DataError when it cannot be written."""
    draft = path.with_name(f".{os.getpid()}.part.{path.name}")
    try:
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield draft
            with draft.open("rb+") as file:  # or the name could reach the disk before the content
                os.fsync(file.fileno())
            os.replace(draft, path)
    finally:
        if draft.exists():
            draft.unlink()


def clear_drafts(folder: Path) -> None:
    """Remove the drafts that killed processes have left in `folder` and in its direct subfolders; drafts of live
    processes stay."""
    for draft in [*folder.glob(".*.part.*"), *folder.glob("*/.*.part.*")]:
        process = draft.name.split(".")[1]
        if process.isdigit() and draft.is_file() and not _lives(int(process)):
            draft.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    """Return whether another process with this number exists. (In a container the number of a killed process is soon
    used again, possibly by this process.)"""
    if process == os.getpid():
        return False
    if os.name != "posix":
        return True  # os.kill would end the process
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def first_good(read: Callable[[int], T], index: int, count: int) -> tuple[T, int, str]:
    """Return (read(n), n, problem) of the first of `count` samples, from `index` on and then from the first, that can
    be read: TRIES are tried. `problem`, else "", says what was wrong with that of `index`. DataError if none can be
    read."""
    problem, tried = "", min(TRIES, count)
    for number in range(index, index + tried):
        number %= count
        try:
            return read(number), number, problem
        except DataError as error:
            problem = problem or str(error)
    after = f"; nor can the {tried - 1} after it be read" if tried > 1 else ""
    raise DataError(f"{problem}{after}")

"""The one error of this room, and files that appear complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """A file or folder that cannot be used. The message is one line: the path, then what is
    wrong."""


def one_line(problem: object) -> str:
    """The text of an exception, or of any object, without line breaks, at most 160 characters."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever is raised inside becomes a DataError that names `path`: decoders of gzip, NIfTI,
    DICOM and JPEG raise what they like."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({one_line(error)})") from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """What the disk refuses inside, such as for want of room, becomes a DataError that names
    `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save to an open file raises an error of its own after the disk's
        said = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(said, OSError):
            raise
        raise DataError(f"{path}: cannot be written ({said.strerror or said})") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path`, with the same ending, that becomes `path` when the block ends well.
    The folder is made if needed. Raises DataError when it cannot be written."""
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
    """Removes the drafts that processes which were killed have left in `folder` and in the folders
    in it; those of processes that live stay."""
    for draft in [*folder.glob(".*.part.*"), *folder.glob("*/.*.part.*")]:
        process = draft.name.split(".")[1]
        if process.isdigit() and draft.is_file() and not _lives(int(process)):
            draft.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    """Whether there is another process of this number. (In a container the number of one that was
    killed comes back soon, and may be our own.)"""
    if process == os.getpid():
        return False
    if os.name != "posix":
        return True  # to ask would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True

"""Files that appear complete or not at all, and the drafts of processes that were killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ndlightnet.data.errors import DataError, atomic_write, clear_drafts, writable


def bytes_of(path: Path) -> None:
    path.write_bytes(bytes(200_000))


def tensors_of(path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"x": torch.zeros(50_000)}, file)


@pytest.mark.parametrize("write", [bytes_of, tensors_of])
def test_a_full_disk_leaves_what_was_there(full_disk, tmp_path, write):
    path = tmp_path / "folder" / "file"
    with atomic_write(path) as draft:
        draft.write_text("before")
    with pytest.raises(DataError) as caught, atomic_write(path) as draft:
        write(draft)
    assert str(caught.value) == f"{path}: cannot be written (File too large)"
    assert path.read_text() == "before" and list(path.parent.iterdir()) == [path]


def test_other_errors_pass(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(RuntimeError, match="mine"), atomic_write(path) as draft:
        draft.write_text("half")
        raise RuntimeError("mine")
    with pytest.raises(KeyError), writable(path):
        raise KeyError("k")
    assert not any(tmp_path.iterdir())


def test_drafts_of_dead_processes_are_cleared(tmp_path):
    """Those of a living one, other files and other folders are not."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    staying = [f".{os.getppid()}.part.last.ckpt", ".x.part.last.ckpt", "last.ckpt", f"a.{dead.pid}.part.b"]
    staying += [f"deep/er/.{dead.pid}.part.last.ckpt"]
    cleared = [f".{number}.part.metrics.json" for number in (dead.pid, os.getpid())]
    cleared += [f"checkpoints/.{dead.pid}.part.last.ckpt"]
    for name in staying + cleared:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    clear_drafts(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*staying}

"""Checkpoints are complete or not there at all, whatever happens while they are written."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.training import ImageTask
from ndlightnet.training.core.checkpoints import AtomicCheckpoints, check_checkpoint

DRAFT = re.compile(r"\.\d+\.part\.last\.ckpt")


def test_a_full_disk_keeps_the_checkpoint_before(full_disk, tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpoints().save_checkpoint({"epoch": 1}, path)
    with pytest.raises(DataError, match=r"last\.ckpt: cannot be written \(File too large\)$"):
        AtomicCheckpoints().save_checkpoint({"epoch": 2, "x": torch.zeros(10**5)}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_a_kill_while_it_is_written(tmp_path):
    """Found half written: it has another name, and the one before it is as it was."""
    path = tmp_path / "last.ckpt"
    code = f"""
import os, pathlib, signal, torch
from ndlightnet.training.core.checkpoints import AtomicCheckpoints
writer, save = AtomicCheckpoints(), torch.save
writer.save_checkpoint({{"epoch": 1}}, {str(path)!r})
def half(content, file):
    file.write(bytes(10)), file.flush(), os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
writer.save_checkpoint({{"epoch": 2}}, {str(path)!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    (draft,) = set(tmp_path.iterdir()) - {path}
    assert DRAFT.fullmatch(draft.name) and draft.stat().st_size == 10


def test_a_full_disk_is_one_line_of_a_fit(full_disk, segment, decathlon, tmp_path):
    out = tmp_path / "out"
    wide = "--model.net.init_args.widths=[32,64]"
    done = segment(
        "fit",
        f"--trainer.default_root_dir={out}",
        f"--data.init_args.root={decathlon}",
        "--data.init_args.patch=[8,8,8]",
        "--model.net.init_args.out_channels=2",
        wide,
    )
    assert done.status == 1 and len(done.errors) == 1 and "Traceback" not in done.err
    folder = out / "checkpoints"
    expected = rf"error: {folder}/(best|last)\.ckpt: cannot be written \(File too large\)"
    assert re.fullmatch(expected, done.errors[0])
    assert not any(folder.iterdir())


def test_a_fit_clears_what_a_killed_one_has_left(segment, decathlon, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder: Path = tmp_path / "out" / "checkpoints"
    folder.mkdir(parents=True)
    drafts = [folder / f".{pid}.part.last.ckpt" for pid in (dead.pid, os.getppid())]
    for draft in drafts:
        draft.write_bytes(b"half")
    done = segment(
        "fit",
        f"--trainer.default_root_dir={tmp_path / 'out'}",
        f"--data.init_args.root={decathlon}",
        "--data.init_args.patch=[8,8,8]",
        "--model.net.init_args.out_channels=2",
    )
    assert done.status == 0
    assert {path.name for path in folder.iterdir()} == {"best.ckpt", "last.ckpt", drafts[1].name}


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_of_another_network_with_batch_norms(tmp_path):
    one, other = ImageTask(nn.Linear(2, 3)), ImageTask(nn.BatchNorm1d(3))
    saved = {"state_dict": one.state_dict(), "names": {}}
    torch.save(saved, tmp_path / "last.ckpt")
    with pytest.raises(DataError, match=r"another network: net\.weight is"):
        check_checkpoint(str(tmp_path / "last.ckpt"), other, SimpleNamespace(names=dict))

"""Checkpoints are complete or not there at all, whatever happens while they are written."""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.training import ImageTask
from ndlightnet.training.core.checkpoints import AtomicCheckpoints, check_checkpoint

SMALL = {"data": {"patch": [8, 8, 8]}, "net": {"out_channels": 2}}


def test_a_full_disk_keeps_the_checkpoint_before(full_disk, tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpoints().save_checkpoint({"epoch": 1}, path)
    with pytest.raises(DataError, match=r"last\.ckpt: cannot be written \(File too large\)$"):
        AtomicCheckpoints().save_checkpoint({"epoch": 2, "x": torch.zeros(10**5)}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_kill_while_it_is_written(tmp_path, monkeypatch):
    """Half written it has another name, and the one before it is as it was."""
    path, writer = tmp_path / "last.ckpt", AtomicCheckpoints()
    writer.save_checkpoint({"epoch": 1}, path)

    def half(content, file):
        file.write(bytes(10))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(torch, "save", half)
    if (child := os.fork()) == 0:
        try:
            writer.save_checkpoint({"epoch": 2}, path)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    (draft,) = set(tmp_path.iterdir()) - {path}
    assert re.fullmatch(r"\.\d+\.part\.last\.ckpt", draft.name) and draft.stat().st_size == 10


def test_a_full_disk_is_one_line_of_a_fit(full_disk, segment, decathlon, tmp_path):
    folder, wide = tmp_path / "checkpoints", "--model.net.init_args.widths=[32,64]"
    done = segment("fit", wide, out=tmp_path, root=decathlon, **SMALL)
    assert done.status == 1 and len(done.errors) == 1 and "Traceback" not in done.err
    expected = rf"error: {folder}/(best|last)\.ckpt: cannot be written \(File too large\)"
    assert re.fullmatch(expected, done.errors[0])
    assert not any(folder.iterdir())


def test_a_fit_clears_what_a_killed_one_has_left(segment, decathlon, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    drafts = [folder / f".{pid}.part.last.ckpt" for pid in (dead.pid, os.getppid())]
    for draft in drafts:
        draft.write_bytes(b"half")
    segment("fit", out=tmp_path, root=decathlon, **SMALL).well()
    assert {path.name for path in folder.iterdir()} == {"best.ckpt", "last.ckpt", drafts[1].name}


@pytest.mark.filterwarnings("error")
def test_a_checkpoint_of_another_network_with_batch_norms(tmp_path):
    torch.save({"state_dict": ImageTask(nn.Linear(2, 3)).state_dict(), "names": {}}, tmp_path / "last.ckpt")
    with pytest.raises(DataError, match=r"another network: net\.weight is"):
        check_checkpoint(str(tmp_path / "last.ckpt"), ImageTask(nn.BatchNorm1d(3)), SimpleNamespace(names=dict))

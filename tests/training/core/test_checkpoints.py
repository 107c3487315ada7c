"""Checkpoints are complete or not there at all, whatever happens while they are written; nothing in them is run."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

import ndlightnet
from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.training import HandwrittenDigits, ImageTask
from ndlightnet.training.core.checkpoints import AtomicCheckpoints, check_checkpoint, network_difference
from ndlightnet.training.core.cli import TaskCLI
from tests.training.conftest import SMALL


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


def test_nothing_is_unpickled():
    """Where torch.load or Lightning's trainer is given a file."""
    reads = 0
    for file in Path(ndlightnet.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if "torch.load(" in text or "ckpt_path=" in text:
            for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
                options = {word.arg: ast.unparse(word.value) for word in call.keywords}
                if ast.unparse(call.func) == "torch.load" or "ckpt_path" in options:
                    assert options.get("weights_only") == "True", (file, call.lineno)
                    reads += 1
    assert reads > 5


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_no_command_lets_lightning_unpickle(command, monkeypatch):
    monkeypatch.setattr(LightningCLI, "_prepare_subcommand_kwargs", lambda *_: {"datamodule": None})
    cli = TaskCLI.__new__(TaskCLI)
    cli.model = ImageTask(nn.Identity())
    assert cli._prepare_subcommand_kwargs(command)["weights_only"] is True


VIDEO_NETWORK = {"dims": 3, "num_classes": 2, "patch_size": [2, 8, 8], "stem_blocks": 1, "embed_dim": 8, "depth": 2}


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"patch_size": [4, 8, 8]}, "patch_size is [2, 8, 8] there, [4, 8, 8] here"),
        ({"num_classes": None}, "num_classes is 2 there, None here"),
        ({"tpe": "published"}, "tpe is True there, published here"),
        ({"mixer": ["LightNetAttention", "TNL"]}, "mixer is {'LightNetAttention': "),
        ({"mixer": {"LightNetAttention": {"impl": "reference"}}}, None),
        ({"mixer": ["LightNetAttention"] * 2, "drop_path_rate": 0.5}, None),
    ],
)
def test_an_argument_of_the_network_that_is_not_the_checkpoints(tmp_path, changes, line):
    """A patch of the same number of halvings has weights of the same shapes."""
    trained, path = ImageTask(NDLightNet(**VIDEO_NETWORK)), tmp_path / "last.ckpt"
    torch.save({"state_dict": trained.state_dict(), "names": {}, "network": trained.net.description()}, path)
    task, data = ImageTask(NDLightNet(**VIDEO_NETWORK | changes)), SimpleNamespace(names=dict)
    if "patch_size" in changes:
        task.load_state_dict(trained.state_dict())
    if line is None:
        check_checkpoint(str(path), task, data)
    else:
        with pytest.raises(DataError, match=re.escape(f"{path}: the checkpoint of another network: {line}")):
            check_checkpoint(str(path), task, data)


def test_another_class_of_network_and_one_that_does_not_know_its_arguments():
    unet = NDLightUNet(2, 1, 2, widths=(4, 8), depths=(0, 1))
    line = "the checkpoint of another network: class is NDLightNet there, NDLightUNet here"
    assert network_difference(unet, NDLightNet(2, embed_dim=8, depth=1).description()) == line
    flat, deep = ({"_class_name": "torch.nn.Flatten", "start_dim": n} for n in (1, 2))
    assert network_difference(nn.Flatten(), flat, deep).endswith("start_dim is 1 there, 2 here")
    assert network_difference(nn.Flatten(), flat, flat) == network_difference(nn.Flatten(), None, flat) == ""


def test_what_changes_no_result_may_differ():
    """Arguments that a mixer has got since, and those of other libraries that begin or store."""
    net = NDLightNet(**VIDEO_NETWORK)
    saved = net.description()
    del saved["mixer"]["LightNetAttention"]["forget"]
    assert network_difference(net, saved) == ""
    command, stored = ({"_class_name": "torch.nn.Flatten", "pretrained": x, "use_checkpoint": x} for x in (True, False))
    assert network_difference(nn.Flatten(), stored, command) == ""


def test_a_checkpoint_of_another_task(tmp_path):
    path, task = tmp_path / "last.ckpt", ImageTask(nn.Linear(2, 3))
    torch.save({"state_dict": task.state_dict(), "names": {}, "task": "SegmentationTask"}, path)
    check_checkpoint(str(path), task, SimpleNamespace(names=dict))  # it fits, whatever it is called
    line = r"another task, SegmentationTask, expected ImageTask \(the checkpoint lacks cost"
    with pytest.raises(DataError, match=line):
        check_checkpoint(str(path), task, SimpleNamespace(names=dict), ("names", "cost"))


def test_a_command_compares_the_arguments_of_other_libraries_networks(tmp_path, monkeypatch):
    """A checkpoint holds those of its command line."""
    monkeypatch.setattr(sys, "argv", ["task.py"])
    words = ["--data=HandwrittenDigits", f"--trainer.default_root_dir={tmp_path}", "--model.net=torch.nn.Flatten"]
    trained, changed = (
        TaskCLI(ImageTask, HandwrittenDigits, run=False, args=[*words, f"--model.net.start_dim={n}"]) for n in (1, 2)
    )
    trained.model._trainer = SimpleNamespace(datamodule=trained.datamodule)
    saved, path = {"state_dict": {}}, tmp_path / "last.ckpt"
    trained.model.on_save_checkpoint(saved)
    torch.save(saved, path)
    check_checkpoint(str(path), trained.model, trained.datamodule)
    with pytest.raises(DataError, match="start_dim is 1 there, 2 here"):
        check_checkpoint(str(path), changed.model, changed.datamodule)

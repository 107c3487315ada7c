"""A training that is killed and goes on is the training that was never killed, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
CONFIG = """
seed_everything: 3
trainer:
  accelerator: ACCELERATOR
  max_epochs: 4
  log_every_n_steps: 1
  check_val_every_n_epoch: 2
  gradient_clip_val: 1.0
  callbacks:
    - class_path: ndlightnet.training.averaging.AveragedWeights
      init_args: {decay: 0.8}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightUNet
    init_args: {dims: 3, in_channels: 1, out_channels: 2, strides: [2, 2], widths: [4, 8, 8],
                convs: [1, 1, 1], depths: [0, 1, 2], drop_path_rate: 0.5, deep_supervision: true}
data:
  class_path: ndlightnet.training.VolumeData
  init_args: {root: ROOT, patch: [8, 8, 8], batch_size: 2, batches: 5, workers: WORKERS,
              augment: {flip_axes: [0, 1, 2], turn: 0.5, shift: 1}}
"""
# writes "step loss" line by line; dies by its own hand, before the optimizer steps, when told to
SCRIPT = """
import os, signal, sys
from pathlib import Path
from ndlightnet.training import SegmentationTask, VolumeData, run

die, losses = int(sys.argv.pop(1)), open(sys.argv.pop(1), "a")
step = SegmentationTask.training_step

def told(task, batch, number):
    loss = step(task, batch, number)
    print(task.global_step, loss.item().hex(), file=losses, flush=True)
    if task.global_step == die:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

SegmentationTask.training_step = told
sys.exit(run(SegmentationTask, VolumeData, Path("none")))
"""


def train(
    out: Path, root: Path, workers: int, die: int = -1, *more: str, accelerator: str = "cpu"
) -> int:
    """The exit status; losses are added to out/losses."""
    out.mkdir(exist_ok=True)
    config = CONFIG.replace("ROOT", str(root)).replace("WORKERS", str(workers))
    config = config.replace("ACCELERATOR", accelerator)
    (out / "given.yaml").write_text(config)
    arguments = ["fit", "--config", str(out / "given.yaml"), f"--trainer.default_root_dir={out}"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(die), str(out / "losses"), *arguments, *more],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout[-2000:])  # pytest shows it where a test fails
    return done.returncode


def checkpoint(out: Path, name: str) -> dict:
    saved = torch.load(out / "checkpoints" / f"{name}.ckpt", weights_only=True)
    saved.pop("callbacks")  # paths, and how much time has passed
    return saved


def same(one: object, other: object, where: str = "") -> None:
    """Bit for bit, through dictionaries and lists."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype, where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}.{place}")
    else:
        assert one == other, where


@pytest.fixture(scope="module")
def uninterrupted(write_decathlon, tmp_path_factory) -> tuple[Path, Path]:
    """(the data, the folder of a whole training without workers)."""
    folder = tmp_path_factory.mktemp("resume")
    root = write_decathlon(folder / "data", cases=6)
    assert train(folder / "whole", root, 0) == 0
    return root, folder / "whole"


@pytest.mark.slow  # processes that import torch and Lightning anew
@pytest.mark.parametrize("workers, die", [(0, 7), (2, 13)])
def test_killed_in_mid_epoch_and_resumed(uninterrupted, tmp_path, workers, die):
    """Die in the second epoch, before any validation, and in the third, with an ema_dice."""
    root, whole = uninterrupted
    out = tmp_path / "killed"
    assert train(out, root, workers, die) == -9
    done = die // 5  # epochs that are in last.ckpt
    assert checkpoint(out, "last")["global_step"] == 5 * done
    resume = f"--ckpt_path={out}/checkpoints/last.ckpt"
    assert train(out, root, workers, -1, resume) == 0
    wanted = (whole / "losses").read_text().splitlines()
    assert [int(line.split()[0]) for line in wanted] == list(range(20))
    assert len({line.split()[1] for line in wanted}) == 20  # no two steps are alike by themselves
    got = (out / "losses").read_text().splitlines()
    assert got == wanted[: die + 1] + wanted[5 * done :]
    for name in ("last", "best"):
        ours, theirs = checkpoint(out, name), checkpoint(whole, name)
        keys = {"state_dict", "current_model_state", "averaging_state", "optimizer_states",
                "lr_schedulers", "ema_dice", "global_step", "epoch"}  # fmt: skip
        assert keys <= ours.keys()
        same({key: ours[key] for key in keys}, {key: theirs[key] for key in keys}, name)
    ema, now = ours["state_dict"], ours["current_model_state"]
    assert any(not torch.equal(ema[key], now[key]) for key in ema)  # or EMA said nothing


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_killed_and_resumed_on_a_card(write_decathlon, tmp_path):
    """Steps 10 to 13, before the kill and again after it. The card adds in any order: two runs from
    one seed were 2e-4 apart in the fourth step."""
    root = write_decathlon(tmp_path / "data", cases=6)
    assert train(tmp_path / "run", root, 2, 13, accelerator="gpu") == -9
    resume = f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    assert train(tmp_path / "run", root, 2, -1, resume, accelerator="gpu") == 0
    lines = (tmp_path / "run" / "losses").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [*range(14), *range(10, 20)]
    losses = np.array([float.fromhex(line.split()[1]) for line in lines])
    before, after = losses[10:14], losses[14:18]
    print("relative differences", np.abs(after / before - 1))
    assert np.abs(after / before - 1).max() < 1e-3 < np.abs(np.diff(before) / before[1:]).min()

"""What the tests of the tasks share: running a command line in this process, tiny data sets."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import nibabel
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from PIL import Image

from ndlightnet import training

UNET = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1}
model:
  net:
    class_path: ndlightnet.NDLightUNet
    init_args: {dims: 3, in_channels: 1, out_channels: 7, widths: [4, 8], convs: [1, 1],
                depths: [0, 1], drop_path_rate: 0.3, deep_supervision: true}
data:
  class_path: ndlightnet.training.VolumeData
  init_args: {root: nowhere, patch: [16, 16, 16], batch_size: 2, batches: 2, workers: 0,
              augment: {flip_axes: [0, 1, 2]}}
"""
NET = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1}
model:
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 3, num_classes: 6, patch_size: [2, 8, 8], embed_dim: 16, depth: 1}
data:
  class_path: ndlightnet.training.VideoData
  init_args: {root: nowhere, frames: 4, size: 24, batch_size: 4, clips: 2, workers: 0}
"""
SIGNALS = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1}
model:
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, in_chans: 32, num_classes: 3, patch_size: 2, embed_dim: 16, depth: 2}
data:
  class_path: ndlightnet.training.SignalData
  init_args: {root: nowhere, spectrum: [64, 32], batch_size: 2, workers: 0}
"""
IMAGES = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 4, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 2, num_classes: 3, patch_size: 2, embed_dim: 16, depth: 1}
data:
  class_path: ndlightnet.training.ImageFolders
  init_args: {root: nowhere, size: 8, scale: [0.5, 1], batch_size: 16, crop_pct: 1, workers: 0}
"""
TEXT = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false,
          default_root_dir: ROOT/run}
model:
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, vocab_size: 256, causal: true, embed_dim: 8, depth: 1}
data:
  class_path: ndlightnet.training.TextData
  init_args: {root: ROOT/text, length: 8, windows: 2, batch_size: 2, lengths: [8], test_tokens: 16, workers: 0}
"""


class Done(NamedTuple):
    """How a command line ended."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def notes(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("note: ")]

    def well(self) -> "Done":
        """The same, of a command that must not have failed."""
        assert (self.status, self.errors) == (0, []), self.err[-2000:]
        return self


# what `options` calls these options
PATHS = {
    "out": "trainer.default_root_dir",
    "root": "data.init_args.root",
    "input": "data.init_args.input",
    "ckpt": "ckpt_path",
}
SECTIONS = {"trainer": "trainer", "model": "model", "net": "model.net.init_args", "data": "data.init_args"}


def options(**values: Any) -> list[str]:
    """Options of a command line: out, root, input and ckpt are paths; trainer, model, net and data are dictionaries."""
    pairs = {PATHS[name]: value for name, value in values.items() if name in PATHS}
    for name, section in SECTIONS.items():
        pairs |= {f"{section}.{key}": value for key, value in values.pop(name, {}).items()}
    assert not values.keys() - PATHS.keys(), values
    return [f"--{key}={x if isinstance(x, str | Path) else json.dumps(x)}" for key, x in pairs.items()]


# options for the two labels and small volumes of `write_decathlon`
SMALL = {"data": {"patch": [8, 8, 8]}, "net": {"out_channels": 2}}


def last(out: Path) -> Path:
    """The last checkpoint of a run."""
    return out / "checkpoints" / "last.ckpt"


def launch(
    task: type, data: type, config: str, folder: Path, command: str, /, *words: object, commands=None, **values: Any
) -> Done:
    """`run` with `config`, which is written to `folder`, further words of the command line and `options`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    words = (command, "--config", folder / "config.yaml", *words, *options(**values))
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["task.py", *map(str, words)])
        patch.setenv("COLUMNS", "300")  # rich breaks no line
        try:
            status = training.run(task, data, Path("no default"), commands)
        except SystemExit as stop:  # of wrong options
            status = int(stop.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def fit_and_test(command: Callable[..., Done], *words: str, **values: Any) -> Done:
    """How a test of the last checkpoint ends, after a training with the same options."""
    command("fit", *words, **values).well()
    return command("test", *words, **values, ckpt=last(values["out"])).well()


class Watcher(training.ImageTask):
    """Remembers the batches that it is trained on."""

    def on_train_start(self) -> None:
        self.batches: list[tuple[torch.Tensor, ...]] = []

    def training_step(self, batch: tuple[torch.Tensor, ...], number: int) -> torch.Tensor:
        self.batches.append(tuple(tensor.clone() for tensor in batch))
        return super().training_step(batch, number)


def set_up(task: LightningModule, data: LightningDataModule, stage: str = "fit") -> None:
    """What a command does before its first batch, without a trainer."""
    task._trainer = SimpleNamespace(datamodule=data, world_size=1)
    data.setup(stage)
    task.setup(stage)


def launcher(task: type, data: type, config: str) -> Callable[..., Callable[..., Done]]:
    """A fixture: the command line of a task on a tiny config, such as segment("fit", "--data.init_args.root=...")."""

    @pytest.fixture(scope="session")
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
        return partial(launch, task, data, config, tmp_path_factory.mktemp("config"))

    return fixture


segment = launcher(training.SegmentationTask, training.VolumeData, UNET)
classify = launcher(training.VideoTask, training.VideoData, NET)
listen = launcher(training.SignalTask, training.SignalData, SIGNALS)
recognise = launcher(training.ImageTask, training.ImageFolders, IMAGES)
pretrain = launcher(training.PretrainTask, training.LabelledData, IMAGES.replace("num_classes: 3", "num_classes: 0"))


def write_text_run(folder: Path) -> Path:
    """A text of 512 bytes and a config of a language model of it, whose run is in `folder`/run; the config."""
    (folder / "text").write_bytes(bytes(range(256)) * 2)
    (folder / "c.yaml").write_text(TEXT.replace("ROOT", str(folder)))
    return folder / "c.yaml"


def save_language_model(folder: Path, net: Any, tokenizer: Any) -> Path:
    """A run's folder, with a checkpoint of a network and a tokenizer as a training leaves it; the checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    state = {f"net.{name}": x for name, x in net.state_dict().items()}
    saved = {"state_dict": state, "network": net.description(), "tokenizer": tokenizer.text}
    torch.save(saved, folder / "checkpoints" / "best.ckpt")
    return folder / "checkpoints" / "best.ckpt"


def _stripes(folder: Path, train: int = 40, test: int = 10, side: int = 12) -> Path:
    rng = np.random.default_rng(0)
    at = np.arange(side) // 2 % 2 * 150
    patterns = {
        "columns": at[None].repeat(side, 0),
        "plain": np.zeros((side, side), int),
        "rows": at[:, None].repeat(side, 1),
    }
    for split, count in (("train", train), ("test", test)):
        for kind, pattern in patterns.items():
            (folder / split / kind).mkdir(parents=True)
            for number in range(count):
                tint = rng.integers(20, 60, 3) + rng.integers(0, 40, (side, side, 3))
                cells = (pattern[..., None] + tint).astype(np.uint8)
                Image.fromarray(cells).save(folder / split / kind / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="session")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `write_stripes`."""
    return _stripes(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(scope="session")
def write_stripes() -> Callable[..., Path]:
    """write_stripes(folder, train=40, test=10, side=12): class folders of three kinds of PNG files, so many of each."""
    return _stripes


def _save(path: Path, voxels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([2.0, 2.0, 3.0, 1.0])), path)
    return path


def _decathlon(folder: Path, channels: int = 1, cases: int = 4) -> Path:
    rng = np.random.default_rng(0)
    pairs = []
    for number in range(cases):
        label = np.zeros((12, 10, 8), np.uint8)
        label[3:8, 2:7, 2:6] = 1
        files = [f"images/{number}{end}.nii.gz" for end in ("", "_b", "_c")[:channels]]
        for file in files:
            image = (label * 100 + rng.normal(0, 20, label.shape)).astype(np.float32)
            _save(folder / file, image)
        pair = {"image": files[0] if channels == 1 else files, "label": f"labels/{number}.nii.gz"}
        _save(folder / f"labels/{number}.nii.gz", label)
        pairs.append(pair)
    listing = {
        "labels": {"0": "background", "1": "cube"},
        "modality": {str(n): ("CT", "PET", "MR")[n] for n in range(channels)},
        "training": pairs[:-1],
        "test": pairs[-1:],
    }
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


@pytest.fixture(scope="session")
def write_decathlon() -> Callable[..., Path]:
    """write_decathlon(folder, channels=1, cases=4): tiny volumes of two labels, the last a test."""
    return _decathlon


@pytest.fixture
def decathlon(tmp_path: Path) -> Path:
    """Four tiny volumes, `images/N.nii.gz` and `labels/N.nii.gz`, of two labels; 3 is the test."""
    return _decathlon(tmp_path / "volumes")


@pytest.fixture
def save_volume() -> Callable[[Path, np.ndarray], Path]:
    """save_volume(path, voxels): NIfTI of 2 x 2 x 3 mm voxels."""
    return _save

"""Files without labels: of every kind, of mixed sizes and formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.data.errors import DataError
from ndlightnet.data.media import write_video
from ndlightnet.training import UnlabelledFiles

SPACES = {"images": [8, 12], "videos": [4, 16, 16], "volumes": [8, 6, 4]}


@pytest.fixture
def folder(tmp_path, save_volume) -> Path:
    """Ten images, ten videos and ten volumes of different sizes, at different depths."""
    rng = np.random.default_rng(0)
    for n in range(10):
        deep = tmp_path / ("a" if n % 2 else "b/c")
        deep.mkdir(parents=True, exist_ok=True)
        picture = rng.integers(0, 256, (20 + n, 30 - n, 3), dtype=np.uint8)
        Image.fromarray(picture).save(deep / f"i{n}.{('png', 'jpg')[n % 2]}")
        frames = rng.integers(0, 256, (5 + n, 32, 48 - 2 * n, 3), dtype=np.uint8)
        write_video(deep / f"v{n}.{('mp4', 'mkv')[n % 2]}", frames, 12)
        save_volume(tmp_path / f"n{n}.nii.gz", rng.normal(size=(6 + n, 7, 5)).astype(np.float32))
    return tmp_path


def unlabelled(folder: Path, kind: str, **options) -> UnlabelledFiles:
    spacing = [2.0, 2.0, 3.0] if kind == "volumes" else None
    small = {"size": SPACES[kind], "spacing": spacing, "batch_size": 4, "validation": 0.2, "workers": 0}
    return UnlabelledFiles(str(folder), kind, **small | options)


@pytest.mark.parametrize("kind", SPACES)
def test_batches_of_every_kind(folder, kind):
    data = unlabelled(folder, kind)
    torch.manual_seed(0)
    data.setup("fit")
    assert (len(data.train_set), len(data.val_set)) == (8, 2)
    assert not {*map(str, data.train_set.files)} & {*map(str, data.val_set.files)}
    batch = next(iter(data.train_dataloader()))
    x, numbers = data.on_after_batch_transfer(batch, 0)
    assert x.shape == (4, data.channels, *SPACES[kind]) and x.dtype == torch.float32
    assert len({*numbers.tolist()}) == 4 and x.isfinite().all() and x.std() > 0.1
    same = [next(iter(data.val_dataloader()))[0] for _ in range(2)]
    assert torch.equal(*same)  # the same crops each time


def test_a_file_that_cannot_be_read_is_named_and_replaced(folder, capsys):
    broken = folder / "a" / "i0.png"
    broken.write_text("no image")
    data = unlabelled(folder, "images", validation=0)
    data.setup("fit")
    at = [str(path) for path in data.train_set.files].index(str(broken))
    for _ in range(2):
        batch = torch.utils.data.default_collate([data.train_set[at]])
        _, numbers = data.on_after_batch_transfer(batch, 0)
    assert numbers.tolist() == [at + 1]
    (note,) = [line for line in capsys.readouterr().err.splitlines() if str(broken) in line]
    assert note.endswith("; the next file replaces it")


def test_a_folder_of_broken_files_only(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.png").write_text("no image")
    data = unlabelled(tmp_path, "images", validation=0)
    data.setup("fit")
    with pytest.raises(DataError, match=r"a\.png: .*; nor can the 1 after it be read"):
        data.train_set[0]


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("images", {"size": [8, 8, 8]}, "data.size: .* expected 2 numbers above 0"),
        ("videos", {"size": [4, 16, 12]}, "data.size: .* expected frames, and two equal sides"),
        ("volumes", {"spacing": None}, "data.spacing: None, expected three numbers of mm"),
        ("images", {"scale": (0.5, 0.2)}, "data.scale: "),
        ("images", {"validation": 1.0}, "data.validation: 1.0"),
        ("images", {"batch_size": 0}, "data.batch_size: 0"),
    ],
)
def test_wrong_options(tmp_path, kind, options, message):
    with pytest.raises(DataError, match=message):
        unlabelled(tmp_path, kind, **options)


def test_it_trains_on_mixed_files(folder, pretrain, tmp_path):
    out, small = tmp_path / "out", {"size": [4, 16, 16], "batch_size": 4, "validation": 0.2, "kind": "videos"}
    words = ("--data.class_path=UnlabelledFiles", "--trainer.max_epochs=1")
    pretrain("fit", *words, root=folder, out=out, data=small, net={"dims": 3, "patch_size": [1, 4, 4]}).well()
    assert (out / "checkpoints" / "last.ckpt").is_file()
    assert (out / "reconstructions" / "epoch_0001.png").is_file()

"""The command `swap`: its data, its table, and a small run of each task."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("monai")

import swap


@pytest.fixture
def folder(tmp_path):
    """Two photographs of each of two classes, as cifar10 has them."""
    from PIL import Image

    for part in ("train", "test"):
        with tarfile.open(tmp_path / f"{part}.tar.xz", "w:xz") as archive:
            for number, name in enumerate(("cat", "dog")):
                for i in range(2):
                    file = io.BytesIO()
                    grey = np.full((32, 32, 3), 60 * number + 10 * i, np.uint8)
                    Image.fromarray(grey).save(file, "JPEG")
                    member = tarfile.TarInfo(f"{part}/{name}/{i}.jpg")
                    member.size = file.tell()
                    file.seek(0)
                    archive.addfile(member, file)
    return tmp_path


def test_photographs(folder):
    x, y = swap.photographs(folder, "train")
    assert x.shape == (4, 3, 32, 32) and x.dtype == torch.uint8 and y.tolist() == [0, 0, 1, 1]
    assert x.flatten(1).float().mean(1).tolist() == pytest.approx([0, 10, 60, 70], abs=1)


def test_shifts_keep_what_is_inside():
    x = torch.zeros(512, 2, 32, 32)
    x[:, :, 10:20, 6:9] = torch.arange(1.0, 513)[:, None, None, None]
    y = swap.shifted(x, torch.Generator().manual_seed(0))
    assert torch.allclose(y.sum((1, 2, 3)), x.sum((1, 2, 3))) and not y.equal(x)
    first = [tuple(image[0].nonzero()[0].tolist()) for image in y]
    assert {row for row, _ in first} == set(range(6, 15))
    assert {column for _, column in first} == {*range(2, 11), *range(19, 28)}


def test_dice():
    truth = torch.zeros(2, 4, 4, 4, dtype=torch.int64)
    truth[:, :2] = 1
    half = truth.clone()
    half[1, 1] = 0  # label 1: 16 of 32 voxels; the other five labels are in neither
    dice = swap.hard_dice(half, truth)
    assert dice.tolist() == pytest.approx([1, (5 + 33 / 49) / 6])
    logits = 50 * torch.nn.functional.one_hot(truth, 7).movedim(-1, 1).float()
    assert float(swap.voxels_loss(logits, truth)) == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_a_small_run(folder, tmp_path, capsys):
    small = "--steps 2 --batch 2 --depth 1 --seeds 3 --size 32 32 32 --hidden 24 --cases 1"
    out = tmp_path / "out"
    more = ["--volumes", "1", "--rows", "own", "ours", "--data", str(folder)]
    swap.main([*small.split(), *more, "--out", str(out)])
    found = json.loads((out / "runs.json").read_text())
    assert [(run["task"], run["row"]) for run in found] == [
        (task, row) for task in ("vit", "unetr") for row in ("own", "ours")
    ]
    assert not [run for run in found if "error" in run]
    assert len(found[0]["losses"]) == 2 and found[0]["parameters"] != found[1]["parameters"]
    said = capsys.readouterr().out
    assert "Lines changed from own to ours: 1, `replace_attention(net)`." in said
    assert "| training loss, steps | 1 to 1 |" in said and "mean_dice" in said and "top1" in said
    with pytest.raises(SystemExit):
        swap.main(["--rows", "theirs"])

"""Folders of images: which files there are, and what becomes of every kind of file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from ndlightnet.data.folders import class_names
from ndlightnet.data.image.image_folder import TRIES, FolderImages, collate, find_images, list_images, read_image
from ndlightnet.data.sampling import SeededSamples

from ..refusals import refuses
from .picture_files import COLOURS, RAMP

to_tensor = v2.PILToTensor()


def save(path: Path, cells: np.ndarray | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(COLOURS if cells is None else cells).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of three files each."""
    for kind in ("cat", "dog"):
        for number in range(3):
            save(tmp_path / "train" / kind / f"{number}.png", np.full((4, 6), number, np.uint8))
    return tmp_path / "train"


def test_transparent_pixels_are_white(tmp_path):
    alpha = np.full((4, 6, 1), 255, np.uint8)
    alpha[0], alpha[1] = 0, 51
    path = save(tmp_path / "a.png", np.concatenate([COLOURS, alpha], -1))
    cells = np.asarray(read_image(path, 3)).astype(int)
    assert (cells[0] == 255).all() and np.array_equal(cells[2:], COLOURS[2:])
    assert np.abs(cells[1] - (0.2 * COLOURS[1] + 0.8 * 255)).max() <= 1
    grey = np.stack([RAMP, alpha[..., 0]], -1)
    assert np.asarray(read_image(save(tmp_path / "g.png", grey), 1))[0].min() == 255
    palette = Image.fromarray(RAMP // 10, "L").convert("P")
    palette.putpalette([x for n in range(256) for x in (n, 255 - n, 7)])
    palette.save(tmp_path / "p.png", transparency=0)
    assert read_image(tmp_path / "p.png", 3).getpixel((0, 0)) == (255, 255, 255)


def test_floats_are_from_0_to_1(tmp_path):
    cells = np.linspace(0, 1, 24, dtype=np.float32).reshape(4, 6)
    image = np.asarray(read_image(save(tmp_path / "a.tif", cells), 1))
    assert np.abs(image - 255 * cells).max() <= 0.5
    for wrong in (-cells, 3 * cells, cells * np.nan):
        path = save(tmp_path / "b.tif", wrong)
        refuses(lambda path=path: read_image(path, 1), path, "has values .*, expected 0 to 1")


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_file_is_turned_as_its_tag_says(tmp_path, ending, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    large = np.kron(RAMP, np.ones((8, 8), np.uint8))
    path = save(tmp_path / f"a.{ending}", large, exif=exif, quality=100)
    across = [large, large[:, ::-1], large[::-1, ::-1], large[::-1]]
    turned = [None, *across, *(across[n].T for n in (0, 3, 2, 1))]
    if ending == "tif" and orientation > 4:
        refuses(lambda: read_image(path, 1), path, f"orientation tag {orientation}, expected an upright")
        return
    cells = np.asarray(read_image(path, 1)).astype(int)
    assert cells.shape == turned[orientation].shape
    assert np.abs(cells - turned[orientation]).max() < 10


def test_what_to_predict(folder):
    assert len(find_images(folder.parent)) == 6
    one = find_images(folder / "cat" / "0.png")
    assert len(one) == 1 and one.path(0) == folder / "cat" / "0.png"
    refuses(lambda: find_images("nowhere"), Path("nowhere"), "no such file or folder")


def test_a_bad_file_is_replaced_by_the_next_good_one(folder):
    files = list_images(folder, class_names(folder))
    for number in (1, 2):
        files.path(number).write_bytes(b"damaged")
    images = FolderImages(files, 1, to_tensor, train=True)
    visits = SeededSamples(images, seed=3)
    samples = [visits[n] for n in range(12)]
    replaced = [sample for sample in samples if sample.problems]
    assert len(replaced) == 4 and all(sample.number == 3 for sample in replaced)
    assert all(sample.label == sample.number // 3 for sample in samples)
    lines = {line for sample in replaced for line in sample.problems}
    assert len(lines) == 2 and all("cannot be read" in line for line in lines)
    assert [visits[n].draw for n in range(12)] == [sample.draw for sample in samples]
    assert len({sample.draw for sample in samples}) == 12
    for number in range(6):
        files.path(number).write_bytes(b"damaged")
    sample = images[0]
    assert sample.image is None and len(sample.problems) == TRIES


def test_a_bad_file_is_left_out_of_a_batch_elsewhere(folder):
    files = list_images(folder, class_names(folder))
    files.path(1).write_bytes(b"damaged")
    images = FolderImages(files, 3, to_tensor)
    batch, labels, numbers, draw, problems = collate([images[n] for n in range(6)], (4, 6), 3)
    assert batch.shape == (5, 3, 4, 6) and batch.dtype == torch.uint8 and draw is None
    assert numbers.tolist() == [0, 2, 3, 4, 5] and labels.tolist() == [0, 0, 1, 1, 1]
    assert len(problems) == 1 and problems[0].startswith(str(files.path(1)))
    empty, none, *_ = collate([images[1]], (4, 6), 3)
    assert empty.shape == (0, 3, 4, 6) and none.shape == (0,)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Tag data", "ignore:Truncated")
def test_a_broken_tag_leaves_the_image(tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "of a camera"
    tag = exif.tobytes()
    for end in (len(tag) - 3, len(tag) // 2, 8):
        path = save(tmp_path / "a.jpg", exif=tag[:end])
        assert set(read_image(path, 3).size) == {4, 6}

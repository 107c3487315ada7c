"""Pictures of samples: what a file and a sheet hold."""

import matplotlib.image
import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.training.generation import sample_sheets
from ndlightnet.training.generation.fidelity import Neighbour
from ndlightnet.training.generation.sample_sheets import save_animation, save_nearest, save_sample, save_sheet, view


def cells(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "shape, picture",
    [
        ((1, 9), (3, 16, 11)),
        ((1, 5, 7), (3, 5, 7)),
        ((3, 5, 7), (3, 5, 7)),
        ((3, 2, 5, 7), (3, 5, 15)),
        ((3, 20, 5, 7), (3, 5, 63)),
        ((1, 4, 5, 6), (3, 5, 23)),
        ((1, 2, 3, 4, 5), (3, 4, 38)),
    ],
)
def test_every_sample_has_a_picture(shape, picture):
    sample = view(cells(*shape))
    assert tuple(sample.shape) == picture and sample.dtype == torch.uint8


def test_pictures_of_images_and_clips_are_their_pixels():
    image, clip = cells(3, 5, 7), cells(3, 2, 5, 7)
    assert torch.equal(view(image), image)
    assert torch.equal(view(clip)[:, :, 8:], clip[:, 1]) and (view(clip)[:, :, 7] == 255).all()
    assert torch.equal(view(image[:1]), image[:1].expand(3, -1, -1))


def test_files_hold_the_samples(tmp_path):
    for name, sample, read in (
        ("grey.png", cells(1, 5, 7), lambda file: np.asarray(Image.open(file))[None]),
        ("colour.png", cells(3, 5, 7), lambda file: np.asarray(Image.open(file)).transpose(2, 0, 1)),
        ("volume.nii.gz", cells(1, 4, 5, 6), lambda file: nibabel.load(file).get_fdata()[None]),
        ("series.nii.gz", cells(1, 3, 3, 3, 3), lambda file: nibabel.load(file).get_fdata()[None]),
        ("line.npy", cells(1, 9), np.load),
    ):
        file = save_sample(tmp_path / name.partition(".")[0], sample)
        assert file.name == name and np.array_equal(read(file), sample)
    clip = save_sample(tmp_path / "clip", cells(3, 4, 6, 8))
    assert clip.name == "clip.gif" and Image.open(clip).n_frames == 4
    assert len([*tmp_path.iterdir()]) == 6  # no drafts
    save_animation(clip, [cells(3, 3, 6, 8)] * 4, columns=2)
    with Image.open(clip) as file:
        assert file.n_frames == 3 and file.size == (2 * 9 + 1, 2 * 7 + 1)


def dark_cells(folder, rows) -> np.ndarray:
    """Where the sheet of these rows is dark."""
    save_sheet(folder / "sheet.png", rows)
    return matplotlib.image.imread(folder / "sheet.png")[..., 0] < 0.1


def test_a_sheet_has_a_row_for_each_class(tmp_path):
    """Three black pictures above one, in two rows: as many dark pixels in each of the four."""
    black, white = torch.zeros(1, 8, 8, dtype=torch.uint8), torch.full((1, 8, 8), 255).byte()
    widths = dark_cells(tmp_path, [("$a", [black] * 3), ("$b", [black, white])]).sum(1)
    first, second = ((abs(widths - width) < 4).sum() for width in (widths.max(), widths.max() // 3))
    assert first > 50 and abs(first - second) < 4


def test_rows_of_a_sheet_begin_at_one_place_and_have_one_size(tmp_path):
    """One with a single sample, too."""
    black = torch.zeros(1, 6, 8, 7, dtype=torch.uint8)
    dark = dark_cells(tmp_path, [("", [black] * 3), ("", [black])])
    lines = dark.any(1).nonzero()[0]
    first, second = (dark[rows] for rows in np.split(lines, [int(np.diff(lines).argmax()) + 1]))
    assert abs(len(first) - len(second)) < 3
    assert abs(first.any(0).argmax() - second.any(0).argmax()) < 2


def test_nearest_samples_tell_their_classes_and_distances(tmp_path, monkeypatch):
    sheet, sample = [], torch.zeros(1, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr(sample_sheets, "save_sheet", lambda path, rows: sheet.extend(rows))
    near = [Neighbour(1.25, 0, sample + 1), Neighbour(30.0, 1, sample + 2)]
    for classes in (["cat", "dog"], []):
        save_nearest(tmp_path / "x.png", [(0, sample)], [near], classes)
    assert [caption for caption, _ in sheet] == [
        "a sample; its nearest in training at 1.25, 30; 1 of 2 of its class, cat",
        "a sample; its nearest in training at 1.25, 30",
    ]
    assert [int(one.max()) for one in sheet[0][1]] == [0, 1, 2]
    clip = torch.zeros(3, 8, 32, 32, dtype=torch.uint8)  # a row has room for two
    near = [Neighbour(1.25, 0, clip), Neighbour(30.0, 1, clip)]
    save_nearest(tmp_path / "x.png", [(1, clip)], [near], ["cat", "dog"])
    caption, samples = sheet[-1]
    assert caption == "a sample; its nearest in training at 1.25; 0 of 1 of its class, dog" and len(samples) == 2


def test_a_long_caption_does_not_make_the_pictures_small(tmp_path):
    black = torch.zeros(1, 8, 8, dtype=torch.uint8)
    sheets = (dark_cells(tmp_path, [(name, [black] * 3)]) for name in ("cat", "mass or hyperplasia " * 20))
    short, long = (dark.sum(1).max() for dark in sheets)
    assert abs(short - long) < 4


@pytest.mark.parametrize("shape", [(3, 8, 32, 32), (1, 28, 28, 28), (1, 9, 9, 9, 9)])
def test_clips_and_volumes_of_a_sheet_are_large_enough_to_be_seen(tmp_path, shape):
    black = torch.zeros(shape, dtype=torch.uint8)
    # a row of all ten would have 12 to 32 pixels
    assert dark_cells(tmp_path, [("", [black] * 10)]).any(1).sum() > 50

"""Volumes to classify: what a folder may hold, where a ball in millimetres ends up, and errors."""

import nibabel
import numpy as np
import pytest
import torch
from scipy import ndimage

from ndlightnet.data.volume.class_folders import largest_extent, read_part, read_volume
from ndlightnet.data.volume.file_grid import Case

from .files import AFFINE, SHAPE, random_image, refuses, write


def case(path):
    return Case(path.name, (path,), None)


def read(path, voxels, affine, size, spacing):
    return read_volume(case(write(path, voxels, affine)), size, spacing)


def ball(affine, shape, centre):
    """A ball of 12 mm around `centre` (RAS mm), 100 on -50."""
    places = np.stack([*np.indices(shape), np.ones(shape)], -1) @ affine.T
    inside = np.linalg.norm(places[..., :3] - centre, axis=-1) <= 12
    return np.where(inside, 100, -50).astype(np.float32)


@pytest.mark.parametrize(
    ("affine", "shape"),
    [
        (np.diag([1.0, 1, 1, 1]), (50, 44, 40)),
        (np.diag([-0.8, -0.8, 2.5, 1]), (61, 70, 20)),
        (np.array([[0, 0, 2.0, 0], [-1, 0, 0, 9], [0, 1.5, 0, 3], [0, 0, 0, 1]]), (50, 31, 23)),
    ],
)
def test_millimetres_and_sides_are_kept(tmp_path, affine, shape):
    """A ball beside the middle lies there in mm whatever grid the file has, and has its volume."""
    offset, size, spacing = np.array([6.0, -4, 5]), (33, 24, 30), (1.5, 2.0, 1.6)
    middle = (affine @ [*((n - 1) / 2 for n in shape), 1])[:3]
    image = read(tmp_path / "x.nii.gz", ball(affine, shape, middle + offset), affine, size, spacing)
    assert image.shape == size and image.dtype == torch.uint8
    inside = image.numpy() > 127
    mm = (np.array(ndimage.center_of_mass(inside)) - (np.array(size) - 1) / 2) * spacing
    # a grid is rounded to cells, and cut or filled unevenly by one, at its ends; voxels are coarse
    assert np.abs(mm - offset).max() < 0.75 * max(*spacing, *np.linalg.norm(affine, axis=0))
    volume = inside.sum() * np.prod(spacing)
    assert volume == pytest.approx(4 / 3 * np.pi * 12**3, rel=0.08)


def test_values_go_from_percentile_to_percentile(tmp_path):
    voxels = np.sort(random_image((8, 9, 10)).ravel()).reshape(8, 9, 10)
    image = read(tmp_path / "x.nii", voxels, np.eye(4), (8, 9, 10), (1, 1, 1)).numpy()
    low, high = np.percentile(voxels.astype(np.float64), (0.5, 99.5))
    truth = np.clip((voxels.astype(np.float64) - low) / (high - low), 0, 1) * 255
    assert np.abs(image - truth).max() <= 0.5 + 1e-3  # rounded to bytes
    assert image.min() == 0 and image.max() == 255


def test_a_small_mask_is_not_lost(tmp_path):
    mask = np.zeros((20, 20, 20), np.uint8)
    mask[9:11, 9:11, 9:11] = 1  # 0.1 %, below the percentile
    image = read(tmp_path / "x.nii", mask, np.eye(4), (20, 20, 20), (1, 1, 1))
    np.testing.assert_array_equal(image, 255 * mask)


def test_larger_cells_are_means_not_samples(tmp_path):
    """The mean of 4 x 4 x 4 independent voxels deviates by an eighth."""
    path = write(tmp_path / "x.nii", random_image((64, 60, 56)), np.eye(4))
    fine, coarse = (read_volume(case(path), [64 // n, 60 // n, 56 // n], [n] * 3).numpy() for n in (1, 4))
    assert coarse.std() == pytest.approx(fine.std() / 8, rel=0.05)
    assert coarse.mean() == pytest.approx(fine.mean(), abs=0.1)


def test_a_split_and_its_largest_extent(tmp_path):
    scans = [write(tmp_path / f"{n}.nii.gz", random_image(seed=n)) for n in range(2)]
    data = read_part([(case(path), label) for label, path in enumerate(scans)], (6, 5, 4), (3, 3, 9))
    assert data.images.shape == (2, 6, 5, 4) and data.labels.tolist() == [0, 1]
    for image, path in zip(data.images, scans, strict=True):
        assert torch.equal(image, read_volume(case(path), (6, 5, 4), (3, 3, 9)))
    edges = nibabel.affines.voxel_sizes(AFFINE)  # the axes are not permuted
    scans.append(write(tmp_path / "long.nii.gz", random_image((4, 3, 40))))
    np.testing.assert_allclose(largest_extent(list(map(case, scans))), edges * [SHAPE[0], SHAPE[1], 40], rtol=1e-6)


def test_what_cannot_be_used(tmp_path):
    flat, colour = np.full(SHAPE, 7, np.float32), random_image((5, 5, 5, 2))
    for voxels, words in ((flat, "value 7 and no other"), (colour, "2 channels")):
        path = write(tmp_path / "x.nii", voxels)
        refuses(lambda path=path: read_part([(case(path), 0)], (4, 4, 4), (1, 1, 1)), path, words)

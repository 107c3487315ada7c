"""What a folder of volumes is like, against counts made by hand."""

from itertools import permutations

import nibabel
import numpy as np
import pytest

from ndlightnet.data.volume import fingerprint as module
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.fingerprint import fingerprint

from .files import random_image, random_label, write

SHAPE = (6, 7, 8)


def stored(folder, name, order, spacing, label, channels=1) -> Case:
    """A case whose index axes run along the body's axes `order`, some of them backwards."""
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for axis, of in enumerate(order):
        affine[of, axis] = spacing[of] * (-1) ** axis
    image = np.stack([random_image(SHAPE, seed) for seed in range(channels)], -1)
    files = (write(folder / f"{name}.nii", image, affine), write(folder / f"{name}l.nii", label, affine))
    return Case(name, files[:1], files[1])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_shape_and_spacing_along_the_body(tmp_path, order):
    """x, y, z whatever axis of the file they are; as nibabel's closest canonical image says."""
    case = stored(tmp_path, "a", order, (0.5, 1.25, 4.0), random_label(SHAPE))
    result = fingerprint([case], 3)
    ras = nibabel.as_closest_canonical(nibabel.load(case.images[0]))
    assert tuple(result.shapes[0]) == ras.shape[:3]
    np.testing.assert_allclose(result.spacings[0], (0.5, 1.25, 4.0))


def test_values_lie_under_the_labels(tmp_path):
    first, second = np.zeros(SHAPE, np.uint8), np.zeros(SHAPE, np.uint8)
    first[1, 2:4, 3] = 1
    first[5, 6, 7] = 2
    second[0, 0, :5] = 2
    cases = [stored(tmp_path, name, (2, 0, 1), (1, 1, 1), label, 2) for name, label in (("a", first), ("b", second))]
    result = fingerprint(cases, 4)
    assert result.shapes.shape == result.spacings.shape == (2, 3)
    assert result.voxels.tolist() == [2 * 336 - 8, 2, 6, 0]
    assert result.values.shape == (2, 8) and result.values.dtype == np.float32
    for channel in range(2):
        image = random_image(SHAPE, channel)
        expected = np.concatenate([image[first > 0], image[second > 0]])
        assert np.array_equal(np.sort(result.values[channel]), np.sort(expected))
    # of a voxel all channels stand in one column
    pairs = {tuple(pair) for pair in result.values.T}
    assert (random_image(SHAPE, 0)[5, 6, 7], random_image(SHAPE, 1)[5, 6, 7]) in pairs


def test_as_many_values_of_every_case(tmp_path, monkeypatch):
    """A large organ does not drown the others, nor does a case have a voxel twice."""
    monkeypatch.setattr(module, "SAMPLE", 20)
    few, none = np.zeros(SHAPE, np.uint8), np.zeros(SHAPE, np.uint8)
    few[2, 2, 2:5] = 1
    labels = {"all": np.ones(SHAPE, np.uint8), "few": few, "none": none}
    cases = [stored(tmp_path, n, (0, 1, 2), (1, 1, 1), label) for n, label in labels.items()]
    result = fingerprint(cases, 2)
    assert result.values.shape == (1, 23) and len(np.unique(result.values[0, :20])) == 20
    again = fingerprint(cases, 2)
    assert np.array_equal(result.values, again.values)
    assert fingerprint(cases[2:], 2).values.shape == (1, 0)

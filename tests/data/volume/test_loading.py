"""Volumes as they are read: NIfTI and DICOM, and what is refused."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from ndlightnet.data.volume.cache import cached_volumes
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, SHAPE, broken_image, random_image, random_label, read_all, refuses, write

# --------------------------------------------------------------------------------------- loading


def test_a_case_is_read(case: Case) -> None:
    loaded = Volume.read(case)
    assert loaded.case.name == "a"
    image, label = loaded.image, loaded.label
    assert isinstance(image, MetaTensor) and isinstance(label, MetaTensor)
    assert (image.shape, image.dtype) == ((1, *SHAPE), torch.float32)
    assert (label.shape, label.dtype) == ((1, *SHAPE), torch.int16)
    np.testing.assert_array_equal(image[0].numpy(), random_image())
    np.testing.assert_array_equal(label[0].numpy(), random_label())
    for volume in (image, label):
        assert volume.affine.dtype == torch.float64
        np.testing.assert_allclose(volume.affine, AFFINE, atol=1e-5)
    assert Volume.read(Case("a", case.images, None)).label is None


def test_stored_slope_and_intercept_are_applied(tmp_path: Path) -> None:
    stored = nibabel.Nifti1Image(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.eye(4))
    stored.header.set_slope_inter(2.0, -1024.0)
    nibabel.save(stored, tmp_path / "ct.nii")
    image = Volume.read(Case("ct", (tmp_path / "ct.nii",), None)).image
    raw = nibabel.load(tmp_path / "ct.nii")
    assert (raw.dataobj.slope, raw.dataobj.inter) == (2.0, -1024.0)
    np.testing.assert_allclose(image[0], raw.get_fdata())


def test_a_second_grid_is_resampled_onto_the_first(tmp_path: Path) -> None:
    """A smooth function of the place in mm, sampled on two grids, is the same on the first."""

    def sample(affine: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        index = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"))
        x, y, z = np.einsum("ij,jxyz->ixyz", affine[:3, :3], index) + affine[:3, 3, None, None, None]
        return (7 + np.sin(x / 9) + np.cos(y / 8) + 0.05 * z).astype(np.float32)

    fine, small = (np.diag([-1.5, -1.5, 2.0, 1.0]), (21, 19, 15))
    coarse, large = (np.diag([2.5, 2.0, 3.0, 1.0]), (24, 27, 22))
    fine[:3, 3] = 20, 15, -30
    coarse[:3, 3] = -20, -20, -45
    images = write(tmp_path / "ct.nii.gz", sample(fine, small), fine), tmp_path / "pet.nii.gz"
    write(images[1], sample(coarse, large), coarse)
    image = Volume.read(Case("x", images, None)).image
    assert image.shape == (2, *small)
    np.testing.assert_allclose(image.affine, fine)
    # Linear interpolation is off by at most h^2/8 |f''| an axis: 2.5^2/8/81 + 2^2/8/64 = 0.017.
    assert float((image[0] - image[1]).abs().max()) < 0.02

    write(images[1], sample(coarse, large)[:, :, :8], coarse)  # ends at z = -24
    cut = Volume.read(Case("x", images, None)).image
    np.testing.assert_allclose(cut[1, ..., :4], image[1, ..., :4], atol=1e-5)
    least = float(sample(coarse, large)[:, :, :8].min())
    np.testing.assert_allclose(cut[1, ..., 5:], least, rtol=1e-5)

    moved = coarse.copy()
    moved[0, 3] += 500
    write(images[1], sample(coarse, large), moved)
    refuses(lambda: Volume.read(Case("x", images, None)), images[1], "does not overlap")


@pytest.mark.parametrize("order, signs", [((0, 1, 2), (-1, -1, 1)), ((2, 0, 1), (1, -1, -1))])
def test_a_label_in_another_index_order(case: Case, order: tuple, signs: tuple) -> None:
    """The same voxels at the same places in the patient; half a voxel beside is another grid."""
    label = random_label().transpose(order)[tuple(slice(None, None, s) for s in signs)]
    matrix = np.eye(4)  # from the label's indices to the image's
    matrix[:3, :3] = np.diag(signs)
    matrix[:3, 3] = [(s < 0) * (n - 1) for s, n in zip(signs, label.shape, strict=True)]
    to_image = np.zeros((4, 4))
    to_image[3, 3] = 1
    for axis, of_image in enumerate(order):
        to_image[of_image] = matrix[axis]
    assert case.label is not None
    write(case.label, label, AFFINE @ to_image)
    loaded = Volume.read(case).label
    assert loaded.shape == (1, *SHAPE) and loaded.as_tensor().is_contiguous()
    np.testing.assert_array_equal(loaded[0].numpy(), random_label())
    np.testing.assert_allclose(loaded.affine, AFFINE, atol=1e-5)
    to_image[0, 3] += 0.5
    write(case.label, label, AFFINE @ to_image)
    refuses(lambda: Volume.read(case), case.label, "another affine|has shape")


IMAGE_FAULTS = (
    "truncated",
    "truncated inside gzip",
    "corrupt",
    "one bit",
    "not NIfTI",
    "text",
    "empty",
    "gone",
    "nan",
    "infinite",
    "5-D",
    "1-D",
    "empty axis",
    "colour",
    "flat affine",
    "affine with NaN",
)


@pytest.mark.parametrize("how", IMAGE_FAULTS)
def test_broken_images_are_refused_by_name(case: Case, how: str) -> None:
    words = broken_image(case.images[0], how)
    refuses(lambda: Volume.read(Case("a", case.images, None)), case.images[0], words)
    refuses(lambda: read_all([case], 3), case.images[0], words)


def test_broken_labels_are_refused_by_name(case: Case) -> None:
    label = case.label
    assert label is not None
    read_all([case], 3)

    def bad(words: str, voxels: np.ndarray, affine: np.ndarray = AFFINE, classes: int = 3) -> None:
        write(label, voxels, affine)
        refuses(lambda: read_all([case], classes), label, words)

    bad(r"0\.\.2, expected 0\.\.1", random_label(), classes=2)
    bad(r"-1\.\.", random_label().astype(np.int16) - 1)
    bad("whole numbers", random_label() + np.float32(0.5))
    bad("whole numbers", random_label().astype(np.float32) * 40000)
    bad("NaN", np.full(SHAPE, np.nan, np.float32))
    bad("a label should have 3 axes", random_label((*SHAPE, 2)))
    bad(r"shape \(9, 7, 10\)", random_label((9, 7, 10)))
    for change in (np.diag([-1, 1, 1, 1]), np.diag([1, 1, 1.05, 1])):
        bad("another affine", random_label(), AFFINE @ change)
    shifted = AFFINE.copy()
    shifted[1, 3] += 0.5
    bad("another affine", random_label(), shifted)
    shifted[1, 3] = AFFINE[1, 3] + 0.05  # rounding of headers is not a fault
    write(label, random_label(), shifted)
    read_all([case], 3)
    label.write_bytes(label.read_bytes()[:60])
    refuses(lambda: read_all([case], 3), label, "cannot be read")


def test_one_broken_file_among_many_is_found(case: Case) -> None:
    sound = [Case(f"c{i}", case.images, case.label) for i in range(20)]
    broken = write(case.images[0].with_name("b.nii.gz"), random_image())
    broken.write_bytes(broken.read_bytes()[:-50])
    some = [*sound, Case("b", (broken,), None), *sound]
    prepare = Prepare([Intensity()])
    refuses(lambda: cached_volumes(some, prepare, 3), broken, "cannot be")

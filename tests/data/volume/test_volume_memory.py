"""The memory that volumes take, and those that it cannot hold."""

import gzip
import tracemalloc

import nibabel
import numpy as np
import pytest

from ndlightnet.data.volume import file_grid
from ndlightnet.data.volume.file_grid import SLAB, Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, SHAPE, load, random_image, refuses, write, write_itk, write_series


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
def test_reading_takes_no_more_than_the_voxels(tmp_path, scaled):
    """64 MiB of float32. Beyond it there is one slab, SLAB voxels: as int16, and where it is scaled as float64 times
    the slope, plus the intercept, and the slab before; under 7 MiB in all."""
    shape = (256, 256, 256)
    voxels = int(np.prod(shape))
    image = nibabel.Nifti1Image(np.ones(shape, np.int16), np.eye(4))
    if scaled:
        image.header.set_slope_inter(2.0, -1024.0)
    nibabel.save(image, tmp_path / "x.nii")
    label = write(tmp_path / "label.nii", np.zeros(shape, np.uint8), np.eye(4))
    slab = SLAB * (2 + 3 * 8) + 2**16
    assert slab < 7 * 2**20

    def peak(label):
        tracemalloc.start()
        try:
            volume = Volume.read(Case("x", (tmp_path / "x.nii",), label))
            assert volume.image[0, 3, 5, 7] == (2 - 1024 if scaled else 1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    load(write(tmp_path / "small.nii", random_image()))  # lazy imports
    assert 4 * voxels <= peak(None) <= 4 * voxels + slab
    assert 6 * voxels <= peak(label) <= (4 + 2) * voxels + slab


def test_a_volume_that_gzip_makes_tiny_is_read(tmp_path):
    """Of zeros, as far as it goes: 1000 times smaller."""
    path = write(tmp_path / "a.nii.gz", np.zeros((128, 128, 128), np.float32))
    data = nibabel.load(path).to_bytes()
    path.write_bytes(gzip.compress(data))
    assert len(data) > 950 * path.stat().st_size
    assert load(path).image.shape == (1, 128, 128, 128)


@pytest.mark.parametrize("ending", [".nii", ".nrrd", ".mha", ""])
def test_what_the_memory_cannot_hold(tmp_path, monkeypatch, ending):
    """Files that hold what they claim, on a machine that is too small."""
    path = tmp_path / f"a{ending}"
    writer = {".nii": write, "": write_series}.get(ending, write_itk)
    writer(path, HU if ending == "" else random_image().astype(np.uint8))
    monkeypatch.setattr(file_grid, "MEMORY", 4 * 693)  # 9 x 7 x 11 voxels
    assert load(path).image.shape == (1, *SHAPE)
    monkeypatch.setattr(file_grid, "MEMORY", 4 * 693 - 1)
    refuses(lambda: load(path), path, "its header claims .* more than this machine's memory can")

"""Drawn series over time: only time tells the labels."""

from pathlib import Path

import nibabel
import numpy as np
import pytest

from ndlightnet.data.made.moving_phantoms import FRAMES, LABELS, NOISE, draw_moving_phantom, make_moving_phantoms
from ndlightnet.data.volume.datasets import read_dataset
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume


def test_a_single_frame_does_not_tell_the_labels() -> None:
    """Nodules of both kinds, and filled vessels of both, have one density; still nodules and vessels stay where they
    are; veins fill later than arteries."""
    means, signs = np.zeros((4, FRAMES)), set()
    for seed in range(4):
        image, label, affine = draw_moving_phantom(np.random.default_rng(seed))
        signs.add(affine[0, 0] > 0)
        assert image.shape == label.shape == (*label.shape[:3], FRAMES)
        means += [[image[..., t][label[..., t] == n].mean() for t in range(FRAMES)] for n in range(1, 5)]
        places = [np.argwhere(label[..., t] == 2).mean(0) for t in range(FRAMES)]
        assert np.ptp(places, axis=0).max() > 0.5  # voxels, of two nodules that go different ways
        still = [(label[..., t] == 1) for t in range(FRAMES)]
        assert (still[0] & still[-1]).sum() > 0.8 * still[0].sum()  # a moving one may pass over
    still, moving, artery, vein = means / 4
    assert abs(still - moving).max() < NOISE / 4 and signs == {True, False}
    assert abs(artery[0] - vein[0]) < NOISE / 2 and abs(artery[-1] - vein[-1]) < NOISE / 2
    assert artery[3] - vein[3] > 3 * NOISE and np.ptp(still) < NOISE / 4


@pytest.mark.slow
def test_the_set_is_a_valid_decathlon(tmp_path: Path) -> None:
    folder = make_moving_phantoms(tmp_path / "set", 2, 1, seed=3, progress=False)
    dataset = read_dataset(folder)
    assert (dataset.labels, dataset.channels) == (LABELS, ("CT",))
    case = dataset.test[0]
    header = nibabel.load(case.images[0]).header
    assert header["pixdim"][4] == 0.5 and header.get_xyzt_units() == ("mm", "sec")
    loaded = Volume.read(Case(case.name, case.images, case.label, over_time=True), len(LABELS), 1)
    assert loaded.image.shape[1] == FRAMES and loaded.grid.time_step == 0.5

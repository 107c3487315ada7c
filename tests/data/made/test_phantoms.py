"""Drawn phantoms: the same from the same seed, and like a torso; of moving ones only time tells the labels."""

from pathlib import Path

import nibabel
import numpy as np
import pytest

from ndlightnet.data.made import moving_phantoms as moving
from ndlightnet.data.made.phantoms import LABELS, draw_phantom, make_phantoms
from ndlightnet.data.volume.datasets import read_dataset
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from ..volume.files import read_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_phantoms(tmp_path_factory.mktemp("made") / "set", 3, 1, seed=5, progress=False)


@pytest.mark.slow
def test_the_set_is_a_valid_decathlon(folder: Path) -> None:
    dataset = read_dataset(folder)
    assert (dataset.labels, dataset.channels) == (LABELS, ("CT",))
    assert (len(dataset.training), len(dataset.test)) == (3, 1)
    read_all([*dataset.training, *dataset.test], len(LABELS))
    image = nibabel.load(dataset.test[0].images[0])
    assert image.get_data_dtype() == np.int16
    assert image.header["sform_code"] > 0 and image.header["qform_code"] > 0
    np.testing.assert_allclose(image.get_qform(), image.get_sform(), atol=1e-3)
    assert [p.name for p in folder.parent.iterdir()] == ["set"], "a draft was left behind"


@pytest.mark.slow
def test_organs_look_and_lie_as_in_a_person() -> None:
    signs = set()
    for seed in range(6):
        image, label, affine = draw_phantom(np.random.default_rng(seed))
        signs.add(affine[0, 0] > 0)
        hu = {name: image[label == n].mean() for n, name in enumerate(LABELS)}
        assert hu["background"] < -900 and -930 < hu["lungs"] < -700 and hu["spine"] > 150
        assert all(20 < hu[name] < 250 for name in ("liver", "spleen", "kidneys")), hu
        sizes = np.bincount(label.ravel(), minlength=len(LABELS)) * abs(np.linalg.det(affine)) / 1e3
        litres = dict(zip(LABELS, sizes / 1e3, strict=True))
        assert 0.5 < litres["liver"] < 2.5 and 0.04 < litres["spleen"] < 0.6, litres
        assert litres["liver"] > 3 * litres["spleen"] and 0.1 < litres["kidneys"] < 0.6, litres
        # RAS millimetres: right is +x, front +y, head +z, whatever the index order.
        centres = {name: [*np.argwhere(label == n).mean(0), 1] for n, name in enumerate(LABELS)}
        place = {name: (affine @ centre)[:3] for name, centre in centres.items()}
        assert place["liver"][0] > place["spine"][0] > place["spleen"][0]
        assert place["spine"][1] < place["body"][1] < place["liver"][1]
        assert place["lungs"][2] > place["liver"][2] > place["kidneys"][2]
        # No threshold does it: parts of the body are as bright as the liver and the bone.
        body = image[label == LABELS.index("body")]
        assert (np.abs(body - hu["liver"]) < 30).sum() > 1000 and (body > 250).sum() > 200
    assert signs == {True, False}, "both index orders should occur"


def test_edges_are_partial_volumes_and_noise_is_there() -> None:
    image, label, _ = draw_phantom(np.random.default_rng(1))
    air = image[label == 0]
    assert 3 < np.median(np.abs(air - np.median(air))) < 20, "8-22 HU of noise, and the table"
    inside = (label == LABELS.index("lungs"))[1:-1]
    edge = inside & (label[2:] == LABELS.index("body"))
    assert ((image[1:-1][edge] > -650) & (image[1:-1][edge] < -200)).sum() > 20


def test_the_seed_decides(tmp_path: Path, folder: Path) -> None:
    def voxels(root: Path, split: str, number: int) -> np.ndarray:
        return np.asarray(nibabel.load(root / f"images{split}" / f"phantom_{number:03d}.nii.gz").dataobj)

    again = make_phantoms(tmp_path / "again", 1, 1, seed=5, progress=False)
    another = make_phantoms(tmp_path / "another", 1, 0, seed=6, progress=False)
    assert np.array_equal(voxels(again, "Tr", 0), voxels(folder, "Tr", 0))
    assert np.array_equal(voxels(again, "Ts", 1), voxels(folder, "Tr", 1)), "depends on the count"
    for case in (voxels(another, "Tr", 0), voxels(folder, "Tr", 1)):
        assert not np.array_equal(case, voxels(folder, "Tr", 0))


def test_a_single_frame_does_not_tell_the_labels() -> None:
    """Nodules of both kinds, and filled vessels of both, have one density; still nodules and vessels stay where they
    are; veins fill later than arteries."""
    means, signs = np.zeros((4, moving.FRAMES)), set()
    for seed in range(4):
        image, label, affine = moving.draw_moving_phantom(np.random.default_rng(seed))
        signs.add(affine[0, 0] > 0)
        assert image.shape == label.shape == (*label.shape[:3], moving.FRAMES)
        means += [[image[..., t][label[..., t] == n].mean() for t in range(moving.FRAMES)] for n in range(1, 5)]
        places = [np.argwhere(label[..., t] == 2).mean(0) for t in range(moving.FRAMES)]
        assert np.ptp(places, axis=0).max() > 0.5  # voxels, of two nodules that go different ways
        still = [(label[..., t] == 1) for t in range(moving.FRAMES)]
        assert (still[0] & still[-1]).sum() > 0.8 * still[0].sum()  # a moving one may pass over
    still, moving_one, artery, vein = means / 4
    assert abs(still - moving_one).max() < moving.NOISE / 4 and signs == {True, False}
    assert abs(artery[0] - vein[0]) < moving.NOISE / 2 and abs(artery[-1] - vein[-1]) < moving.NOISE / 2
    assert artery[3] - vein[3] > 3 * moving.NOISE and np.ptp(still) < moving.NOISE / 4


@pytest.mark.slow
def test_the_moving_set_is_one_over_time(tmp_path: Path) -> None:
    folder = moving.make_moving_phantoms(tmp_path / "set", 2, 1, seed=3, progress=False)
    dataset = read_dataset(folder)
    assert (dataset.labels, dataset.channels) == (moving.LABELS, ("CT",))
    case = dataset.test[0]
    header = nibabel.load(case.images[0]).header
    assert header["pixdim"][4] == 0.5 and header.get_xyzt_units() == ("mm", "sec")
    loaded = Volume.read(Case(case.name, case.images, case.label, over_time=True), len(moving.LABELS), 1)
    assert loaded.image.shape[1] == moving.FRAMES and loaded.grid.time_step == 0.5

"""Between a volume on disk and a network: turned, resampled, scaled, and labels back again."""

import pickle
from itertools import permutations, product

import nibabel
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from ndlightnet.data.volume import cache, transforms
from ndlightnet.data.volume.cache import cached_volumes
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, SHAPE, load, random_image, random_label, refuses, write

CT = Intensity(-100, 300, 50, 80)
ORIENTATIONS = list(product(permutations(range(3)), product((1, -1), repeat=3)))

# --------------------------------------------------------------------------------- intensities


def test_numbers_scale_in_place():
    CT.scale_(x := torch.tensor([-3000.0, -100, 50, 130, 300, 9000]).reshape(1, 2, 3))
    assert torch.equal(x.flatten(), torch.tensor([-1.875, -1.875, 0, 1, 3.125, 3.125]))


@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_without_numbers_a_volume_is_scaled_by_itself(factor):
    """Against float64: clipped to its percentiles, mean 0, deviation 1."""
    # in tens, so that the percentiles are values that occur, however finely ranks are counted
    voxels = random_image((20, 21, 22)).round(-1) * np.float32(factor)
    voxels[0, 0, 0] = 1000 * voxels.max()
    x = torch.from_numpy(voxels).permute(2, 0, 1)  # not dense in its own order
    Intensity().scale_(x)
    clipped = voxels.astype(np.float64).clip(*np.percentile(voxels.astype(float), (0.5, 99.5)))
    expected = ((clipped - clipped.mean()) / clipped.std()).transpose(2, 0, 1)
    # float32: a voxel is rounded to 2^-24 of its size, at most 6 deviations here
    np.testing.assert_allclose(x.numpy(), expected, atol=6 * 2**-22)


@pytest.mark.parametrize("value", [0.0, 7.0, 1000.1])
def test_a_constant_volume_becomes_zero(value):
    """Not rounding noise over a deviation of nothing."""
    Intensity().scale_(x := torch.full((30, 31, 32), value))
    assert not x.any()


def test_percentiles_of_a_large_volume(monkeypatch):
    """Of a sample that is spread over it: slices of 8 planes that every 32nd voxel would miss."""
    monkeypatch.setattr(transforms, "SAMPLE", 4096)
    x = torch.rand(64, 64, 32)
    x[..., 0] = 100.0  # 3 % of the voxels, all of those that a step of 32 sees
    Intensity().scale_(x)
    assert x.mean().abs() < 1e-4 and x.max() > 5  # kept: above the percentile 99.5 is only half


def test_scaling_does_not_hold_a_volume_twice():
    x = torch.rand(1, 1, 1).expand(48, 48, 48).clone() + torch.rand(48, 48, 48)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        CT.scale_(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transforms, "SAMPLE", 100)
            Intensity().scale_(x)
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    assert len(live) and live.max() < x.nbytes / 4


@pytest.mark.parametrize(
    "numbers, words",
    [((0.0, 1.0, 0.5), "all four"), ((1.0, 0.0, 0.5, 1.0), "low < high"), ((0.0, 1.0, 0.5, 0.0), "deviation > 0")],
)
def test_intensities_that_are_none(numbers, words):
    refuses(lambda: Intensity(*numbers), None, words)


# --------------------------------------------------------------------------------- orientation


def turned(order, signs, shape=SHAPE) -> np.ndarray:
    """AFFINE with its index axes in another order and direction; it covers the same box."""
    affine = np.eye(4)
    for axis, (of, sign) in enumerate(zip(order, signs, strict=True)):
        affine[:3, axis] = AFFINE[:3, of] * sign
        affine[3, axis] = 0
    first = np.where(np.array(signs) < 0, np.array(shape) - 1, 0)
    affine[:3, 3] = AFFINE[:3, 3] - affine[:3, :3] @ first
    return affine


def every_index(shape) -> np.ndarray:
    """(voxels, 4), homogeneous."""
    places = np.indices(shape).reshape(3, -1).T
    return np.concatenate([places, np.ones((len(places), 1))], 1)


@pytest.mark.parametrize("spacing", [None, (2.5, 1.3, 4.1)])
@pytest.mark.parametrize("order, signs", ORIENTATIONS)
def test_labels_come_back_to_the_voxels_of_the_file(tmp_path, order, signs, spacing):
    """Every voxel of the grid that labels are made on has a number; in the file's order it stands at the voxel which
    lies at the same place in the world."""
    affine = turned(order, signs)
    file = write(tmp_path / "i.nii", random_image(), affine)
    volume = load(file)
    image = Prepare([CT], spacing)(volume)["image"]
    onto = volume.onto(image)
    assert (onto is None) == (spacing is None)
    shape, matrix = (tuple(image.shape[1:]), np.eye(4)) if onto is None else onto
    labels = torch.arange(np.prod(shape)).reshape(shape)
    back = volume.from_ras(labels)
    assert back.shape == SHAPE and np.shares_memory(back, labels.numpy())
    grid_in_world = every_index(shape) @ (image.affine.numpy() @ matrix).T
    file_in_world = every_index(SHAPE) @ nibabel.load(file).affine.T
    # NIfTI holds an affine in float32: off by 2^-24 of the 60 mm and less that are in it
    np.testing.assert_allclose(grid_in_world[back.ravel()], file_in_world, atol=1e-4)
    assert np.array_equal(np.sort(back.ravel()), np.arange(back.size))


@pytest.mark.parametrize("order, signs", ORIENTATIONS[5::7])
def test_stored_axis_order_does_not_matter(tmp_path, order, signs):
    """One body, stored in two index orders, is one prepared volume, label and all."""
    step = tuple(slice(None, None, sign) for sign in signs)
    plain, permuted = tmp_path / "plain", tmp_path / "permuted"
    for name, voxels in (("image.nii", random_image()), ("label.nii", random_label())):
        write(plain / name, voxels)
        affine = turned(order, signs, [SHAPE[of] for of in order])
        write(permuted / name, np.ascontiguousarray(voxels.transpose(order)[step]), affine)
    cases = [Case("x", (folder / "image.nii",), folder / "label.nii") for folder in (plain, permuted)]
    one, two = (Prepare([CT])(Volume.read(case)) for case in cases)
    assert nibabel.aff2axcodes(one["image"].affine.numpy()) == ("R", "A", "S")
    for key in ("image", "label"):
        assert torch.equal(one[key].as_tensor(), two[key].as_tensor())
        np.testing.assert_allclose(one[key].affine, two[key].affine, atol=1e-4)
    assert torch.equal(one["label"][0].as_tensor(), torch.from_numpy(random_label()[::-1].copy()))


# ------------------------------------------------------------------------------------- spacing


def test_spacing_of_a_ramp(tmp_path):
    """Resampled linearly, what grows linearly with the place still does, to the border's half voxel; labels stay whole
    and lie where they lay."""
    affine = np.diag([-1.0, 2.0, 3.0, 1.0])
    index = np.indices((24, 20, 18)).astype(np.float32)
    ramp = np.float32(3) * -index[0] + index[1] * 2 - index[2]
    label = (index[1] >= 10).astype(np.uint8) * 200
    case = Case("x", (write(tmp_path / "i.nii", ramp, affine),), write(tmp_path / "l.nii", label, affine))
    prepared = Prepare([Intensity(-1e3, 1e3, 0, 1)], (1.6, 1.5, 2.0))(Volume.read(case))
    image = prepared["image"]
    assert np.allclose(image.pixdim, (1.6, 1.5, 2.0)) and image.dtype == torch.float32
    assert prepared["label"].shape == image.shape and prepared["label"].dtype == torch.uint8
    x, y, z, _ = (every_index(image.shape[1:]) @ image.affine.numpy().T).T
    inside = (x >= -23) & (x <= 0) & (y >= 0) & (y <= 38) & (z >= 0) & (z <= 51)
    assert inside.mean() > 0.9
    values = image.numpy().ravel()[inside]
    np.testing.assert_allclose(values, (3 * x + y - z / 3)[inside], atol=1e-3)
    labels = prepared["label"].numpy().ravel()
    assert set(np.unique(labels)) == {0, 200}
    clear = np.abs(y - 19) > 1.01  # the nearest voxel is 1 mm away at most
    assert np.array_equal((labels == 200)[clear], (y > 19)[clear])


def test_a_spacing_that_is_not_meant(tmp_path, case):
    refuses(lambda: Prepare([CT], (1e-3,) * 3)(Volume.read(case)), None, "data.spacing.*shape")
    for wrong in ((1, 1), (0, 1, 1), (1, -1, 1), (1, float("nan"), 1)):
        refuses(lambda wrong=wrong: Prepare([CT], wrong), None, "data.spacing.*three edges")
    prepare, cache = Prepare([CT], (1e-3,) * 3), str(tmp_path / "cache")
    for folder in (None, cache):
        refuses(lambda at=folder: cached_volumes([case], prepare, 256, folder=at), None, "data.spacing.*shape")
    assert not any((tmp_path / "cache").glob("*"))


# ------------------------------------------------------------------------------------ channels


def test_channels_by_number_with_their_own_scale(tmp_path):
    voxels = random_image((*SHAPE, 3))
    volume = load(write(tmp_path / "i.nii", voxels, np.eye(4)))
    scales = [Intensity(-1e4, 1e4, 0, 10.0**n) for n in range(3)]
    for channels in (None, [2], [2, 0]):
        prepared = Prepare(scales, None, channels)(volume)
        for channel, n in zip(prepared["image"], channels or range(3), strict=True):
            np.testing.assert_allclose(channel.numpy(), voxels[..., n] / 10**n, rtol=1e-6)
        assert volume.onto(prepared["image"]) is None
        assert volume.from_ras(torch.zeros(SHAPE)).shape == SHAPE


@pytest.mark.parametrize("affine", [AFFINE, np.eye(4)])
@pytest.mark.parametrize("largest, dtype", [(2, torch.uint8), (300, torch.int16)])
def test_prepare_leaves_the_volume_as_it_was_read(case, affine, largest, dtype):
    """It is drawn and written onto later; a volume in RAS order already needs no turn. Many labels are int16."""
    labels = random_label().astype(np.int16)
    labels[1, 2, 3] = largest
    write(case.images[0], random_image(), affine)
    write(case.label, labels, affine)
    volume = Volume.read(case)
    prepared = Prepare([CT])(volume)
    assert set(prepared) == {"name", "image", "label"} and prepared["label"].dtype == dtype
    assert not torch.equal(prepared["image"].as_tensor(), volume.image.as_tensor())
    np.testing.assert_array_equal(volume.image[0].numpy(), random_image())
    np.testing.assert_array_equal(volume.label[0].numpy(), labels)


# ------------------------------------------------------------------------------------- dataset


@pytest.fixture
def cases(tmp_path):
    """Three, of one voxel of class 3 and none of class 2."""

    def write_case(number, shape):
        label = random_label(shape, 2, seed=number)
        label[3, 4, 5] = 3
        image = write(tmp_path / f"{number}.nii.gz", random_image(shape, number))
        return Case(f"c{number}", (image,), write(tmp_path / f"l{number}.nii.gz", label))

    return [write_case(number, shape) for number, shape in enumerate([(30, 26, 22), (18, 33, 21), (9, 8, 7)])]


@pytest.mark.parametrize("cached", [False, True])
def test_prepared_once_and_as_they_are(cases, tmp_path, cached):
    folder = str(tmp_path / "cache") if cached else None
    expected = [Prepare([CT])(Volume.read(case)) for case in cases]
    data = cached_volumes(cases, Prepare([CT]), 4, folder=folder)
    for case in cases:
        case.images[0].unlink()
    assert len(data) == 3
    for number, truth in enumerate(expected):
        for prepared in (data[number], pickle.loads(pickle.dumps(data))[number]):
            assert prepared["name"] == truth["name"]
            for key in ("image", "label"):
                assert isinstance(prepared[key], MetaTensor) and prepared[key].dtype == truth[key].dtype
                assert torch.equal(prepared[key].as_tensor(), truth[key].as_tensor())
                assert torch.equal(prepared[key].affine, truth[key].affine)
    workers = DataLoader(data, batch_size=None, num_workers=2)
    for prepared, truth in zip(workers, expected, strict=True):
        assert torch.equal(prepared["image"].as_tensor(), truth["image"].as_tensor())


@pytest.mark.parametrize("cached", [False, True])
def test_padded_to_a_patch_with_places_of_each_class(cases, tmp_path, cached, monkeypatch):
    monkeypatch.setattr(cache, "KEPT_PER_CLASS", 100)
    folder = str(tmp_path / "cache") if cached else None
    data = cached_volumes(cases, Prepare([CT]), 4, (16, 8, 24), 2, folder)
    shapes = [(30, 26, 24), (18, 33, 24), (16, 8, 24)]
    for case, item, shape in zip(cases, map(data.__getitem__, range(3)), shapes, strict=True):
        prepared = Prepare([CT])(Volume.read(case))  # and then padded with zeros
        for key in ("image", "label"):
            assert item[key].shape == (1, *shape)
            assert torch.equal(item[key].as_tensor(), cache.padded(prepared[key], (16, 8, 24)).as_tensor())
        flat = item["label"].as_tensor().flatten()
        assert [len(places) for places in item["places"]] == [len(item["places"][0]), 0, 1]
        assert 50 < len(item["places"][0]) <= 100
        for number, places in enumerate(item["places"], start=1):
            assert (flat[places] == number).all() and places.dtype == torch.int64
            assert len(places) == len(places.unique())
        assert item["places"][0].max() > 0.9 * flat.nonzero().max()  # not only the first ones


def test_what_the_cache_depends_on(cases, tmp_path):
    cache = tmp_path / "cache"
    prepare = Prepare([CT])

    def fresh(*arguments):
        """How many files this made."""
        before = set(cache.glob("*"))
        cached_volumes(*arguments, folder=str(cache))
        return len(set(cache.glob("*")) - before)

    assert fresh(cases, prepare, 4) == 3
    assert fresh(cases, prepare, 4) == 0
    assert fresh(cases[1:], Prepare([CT], None, [0]), 4) == 0  # another fold, the same channels by number
    assert fresh(cases, Prepare([CT], (2.0, 2.0, 2.0)), 4) == 3
    assert fresh(cases, Prepare([Intensity()]), 4) == 3
    assert fresh(cases, prepare, 4, (8, 8, 8)) == 3
    assert fresh(cases, prepare, 5, (8, 8, 8)) == 3
    write(cases[1].label, random_label((18, 33, 21), 3, seed=9))
    assert fresh(cases, prepare, 4) == 1
    newest = max(cache.glob("c1.*.pt"), key=lambda file: file.stat().st_mtime_ns)
    (again,) = cached_volumes(cases[1:2], prepare, 4, folder=str(cache)).held
    assert again == newest and torch.load(newest, weights_only=True)["label"].max() == 2
    nibabel.save(nibabel.Nifti1Pair(random_image(), AFFINE), tmp_path / "pair.hdr")
    pair = [Case("pair", (tmp_path / "pair.hdr",), write(tmp_path / "l.nii", random_label()))]
    assert fresh(pair, prepare, 4) == 1
    (tmp_path / "pair.img").write_bytes(bytes(4 * np.prod(SHAPE)))
    assert fresh(pair, prepare, 4) == 1  # its second file is another one


def test_a_cached_file_that_is_broken(cases, tmp_path):
    data = cached_volumes(cases, Prepare([CT]), 4, folder=str(tmp_path / "cache"))
    data.held[0].write_bytes(data.held[0].read_bytes()[:500])
    refuses(lambda: data[0], data.held[0], "cannot be read")
    cases[1].images[0].write_bytes(b"none")
    refuses(lambda: cached_volumes(cases, Prepare([CT]), 4), cases[1].images[0], "cannot")

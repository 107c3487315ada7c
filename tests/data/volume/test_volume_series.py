"""Series of volumes over time: every frame is treated as a volume by itself would be, and files that do not fit
together are refused in one line."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.transforms import SpatialPad
from nibabel import orientations

from ndlightnet.data.volume.augment import PROBABILITIES, Augment
from ndlightnet.data.volume.cache import cached_volumes, padded
from ndlightnet.data.volume.crops import Crops
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.fingerprint import fingerprint
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.data.volume.volume import Volume

from .files import AFFINE, SHAPE, random_image, random_label, refuses, write

T = 3
SCALE = Intensity(0.0, 200.0, 100.0, 50.0)


def series(path: Path, voxels: np.ndarray, step: float = 0.8, unit: str = "sec") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(voxels, AFFINE)
    image.header.set_xyzt_units("mm", unit)
    image.header["pixdim"][4] = step
    nibabel.save(image, path)
    return path


@pytest.fixture
def moving(tmp_path: Path) -> Case:
    """Two channels, the second of which has frames with NaN, and a label."""
    second = random_image((*SHAPE, T), seed=1)
    second[2, 3, :4, 1] = np.nan
    images = [random_image((*SHAPE, T)), second]
    files = [series(tmp_path / f"{n}.nii.gz", image) for n, image in enumerate(images)]
    label = series(tmp_path / "label.nii.gz", random_label((*SHAPE, T)))
    return Case("a", tuple(files), label, over_time=True)


def frame_of(case: Case, frame: int, folder: Path) -> Case:
    """One frame of a case, as a case of volumes."""

    def cut(path: Path) -> Path:
        whole = nibabel.load(path)
        part = np.asarray(whole.dataobj)[..., frame]
        return write(folder / f"{frame}" / path.name, part, whole.affine)

    return Case(f"{frame}", tuple(map(cut, case.images)), cut(case.label))


def test_frames_are_read_and_prepared_as_volumes_are(moving: Case, tmp_path: Path) -> None:
    prepare = Prepare([SCALE] * 2, [2.0, 1.5, 4.0])
    loaded = Volume.read(moving, 3, 2)
    assert loaded.image.shape == (2, T, *SHAPE) and loaded.label.shape == (1, T, *SHAPE)
    assert loaded.image.dtype == torch.float32 and loaded.label.dtype == torch.int16
    ready = prepare(loaded)
    assert len(loaded.notes) == 1 and "4 voxels are NaN" in loaded.notes[0]
    for t in range(T):
        single = Volume.read(frame_of(moving, t, tmp_path), 3, 2)
        whole = prepare(single)
        for key in ("image", "label"):
            one, all_of_them = getattr(single, key), getattr(loaded, key)
            assert torch.equal(one.as_tensor(), all_of_them.as_tensor()[:, t])
            assert torch.equal(one.affine, all_of_them.affine)
            assert torch.equal(whole[key].as_tensor(), ready[key].as_tensor()[:, t])
            assert torch.equal(whole[key].affine, ready[key].affine)
            assert whole[key].dtype == ready[key].dtype


def test_a_series_is_scaled_as_a_whole(moving: Case) -> None:
    """Not frame by frame: brightness that changes over time is information."""
    image = Prepare([Intensity()] * 2)(Volume.read(moving))["image"].as_tensor()
    means = image.flatten(2).mean(2)
    assert means.mean(1).abs().max() < 0.05 and means.std(1).min() > 1e-4


def test_further_files_in_another_order_or_on_another_grid(moving: Case, tmp_path: Path) -> None:
    """A label with flipped and permuted axes; a second channel that covers a part only."""
    label = nibabel.load(moving.label)
    turn = orientations.axcodes2ornt("PSL")
    turn = orientations.ornt_transform(nibabel.io_orientation(label.affine), turn)
    turned = label.as_reoriented(turn)
    assert turned.shape != label.shape
    nibabel.save(turned, tmp_path / "turned.nii.gz")
    case = Case("a", moving.images, tmp_path / "turned.nii.gz", over_time=True)
    assert torch.equal(Volume.read(case).label, Volume.read(moving).label)

    part = nibabel.load(moving.images[1]).slicer[2:, :5]
    nibabel.save(part, tmp_path / "part.nii.gz")
    case = Case("a", (moving.images[0], tmp_path / "part.nii.gz"), None, over_time=True)
    image, whole = Volume.read(case).image[1], Volume.read(moving).image[1]
    np.testing.assert_allclose(image[:, 2:, :5], whole[:, 2:, :5], atol=1e-2)
    assert (image[:, 0, 6] == image[:, 2:, :5].amin((1, 2, 3))[:, None]).all()


def test_one_frame_is_a_series_of_one(tmp_path: Path) -> None:
    """NIfTI drops axes of length 1 at the end."""
    image, label = (write(tmp_path / "a.nii", random_image()), write(tmp_path / "l.nii", np.ones(SHAPE, "u1")))
    loaded = Volume.read(Case("a", (image,), label, over_time=True), 2, 1)
    assert loaded.image.shape == loaded.label.shape == (1, 1, *SHAPE)
    labels = loaded.from_ras(torch.zeros(Prepare([SCALE])(loaded)["image"].shape[1:]))
    assert labels.shape == (*SHAPE, 1)


# -------------------------------------------------------------------------------------- refusals


def test_files_that_do_not_fit_together_are_refused(moving: Case, tmp_path: Path) -> None:
    first, second = moving.images
    short = series(tmp_path / "short.nii.gz", random_image((*SHAPE, T - 1)))
    label = series(tmp_path / "few.nii.gz", random_label((*SHAPE, T - 1)))
    still = write(tmp_path / "still.nii.gz", random_label())
    five = write(tmp_path / "five.nii.gz", random_image((*SHAPE, T, 2)))
    moved = AFFINE.copy()
    moved[0, 3] += 5  # mm
    other = write(tmp_path / "other.nii.gz", random_label((*SHAPE, T)), moved)

    def read(images: tuple[Path, ...], label: Path | None, channels: int | None = None) -> None:
        Volume.read(Case("a", images, label, over_time=True), 3, channels)

    refuses(lambda: read((first,), label), label, "should have 3 frames as 0.nii.gz, has 2")
    refuses(lambda: read((first,), still), still, "should have 3 frames as 0.nii.gz, has 1")
    refuses(lambda: read((first, short), None), short, "should have 3 frames as 0.nii.gz, has 2")
    refuses(lambda: read((five,), None), five, "or 4 with channels or frames.*shape")
    refuses(lambda: read((first, second), None, 1), first, "has 2 channels, expected 1")
    refuses(lambda: read((first,), other), other, "another affine")
    # without time the fourth axis holds channels, as ever
    refuses(lambda: Volume.read(Case("a", (first,), None), 3, 1), first, "has 3 channels")
    refuses(lambda: Volume.read(Case("a", (first,), label), 3), label, "should have 3 axes")


HEADERS = {
    "zero": (0.0, "sec"),
    "negative": (-1.5, "sec"),
    "NaN": (np.nan, "msec"),
    "infinite": (np.inf, "sec"),
    "hertz": (2.0, "hz"),
    "no unit": (2.0, "unknown"),
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_header_without_time_is_noted(how: str, tmp_path: Path) -> None:
    """The frames are there; labels are written with the header as it is."""
    path = series(tmp_path / "a.nii.gz", random_image((*SHAPE, T)), *HEADERS[how])
    loaded = Volume.read(Case("a", (path,), None, over_time=True))
    assert loaded.grid.time_step is None
    assert [*loaded.notes] == [f"{path}: its header tells no time step in seconds"]
    loaded.save_labels(np.zeros((*SHAPE, T), np.uint8), tmp_path / "out.nii.gz")
    source, written = (nibabel.load(p).header for p in (path, tmp_path / "out.nii.gz"))
    np.testing.assert_array_equal(written["pixdim"][4], source["pixdim"][4])
    assert written.get_xyzt_units() == source.get_xyzt_units()


@pytest.mark.parametrize("unit, seconds", [("sec", 0.8), ("msec", 0.0008), ("usec", 8e-7)])
def test_the_time_step_is_in_seconds(unit: str, seconds: float, tmp_path: Path) -> None:
    path = series(tmp_path / "a.nii", random_image((*SHAPE, T)), 0.8, unit)
    loaded = Volume.read(Case("a", (path,), None, over_time=True))
    assert loaded.grid.time_step == pytest.approx(seconds) and not loaded.notes


def test_labels_are_written_as_they_were_read(moving: Case, tmp_path: Path) -> None:
    """From RAS axes back to the file's, with its affine, codes and time step."""
    loaded = Volume.read(moving)
    ready = Prepare([SCALE] * 2)(loaded)
    assert loaded.onto(ready["image"]) is None
    labels = ready["label"].as_tensor()[0]
    loaded.save_labels(loaded.from_ras(labels), tmp_path / "out" / "a.nii.gz")
    written, source = nibabel.load(tmp_path / "out" / "a.nii.gz"), nibabel.load(moving.images[0])
    np.testing.assert_array_equal(written.dataobj, nibabel.load(moving.label).dataobj)
    assert written.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(written.affine, source.affine)
    for key in ("pixdim", "xyzt_units", "sform_code", "qform_code", "srow_x", "quatern_b"):
        np.testing.assert_array_equal(written.header[key], source.header[key])
    with pytest.raises(ValueError, match=r"\(9, 7, 11, 2\)"):
        loaded.save_labels(np.zeros((*SHAPE, T - 1), np.uint8), tmp_path / "wrong.nii.gz")


def test_the_grid_of_resampled_series(moving: Case) -> None:
    """Frames are not resampled: their axis keeps its scale of 1."""
    loaded = Volume.read(moving)
    found = loaded.onto(Prepare([SCALE] * 2, [2.0, 2.0, 2.0])(loaded)["image"])
    assert found is not None
    shape, matrix = found
    assert shape == (T, *SHAPE) and matrix.shape == (5, 5)
    np.testing.assert_array_equal(matrix[0], [1, 0, 0, 0, 0])
    np.testing.assert_allclose(np.diag(matrix)[1:4], np.array([1.5, 2, 3]) / 2, rtol=1e-5)


# -------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("patch", [(5, 4, 6), (12, 9, 11), (20, 20, 20)])
def test_padding_is_that_of_monai(moving: Case, tmp_path: Path, patch: tuple[int, ...]) -> None:
    image = Volume.read(frame_of(moving, 0, tmp_path)).image
    expected, found = SpatialPad(patch)(image), padded(image, patch)
    assert torch.equal(found.as_tensor(), expected.as_tensor())
    torch.testing.assert_close(found.affine, expected.affine, check_dtype=False)


def test_crops_of_series(moving: Case) -> None:
    """Windows of frames and space; a series that is too short is padded with empty frames."""
    prepare = Prepare([SCALE] * 2)
    (data,) = cached_volumes([moving], prepare, 3, (T + 2, 5, 4, 12))
    assert data["image"].shape == (2, T + 2, 9, 7, 12) and data["label"].dtype == torch.uint8
    frames = data["label"].as_tensor()[0].flatten(1).any(1)
    assert frames.tolist() == [False, True, True, True, False]
    crops = Crops([data], (T, 5, 4, 6), 1, 1.0, 0)
    for number in range(5):
        image, label, _ = crops[number]
        assert image.shape == (2, T, 5, 4, 6) and label.shape == (1, T, 5, 4, 6) and label.any()


def test_a_cache_tells_series_from_channels(moving: Case, tmp_path: Path) -> None:
    case = Case("a", moving.images[:1], moving.label, over_time=True)
    folder = str(tmp_path / "cache")
    for _ in range(2):
        (data,) = cached_volumes([case], Prepare([SCALE]), 3, folder=folder)
        assert data["image"].shape == (1, T, *SHAPE)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_fingerprint_is_that_of_space(moving: Case) -> None:
    found = fingerprint([moving], 3, 2)
    assert found.shapes.tolist() == [list(SHAPE)]
    np.testing.assert_allclose(found.spacings, [[1.5, 2, 3]], rtol=1e-5)
    counts = np.bincount(random_label((*SHAPE, T)).ravel())
    assert found.voxels.tolist() == counts.tolist()
    assert found.values.shape[0] == 2 and found.values.shape[1] == counts[1:].sum()


@pytest.mark.parametrize("name", ["move", "blur", "brightness", "low", "mirror"])
def test_all_frames_are_augmented_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the same frame would be by itself; only noise is drawn for each."""
    for key in PROBABILITIES:
        monkeypatch.setitem(PROBABILITIES, key, 0.7 if key == name else 0.0)
    turn = 0.7 if name == "move" else 0.0
    rng = torch.Generator().manual_seed(0)
    image = torch.randn(5, 2, T, 9, 7, 6, generator=rng)
    label = torch.randint(0, 3, (5, 1, T, 9, 7, 6), generator=rng)
    spacing = (1.0, 1.0, 2.0)
    after, labels = Augment((1, 3), spacing, 1 if turn else 0, turn)(image, label, torch.Generator().manual_seed(1))
    assert not torch.equal(after, image) and after.shape == image.shape
    assert torch.equal(labels, label) == (name not in ("move", "mirror"))
    for t in range(T):
        one, of_label = Augment((0, 2), spacing, 1 if turn else 0, turn)(
            image[:, :, t], label[:, :, t], torch.Generator().manual_seed(1)
        )
        torch.testing.assert_close(after[:, :, t], one, rtol=0, atol=2e-6)
        assert torch.equal(labels[:, :, t], of_label)


def test_all_of_the_augmentation_on_series() -> None:
    """Repeatable, finite; frames keep their order unless the first axis is mirrored."""
    image = torch.randn(8, 2, T, 9, 7, 6) + torch.arange(T).view(1, 1, T, 1, 1, 1) * 10
    label = torch.arange(T).view(1, 1, T, 1, 1, 1).expand(8, 1, T, 9, 7, 6)
    for flips, orders in ((), {(0, 1, 2)}), ((0,), {(0, 1, 2), (2, 1, 0)}):
        augment = Augment(flips, turn=1.0)
        one, two = (augment(image, label, torch.Generator().manual_seed(2)) for _ in range(2))
        assert torch.equal(one[0], two[0]) and one[0].isfinite().all()
        found = {tuple(order) for order in one[1][:, 0, :, 0, 0, 0].tolist()}
        assert found == orders
        assert {tuple(o) for o in one[0].mean((1, 3, 4, 5)).argsort(1).tolist()} == orders


def test_a_case_keeps_its_name_as_a_series():
    """Also one that was changed to a valid file name: it is not changed twice."""
    case = Case("a/" + 300 * "b", (Path("image.nii.gz"),), None)
    series = case.as_series(True)
    assert series.over_time and not case.over_time
    assert series.name == case.name != "a/" + 300 * "b"

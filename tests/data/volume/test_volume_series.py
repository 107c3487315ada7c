"""Series of volumes over time: every frame is treated as a volume by itself would be, and files that do not fit
together are refused in one line."""

from dataclasses import replace
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

from .files import AFFINE, SHAPE, load, random_image, random_label, refuses, write, write_nrrd

T = 3
SCALE = Intensity(0.0, 200.0, 100.0, 50.0)


def series(path, voxels, step=0.8, unit="sec", affine=AFFINE):
    image = nibabel.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm", unit)
    image.header["pixdim"][4] = step
    nibabel.save(image, path)
    return path


@pytest.fixture
def moving(tmp_path):
    """Two channels, the second of which has frames with NaN, and a label."""
    second = random_image((*SHAPE, T), seed=1)
    second[2, 3, :4, 1] = np.nan
    images = [random_image((*SHAPE, T)), second]
    files = [series(tmp_path / f"{n}.nii.gz", image) for n, image in enumerate(images)]
    label = series(tmp_path / "label.nii.gz", random_label((*SHAPE, T)))
    return Case("a", tuple(files), label, over_time=True)


def frame_of(case, frame, folder):
    """One frame of a case, as a case of volumes."""

    def select(path):
        image = nibabel.load(path)
        return write(folder / f"{frame}" / path.name, np.asarray(image.dataobj)[..., frame], image.affine)

    return Case(f"{frame}", tuple(map(select, case.images)), select(case.label))


def test_frames_are_read_and_prepared_as_volumes_are(moving, tmp_path):
    prepare, volume = Prepare([SCALE] * 2, [2.0, 1.5, 4.0]), Volume.read(moving, 3, 2)
    assert volume.image.shape == (2, T, *SHAPE) and volume.label.shape == (1, T, *SHAPE)
    assert volume.image.dtype == torch.float32 and volume.label.dtype == torch.int16
    assert len(volume.notes) == 1 and "4 voxels are NaN" in volume.notes[0]
    prepared = prepare(volume)
    for t in range(T):
        single = Volume.read(frame_of(moving, t, tmp_path), 3, 2)
        for key, ready in prepare(single).items():
            if key != "name":
                for one, frames in ((getattr(single, key), getattr(volume, key)), (ready, prepared[key])):
                    assert torch.equal(one.as_tensor(), frames.as_tensor()[:, t])
                    assert torch.equal(one.affine, frames.affine) and one.dtype == frames.dtype


def test_a_series_is_scaled_at_once(moving):
    """Not frame by frame: brightness that changes over time is information."""
    image = Prepare([Intensity()] * 2)(Volume.read(moving))["image"].as_tensor()
    means = image.flatten(2).mean(2)
    assert means.mean(1).abs().max() < 0.05 and means.std(1).min() > 1e-4


def test_further_files_in_another_order_or_on_another_grid(moving, tmp_path):
    """A label with flipped and permuted axes; a second channel that covers a corner only."""
    label = nibabel.load(moving.label)
    turn = orientations.ornt_transform(nibabel.io_orientation(label.affine), orientations.axcodes2ornt("PSL"))
    permuted = label.as_reoriented(turn)
    assert permuted.shape != label.shape
    nibabel.save(permuted, tmp_path / "permuted.nii.gz")
    volume = Volume.read(moving)
    assert torch.equal(Volume.read(replace(moving, label=tmp_path / "permuted.nii.gz")).label, volume.label)

    nibabel.save(nibabel.load(moving.images[1]).slicer[2:, :5], tmp_path / "corner.nii.gz")
    case = Case("a", (moving.images[0], tmp_path / "corner.nii.gz"), None, over_time=True)
    image = Volume.read(case).image[1]
    np.testing.assert_allclose(image[:, 2:, :5], volume.image[1, :, 2:, :5], atol=1e-2)
    assert (image[:, 0, 6] == image[:, 2:, :5].amin((1, 2, 3))[:, None]).all()


def test_one_frame_is_a_series_of_one(tmp_path):
    """NIfTI drops axes of length 1 at the end."""
    image, label = write(tmp_path / "a.nii", random_image()), write(tmp_path / "l.nii", np.ones(SHAPE, "u1"))
    volume = Volume.read(Case("a", (image,), label, over_time=True), 2, 1)
    assert volume.image.shape == volume.label.shape == (1, 1, *SHAPE)
    labels = volume.from_ras(torch.zeros(Prepare([SCALE])(volume)["image"].shape[1:]))
    assert labels.shape == (*SHAPE, 1)


def test_files_that_do_not_fit_together_are_refused(moving, tmp_path):
    first, second = moving.images
    short = series(tmp_path / "short.nii.gz", random_image((*SHAPE, T - 1)))
    few = series(tmp_path / "few.nii.gz", random_label((*SHAPE, T - 1)))
    still = write(tmp_path / "still.nii.gz", random_label())
    five = write(tmp_path / "five.nii.gz", random_image((*SHAPE, T, 2)))
    affine = AFFINE.copy()
    affine[0, 3] += 5  # mm
    beside = write(tmp_path / "beside.nii.gz", random_label((*SHAPE, T)), affine)
    for images, label, time, channels, at, words in (
        ((first,), few, True, None, few, "should have 3 frames as 0.nii.gz, has 2"),
        ((first,), still, True, None, still, "should have 3 frames as 0.nii.gz, has 1"),
        ((first, short), None, True, None, short, "should have 3 frames as 0.nii.gz, has 2"),
        ((five,), None, True, None, five, "or 4 with channels or frames.*shape"),
        ((first, second), None, True, 1, first, "has 2 channels, expected 1"),
        ((first,), beside, True, None, beside, "another affine"),
        # without time the fourth axis holds channels
        ((first,), None, False, 1, first, "has 3 channels"),
        ((first,), few, False, None, few, "should have 3 axes"),
    ):
        case = Case("a", images, label, over_time=time)
        refuses(lambda case=case, channels=channels: Volume.read(case, 3, channels), at, words)


@pytest.mark.parametrize("unit, scale", [("sec", 1), ("msec", 1e-3), ("usec", 1e-6), ("unknown", None), ("hz", None)])
@pytest.mark.parametrize("ending", [".nii", ".nrrd"])
def test_the_time_step_is_in_seconds(tmp_path, unit, scale, ending):
    voxels, path = random_image((*SHAPE, 2)), tmp_path / f"a{ending}"
    if ending == ".nii":
        series(path, voxels, 0.8, unit)
    else:
        short = {"sec": "s", "msec": "ms", "usec": "us"}.get(unit, unit)
        write_nrrd(path, voxels, None, f'units: "mm" "mm" "mm" "{short}"\nspacings: 0.5 0.5 0.5 0.8\n')
    volume = load(path, over_time=True)
    assert volume.grid.time_step == (None if scale is None else pytest.approx(0.8 * scale))
    assert (scale is None) == (f"{path}: its header tells no time step in seconds" in volume.notes)


@pytest.mark.parametrize("step", [0.0, -1.5, np.nan, np.inf])
def test_a_header_without_a_step_is_noted(step, tmp_path):
    """The frames are there; labels are written with the header as it is."""
    path = series(tmp_path / "a.nii.gz", random_image((*SHAPE, T)), step)
    volume = load(path, over_time=True)
    assert volume.grid.time_step is None and volume.notes == (f"{path}: its header tells no time step in seconds",)
    volume.save_labels(np.zeros((*SHAPE, T), np.uint8), tmp_path / "out.nii.gz")
    source, written = (nibabel.load(p).header for p in (path, tmp_path / "out.nii.gz"))
    np.testing.assert_array_equal(written["pixdim"][4], source["pixdim"][4])
    assert written.get_xyzt_units() == source.get_xyzt_units()


def test_labels_are_written_as_they_were_read(moving, tmp_path):
    """From RAS axes back to the file's, with its affine, codes and time step."""
    volume, out = Volume.read(moving), tmp_path / "out" / "a.nii.gz"
    prepared = Prepare([SCALE] * 2)(volume)
    assert volume.onto(prepared["image"]) is None
    volume.save_labels(volume.from_ras(prepared["label"].as_tensor()[0]), out)
    written, source = nibabel.load(out), nibabel.load(moving.images[0])
    np.testing.assert_array_equal(written.dataobj, nibabel.load(moving.label).dataobj)
    assert written.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(written.affine, source.affine)
    for key in ("pixdim", "xyzt_units", "sform_code", "qform_code", "srow_x", "quatern_b"):
        np.testing.assert_array_equal(written.header[key], source.header[key])
    with pytest.raises(ValueError, match=r"\(9, 7, 11, 2\)"):
        volume.save_labels(np.zeros((*SHAPE, T - 1), np.uint8), tmp_path / "wrong.nii.gz")


def test_the_grid_of_resampled_series(moving):
    """Frames are not resampled: their axis keeps its scale of 1."""
    volume = Volume.read(moving)
    shape, matrix = volume.onto(Prepare([SCALE] * 2, [2.0, 2.0, 2.0])(volume)["image"])
    assert shape == (T, *SHAPE) and matrix.shape == (5, 5)
    np.testing.assert_array_equal(matrix[0], [1, 0, 0, 0, 0])
    np.testing.assert_allclose(np.diag(matrix)[1:4], np.array([1.5, 2, 3]) / 2, rtol=1e-5)


# -------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("patch", [(5, 4, 6), (12, 9, 11), (20, 20, 20)])
def test_padding_is_that_of_monai(moving, tmp_path, patch):
    image = Volume.read(frame_of(moving, 0, tmp_path)).image
    expected, result = SpatialPad(patch)(image), padded(image, patch)
    assert torch.equal(result.as_tensor(), expected.as_tensor())
    torch.testing.assert_close(result.affine, expected.affine, check_dtype=False)


def test_crops_of_series(moving):
    """Windows of frames and space; a series that is too short is padded with empty frames."""
    (data,) = cached_volumes([moving], Prepare([SCALE] * 2), 3, (T + 2, 5, 4, 12))
    assert data["image"].shape == (2, T + 2, 9, 7, 12) and data["label"].dtype == torch.uint8
    frames = data["label"].as_tensor()[0].flatten(1).any(1)
    assert frames.tolist() == [False, True, True, True, False]
    for number in range(5):
        image, label, _ = Crops([data], (T, 5, 4, 6), 1, 1.0, 0)[number]
        assert type(image) is torch.Tensor and image.shape == (2, T, 5, 4, 6)
        assert label.shape == (1, T, 5, 4, 6) and label.any()


def test_a_cache_tells_series_from_channels(moving, tmp_path):
    case = replace(moving, images=moving.images[:1])
    for _ in range(2):
        (data,) = cached_volumes([case], Prepare([SCALE]), 3, folder=str(tmp_path / "cache"))
        assert data["image"].shape == (1, T, *SHAPE)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_fingerprint_is_that_of_space(moving):
    result = fingerprint([moving], 3, 2)
    assert result.shapes.tolist() == [list(SHAPE)]
    np.testing.assert_allclose(result.spacings, [[1.5, 2, 3]], rtol=1e-5)
    counts = np.bincount(random_label((*SHAPE, T)).ravel())
    assert result.voxels.tolist() == counts.tolist() and result.values.shape == (2, counts[1:].sum())


@pytest.mark.parametrize("name", ["move", "blur", "brightness", "low", "mirror"])
def test_all_frames_are_augmented_alike(name, monkeypatch):
    """As the same frame would be by itself; only noise is drawn for each."""
    for key in PROBABILITIES:
        monkeypatch.setitem(PROBABILITIES, key, 0.7 if key == name else 0.0)
    image, label = torch.randn(5, 2, T, 9, 7, 6), torch.randint(0, 3, (5, 1, T, 9, 7, 6))
    moves = {"spacing": (1.0, 1.0, 2.0), "shift": int(name == "move"), "turn": 0.7 * (name == "move")}
    seed = torch.Generator().manual_seed
    after, labels = Augment((1, 3), **moves)(image, label, seed(1))
    assert not torch.equal(after, image) and after.shape == image.shape
    assert torch.equal(labels, label) == (name not in ("move", "mirror"))
    for t in range(T):
        one, its_label = Augment((0, 2), **moves)(image[:, :, t], label[:, :, t], seed(1))
        torch.testing.assert_close(after[:, :, t], one, rtol=0, atol=2e-6)
        assert torch.equal(labels[:, :, t], its_label)


def test_all_of_the_augmentation_on_series():
    """Repeatable, finite; frames keep their order unless the first axis is mirrored."""
    frames = torch.arange(T).view(1, 1, T, 1, 1, 1)
    image, label = torch.randn(8, 2, T, 9, 7, 6) + frames * 10, frames.expand(8, 1, T, 9, 7, 6)
    for flips, orders in ((), {(0, 1, 2)}), ((0,), {(0, 1, 2), (2, 1, 0)}):
        augment = Augment(flips, turn=1.0)
        one, two = (augment(image, label, torch.Generator().manual_seed(2)) for _ in range(2))
        assert torch.equal(one[0], two[0]) and one[0].isfinite().all()
        assert {tuple(order) for order in one[1][:, 0, :, 0, 0, 0].tolist()} == orders
        assert {tuple(o) for o in one[0].mean((1, 3, 4, 5)).argsort(1).tolist()} == orders


def test_a_case_keeps_its_name_as_a_series():
    """Also one that was changed to a valid file name: it is not changed twice."""
    case = Case("a/" + 300 * "b", (Path("image.nii.gz"),), None)
    over_time = case.as_series(True)
    assert over_time.over_time and not case.over_time
    assert over_time.name == case.name != "a/" + 300 * "b"

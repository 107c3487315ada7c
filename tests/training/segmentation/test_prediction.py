"""Predict: labels lie on their voxels; every option of it; DICOM of an archive. (Broken files: test_broken_volumes.)"""

from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
import torch
import yaml
from scipy import ndimage

from ndlightnet import NDLightUNet
from tests.data.volume.files import AFFINE, HU, random_image, write, write_object, write_series
from tests.training.segmentation.conftest import units

SHAPE = (13, 9, 11)
RAS = np.diag([2.0, 2, 3, 1])  # axes as in RAS


@pytest.fixture
def labels_of(predict, tmp_path, monkeypatch) -> Callable[..., np.ndarray]:
    """labels_of(file, *options): what is predicted for it, in the file's index order. No picture of it is drawn."""
    monkeypatch.setattr("ndlightnet.training.segmentation.segmentation_task.save_case", lambda *_: None)

    def run(file: Path, *more: str) -> np.ndarray:
        predict(file, *more).well()
        written = tmp_path / "out" / "predictions" / (file.name.split(".")[0] + ".nii.gz")
        return np.asarray(nibabel.load(written).dataobj)

    return run


WINDOWS = ("--model.window=[5,8,4]", "--model.overlap=0.25")


@pytest.mark.parametrize("order, more", [((0, 1, 2, 3), ()), ((2, 0, 1, 3), ()), ((0, 1, 2, 3), WINDOWS)])
def test_prediction_lies_on_its_voxels(labels_of, tmp_path, network, order, more):
    """A "network" that says 1 above 150: the file's own threshold, whatever way the file lies, also in windows, whose
    borders do not matter to a network without reach. All of several components stay."""
    voxels, shapes = random_image(SHAPE), []
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE[:, order])
    network(lambda x: shapes.extend([x.shape[2:]] * len(x)) or x)
    np.testing.assert_array_equal(labels_of(file, units(mean=150), *more), voxels > 150)
    assert ndimage.label(voxels > 150, np.ones((3, 3, 3)))[1] > 1
    assert not more or (set(shapes) == {(5, 8, 4)} and len(shapes) > 8)


@pytest.mark.parametrize("spacing", [(1.0, 2.5, 4.0), (2.0, 1.0, 1.3)])
def test_prediction_lies_on_its_voxels_through_another_spacing(labels_of, tmp_path, network, spacing):
    """A ramp, which linear interpolation there and back leaves as it is, but where a grid's border goes on: there it
    may be off by what it climbs along one cell of the coarser grid."""
    slope = np.array([3.0, -5.0, 7.0])  # per voxel of the file
    voxels = np.einsum("i,ixyz->xyz", slope, np.indices(SHAPE)).astype(np.float32)
    limit = float(np.median(voxels)) + 0.4
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE)
    network(lambda x: x)
    labels = labels_of(file, units(mean=limit), f"--data.init_args.spacing={list(spacing)}") == 1
    edges = np.linalg.norm(AFFINE[:3, :3], axis=0)
    cells = np.maximum(1, np.array(spacing) / edges)  # of the coarser grid, in voxels of the file
    places = np.moveaxis(np.indices(SHAPE), 0, -1)
    inside = ((places >= cells) & (places <= np.array(SHAPE) - 1 - cells)).all(-1)
    assert inside.sum() > 100
    # inside all that is left is the rounding of float32, of values up to 200: below 0.01
    assert (np.abs(voxels - limit) > 0.01).all()
    np.testing.assert_array_equal(labels[inside], (voxels > limit)[inside])
    sure = np.abs(voxels - limit) > np.abs(slope) @ cells
    assert 0.3 < sure.mean() < 1
    np.testing.assert_array_equal(labels[sure], (voxels > limit)[sure])


def test_only_the_largest_component_stays(labels_of, tmp_path, network):
    voxels = np.zeros(SHAPE, np.float32)
    voxels[1:4, 1:4, 1:4] = voxels[8:12, 3:8, 5:9] = voxels[5, 1, 9] = 1
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE)
    network(lambda x: x - 0.5)
    voxels[:8] = 0
    np.testing.assert_array_equal(labels_of(file, units(), "--model.largest=true"), voxels)


def test_mirrored_copies_count_as_much(labels_of, tmp_path, network):
    """A network that adds up from one side; its mean over the sides, in float64."""
    voxels = random_image(SHAPE) - 100
    file = write(tmp_path / "a.nii.gz", voxels, RAS)
    network(lambda x: x.cumsum(2) + x.roll(1, 3))
    flipped = [(axes, np.flip(voxels.astype(float), axes)) for axes in [(), (0,), (1,), (0, 1)]]
    ways = [np.flip(x.cumsum(0) + np.roll(x, 1, 1), axes) for axes, x in flipped]
    mean = np.mean(ways, axis=0)
    sure = np.abs(mean) > 1e-2  # sums of 13 values around 50, in float32: off by 1e-4 at most
    assert sure.mean() > 0.99 and ((ways[0] > 0) != (mean > 0))[sure].any()
    labels = labels_of(file, units(), "--model.mirror_axes=[0,1]")
    np.testing.assert_array_equal(labels[sure], (mean > 0)[sure])


def test_an_ensemble_is_the_mean_of_its_networks(labels_of, checkpoints, tmp_path):
    voxels = random_image(SHAPE)
    file = write(tmp_path / "a.nii.gz", voxels, RAS)
    labels = labels_of(file, units(mean=100.0, deviation=50.0), f"--model.ensemble=['{checkpoints[1]}']")
    config = yaml.safe_load((checkpoints[0].parents[1] / "config.yaml").read_text())
    arguments = config["model"]["net"]["init_args"]
    arguments.pop("mixer")  # the default
    logits = []
    for checkpoint in checkpoints:
        net = NDLightUNet(**arguments).double().eval()
        saved = torch.load(checkpoint, weights_only=True)["state_dict"]
        net.load_state_dict({key.removeprefix("net."): value for key, value in saved.items()})
        x = (torch.from_numpy(voxels).double() - 100) / 50
        with torch.no_grad():
            logits.append(net(x[None, None])[0])
    mean = (logits[0] + logits[1]) / 2
    sure = ((mean[1] - mean[0]).abs() > 1e-4 * mean.abs().max()).numpy()
    assert sure.mean() > 0.98
    np.testing.assert_array_equal(labels[sure], mean.argmax(0).numpy()[sure])
    # neither of them alone would have passed
    assert all((one.argmax(0).numpy() != mean.argmax(0).numpy())[sure].any() for one in logits)


def test_errors_and_notes_of_single_cases(predict, tmp_path, network):
    """A network that gives no numbers and a wrong number of channels spoil one case each; what was decided of another
    is printed."""
    good, nan = (write(tmp_path / "in" / f"{n}.nii.gz", random_image(seed=n) + 100 * n) for n in (0, 5))
    two, some = write(tmp_path / "in" / "two.nii", random_image((9, 7, 11, 2))), random_image(SHAPE)
    some[0, :2, 3] = np.nan
    holes = write(tmp_path / "in" / "some_nan.nii", some)
    network(lambda x: torch.where(x.mean() > 300, torch.nan, x))
    done = predict(tmp_path / "in", units())
    assert done.status == 1 and len(done.errors) == 2
    assert f"error: {two}: 2 channels, the network was trained on 1" in done.errors
    assert [line for line in done.errors if line.startswith(f"error: {nan}: ")]
    assert [line for line in done.notes if line.startswith(f"note: {holes}: 2 voxels are NaN")]
    results = {path.name for path in (tmp_path / "out" / "predictions").iterdir()}
    files = {f"{path.name.split('.')[0]}.{end}" for path in (good, holes) for end in ("nii.gz", "png")}
    assert results == {*files, "cases.csv", "index.html"}


@pytest.mark.slow
def test_an_export_of_an_archive(predict, tmp_path, network):
    """Three series of one patient, two levels down, in files without an ending, beside NIfTI; other objects. Those of
    one modality are predicted."""
    highdicom = pytest.importorskip("highdicom")
    write(tmp_path / "in" / "nifti.nii.gz", random_image())
    study = tmp_path / "in" / "patient" / "study"
    for number, (kind, folder) in enumerate([("CT", "a"), ("CT", "b"), ("MR", "b")], 1):
        tags = {"PatientID": "P 7", "Modality": kind, "SeriesNumber": number}
        for file in write_series(study / folder, HU + 100 * number, **tags).glob("*.dcm"):
            file.rename(file.with_name(f"{number}-{file.stem}"))
    write_object(study / "c" / "structures.dcm", "RTSTRUCT")
    write_object(study / "d" / "segments.dcm", "SEG")
    network(lambda x: x)
    done = predict(tmp_path / "in", units(mean=200), "--model.dicom_seg=true", "--data.init_args.modality=CT").well()
    names, out = ["P-7_CT_1", "P-7_CT_2"], tmp_path / "out" / "predictions"
    assert sorted(path.name for path in out.glob("*.nii.gz")) == [f"{n}.nii.gz" for n in (*names, "nifti")]
    assert sorted(path.name for path in out.glob("*.dcm")) == [f"{n}.dcm" for n in names]
    for number, name in enumerate(names, 1):
        labels = np.asarray(nibabel.load(out / f"{name}.nii.gz").dataobj)
        np.testing.assert_array_equal(labels, HU + 100 * number > 200)
        segments = pydicom.dcmread(out / f"{name}.dcm")
        study_of = {pydicom.dcmread(file).StudyInstanceUID for file in study.glob(f"*/{number}-*")}
        assert {segments.StudyInstanceUID} == study_of
        written = highdicom.seg.segread(out / f"{name}.dcm")
        assert written.get_segment_description(1).SegmentLabel == "cube"
        assert written.pixel_array.sum() == labels.sum()
    (note,) = done.notes
    assert note.startswith(f"note: {tmp_path}/in: DICOM objects are left out: 1 MR series, 1 RTSTRUCT, ")
    page = (out / "index.html").read_text()
    assert page.count("<img") == len(names) + 1

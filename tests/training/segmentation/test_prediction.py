"""Predict: a folder as hospitals have them; labels lie on their voxels; every option of it."""

import csv
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
import torch
import yaml
from torch import Tensor

from ndlightnet import NDLightUNet
from tests.data.volume.files import AFFINE, HU, broken_image, random_image, write, write_object, write_series

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # x to the left, y to the back, as DICOM and ITK have it
TURN = np.array([[0.8, -0.6, 0], [0.6, 0.8, 0], [0, 0, 1.0]])
SHAPE = (13, 9, 11)
CLASSES = "--model.net.init_args.out_channels=2"


@pytest.fixture
def predict(segment, checkpoints, tmp_path) -> Callable[..., object]:
    """predict(input, *options): how it ended; results are in tmp_path/out/predictions."""
    common = (CLASSES, f"--trainer.default_root_dir={tmp_path}/out", "--data.init_args.root=/gone")
    return lambda given, *more: segment(
        "predict", *common, f"--ckpt_path={checkpoints[0]}", f"--data.init_args.input={given}", *more
    )


@pytest.fixture
def labels_of(predict, tmp_path) -> Callable[..., np.ndarray]:
    """labels_of(file, *options): what is predicted for it, in the file's index order."""

    def run(file: Path, *more: str) -> np.ndarray:
        done = predict(file, *more)
        assert (done.status, done.errors) == (0, []), done.err[-2000:]
        written = tmp_path / "out" / "predictions" / (file.name.split(".")[0] + ".nii.gz")
        return np.asarray(nibabel.load(written).dataobj)

    return run


def network(monkeypatch, function: Callable[[Tensor], Tensor]) -> None:
    """In place of the trained one: class 1 where function(x) is above 0."""

    def forward(net: NDLightUNet, x: Tensor) -> Tensor:
        value = function(x)
        return torch.cat([-value, value], 1)

    monkeypatch.setattr(NDLightUNet, "forward", forward)


def units(low: float = -1e6, high: float = 1e6, mean: float = 0.0, deviation: float = 1.0) -> str:
    """Values reach the network as (x - mean) / deviation."""
    numbers = {"low": low, "high": high, "mean": mean, "deviation": deviation}
    return f"--data.init_args.intensities={[numbers]}"


def clinic(folder: Path) -> dict[str, np.ndarray]:
    """14 cases that can be predicted, with their affines as other libraries have them."""
    affines = {}
    turned = AFFINE[:, [2, 0, 1, 3]]  # another order of the axes
    for number in range(8):
        affine = [AFFINE, turned, np.diag([1.0, 1, 2, 1]), np.diag([-1.0, 1, -3, 1])][number % 4]
        path = write(folder / f"nifti{number}.nii.gz", random_image(seed=number), affine)
        affines[path.name] = nibabel.load(path).affine
    voxels = random_image()
    voxels[0, :2, 3] = np.nan
    path = write(folder / "some_nan.nii", voxels)
    affines[path.name] = nibabel.load(path).affine
    path = write(folder / "short.nii", random_image().astype(np.int16))
    affines[path.name] = nibabel.load(path).affine
    for ending in ("nrrd", "mha"):
        volume = sitk.GetImageFromArray(random_image((7, 8, 9)))
        volume.SetSpacing((0.5, 1.25, 3.0))
        volume.SetOrigin((-10.0, 20.0, 30.5))
        volume.SetDirection(TURN.ravel().tolist())
        sitk.WriteImage(volume, str(folder / f"itk_{ending}.{ending}"))
        affine = np.eye(4)
        affine[:3, :3] = TURN * (0.5, 1.25, 3.0)
        affine[:3, 3] = (-10.0, 20.0, 30.5)
        affines[f"itk_{ending}.{ending}"] = LPS @ affine
    for name, gap in (("series_a", 2.5), ("series_b", 4.0)):
        write_series(folder / name, HU, gap)
        affines[name] = LPS @ np.array([[0.75, 0, 0, -30], [0, 1.25, 0, -20], [0, 0, gap, 100], [0, 0, 0, 1.0]])
    return affines


@pytest.mark.slow
def test_a_folder_with_broken_files(predict, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out" / "predictions"
    affines = clinic(folder)
    broken = {"cut": "truncated", "text": "text", "zero": "empty", "five_d": "5-D", "nan": "nan"}
    named = {f"{name}.nii.gz" for name in broken} | {"gap"}
    for name, how in broken.items():
        broken_image(write(folder / f"{name}.nii.gz", random_image()), how)
    mostly = np.full((9, 7, 11), np.nan, np.float32)
    mostly[:4] = 1
    write(folder / "nan.nii.gz", mostly)
    slices = sorted(write_series(folder / "gap", HU).iterdir())
    slices[len(slices) // 2].unlink()
    done = predict(folder)
    assert done.status == 1 and "Traceback" not in done.err
    assert len(done.errors) == 6
    assert {line.split(": ")[1] for line in done.errors} == {str(folder / name) for name in named}
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert any(line.startswith(f"note: {folder}/some_nan.nii: 2 voxels are NaN") for line in notes)
    names = {name: name.split(".")[0] for name in affines}
    assert len(names) == 14
    left = sorted(path.name for path in out.iterdir())
    wanted = [f"{name}.{end}" for name in names.values() for end in ("nii.gz", "png")]
    assert left == sorted([*wanted, "cases.csv", "index.html"])
    for name, affine in affines.items():
        written = nibabel.load(out / f"{names[name]}.nii.gz")
        np.testing.assert_allclose(written.affine, affine, atol=1e-4)
        assert written.get_data_dtype() == np.uint8
    with (out / "cases.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["case"] for line in lines] == sorted(names.values())
    assert {(line["class"], line["dice"]) for line in lines} == {("cube", "")}
    for line in lines:
        labels = nibabel.load(out / f"{line['case']}.nii.gz")
        ml = np.asarray(labels.dataobj).sum() * abs(np.linalg.det(labels.affine)) / 1000
        assert float(line["volume_ml"]) == pytest.approx(ml, rel=1e-4, abs=1e-6)
    page = (out / "index.html").read_text()
    assert all(f'src="{name}.png"' in page for name in names.values())
    assert all(str(folder / name) in page for name in named)


def test_wrong_number_of_channels(predict, tmp_path):
    file = write(tmp_path / "two.nii.gz", random_image((9, 7, 11, 2)))
    done = predict(file)
    assert done.status == 1
    assert done.errors == [f"error: {file}: 2 channels, the network was trained on 1"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3)])
def test_prediction_lies_on_its_voxels(labels_of, tmp_path, monkeypatch, order):
    """A "network" that says 1 above 100: the file's own threshold, whatever way the file lies."""
    voxels = random_image(SHAPE)
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE[:, order])
    network(monkeypatch, lambda x: x)
    np.testing.assert_array_equal(labels_of(file, units(mean=100)), voxels > 100)


@pytest.mark.parametrize("spacing", [(1.0, 2.5, 4.0), (2.0, 1.0, 1.3)])
def test_prediction_lies_on_its_voxels_through_another_spacing(labels_of, tmp_path, monkeypatch, spacing):
    """A ramp, which linear interpolation there and back leaves as it is, but where a grid's border goes on: there it
    may be off by what it climbs along one cell of the coarser grid."""
    slope = np.array([3.0, -5.0, 7.0])  # per voxel of the file
    voxels = np.einsum("i,ixyz->xyz", slope, np.indices(SHAPE)).astype(np.float32)
    limit = float(np.median(voxels)) + 0.4
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE)
    network(monkeypatch, lambda x: x)
    given = f"--data.init_args.spacing={list(spacing)}"
    found = labels_of(file, units(mean=limit), given) == 1
    edges = np.linalg.norm(AFFINE[:3, :3], axis=0)
    cells = np.maximum(1, np.array(spacing) / edges)  # of the coarser grid, in voxels of the file
    places = np.moveaxis(np.indices(SHAPE), 0, -1)
    inside = ((places >= cells) & (places <= np.array(SHAPE) - 1 - cells)).all(-1)
    assert inside.sum() > 100
    # inside all that is left is the rounding of float32, of values up to 200: below 0.01
    assert (np.abs(voxels - limit) > 0.01).all()
    np.testing.assert_array_equal(found[inside], (voxels > limit)[inside])
    sure = np.abs(voxels - limit) > np.abs(slope) @ cells
    assert 0.3 < sure.mean() < 1
    np.testing.assert_array_equal(found[sure], (voxels > limit)[sure])


@pytest.mark.slow
def test_only_the_largest_component_stays(labels_of, tmp_path, monkeypatch):
    voxels = np.zeros(SHAPE, np.float32)
    voxels[1:4, 1:4, 1:4] = voxels[8:12, 3:8, 5:9] = voxels[5, 1, 9] = 1
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE)
    network(monkeypatch, lambda x: x - 0.5)
    assert labels_of(file, units()).sum() == 27 + 80 + 1
    kept = labels_of(file, units(), "--model.largest=true")
    wanted = np.zeros(SHAPE, bool)
    wanted[8:12, 3:8, 5:9] = True
    np.testing.assert_array_equal(kept, wanted)


@pytest.mark.slow
def test_mirrored_copies_count_as_much(labels_of, tmp_path, monkeypatch):
    """A network that adds up from one side; its mean over the sides, in float64."""
    voxels = random_image(SHAPE) - 100
    file = write(tmp_path / "a.nii.gz", voxels, np.diag([2.0, 2, 3, 1]))  # axes as in RAS
    network(monkeypatch, lambda x: x.cumsum(2) + x.roll(1, 3))

    def one(x: np.ndarray) -> np.ndarray:
        return x.cumsum(0) + np.roll(x, 1, 1)

    x = voxels.astype(float)
    flips = [(), (0,), (1,), (0, 1)]
    mean = np.mean([np.flip(one(np.flip(x, axes)), axes) for axes in flips], axis=0)
    sure = np.abs(mean) > 1e-2  # sums of 13 values around 50, in float32: off by 1e-4 at most
    assert sure.mean() > 0.99
    found = labels_of(file, units(), "--model.mirror_axes=[0,1]")
    np.testing.assert_array_equal(found[sure], (mean > 0)[sure])
    assert (labels_of(file, units())[sure] != (mean > 0)[sure]).any()


def test_an_ensemble_is_the_mean_of_its_networks(labels_of, checkpoints, tmp_path, segment):
    voxels = random_image(SHAPE)
    file = write(tmp_path / "a.nii.gz", voxels, np.diag([2.0, 2, 3, 1]))
    scale = (100.0, 50.0)
    found = labels_of(file, units(-1e6, 1e6, *scale), f"--model.ensemble=['{checkpoints[1]}']")
    config = yaml.safe_load((checkpoints[0].parents[1] / "config.yaml").read_text())
    asked = config["model"]["net"]["init_args"]
    asked.pop("mixer")  # the default
    logits = []
    for checkpoint in checkpoints:
        net = NDLightUNet(**asked).double().eval()
        saved = torch.load(checkpoint, weights_only=True)["state_dict"]
        net.load_state_dict({key.removeprefix("net."): value for key, value in saved.items()})
        x = (torch.from_numpy(voxels).double() - scale[0]) / scale[1]
        with torch.no_grad():
            logits.append(net(x[None, None])[0])
    mean = (logits[0] + logits[1]) / 2
    margin = (mean[1] - mean[0]).abs().numpy()
    sure = margin > 1e-4 * mean.abs().max().item()
    assert sure.mean() > 0.98
    np.testing.assert_array_equal(found[sure], mean.argmax(0).numpy()[sure])
    single = [(one.argmax(0).numpy() != mean.argmax(0).numpy())[sure].any() for one in logits]
    assert all(single)  # neither of them alone would have passed


def test_windows_give_what_the_whole_gives(labels_of, tmp_path, monkeypatch):
    """Of a network without reach, whose windows' borders do not matter."""
    seen = []
    voxels = random_image(SHAPE)
    file = write(tmp_path / "a.nii.gz", voxels, AFFINE)
    network(monkeypatch, lambda x: seen.extend([x.shape[2:]] * len(x)) or x)
    found = labels_of(file, units(mean=100), "--model.window=[5,8,4]", "--model.overlap=0.25")
    np.testing.assert_array_equal(found, voxels > 100)
    assert set(seen) == {(5, 8, 4)} and len(seen) > 8


def test_a_network_that_gives_no_numbers_spoils_one_case(predict, tmp_path, monkeypatch):
    files = [write(tmp_path / "in" / f"{n}.nii.gz", random_image(seed=n) + 100 * n) for n in (0, 5)]
    network(monkeypatch, lambda x: torch.where(x.mean() > 300, torch.nan, x))
    done = predict(tmp_path / "in", units())
    assert done.status == 1
    assert len(done.errors) == 1 and done.errors[0].startswith(f"error: {files[1]}: ")
    left = {path.name for path in (tmp_path / "out" / "predictions").iterdir()}
    assert left == {"0.nii.gz", "0.png", "cases.csv", "index.html"}


@pytest.mark.slow
def test_a_dicom_seg_for_what_is_dicom(predict, tmp_path, monkeypatch):
    highdicom = pytest.importorskip("highdicom")
    write_series(tmp_path / "in" / "series", HU)
    write(tmp_path / "in" / "nifti.nii.gz", random_image())
    network(monkeypatch, lambda x: x)
    done = predict(tmp_path / "in", units(mean=200), "--model.dicom_seg=true")
    assert (done.status, done.errors) == (0, [])
    out = tmp_path / "out" / "predictions"
    assert [path.name for path in out.glob("*.dcm")] == ["series.dcm"]
    found = highdicom.seg.segread(out / "series.dcm")
    assert found.get_segment_description(1).SegmentLabel == "cube"
    assert found.pixel_array.sum() == (HU > 200).sum()


@pytest.mark.slow
@pytest.mark.parametrize("modality, left", [(None, ""), ("CT", "1 MR series, ")])
def test_an_export_of_an_archive(predict, tmp_path, monkeypatch, modality, left):
    """Three series of one patient, two levels down, in files without an ending; other objects."""
    study = tmp_path / "in" / "patient" / "study"
    for number, (kind, folder) in enumerate([("CT", "a"), ("CT", "b"), ("MR", "b")], 1):
        tags = {"PatientID": "P 7", "Modality": kind, "SeriesNumber": number}
        for file in write_series(study / folder, HU + 100 * number, **tags).glob("*.dcm"):
            file.rename(file.with_name(f"{number}-{file.stem}"))
    write_object(study / "c" / "structures.dcm", "RTSTRUCT")
    write_object(study / "d" / "segments.dcm", "SEG")
    network(monkeypatch, lambda x: x)
    given = [] if modality is None else [f"--data.init_args.modality={modality}"]
    done = predict(tmp_path / "in", units(mean=200), "--model.dicom_seg=true", *given)
    assert (done.status, done.errors) == (0, []), done.err[-2000:]
    names = ["P-7_CT_1", "P-7_CT_2", "P-7_MR_3"][: 3 if modality is None else 2]
    out = tmp_path / "out" / "predictions"
    assert sorted(path.name for path in out.glob("*.nii.gz")) == [f"{n}.nii.gz" for n in names]
    for number, name in enumerate(names, 1):
        labels = np.asarray(nibabel.load(out / f"{name}.nii.gz").dataobj)
        np.testing.assert_array_equal(labels, HU + 100 * number > 200)
        segments = pydicom.dcmread(out / f"{name}.dcm")
        study_of = {pydicom.dcmread(file).StudyInstanceUID for file in study.glob(f"*/{number}-*")}
        assert {segments.StudyInstanceUID} == study_of
    (note,) = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert note.startswith(f"note: {tmp_path}/in: DICOM objects are left out: {left}1 RTSTRUCT, ")
    page = (out / "index.html").read_text()
    assert page.count("<img") == len(names)

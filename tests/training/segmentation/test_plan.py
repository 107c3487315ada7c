"""A plan from data: its rules against examples by hand, and the file that it writes."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from ndlightnet import NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.fingerprint import Fingerprint
from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.core.cli import task_cli
from ndlightnet.training.peers import DynUNet
from ndlightnet.training.segmentation.plan import config_of, intensity_of, patch_of, plan, step_bytes, target_spacing

module = sys.modules[plan.__module__]
CROP = (64, 48, 40)
FINE, THICK = [2, 2, 2], [2, 2, 1]
# shape, mm: patch, strides; the cube has 192 cells of the mean edge
BY_HAND = {
    "isotropic": ((300, 280, 260), (1, 1, 1), [192, 192, 192], [FINE] * 5),
    # mean edge 1.348: 370 cells in the plane. 0.7, 1.4: 5 mm are more than twice that; 2.8: they
    # are not any more; 24 slices are halved twice, 6 are too few for a third time
    "thick slices": ((512, 512, 24), (0.7, 0.7, 5), [384, 384, 24], [THICK, THICK, FINE, FINE, THICK]),
    "tiny": ((35, 50, 36), (1, 1, 1), [40, 56, 40], [FINE] * 3),  # to 5 x 7 x 5 cells
    "one slice": ((320, 320, 1), (0.8, 0.8, 8), [320, 320, 1], [THICK] * 5),
    "a few voxels": ((7, 3, 5), (1, 1, 1), [7, 3, 5], []),
    # scanners' edges differ in the third digit; one voxel more is a step of 16 more
    "a hundredth less": ((63.96,) * 3, (1, 1, 1), [64] * 3, [FINE] * 4),
    "a hundredth more": ((64.04,) * 3, (1, 1, 1), [64] * 3, [FINE] * 4),
    "a voxel more": ((65,) * 3, (1, 1, 1), [80] * 3, [FINE] * 4),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_patch_and_strides_by_hand(name):
    shape, spacing, patch, strides = BY_HAND[name]
    assert patch_of(np.array(shape, float), np.array(spacing, float), lambda *_: True) == (patch, strides)


def test_patches_fit_the_memory_and_the_strides():
    rng, fitting = np.random.default_rng(0), 0
    for _ in range(200):
        shape = np.exp(rng.uniform(0, 6.5, 3)).round()
        spacing = np.exp(rng.uniform(-1, 2, 3))
        most = int(np.exp(rng.uniform(np.log(512), 16)))
        patch, strides = patch_of(shape, spacing, lambda patch, _, most=most: prod(patch) <= most)
        step = np.prod(np.array(strides or [[1, 1, 1]]), axis=0)
        assert not (np.array(patch) % step).any()
        assert (patch < shape + step).all()  # no more than padding
        assert prod(patch) <= most or max(patch) <= 8
        fitting += prod(patch) <= most
        coarsest = np.array(patch) // step
        assert ((coarsest >= 4) | (step == 1)).all()
        assert (coarsest <= 8).all() or len(strides) == 5 or not strides
        # cells become cubes: an axis is not halved while a finer one that can be is left behind
        for before in range(len(strides)):
            edge = spacing * np.prod(np.array(strides[:before] or [[1, 1, 1]]), axis=0)
            halved = edge[np.array(strides[before]) == 2]
            assert halved.max() < 2 * halved.min()
    assert fitting > 150


def test_target_spacing_by_hand():
    fine = [[0.7, 0.7, 5.0]] * 3 + [[0.7, 0.7, 2.0], [0.7, 0.7, 1.0]]
    shapes = np.array([[512, 512, 24]] * 5)
    # far coarser and far shorter: the tenth percentile of 1, 2, 5, 5, 5, at 0.4 of the way
    np.testing.assert_allclose(target_spacing(np.array(fine), shapes), (0.7, 0.7, 1.4))
    shapes[:, 2] = 200  # not three times shorter
    np.testing.assert_allclose(target_spacing(np.array(fine), shapes), (0.7, 0.7, 5.0))
    shapes[:, 2] = 24
    mild = np.array(fine) * (1, 1, 0.4)  # 2 mm against 0.7
    np.testing.assert_allclose(target_spacing(mild, shapes), (0.7, 0.7, 2.0))
    turned = target_spacing(np.array(fine)[:, [2, 0, 1]], shapes[:, [2, 0, 1]])
    np.testing.assert_allclose(turned, (1.4, 0.7, 0.7))


def test_intensities_by_hand():
    values = np.arange(1001, dtype=np.float32)  # percentiles 5 and 995, mean 500
    deviation = float(f"{np.sqrt((1001**2 - 1) / 12):.5g}")
    expected = {"low": 5.0, "high": 995.0, "mean": 500.0, "deviation": deviation}
    assert intensity_of("CT", values) == intensity_of("ct", values) == expected
    assert intensity_of("PET", values) == {**expected, "low": 0.0}
    assert intensity_of("T1", values) == {}
    assert intensity_of("CT", values[:0]) == intensity_of("CT", np.ones(9, np.float32)) == {}


# -------------------------------------------------------------------------------------- memory


def most_at_once(make: Callable[[], nn.Module], shape) -> int:
    """What torch counts in a step in bf16, without the weights: forward, a loss of each output, backward.
    Of shapes alone, so that no workspace counts: those of a CPU without bf16 units are many times a GPU's."""
    with FakeTensorMode():
        net, x, tracker = make().train(), torch.zeros(shape), MemTracker()
        with tracker, torch.autocast("cpu", torch.bfloat16):
            outputs = net(x)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            sum(y.float().square().mean() for y in outputs).backward()
    peak: int = tracker.get_tracker_snapshot("peak")[x.device]["Total"]
    return peak - sum(p.nbytes for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, patch",
    [
        (lambda: NDLightUNet(3, 2, 3, size="S", strides=[FINE] * 3, deep_supervision=True), CROP),
        (lambda: DynUNet(3, 2, 3, [FINE] * 2), CROP),
        (lambda: NDLightUNet(4, 2, 5, widths=[8, 16], depths=[0, 1]), (5, 24, 20, 16)),
    ],
)
def test_memory_of_a_step_against_the_most_at_once(make, patch):
    """Counted on a smaller crop it is within a factor of two of what a step takes."""
    assert 0.5 < step_bytes(make(), 2, patch) / most_at_once(make, (1, 2, *patch)) < 2


def test_memory_grows_with_the_crop_alone():
    """Autocast's copies of 15 million weights are no part of a crop, however large it is."""
    net = nn.Sequential(nn.Conv3d(1, 4, 1), nn.Conv3d(4, 2048, 8, stride=8), nn.Linear(2, 2))
    assert sum(p.numel() for p in net.parameters()) > 4e6
    net.forward = lambda x: net[1](net[0](x))
    one = step_bytes(net, 1, (64, 32, 32))
    # in bf16: the input and what the first convolution gives, five numbers a cell
    assert one == pytest.approx(1.7 * 2 * 5 * 64 * 32 * 32, rel=0.01)
    assert step_bytes(net, 1, (128, 64, 96)) == pytest.approx(12 * one)


# -------------------------------------------------------------------------------------- config


def measured(shape=(64, 64, 64), spacing=(0.9765625, 0.9765625, 0.9765625), cases=40, channels=1):
    values = np.random.default_rng(0).normal(50, 20, (channels, 500)).astype(np.float32)
    return Fingerprint(np.array([shape] * cases), np.array([spacing] * cases), values, np.array([9, 9]))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crop takes 1,000 bytes a cell; nothing is run to count it."""
    monkeypatch.setattr(module, "step_bytes", lambda net, channels, patch: 1000.0 * prod(patch))


def config(fingerprint, labels=("background", "liver"), memory=8e9, frames=None):
    """The arguments of the model and those of its data."""
    return config_of(fingerprint, labels, ("CT",), "ndlightnet.NDLightUNet", "S", memory, frames)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    "cases, memory, batch", [(40, 200, 2), (200, 200, 10), (4, 200, 2), (200, 5.5 * 0.262 + 0.253, 5)]
)
def test_batches_are_5_percent_of_the_patches_that_fit(cases, memory, batch):
    """At least two. A crop takes 0.262 GB, 15.8 million weights and what goes with them 0.252 GB."""
    assert config(measured(cases=cases), memory=memory * 1e9)[1]["batch_size"] == batch


@pytest.mark.slow
@pytest.mark.usefixtures("cheap")
def test_a_smaller_card_gets_a_smaller_patch():
    large, small = (config(measured((160, 160, 160)), memory=gb * 1e9) for gb in (24, 6))
    patches = [prod(data["patch"]) for _, data in (large, small)]
    assert patches[1] < patches[0] == 160**3
    assert 2 * 1000 * patches[1] < 6e9 - 16 * 4e6  # S has more than 4 million weights
    with pytest.raises(DataError, match=r"^memory: 0.004 GB, expected enough.*2 crops"):
        config(measured(), memory=0.004e9)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    "names, axes", [(("liver", "bright spot"), [0, 1, 2]), (("lung_left",), [1, 2]), (("Kidney (Right)",), [1, 2])]
)
def test_left_and_right_are_not_mirrored(names, axes):
    assert config(measured(), ("background", *names))[1]["augment"] == {"flip_axes": axes}


@pytest.mark.usefixtures("cheap")
def test_a_series_has_patches_of_frames():
    """Space is planned as that of volumes in the memory that the frames leave; time is not strided and not mirrored."""

    def arguments(memory):
        model, data = config(measured(), memory=memory, frames=10)
        assert data["patch"] == model["window"] and data["patch"][0] == 10
        assert data["augment"] == {"flip_axes": [1, 2, 3]} and len(data["spacing"]) == 3
        return data, model["net"]["init_args"]

    (large, net), (small, _) = arguments(24e9), arguments(5e9)
    assert large["patch"] == [10, 64, 64, 64] and large["batch_size"] == 2
    assert net["dims"] == 4 and net["strides"] == [[1, 2, 2, 2]] * 4
    assert prod(small["patch"]) * 2 * 1000 < 5e9 < prod(large["patch"]) * 2 * 1000


# ---------------------------------------------------------------------------------------- file


@pytest.fixture
def scans(tmp_path: Path, write_decathlon) -> Path:
    """Three volumes of CT and MR, of 12 x 10 x 8 voxels of 2 x 2 x 3 mm, whose second class occurs in none."""
    root = write_decathlon(tmp_path / "scans", channels=2)
    listing = json.loads((root / "dataset.json").read_text())
    listing["labels"] = {"0": "background", "1": "left cube", "2": "never"}
    listing["modality"]["1"] = "MR"
    (root / "dataset.json").write_text(json.dumps(listing))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("net, frames", [("NDLightUNet", None), ("training.peers.SegResNet", None), ("NDLightUNet", 2)])
def test_the_plan_is_a_config(scans, tmp_path, capsys, net, frames):
    options = {"net": f"ndlightnet.{net}", "size": "S", "memory": 4.0, "epochs": 80, "workers": 0, "frames": frames}
    for path in scans.rglob("*.nii.gz") if frames else ():
        volume = nibabel.load(path)
        voxels = np.stack([volume.get_fdata(dtype=np.float32)] * 3, -1)
        nibabel.save(nibabel.Nifti1Image(voxels, volume.affine), path)
    plan(str(scans), str(tmp_path / "out"), **options)
    file = tmp_path / "out" / "plan.yaml"
    text = capsys.readouterr().out
    assert "no training case has a voxel of 'never'" in text and str(file) in text
    config = yaml.safe_load(file.read_text())
    data = config["data"]["init_args"]
    time = [frames] if frames else []
    assert data["patch"] == [*time, 12, 10, 8] == config["model"]["window"] and data["spacing"] == [2, 2, 3]
    flips = [len(time) + axis for axis in (1, 2)]
    assert data["batch_size"] == 2 and data["augment"] == {"flip_axes": flips} and data["workers"] == 0
    assert config["trainer"]["default_root_dir"] == str(tmp_path / "out")
    assert list(data["intensities"][0]) == ["low", "high", "mean", "deviation"]
    assert abs(data["intensities"][0]["mean"] - 100) < 5 and data["intensities"][1] == {}
    cli = task_cli(SegmentationTask, VolumeData, ["--config", str(file)], run=False)
    assert cli.datamodule.augment.flip_axes == tuple(flips) and cli.trainer.max_epochs == 80
    cli.datamodule.setup("fit")
    image, label, _ = cli.datamodule.crops[0]
    assert image.shape == (2, *data["patch"]) and label.shape == (1, *data["patch"])
    cli.model.data = lambda: cli.datamodule
    cli.model.setup("fit")  # the network's channels and classes are those of the data
    out = cli.model.net.train()(image[None])
    first = out[0] if isinstance(out, list) else out
    assert first.shape == (1, 3, *data["patch"]) and first.isfinite().all()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"memory": 0.0}, "memory: 0.0, expected GB above 0"),
        ({"memory": 1e-4}, "memory: 0.0001 GB, expected enough for .* 2 crops"),
        ({"epochs": 0}, "epochs: 0, expected 1 or more"),
        ({"frames": 0}, "frames: 0, expected 1 or more"),
        ({"frames": 2}, "scans: frames=2, no file has a fourth axis of time"),
        ({"net": "nothing"}, "net: 'nothing', expected the path of a class"),
        ({"net": "ndlightnet.Nothing"}, "net: 'ndlightnet.Nothing', expected the path"),
        ({"net": "no.such"}, "net: 'no.such', expected the path"),
        ({"net": "print"}, "net: 'print', expected the path"),
        ({"net": "torch.nn.Conv3d"}, r"net: torch.nn.Conv3d, patch \[12, 10, 8\]: .*kernel_size"),
        ({"net": "ndlightnet.training.peers.DynUNet"}, r"DynUNet, patch \[12, 10, 8\]: .*expected 2 or more"),
        ({"out": "DIR/file/out"}, "DIR/file/out: cannot be written"),
        ({"root": "DIR/nowhere"}, "DIR/nowhere: no such folder"),
        ({"root": "DIR/none"}, "DIR/none: no training case with a label"),
    ],
)
@pytest.mark.usefixtures("cheap")
def test_what_cannot_be_planned(scans, tmp_path, options, words):
    (tmp_path / "file").write_text("")
    listing = json.loads((scans / "dataset.json").read_text())
    listing |= {"training": [], "test": [entry["image"] for entry in listing["training"]]}
    shutil.copytree(scans, tmp_path / "none")
    (tmp_path / "none" / "dataset.json").write_text(json.dumps(listing))
    options = {key: v.replace("DIR", str(tmp_path)) if isinstance(v, str) else v for key, v in options.items()}
    valid = {"root": str(scans), "out": str(tmp_path / "out"), "size": "S", "memory": 4.0}
    with pytest.raises(DataError, match=words.replace("DIR", re.escape(str(tmp_path)))) as caught:
        plan(**{**valid, **options})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*plan.yaml"))


def test_a_network_whose_module_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = r"^net: 'broken\.Net', cannot be imported \(.*no_such_package.*\)$"
    with pytest.raises(DataError, match=words):
        plan(str(tmp_path), net="broken.Net")

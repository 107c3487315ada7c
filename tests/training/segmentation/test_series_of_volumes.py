"""Series of volumes over time through fit, test and predict, by a network of four axes and frame by frame; their
measures and pictures; what does not fit together is one line."""

import json
from pathlib import Path

import matplotlib.image
import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from ndlightnet import NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.made.moving_phantoms import FRAMES, LABELS, make_moving_phantoms
from ndlightnet.models import FrameByFrame, FramesAsChannels
from ndlightnet.training.segmentation.bundle import bundle
from ndlightnet.training.segmentation.case_figure import save_case
from ndlightnet.training.segmentation.metrics import measure_case
from ndlightnet.training.segmentation.segmentation_task import _shrunk
from tests.training.conftest import fit_and_test, last

NET = "--model.net.init_args"
NAME = "moving_phantom_002.nii.gz"  # of the test case
# laid over the tests' config: crops of series, and a network of four axes
FOUR = (
    f"{NET}.dims=4",
    f"{NET}.out_channels=5",
    f"{NET}.strides=[[1,2,2,2]]",
    "--data.init_args.patch=[4,8,8,8]",
    "--data.init_args.augment.flip_axes=[1,2,3]",
    "--model.window=[5,24,24,24]",
    "--model.overlap=0.2",
)


@pytest.fixture(scope="module")
def moving(tmp_path_factory) -> Path:
    """Two series and a test case, whose axes run to the left and back: turning it back shows."""
    folder = tmp_path_factory.mktemp("moving") / "data"
    return make_moving_phantoms(folder, 2, 1, seed=2, progress=False)


@pytest.fixture(scope="module")
def run(moving, segment, tmp_path_factory) -> Path:
    """The folder of a finished fit, test and predict."""
    out = tmp_path_factory.mktemp("run")
    fit_and_test(segment, *FOUR, out=out, root=moving)
    series = {"input": moving / "imagesTs", "ckpt": last(out)}
    segment("predict", *FOUR, "--model.window=null", out=out, root=moving, **series).well()
    return out


@pytest.mark.slow
def test_labels_are_written_on_the_grid_of_the_series_and_measured(run, moving):
    """Dice over all frames, both as they are on disk."""
    source = nibabel.load(moving / "imagesTs" / NAME)
    assert source.affine[0, 0] < 0
    for kind in ("test", "predictions"):
        guess = nibabel.load(run / kind / NAME)
        assert guess.shape == source.shape and guess.shape[3] == FRAMES
        np.testing.assert_array_equal(guess.affine, source.affine)
        assert guess.header["pixdim"][4] == 0.5 and guess.header.get_xyzt_units() == ("mm", "sec")
        picture = matplotlib.image.imread(run / kind / "moving_phantom_002.png")
        assert picture.shape[0] > 200 and picture.shape[1] > 600 and picture.std() > 0.05
        assert 'src="moving_phantom_002.png"' in (run / kind / "index.html").read_text()
    a, b = (np.asarray(nibabel.load(path).dataobj) for path in (run / "test" / NAME, moving / "labelsTs" / NAME))
    dice = [2 * ((a == n) & (b == n)).sum() / ((a == n).sum() + (b == n).sum()) for n in range(1, len(LABELS))]
    metrics = json.loads((run / "metrics.json").read_text())
    np.testing.assert_allclose(list(metrics["dice"].values()), dice, atol=1e-5)
    assert tuple(metrics["dice"]) == LABELS[1:] and metrics["gflops"] > 0


def test_prediction_is_that_of_the_network(run, moving):
    """Oracle: the volume by nibabel, turned by hand, scaled, and the network at once."""
    source = nibabel.load(moving / "imagesTs" / NAME)
    image = np.asarray(source.dataobj, np.float32)[::-1, ::-1].transpose(3, 0, 1, 2).copy()
    low, high = np.percentile(image, (0.5, 99.5))
    clipped = image.clip(low, high)
    x = torch.from_numpy((clipped - clipped.mean()) / clipped.std()).float()
    sizes = {"widths": [4, 8], "convs": [1, 1], "depths": [0, 1], "strides": [(1, 2, 2, 2)]}
    net = NDLightUNet(4, 1, 5, **sizes, deep_supervision=True).eval()
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    net.load_state_dict({k[4:]: v for k, v in saved.items() if k.startswith("net.")})
    with torch.no_grad():
        guess = net(x[None, None])[0].argmax(0).numpy().transpose(1, 2, 3, 0)[::-1, ::-1]
    written = nibabel.load(run / "predictions" / NAME)
    assert (np.asarray(written.dataobj) == guess).mean() > 0.9999  # logits are equal up to rounding


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([f"{NET}.dims=3", f"{NET}.strides=[2]"], "model.net: dims=3, expected dims=4 for data.patch: [4, 8, 8, 8]"),
        (["--model.window=[8,8,8]"], "model.window: [8, 8, 8], expected 4 sizes"),
        (["--data.init_args.patch=[1,1,8,8,8]"], "data.patch: [1, 1, 8, 8, 8], "),
        (["--model.dicom_seg=true"], "model.dicom_seg: True, expected false"),
        ([f"{NET}.causal=true", f"{NET}.strides=[2]"], "strides=[2]: expected 1 along the first axis if causal=True"),
    ],
)
def test_what_does_not_fit_is_one_line(options, words, moving, segment, tmp_path):
    done = segment("fit", *FOUR, *options, out=tmp_path, root=moving)
    assert done.status and words in done.err, done.err[-2000:]


def test_a_bundle_of_a_series_is_refused(run, moving, tmp_path):
    files = [f"--ckpt_path={run}/checkpoints/last.ckpt", f"--out={tmp_path}/b"]
    with pytest.raises(DataError, match=r"expected 3 sizes: .* series over time"):
        bundle([f"--config={run}/config.yaml", *files])


def test_a_bad_series_is_listed_and_the_others_go_on(run, moving, segment, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    series = nibabel.load(moving / "imagesTs" / NAME)
    nibabel.save(series.slicer[..., :3], folder / "few.nii.gz")
    nibabel.save(series.slicer[..., 0], folder / "one.nii.gz")
    five = nibabel.Nifti1Image(np.zeros((4, 4, 4, 2, 2), np.float32), np.eye(4))
    nibabel.save(five, folder / "five.nii.gz")
    done = segment("predict", *FOUR, out=tmp_path / "out", ckpt=last(run), input=folder)
    assert done.status == 1 and len(done.errors) == 1, done.err
    assert "five.nii.gz: should have 3 axes (or 2, or 4 with channels or frames)" in done.errors[0]
    shapes = [nibabel.load(tmp_path / f"out/predictions/{n}.nii.gz").shape for n in ("few", "one")]
    assert shapes == [(*series.shape[:3], 3), series.shape[:3]]


# --------------------------------------------------------------------------------- frame by frame


def test_frame_by_frame_is_the_network_on_each_frame(close):
    net = NDLightUNet(3, 2, 4, widths=[4, 8], depths=[0, 1], deep_supervision=True)
    frames, x = FrameByFrame(net), torch.randn(2, 2, 3, 5, 6, 7)
    assert (frames.dims, frames.in_channels, frames.out_channels) == (4, 2, 4)
    y = frames.eval()(x)
    assert y.shape == (2, 4, 3, 5, 6, 7)
    for t in range(3):
        close(y[:, :, t], net(x[:, :, t]), 1e-5)
    (one,) = frames.train()(x)
    assert one.shape == y.shape
    plain = FrameByFrame(nn.Conv2d(1, 3, 1))
    assert plain(torch.randn(2, 1, 4, 5, 6)).shape == (2, 3, 4, 5, 6)


def test_frames_as_channels(close):
    """Channel c of frame t is channel 3 c + t of the network, and class k of frame t likewise."""
    net = nn.Conv2d(2 * 3, 5 * 3, 1)
    x = torch.randn(2, 2, 3, 4, 5)
    y = FramesAsChannels(net, 3)(x)
    assert y.shape == (2, 5, 3, 4, 5)
    close(y[:, 4, 1], net(torch.stack([x[:, c, t] for c in range(2) for t in range(3)], 1))[:, 13], 1e-6)
    with pytest.raises(ValueError, match="expected 3 frames"):
        FramesAsChannels(net, 3)(x[:, :, :2])


# -------------------------------------------------------------------------- measures and pictures


def test_measures_of_a_series():
    """Dice of all frames together; distances, surface Dice and volumes are means over frames."""
    rng = torch.Generator().manual_seed(0)
    shape, spacing = (3, 9, 8, 7), (1.0, 2.0, 3.0)
    truth = torch.randint(0, 3, shape, generator=rng)
    labels = torch.where(torch.rand(shape, generator=rng) < 0.7, truth, 0)
    truth[1][truth[1] == 2] = 0  # class 2 is in two frames of both, in one of the truth alone
    labels[1][labels[1] == 2] = 0
    labels[2][labels[2] == 2] = 1
    frames = [measure_case(a, b, 3, spacing) for a, b in zip(labels, truth, strict=True)]
    counted = {("hd95_mm", 1): 3, ("nsd", 1): 3, ("hd95_mm", 2): 1, ("nsd", 2): 2}  # frames that have a value
    for number, row in enumerate(measure_case(labels, truth, 3, spacing), 1):
        for key in ("hd95_mm", "nsd"):
            values = [frame[number - 1][key] for frame in frames]
            assert row[key] == pytest.approx(np.nanmean(values))
            assert np.isfinite(values).sum() == counted[key, number]
        for key, what in (("volume_ml", labels), ("truth_ml", truth)):
            assert row[key] == pytest.approx((what == number).sum().item() * 6 / 1000 / 3)
        both = ((labels == number) & (truth == number)).sum()
        sizes = (labels == number).sum() + (truth == number).sum()
        assert row["dice"] == pytest.approx((2 * both / sizes).item())
    with pytest.raises(ValueError, match="spacing: expected 4"):
        measure_case(labels, truth, 3, (1.0, 2.0))


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_a_picture_has_the_first_the_middle_and_the_last_frame(frames, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda _, text, **__: titles.append(text), raising=True)
    image = torch.randn(frames, 8, 7, 6)
    labels = torch.zeros(frames, 8, 7, 6, dtype=torch.long)
    labels[:, 2:4, 3:5, 4] = 1
    save_case(tmp_path / "a.png", "a", image, labels, labels, (1, 1, 2), ("b", "c"), 0.25)
    expected = {1: [1], 2: [1, 2], 7: [1, 4, 7]}[frames]
    axial = [title for title in titles if title.startswith("axial")]
    assert axial == [f"axial 5/6, frame {t}/{frames}, {(t - 1) * 0.25:.3g} s" for t in expected]
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize("space", [(3, 4), (2, 5, 3), (3, 2, 5, 4)])
def test_labels_of_coarser_levels_are_the_nearest(space):
    """As torch's nearest-exact, where it has that."""
    fine = tuple(2 * n - (n % 2) for n in space)
    label = torch.randint(0, 9, (2, 1, *fine), dtype=torch.int16)
    coarse = _shrunk(label, torch.Size(space))
    assert coarse.shape == (2, 1, *space) and coarse.dtype == torch.int16
    if len(space) < 4:
        nearest = nn.functional.interpolate(label.float(), space, mode="nearest-exact")
        assert torch.equal(coarse, nearest.short())
    assert _shrunk(label, torch.Size(fine)) is label

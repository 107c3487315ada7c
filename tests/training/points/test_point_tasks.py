"""Completion and classification of clouds: measures, samples, fit, test and predict, bad files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.shapes import SHAPES, make_shapes
from ndlightnet.data.points.clouds import placed, read_cloud, surface
from ndlightnet.training.points.cloud_data import CloudFolders, Clouds, PartialClouds, PointData, _short_names
from ndlightnet.training.points.completion_task import NEAR, CompletionTask, chamfer, completion_scores
from ndlightnet.training.points.point_cls_task import PointClsTask
from tests.training.conftest import fit_and_test, last, launcher, set_up

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
"""
COMPLETION = f"""{CONFIG}
    class_path: ndlightnet.models.PointCompletion
    init_args: {{points: 16, queries: 8, embed_dim: 16, depth: 1, decoder_depth: 1}}
data:
  class_path: ndlightnet.training.PartialClouds
  init_args: {{root: nowhere, batch_size: 4, points: 32}}
"""
CLASSES = f"""{CONFIG}
    class_path: ndlightnet.NDLightNet
    init_args: {{dims: 3, in_chans: 3, num_classes: 5, patch_size: 1, embed_dim: 16, depth: 1, tpe: false,
                 mixer: SoftmaxAttention}}
data:
  class_path: ndlightnet.training.CloudFolders
  init_args: {{root: nowhere, batch_size: 4, points: 32}}
"""
complete = launcher(CompletionTask, PartialClouds, COMPLETION)
sort = launcher(PointClsTask, CloudFolders, CLASSES)


@pytest.fixture
def shapes(tmp_path):
    return make_shapes(tmp_path / "shapes", 20, 6, 40)


# ------------------------------------------------------------------------------------ measures
def test_measures_are_those_of_pairs_of_points():
    answer, truth, unit = torch.randn(2, 7, 3), torch.randn(2, 5, 3), torch.tensor([0.1, 0.02])
    answer[:, :3] = truth[:, 1:4] + 0.1
    scores = completion_scores(answer, truth, unit)
    for row in range(2):
        pairs = np.array([[float((a - b).norm() * unit[row]) for b in truth[row]] for a in answer[row]])
        there, back = pairs.min(1), pairs.min(0)
        precision, recall = (there < NEAR).mean(), (back < NEAR).mean()
        f_score = 2 * precision * recall / (precision + recall) if precision + recall else 0
        expected = (there.mean() + back.mean()) / 2, (there**2).mean() + (back**2).mean(), f_score
        assert [float(scores[name][row]) for name in ("chamfer_l1", "chamfer_l2", "f_score")] == pytest.approx(expected)
    assert 0 < scores["f_score"][0] < 1  # or it said nothing
    torch.testing.assert_close(chamfer(answer, truth) * unit, scores["chamfer_l1"])


def test_gradients_are_those_of_the_nearest_pairs():
    answer, truth = torch.randn(2, 7, 3).double().requires_grad_(), torch.randn(2, 5, 3).double()
    distances = torch.cdist(answer, truth)
    loss = (distances.amin(2).mean(1) + distances.amin(1).mean(1)).sum() / 2
    expected, actual = (torch.autograd.grad(x, answer)[0] for x in (loss, chamfer(answer, truth).sum()))
    torch.testing.assert_close(actual, expected)
    same = answer.detach().requires_grad_()
    chamfer(same, same.detach()).sum().backward()
    assert not same.grad.any()  # at a distance of 0 as well


def test_near_points_of_far_clouds_are_told_apart():
    """Distances from products of float32 would be off by 0.03 at 100."""
    a = 100 + torch.rand(1, 50, 3)
    assert float(chamfer(a, a + 1e-3)[0]) == pytest.approx(3**0.5 * 1e-3, rel=0.02)


# ------------------------------------------------------------------------------------- samples
def test_a_sample_is_a_part_in_its_own_frame(shapes):
    data = PartialClouds(str(shapes), points=30, keep=0.4, validation=0.25)
    for stage in ("fit", "test"):
        set_up(CompletionTask(torch.nn.Linear(1, 1)), data, stage)
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (15, 5, 6)
    part, cloud, share, number = data.test_set[3]
    assert (part.shape, cloud.shape, number) == ((12, 3), (30, 3), 3)
    assert part.mean(0).abs().max() < 1e-5 and part.norm(dim=1).max() == pytest.approx(1, abs=1e-5)
    complete = placed(data.test_set.clouds[3][0]).points
    sides = [torch.cdist(x, x).flatten() for x in (share * cloud, complete)]  # no frame changes them
    assert (sides[0][:, None] - sides[1]).abs().amin(1).max() < 1e-3
    assert torch.cdist(part, cloud).amin(1).max() < 1e-3  # the part is one of it
    again = data.test_set[3]
    assert torch.equal(again[0], part) and not torch.equal(data.train_set[3][0], data.train_set[3][0])


def test_a_part_at_one_place_is_not_blown_up():
    """Such as the points that a depth camera did not see."""
    cloud = torch.cat([torch.zeros(500, 3), torch.ones(500, 3)]).double()
    part, scaled, share, _ = Clouds([(cloud, 0)], 256, 0.25)[0]
    assert share == pytest.approx(0.01) and scaled.isfinite().all() and scaled.abs().max() <= 2 / 0.01
    assert part.abs().max() < 1e-9


def test_names_of_results_are_all_different():
    assert _short_names(Path("x"), ["x/a.ply", "x/b.nii.gz"]) == ["a", "b"]
    assert _short_names(Path("x"), ["x/a.ply", "x/a.npy", "x/b.xyz"]) == ["a.ply", "a.npy", "b"]
    names = ["a.ply", "a.npy", "a.ply.npy"]
    assert _short_names(Path("x"), [f"x/{name}" for name in names]) == names


def test_masks_of_medmnist(tmp_path):
    rng, arrays, path = np.random.default_rng(0), {}, tmp_path / "masks.npz"
    for split, count in (("train", 5), ("val", 2), ("test", 3)):
        arrays[f"{split}_images"] = (rng.random((count, 8, 8, 8)) < 0.7).astype(np.uint8)
        arrays[f"{split}_labels"] = np.arange(count)[:, None] % 2
    np.savez(path, **arrays)
    data = CloudFolders(str(path), points=500)
    data.setup("fit")
    data.setup("test")
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (5, 2, 3) and data.classes == ("0", "1")
    cloud, label = data.test_set.clouds[1]
    assert label == 1 and np.array_equal(cloud.numpy(), surface(arrays["test_images"][1] != 0))
    with pytest.raises(Exception, match=r"data.classes: \('one',\), expected 2 names or more"):
        CloudFolders(str(path), classes=("one",)).setup("fit")
    arrays["test_images"][2] = 0
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=r"test has masks of fewer than 8 voxels at the surface: numbers \[2\]"):
        PointData(str(path)).setup("test")


# ------------------------------------------------------------------------- fit, test, predict
def test_a_completion(complete, shapes, tmp_path):
    out = tmp_path / "run"
    done = fit_and_test(complete, root=shapes, out=out)
    results, rows = json.loads((out / "metrics.json").read_text()), [*csv.DictReader((out / "test.csv").open())]
    assert results["clouds"] == len(rows) == 6 and {*results["input"]} == {"chamfer_l1", "chamfer_l2", "f_score"}
    for name in results["input"]:
        assert np.mean([float(row[name]) for row in rows]) == pytest.approx(results[name], abs=1e-5)
    assert {Path(row["file"]).parts[-3] for row in rows} == {"test"}
    assert f"Chamfer distance {results['chamfer_l1']:.4f}" in done.out
    assert (
        Image.open(out / "test_clouds.png").size[1] > Image.open(out / "test_clouds.png").size[0]
    )  # six rows of three
    points, inputs = 100 + 7 * np.random.default_rng(0).random((50, 3)), tmp_path / "inputs"
    inputs.mkdir()
    np.savetxt(inputs / "mine.xyz", points)
    (inputs / "broken.ply").write_bytes(b"none")
    (inputs / "a").mkdir()
    for other in ("mine.npy", "a/yours.npy", "a/mine.npy"):
        np.save(inputs / other, points + 50)
    done = complete("predict", root=shapes, out=out, input=inputs)
    assert "--ckpt_path: predict expects the checkpoint of a training" in done.errors[0]
    done = complete("predict", root=shapes, out=out, input=inputs, ckpt=last(out))
    assert done.status == 1 and len(done.errors) == 1 and "broken.ply" in done.errors[0]
    files = sorted(path.name for path in (out / "predictions").glob("*.ply"))
    assert len(files) == 4 and files[2:] == ["mine.npy.ply", "mine.xyz.ply"]  # none replaces another
    assert files[0].startswith("a_mine") and files[1].startswith("a_yours")
    answer = read_cloud(out / "predictions" / "mine.xyz.ply").double()
    assert len(answer) == 50 + 16  # all that was read, and what the network adds
    assert np.array_equal(answer[:50].numpy(), np.loadtxt(inputs / "mine.xyz"))
    assert (out / "predictions" / "mine.xyz.png").is_file()


def test_a_classification(sort, shapes, tmp_path):
    out = tmp_path / "run"
    (shapes / "test").rename(shapes / "later")
    sort("fit", root=shapes, out=out).well()  # which needs no test set
    (shapes / "later").rename(shapes / "test")
    sort("test", root=shapes, out=out, ckpt=last(out)).well()
    assert json.loads((out / "metrics.json").read_text())["clouds"] == 6
    assert "test_clouds.png" in (out / "index.html").read_text() and (out / "test_clouds.png").is_file()
    sort("predict", root=shapes, out=out, input=shapes / "test" / "box", ckpt=last(out)).well()
    rows = [*csv.DictReader((out / "predictions.csv").open())]
    assert len(rows) == 2 and sum(float(rows[0][name]) for name in SHAPES) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("command", ["complete", "sort"])
def test_a_training_ends_at_a_bad_file(request, command, shapes, tmp_path):
    bad = shapes / "train" / "box" / "00000.npy"
    bad.write_bytes(b"none")
    done = request.getfixturevalue(command)("fit", root=shapes, out=tmp_path / "run")
    assert done.status == 1 and len(done.errors) == 1 and str(bad) in done.errors[0] and "Traceback" not in done.err


@pytest.mark.parametrize(
    "options, message",
    [
        ({"keep": 0}, "data.keep"),
        ({"points": 7}, "data.points"),
        ({"validation": 1}, "data.validation"),
        ({"validation": 0.99}, "leaves no cloud to train on"),
    ],
)
def test_bad_options_are_named(complete, shapes, tmp_path, options, message):
    done = complete("fit", root=shapes, out=tmp_path / "run", data=options)
    assert done.status and message in done.err and "Traceback" not in done.err

"""Pre-training through fit and test, and trainings that begin with its weights."""

import json
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.training import ImageFolders, PretrainTask, VideoData
from ndlightnet.training.core.checkpoints import load_initial
from tests.training.conftest import fit_and_test, last, set_up


@pytest.fixture(scope="module")
def trained(tmp_path_factory, stripes, pretrain) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("out")
    done = fit_and_test(pretrain, root=stripes, out=out)
    assert "of what was dropped, over 30 samples" in done.out
    return out


@pytest.mark.slow
def test_it_leaves_checkpoints_metrics_and_sheets(trained):
    for name in ("best.ckpt", "last.ckpt"):
        saved = torch.load(trained / "checkpoints" / name, weights_only=True)["state_dict"]
        assert {key.split(".")[0] for key in saved} == {"net", "decoder"}
    net = NDLightNet.from_checkpoint(last(trained))
    assert all(torch.equal(value, saved[f"net.{name}"]) for name, value in net.state_dict().items())
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["samples"] == 30 and (metrics["box"], metrics["dropped"]) == ([2, 2], 0.75)
    assert -0.5 < metrics["explained"] < 1 and metrics["steps"] == 4 * (108 // 16)
    sheets = sorted(path.name for path in (trained / "reconstructions").iterdir())
    assert sheets == ["epoch_0001.png", "epoch_0002.png", "epoch_0003.png", "epoch_0004.png", "test.png"]
    assert matplotlib.image.imread(trained / "reconstructions" / "test.png").std() > 0.05


@pytest.mark.slow
def test_a_training_begins_with_its_weights(trained, stripes, recognise, tmp_path):
    """Those that fit; a line names the head, which is as drawn."""
    checkpoint, places = last(trained), {"root": stripes, "out": tmp_path}
    rates = {"lr": 1e-9, "min_lr": 0, "init": str(checkpoint)}
    done = recognise("fit", "--trainer.max_epochs=1", **places, model=rates).well()
    # a test does not read it: a config with `init` works where the file is gone
    recognise("test", "--model.init=gone.ckpt", **places, ckpt=last(tmp_path)).well()
    (note,) = [line for line in done.notes if "weights of the network" in line]
    assert note.startswith(f"note: {checkpoint}: ")
    assert note.endswith("as drawn: head.bias, head.weight; not used: none")
    before = torch.load(checkpoint, weights_only=True)["state_dict"]
    after = torch.load(last(tmp_path), weights_only=True)["state_dict"]
    shared = [key for key in before if key.startswith("net.") and key in after]
    assert len(shared) > 15
    for key in shared:
        torch.testing.assert_close(after[key], before[key], atol=1e-6, rtol=1e-5)


def test_missing_and_surplus_weights_are_named(tmp_path):
    small = NDLightNet(2, patch_size=2, embed_dim=16, depth=1, num_classes=3)
    large = NDLightNet(2, patch_size=2, embed_dim=16, depth=2, num_classes=5)
    weights = {f"net.{key}": value for key, value in small.state_dict().items()}
    torch.save({"state_dict": {**weights, "net.extra": torch.zeros(1)}}, tmp_path / "a.ckpt")
    before = {key: value.clone() for key, value in large.state_dict().items()}
    line = load_initial(str(tmp_path / "a.ckpt"), large)
    fitting = len(small.state_dict()) - 2
    assert f"{fitting} of {len(before)} weights" in line
    assert "as drawn: blocks.1." in line and "more; not used: extra, head.bias, head.weight" in line
    for key, value in large.state_dict().items():
        source = small.state_dict().get(key)
        fits = source is not None and source.shape == value.shape
        assert torch.equal(value, source if fits else before[key]), key


def network(**options) -> NDLightNet:
    return NDLightNet(**{"dims": 2, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_classes": 0} | options)


@pytest.mark.parametrize(
    "net, options, message",
    [
        (network, {"box": 3}, r"data.size: \[8, 8\], expected multiples of \[6, 6\], boxes of \[3, 3\]"),
        (network, {"compile": True}, "model.compile: True, expected false for pre-training"),
        (network, {"dropped": 1.0}, "model.dropped: 1.0, expected a fraction between 0 and 1"),
        (network, {"box": [1, 2, 3]}, "model.box="),
        (lambda: network(causal=True), {}, "net: expected a network of cells that is not"),
        (torch.nn.Identity, {}, "model.net: Identity, expected an"),
    ],
)
def test_wrong_options(stripes, net, options, message):
    with pytest.raises(DataError, match=f"^{message}"):
        set_up(PretrainTask(net(), **options), ImageFolders(str(stripes), 8))


def test_files_that_cannot_begin_a_training(tmp_path):
    (tmp_path / "text.ckpt").write_text("no weights")
    torch.save({"state_dict": {"net.other": torch.zeros(2)}}, tmp_path / "other.ckpt")
    for name, message in (
        ("gone", "no such checkpoint"),
        ("text", "not a checkpoint"),
        ("other", "has no weight of this NDLightNet"),
    ):
        path = tmp_path / f"{name}.ckpt"
        with pytest.raises(DataError, match=f"^model.init: {path}: {message}"):
            load_initial(str(path), network())


def test_all_clips_of_a_video_are_samples():
    """As their networks see them."""
    net = NDLightNet(3, 6, patch_size=2, embed_dim=16, depth=1, num_classes=0)
    task = PretrainTask(net, box=1)
    task._trainer = SimpleNamespace(datamodule=VideoData("x", frames=4, size=8, pixels="both"))
    clips = torch.randn(2, 5, 3, 4, 8, 8)
    samples = task.samples((clips, torch.zeros(2), torch.zeros(2)))
    assert samples.shape == (10, 6, 4, 8, 8) and torch.equal(samples[7, :3], clips[1, 2])
    assert task.samples((clips[:, 0], None, None)).shape == (2, 6, 4, 8, 8)


def test_a_step_is_one_call_of_fixed_shape_that_never_waits_for_its_numbers(stripes, monkeypatch):
    """As a CUDA graph needs it: the random boxes, too, are drawn on the device."""
    task, data = PretrainTask(network(in_chans=3)), ImageFolders(str(stripes), 12, batch_size=4, workers=0)
    set_up(task, data)
    calls = []
    task.called.register_forward_pre_hook(lambda _, inputs: calls.append([(x.shape, x.dtype) for x in inputs]))
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    batch = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    loss = task.training_step(batch, 0)
    assert loss.requires_grad and calls == [[(x.shape, x.dtype) for x in task.example_inputs()]]
    assert {key.split(".")[0] for key in task.state_dict()} == {"net", "decoder"}
    with FakeTensorMode(allow_non_fake_inputs=True):  # which has no numbers to wait for
        task.called(*task.example_inputs()).backward()


def test_data_of_many_sizes():
    task = PretrainTask(NDLightNet(1, 4, patch_size=2, embed_dim=16, depth=1, num_classes=0))
    task._trainer = SimpleNamespace(datamodule=object())
    with pytest.raises(DataError, match="data=object: expected samples of one size"):
        task.setup("fit")


def test_what_is_explained_is_the_mean_over_samples(monkeypatch):
    """A last batch of one sample counts once, beside four of the first batch."""
    task, written = PretrainTask(network()), []
    task._trainer = SimpleNamespace(is_global_zero=True)
    monkeypatch.setattr(task, "_explained", lambda batch, _: torch.tensor(1.0 if len(batch[0]) == 1 else 0.5))
    monkeypatch.setattr(task, "out", lambda: Path("out"))
    for name in ("on_validation_epoch_start", "on_validation_epoch_end"):
        monkeypatch.setattr(task, name, lambda: None)
    module = "ndlightnet.training.pretraining.pretrain_task"
    monkeypatch.setattr(task, "costs", dict)
    monkeypatch.setattr(f"{module}.write_metrics", lambda _, metrics: written.append(metrics))
    task.on_test_epoch_start()
    for size in (4, 1, 0):
        task.test_step((torch.zeros(size, 3),), 0)
    task.on_test_epoch_end()
    assert (written[0]["explained"], written[0]["samples"]) == (pytest.approx(3 / 5), 5)

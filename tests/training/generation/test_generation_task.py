"""Generation from the command line: fit, test and predict on tiny data of 1 to 4 axes, on clips
and on an autoencoder's latents; wrong options in one line."""

import json
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("diffusers")

from ndlightnet import NDLightDiT, NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.training import GenerationTask, HandwrittenDigits, ImageData, LabelledData
from ndlightnet.training.generation.latents import Latents
from tests.training.conftest import launch as command_line
from tests.training.conftest import set_up

TINY = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  callbacks:
    - class_path: ndlightnet.training.AveragedWeights
      init_args: {decay: 0.9, warmup: true}
model:
  sampling_steps: 3
  samples: 6
  net:
    class_path: ndlightnet.NDLightDiT
    init_args: {dims: 2, in_chans: 1, num_classes: 2, embed_dim: 16, depth: 1, tpe_states: 4}
data:
  class_path: ndlightnet.training.ImageData
  init_args: {root: nowhere, batch_size: 8}
"""
CLIPS = TINY.replace(
    "dims: 2, in_chans: 1, num_classes: 2,", "dims: 3, in_chans: 3, num_classes: 6, patch_size: [1, 4, 4],"
)
CLIPS = CLIPS.replace("ImageData", "VideoData").replace(
    "batch_size: 8", "batch_size: 4, frames: 3, size: 12, clips: 2, augment: false, workers: 0"
)
SPACES = {1: (9,), 2: (8, 6), 3: (4, 6, 5), 4: (3, 4, 3, 4)}
READERS = {1: np.load, 4: lambda file: nibabel.load(file).dataobj}


def bars(folder: Path, space: tuple[int, ...]) -> Path:
    """An npz of dark and bright samples, with noise."""
    rng = np.random.default_rng(0)
    content = {}
    for split, count in (("train", 24), ("val", 8), ("test", 10)):
        labels = np.arange(count) % 2
        level = 50 + 150 * labels.reshape(-1, *[1] * len(space))
        images = level + rng.integers(-20, 20, (count, *space))
        content |= {f"{split}_images": images.astype(np.uint8), f"{split}_labels": labels[:, None]}
    np.savez(folder / "bars.npz", **content)
    return folder / "bars.npz"


def launch(folder: Path, *arguments: object, config: str = TINY):
    """The exit status, what was printed, and the lines of errors."""
    command, *more = arguments
    root = f"--trainer.default_root_dir={folder}"
    done = command_line(GenerationTask, LabelledData, config, folder / "given", command, root, *more)
    return done.status, done.out, done.errors


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[str, Path]:
    """The option of the data and the folder of a finished training on images."""
    folder = tmp_path_factory.mktemp("images")
    root = f"--data.init_args.root={bars(folder, SPACES[2])}"
    assert launch(folder / "run", "fit", root) == (0, "", [])
    return root, folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("dims", READERS)
def test_fit_test_and_predict_on_any_number_of_axes(dims, tmp_path):
    space, out = SPACES[dims], tmp_path / "run"
    common = [f"--data.init_args.root={bars(tmp_path, space)}", f"--model.net.init_args.dims={dims}"]
    common, last = [*common, "--model.guidance=1.5"], f"--ckpt_path={out}/checkpoints/last.ckpt"
    assert launch(out, "fit", *common) == (0, "", [])
    assert (out / "samples" / "epoch_0002.png").is_file()
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True).keys()
    assert {"space", "prediction", "cost"} <= {*GenerationTask.saved} <= saved
    status, summary, errors = launch(out, "test", *common, last)
    assert (status, errors) == (0, [])
    assert "Frechet distance" in summary and "in pixels, 6 samples against 10 of the test" in summary
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["frechet"] > 0 and metrics["frechet_train"] > 0
    assert metrics["fit"]["best"]["val_score"] == -metrics["fit"]["best"]["val_loss"]
    assert {"precision", "recall", "nearest_has_class", "parameters", "step_ms"} <= metrics.keys()
    assert metrics["sampled_per_second"] > 0 and metrics["guidance"] == 1.5
    assert (out / "samples.png").is_file() and (out / "nearest.png").is_file()
    (tmp_path / "bars.npz").unlink()  # the checkpoint has all that sampling needs
    size = [side + 1 for side in space]
    more = [f"--model.size={size}", "--model.samples=3"]
    status, summary, errors = launch(tmp_path / "drawn", "predict", *common, *more, last)
    assert (status, errors) == (0, []) and "3 samples are in" in summary
    files = sorted((tmp_path / "drawn" / "predictions").iterdir())
    assert [file.name.split(".")[0] for file in files] == ["00000_0", "00001_1", "00002_0"]
    assert {np.squeeze(READERS[dims](file)).shape for file in files} == {tuple(size)}


@pytest.mark.slow
def test_prediction_is_repeated_by_its_seed_and_of_the_classes_asked(images, tmp_path):
    root, out = images
    common = [root, f"--ckpt_path={out}/checkpoints/last.ckpt", "--data.init_args.batch_size=4"]
    samples = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert launch(tmp_path / name, "predict", *common, "--model.classes=['1']", f"--model.seed={seed}")[0] == 0
        files = sorted((tmp_path / name / "predictions").iterdir())
        assert len(files) == 6 and all(file.stem.endswith("_1") for file in files)
        samples.append(np.stack([np.asarray(Image.open(file)) for file in files]))
    assert np.array_equal(samples[0], samples[1]) and not np.array_equal(samples[0], samples[2])
    assert len(np.unique(samples[0], axis=0)) == 6  # in several batches


@pytest.mark.slow
def test_classes_and_noise_are_those_that_are_reported(images, tmp_path, monkeypatch):
    """A network that draws the number of the class; every validation has the same loss."""
    root, out = images
    calls, seeds, last = [], [], f"--ckpt_path={out}/checkpoints/last.ckpt"

    def sample(network, scheduler, shape, classes, *, generator, **_):
        calls.append(classes.tolist())
        seeds.append(generator.initial_seed())
        return (classes.float() * 3 - 1.5).view(-1, 1, 1, 1).expand(shape)

    losses = [launch(tmp_path / "v", "validate", root, last)[1] for _ in range(2)]
    assert losses[0] == losses[1] and "val_loss" in losses[0]
    monkeypatch.setattr("ndlightnet.training.generation.generation_task.sample", sample)
    assert launch(tmp_path, "test", root, last, "--data.init_args.batch_size=2")[::2] == (0, [])
    assert len(calls) == len({*seeds}) == 3  # no batch has the noise of another
    assert sorted(label for call in calls for label in call) == [0] * 3 + [1] * 3
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["nearest_has_class"] == 1
    calls.clear()
    assert launch(tmp_path, "predict", root, last, "--model.classes=['1','0']")[::2] == (0, [])
    assert calls == [[1, 0] * 3]
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["nearest.png", "predictions.png", "samples.png"]
    for name in ("12345.txt", "mine.png"):
        (tmp_path / "predictions" / name).write_text("of the user")
    assert launch(tmp_path, "predict", root, last, "--model.samples=2")[::2] == (0, [])
    files = sorted((tmp_path / "predictions").iterdir())  # none of the four others is left
    assert [file.name for file in files] == ["00000_0.png", "00001_1.png", "12345.txt", "mine.png"]
    for file in files[:2]:
        assert (np.asarray(Image.open(file)).mean() > 128) == file.stem.endswith("_1")


@pytest.mark.slow
def test_compared_in_the_features_of_a_classifier(images, tmp_path):
    root, out = images
    last = f"--ckpt_path={out}/checkpoints/last.ckpt"
    net = NDLightNet(2, 1, 2, patch_size=2, embed_dim=8, depth=1)
    weights = {f"net.{key}": value for key, value in net.state_dict().items()}
    path = tmp_path / "classifier.ckpt"
    torch.save({"state_dict": weights, "network": net.description()}, path)
    status, summary, errors = launch(tmp_path, "test", root, last, f"--model.features_checkpoint={path}")
    assert (status, errors) == (0, []) and "in features of NDLightNet" in summary
    assert json.loads((tmp_path / "metrics.json").read_text())["compared_in"] == "features of NDLightNet"


@pytest.mark.slow
def test_noise_prediction(images, tmp_path):
    root, _ = images
    scheduler = "--model.scheduler={DDIMScheduler: {prediction_type: v_prediction}}"
    more = [root, scheduler, "--model.net.init_args.num_classes=0", "--trainer.max_epochs=1"]
    assert launch(tmp_path, "fit", *more) == (0, "", [])
    last = f"--ckpt_path={tmp_path}/checkpoints/last.ckpt"
    status, _, errors = launch(tmp_path, "test", *more, last)
    assert (status, errors) == (0, [])
    assert json.loads((tmp_path / "metrics.json").read_text())["nearest_has_class"] is None


@pytest.mark.slow
def test_clips_become_strips_and_an_animation(tmp_path):
    pytest.importorskip("av")
    from ndlightnet.data.made.digits import make_moving_digits

    root = make_moving_digits(tmp_path / "digits", 12, 6, frames=4, size=24, progress=False)
    common = [f"--data.init_args.root={root}", "--trainer.max_epochs=1"]
    run = partial(launch, config=CLIPS)
    out = tmp_path / "run"
    assert run(out, "fit", *common)[::2] == (0, [])
    last = f"--ckpt_path={out}/checkpoints/last.ckpt"
    assert run(out, "test", *common, last)[::2] == (0, [])
    assert Image.open(out / "samples.gif").n_frames == 3
    assert run(tmp_path / "drawn", "predict", *common, last)[::2] == (0, [])
    (first, *_) = sorted((tmp_path / "drawn" / "predictions").iterdir())
    assert first.name == "00000_anticlockwise.gif" and Image.open(first).n_frames == 3


def save_autoencoder(folder: Path, latent_channels: int = 2) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    blocks |= {"block_out_channels": [4] * 2, "norm_num_groups": 4, "scaling_factor": 0.5, "shift_factor": 0.25}
    net = AutoencoderKL(in_channels=1, out_channels=1, latent_channels=latent_channels, sample_size=8, **blocks)
    net.save_pretrained(folder)
    return folder


@pytest.fixture
def autoencoder(tmp_path) -> Path:
    return save_autoencoder(tmp_path / "vae")


@pytest.mark.slow
def test_latents_of_an_autoencoder(images, autoencoder, tmp_path):
    root, _ = images
    out = tmp_path / "run"
    net = ["--model.net.init_args.in_chans=2", "--model.net.init_args.patch_size=1"]
    common = [root, f"--model.autoencoder={autoencoder}", *net]
    assert launch(out, "fit", *common) == (0, "", [])
    last = f"--ckpt_path={out}/checkpoints/last.ckpt"
    assert launch(out, "test", *common, last)[::2] == (0, [])
    saved = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(key.startswith("net.") for key in saved["state_dict"])
    assert launch(out, "predict", *common, "--model.size=[8,4]", last)[::2] == (0, [])
    assert Image.open(next((out / "predictions").glob("00000*"))).size == (4, 8)
    status, _, errors = launch(out, "predict", *common, "--model.size=[8,5]", last)
    assert status == 1 and "multiples of 2" in errors[0]
    wider = save_autoencoder(tmp_path / "wider", latent_channels=4)
    for path, channels in ((wider, 4), ("null", 1)):  # not the one of the training
        status, _, errors = launch(out, "predict", *common, f"--model.autoencoder={path}", last)
        assert status == 1 and len(errors) == 1
        assert f"expected a network with in_chans={channels}, got 2" in errors[0]


def test_latents_are_shifted_then_scaled_and_decoded_the_other_way(autoencoder):
    data = HandwrittenDigits(size=8)
    data.setup("fit")
    codec, x = Latents(data, str(autoencoder)), data.from_pixels(data.train_set.images[:3, None])
    with torch.autocast("cpu", torch.bfloat16):
        first, again = (codec.encode(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again) and first.dtype == torch.float32
    assert not torch.equal(codec.encode(x), codec.encode(x))
    pixels = data.train_set.images[:3, None] / 127.5 - 1
    plain = codec.net.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(5))
    latents = codec.encode(x, torch.Generator().manual_seed(5))
    torch.testing.assert_close(latents, (plain - 0.25) * 0.5)  # its shift_factor, scaling_factor
    decoded = (codec.net.decode(plain).sample + 1) * 127.5
    torch.testing.assert_close(codec.decode(latents).float(), decoded.clamp(0, 255), atol=0.6, rtol=0)
    assert decoded.std() > 1


def test_weights_of_an_autoencoder_that_are_code_are_not_read(autoencoder):
    (weights,) = autoencoder.glob("*.safetensors")
    torch.save(load_file(weights), autoencoder / "diffusion_pytorch_model.bin")
    weights.unlink()
    with pytest.raises(DataError, match=r"model\.autoencoder=.*vae: .*safetensors"):
        Latents(None, str(autoencoder))


@pytest.mark.parametrize(
    "net, options, message",
    [
        ({"num_classes": 3}, {}, "with num_classes=2, got 3"),
        ({"dims": 3}, {}, "with dims=2, got 3"),
        ({"in_chans": 3}, {}, "with in_chans=1, got 3"),
        ({"num_classes": 0}, {"guidance": 2}, "model.guidance: 2"),
        ({}, {"sampling_steps": 0}, "model.sampling_steps: 0, expected 1 or more"),
        ({}, {"autoencoder": "nowhere"}, "model.autoencoder=nowhere: expected a folder"),
        ({}, {"scheduler": "LCMScheduler", "sampling_steps": 99}, "in 99 steps"),
        ({}, {"scheduler": "PNDM"}, "expected one of diffusers, such as PNDMScheduler"),
        (None, {}, "model.net: NDLightNet, expected a network that takes noisy samples, times"),
    ],
)
def test_wrong_options(tmp_path, net, options, message):
    plain = {"dims": 2, "in_chans": 1, "num_classes": 2, "embed_dim": 16, "depth": 1}
    network = NDLightNet(2, embed_dim=8, depth=1) if net is None else NDLightDiT(**plain | net)
    with pytest.raises(DataError, match=message):
        set_up(GenerationTask(network, **options), ImageData(str(bars(tmp_path, SPACES[2])), batch_size=8))


def test_an_autoencoder_takes_images_of_its_sides_only(autoencoder, tmp_path):
    net = NDLightDiT(3, in_chans=2, num_classes=2, embed_dim=16, depth=1)
    with pytest.raises(DataError, match="expected images whose sides are multiples of 2"):
        set_up(GenerationTask(net, autoencoder=str(autoencoder)), ImageData(str(bars(tmp_path, SPACES[3]))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, message",
    [
        ("--model.size=[4]", "model.size=[4]: expected an int >= 1 or 2"),
        ("--model.classes=['7']", "model.classes: 7, expected one of 0, 1"),
        ("--model.scheduler=DDIMScheduler", "predict flow, as in the traini"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(images, tmp_path, option, message):
    root, out = images
    status, _, errors = launch(tmp_path, "predict", root, option, f"--ckpt_path={out}/checkpoints/last.ckpt")
    assert status == 1 and len(errors) == 1 and message in errors[0]


def test_handwritten_digits_are_the_images_of_scikit_learn():
    from sklearn.datasets import load_digits

    data = HandwrittenDigits(size=8, validation=0.0)
    data.setup("fit")
    assert (data.space, data.channels, data.classes) == ((8, 8), 1, tuple("0123456789"))
    assert len(data.train_set) == 1500 and len(data.test_set) == 297
    expected = {(image * 255 / 16).round().astype(np.uint8).tobytes() for image in load_digits().images}
    images = torch.cat([data.train_set.images, data.test_set.images]).numpy()
    assert {image.tobytes() for image in images} == expected
    batch = next(iter(data.plain_train_dataloader()))
    images, *_ = data.on_after_batch_transfer(batch, 0)
    assert torch.equal(data.to_pixels(images), batch[0])


def test_pixels_and_normalised_clips_are_each_others_inverse():
    from ndlightnet.training import VideoData

    data, pixels = VideoData("nowhere"), torch.arange(256, dtype=torch.uint8).view(1, 1, 4, 8, 8)
    assert torch.equal(data.to_pixels(data.from_pixels(pixels)), pixels)
    assert data.to_pixels(torch.tensor([[99.0, -99.0]])).tolist() == [[255, 0]]

"""Generation from the command line: fit, test and predict on tiny data of 1 to 4 axes, on clips
and on an autoencoder's latents; wrong options in one line."""

import json
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
from ndlightnet.data.made.digits import make_moving_digits
from ndlightnet.training import GenerationTask, HandwrittenDigits, ImageData, ImageFolders, LabelledData, VideoData
from ndlightnet.training.generation.latents import Latents
from tests.training.conftest import fit_and_test, last, launcher, set_up
from tests.training.generation.conftest import TINY, save_autoencoder

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


generate = launcher(GenerationTask, LabelledData, TINY)
animate = launcher(GenerationTask, LabelledData, CLIPS)


@pytest.fixture(scope="module")
def images(generate, tmp_path_factory) -> tuple[Path, Path]:
    """The data and the folder of a finished training on images."""
    folder = tmp_path_factory.mktemp("images")
    root = bars(folder, SPACES[2])
    assert generate("fit", root=root, out=folder / "run").well().out == ""
    return root, folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("dims", READERS)
def test_fit_test_and_predict_on_any_number_of_axes(generate, dims, tmp_path):
    space, out, drawn = SPACES[dims], tmp_path / "run", tmp_path / "drawn"
    root, common = bars(tmp_path, space), {"net": {"dims": dims}, "model": {"guidance": 1.5}}
    done = fit_and_test(generate, root=root, out=out, **common)
    assert (out / "samples" / "epoch_0002.png").is_file()
    saved = torch.load(last(out), weights_only=True).keys()
    assert {"space", "prediction", "cost"} <= {*GenerationTask.saved} <= saved
    assert "Frechet distance" in done.out and "in pixels, 6 samples against 10 of the test" in done.out
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["frechet"] > 0 and metrics["frechet_train"] > 0
    assert metrics["fit"]["best"]["val_score"] == -metrics["fit"]["best"]["val_loss"]
    assert {"precision", "recall", "nearest_has_class", "parameters", "step_ms"} <= metrics.keys()
    assert metrics["sampled_per_second"] > 0 and metrics["guidance"] == 1.5
    assert (out / "samples.png").is_file() and (out / "nearest.png").is_file()
    root.unlink()  # the checkpoint has all that sampling needs
    size = [side + 1 for side in space]
    more = (f"--model.size={size}", "--model.samples=3")
    done = generate("predict", *more, root=root, out=drawn, ckpt=last(out), **common).well()
    assert "3 samples are in" in done.out
    files = sorted((drawn / "predictions").iterdir())
    assert [file.name.split(".")[0] for file in files] == ["00000_0", "00001_1", "00002_0"]
    assert {np.squeeze(READERS[dims](file)).shape for file in files} == {tuple(size)}


@pytest.mark.slow
def test_prediction_is_repeated_by_its_seed_and_of_the_classes_asked(generate, images, tmp_path):
    root, out = images
    samples = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = {"model": {"classes": ["1"], "seed": seed}, "data": {"batch_size": 4}}
        generate("predict", root=root, out=tmp_path / name, ckpt=last(out), **options).well()
        files = sorted((tmp_path / name / "predictions").iterdir())
        assert len(files) == 6 and all(file.stem.endswith("_1") for file in files)
        samples.append(np.stack([np.asarray(Image.open(file)) for file in files]))
    assert np.array_equal(samples[0], samples[1]) and not np.array_equal(samples[0], samples[2])
    assert len(np.unique(samples[0], axis=0)) == 6  # in several batches


@pytest.mark.slow
def test_classes_and_noise_are_those_that_are_reported(generate, images, tmp_path, monkeypatch):
    """A network that draws the number of the class; every validation has the same loss."""
    root, out = images
    calls, seeds, places = [], [], {"root": root, "out": tmp_path, "ckpt": last(out)}

    def sample(network, scheduler, shape, classes, *, generator, **_):
        calls.append(classes.tolist())
        seeds.append(generator.initial_seed())
        return (classes.float() * 3 - 1.5).view(-1, 1, 1, 1).expand(shape)

    losses = [generate("validate", **{**places, "out": tmp_path / "v"}).out for _ in range(2)]
    assert losses[0] == losses[1] and "val_loss" in losses[0]
    monkeypatch.setattr("ndlightnet.training.generation.generation_task.sample", sample)
    generate("test", **places, data={"batch_size": 2}).well()
    assert len(calls) == len({*seeds}) == 3  # no batch has the noise of another
    assert sorted(label for call in calls for label in call) == [0] * 3 + [1] * 3
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["nearest_has_class"] == 1
    calls.clear()
    generate("predict", **places, model={"classes": ["1", "0"]}).well()
    assert calls == [[1, 0] * 3]
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["nearest.png", "predictions.png", "samples.png"]
    for name in ("12345.txt", "mine.png"):
        (tmp_path / "predictions" / name).write_text("of the user")
    generate("predict", **places, model={"samples": 2}).well()
    files = sorted((tmp_path / "predictions").iterdir())  # none of the four others is left
    assert [file.name for file in files] == ["00000_0.png", "00001_1.png", "12345.txt", "mine.png"]
    for file in files[:2]:
        assert (np.asarray(Image.open(file)).mean() > 128) == file.stem.endswith("_1")


@pytest.mark.slow
def test_compared_in_the_features_of_a_classifier(generate, images, tmp_path):
    root, out = images
    net = NDLightNet(2, 1, 2, patch_size=2, embed_dim=8, depth=1)
    weights = {f"net.{key}": value for key, value in net.state_dict().items()}
    path = tmp_path / "classifier.ckpt"
    torch.save({"state_dict": weights, "network": net.description()}, path)
    done = generate("test", f"--model.features_checkpoint={path}", root=root, out=tmp_path, ckpt=last(out)).well()
    assert "in features of NDLightNet" in done.out
    assert json.loads((tmp_path / "metrics.json").read_text())["compared_in"] == "features of NDLightNet"


@pytest.mark.slow
def test_compared_in_the_features_of_inception(generate, images, inception_weights, tmp_path):
    root, out = images
    words = [f"--model.inception={inception_weights}"]
    generate("test", *words, root=root, out=tmp_path, ckpt=last(out)).well()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["compared_in"] == "features of FeatureExtractorInceptionV3"
    assert metrics["fid"] > 0 and metrics["sfid"] > 0 and metrics["inception_score"] >= 1
    done = generate("test", *words, "--model.features_checkpoint=x.ckpt", root=root, out=tmp_path, ckpt=last(out))
    assert done.status == 1 and f"model.inception: {inception_weights}, expected null with features" in done.errors[0]


@pytest.mark.slow
def test_noise_prediction_without_classes(generate, images, tmp_path):
    scheduler = "--model.scheduler={DDIMScheduler: {prediction_type: v_prediction}}"
    places = {"root": images[0], "out": tmp_path, "net": {"num_classes": 0}, "trainer": {"max_epochs": 1}}
    fit_and_test(generate, scheduler, **places)
    assert json.loads((tmp_path / "metrics.json").read_text())["nearest_has_class"] is None


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Ten images of each colour to train with, four to test; one cannot be read."""
    root, rng = tmp_path_factory.mktemp("folders"), np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for channel, name in enumerate(("red", "green")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 60, (8, 8, 3), np.uint8)
                pixels[..., channel] += 180
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    (root / "train" / "red" / "broken.png").write_bytes(b"no picture")
    return root


@pytest.mark.slow
def test_fit_test_and_predict_on_class_folders(generate, folders, tmp_path):
    words = ("--data.class_path=ImageFolders", "--trainer.max_epochs=1")
    data, net = {"size": 8, "batch_size": 4, "scale": None, "crop_pct": 1.0, "workers": 0}, {"in_chans": 3}
    places = {"root": folders, "out": tmp_path, "data": data, "net": net}
    (note,) = fit_and_test(generate, *words, **places).notes  # training did without the broken file, too
    places["ckpt"] = last(tmp_path)
    assert note.startswith(f"note: {folders}/train/red/broken.png: cannot be read")
    (folders / "test" / "red" / "cut.png").write_bytes(b"no picture")
    done = generate("test", *words, **places)  # it stops nothing
    (folders / "test" / "red" / "cut.png").unlink()
    assert done.status == 1 and len(done.errors) == 1 and "test/red/cut.png: cannot be read" in done.errors[0]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["test_samples"] == 8 and metrics["samples"] == 6
    generate("predict", "--model.size=[8,12]", *words, **places).well()
    (first, *_) = sorted((tmp_path / "predictions").glob("0*"))
    assert first.name == "00000_green.png" and Image.open(first).size == (12, 8)
    done = generate("fit", *words, root=folders, out=tmp_path / "new", data={**data, "mixup": 0.5}, net=net)
    assert done.status == 1 and "data.mixup, data.cutmix: above 0, expected 0" in done.err


def test_pixels_are_normalised_and_back(folders):
    data = ImageFolders(str(folders), 8, scale=None, crop_pct=1.0, workers=0, batch_size=4)
    data.setup("fit")
    count = 0
    for batch in data.plain_train_dataloader():
        pixels = batch[0]
        images, labels, _ = data.on_after_batch_transfer(batch, 0)
        assert torch.equal(data.to_pixels(images), pixels)
        assert torch.equal(data.from_pixels(pixels), images)
        count += len(labels)
    assert count == len(data.train_set) - 1  # but the broken one


@pytest.mark.slow
def test_clips_become_strips_and_an_animation(animate, tmp_path):
    pytest.importorskip("av")
    root = make_moving_digits(tmp_path / "digits", 12, 6, frames=4, size=24, progress=False)
    out, drawn = tmp_path / "run", tmp_path / "drawn"
    fit_and_test(animate, "--trainer.max_epochs=1", root=root, out=out)
    assert Image.open(out / "samples.gif").n_frames == 3
    animate("predict", root=root, out=drawn, ckpt=last(out)).well()
    (first, *_) = sorted((drawn / "predictions").iterdir())
    assert first.name == "00000_anticlockwise.gif" and Image.open(first).n_frames == 3


@pytest.mark.slow
def test_latents_of_an_autoencoder(generate, images, autoencoder, tmp_path):
    out = tmp_path / "run"
    common = {"root": images[0], "out": out, "net": {"in_chans": 2, "patch_size": 1}}
    model = {"autoencoder": str(autoencoder)}
    fit_and_test(generate, **common, model=model)
    saved = torch.load(last(out), weights_only=True)
    assert all(key.startswith("net.") for key in saved["state_dict"])
    common["ckpt"] = last(out)
    generate("predict", **common, model={**model, "size": [8, 4]}).well()
    assert Image.open(next((out / "predictions").glob("00000*"))).size == (4, 8)
    wider = str(save_autoencoder(tmp_path / "wider", latent_channels=4))
    for changed, message in (
        ({"size": [8, 5]}, "multiples of 2"),
        ({"autoencoder": wider}, "expected a network with in_chans=4, got 2"),  # not the one of the training
        ({"autoencoder": None}, "expected a network with in_chans=1, got 2"),
    ):
        done = generate("predict", **common, model=model | changed)
        assert done.status == 1 and len(done.errors) == 1 and message in done.errors[0]


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
def test_what_cannot_be_predicted_is_one_line(generate, images, tmp_path, option, message):
    root, out = images
    done = generate("predict", option, root=root, out=tmp_path, ckpt=last(out))
    assert done.status == 1 and len(done.errors) == 1 and message in done.errors[0]


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
    data, pixels = VideoData("nowhere"), torch.arange(256, dtype=torch.uint8).view(1, 1, 4, 8, 8)
    assert torch.equal(data.to_pixels(data.from_pixels(pixels)), pixels)
    assert data.to_pixels(torch.tensor([[99.0, -99.0]])).tolist() == [[255, 0]]

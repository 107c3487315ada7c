"""Latents that are encoded once: what training gets from a folder is what it would encode; stale and cut folders."""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

pytest.importorskip("diffusers")

from ndlightnet import NDLightDiT
from ndlightnet.data.errors import DataError
from ndlightnet.training import GenerationTask, ImageFolders, LabelledData
from ndlightnet.training.generation import latents
from ndlightnet.training.generation.latents import Latents
from tests.training.conftest import last, launcher
from tests.training.generation.conftest import TINY, save_autoencoder

FOLDERS = TINY.replace("ImageData", "ImageFolders").replace(
    "in_chans: 1, num_classes: 2", "in_chans: 2, num_classes: 3"
)
FOLDERS = FOLDERS.replace("batch_size: 8", "batch_size: 8, size: 8, channels: 1, scale: null, crop_pct: 1, workers: 0")
generate = launcher(GenerationTask, LabelledData, FOLDERS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(latents, "CHUNK", 5)


def process(rank: int = 0, count: int = 1) -> SimpleNamespace:
    """What the cache asks a trainer for."""
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    names = {"progress_bar_callback": None, "is_global_zero": rank == 0, "testing": False, "predicting": False}
    return SimpleNamespace(strategy=strategy, global_rank=rank, world_size=count, precision_plugin=Precision(), **names)


def colour_folders(root, **options) -> ImageFolders:
    options = {"size": 8, "channels": 1, "scale": None, "crop_pct": 1.0, "hflip": 0.5} | options
    data = ImageFolders(str(root), batch_size=4, workers=0, **options)
    data.setup("fit")
    return data


def encoded(data, folder, autoencoder, **process_options):
    return latents.cached_latents(folder, Latents(data, str(autoencoder)), process(**process_options))


@pytest.mark.parametrize("hflip", [0.5, 0.0])
def test_cached_latents_are_those_of_the_images(write_stripes, autoencoder, tmp_path, hflip):
    """In the same order, with the same mirror images and, with the same noise, the same draws; an image that cannot be
    read is replaced by the next one."""
    root = write_stripes(tmp_path / "data", train=7, test=1)
    (root / "train" / "plain" / "002.png").write_bytes(b"no picture")
    data = colour_folders(root, hflip=hflip, validation=0.0)
    codec, batches = Latents(data, str(autoencoder)), [*data.train_dataloader()]
    data.train_set = encoded(data, tmp_path / "latents", autoencoder)
    assert len(data.train_set) == 21 and len([*(tmp_path / "latents").glob("*.pt")]) == 5
    cached = [*data.train_dataloader()]
    assert len(cached) == len(batches) == 5
    for plain, held in zip(batches, cached, strict=True):
        images, labels, *_ = data.on_after_batch_transfer(plain, 0)
        moments, held_labels, *_ = data.on_after_batch_transfer(held, 0)
        assert torch.equal(labels, held_labels) and moments.dtype == torch.float16
        torch.testing.assert_close(moments.float(), codec.moments(images), atol=1e-3, rtol=1e-3)
        draws = [codec.encode(x, torch.Generator().manual_seed(3)) for x in (images, moments)]
        torch.testing.assert_close(*draws, atol=2e-3, rtol=2e-3)
        mirrored = codec.moments(images.flip(-1))
        assert (mirrored - moments).abs().max() > 0.01  # else nothing is tested


def test_an_interrupted_run_goes_on_and_processes_share_the_images(write_stripes, autoencoder, tmp_path, monkeypatch):
    root, folder = write_stripes(tmp_path / "data", train=7, test=1), tmp_path / "latents"
    data = colour_folders(root, validation=0.0)
    encoded(data, folder, autoencoder, rank=1, count=2)
    assert sorted(file.stem for file in folder.glob("*.pt")) == ["000001", "000003"]
    before = {file: file.stat().st_mtime_ns for file in folder.glob("*.pt")}
    calls, moments = [], Latents.moments
    monkeypatch.setattr(Latents, "moments", lambda self, x: calls.append(len(x)) or moments(self, x))
    held = encoded(data, folder, autoencoder)
    assert sum(calls) == 2 * 11  # images and mirror images of files 0, 2 and 4
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    calls.clear()
    again = encoded(data, folder, autoencoder)
    assert (
        calls == []
        and [again[n].label for n in range(21)] == [held[n].label for n in range(21)] == [0] * 7 + [1] * 7 + [2] * 7
    )


@pytest.mark.parametrize(
    "options, wider, message",
    [
        (
            {"size": 12},
            False,
            r"has latents of {'size': \[1, 8, 8, 'bicubic'\]}, expected {'size': \[1, 12, 12, .*; remove the folder",
        ),
        (
            {"interpolation": "bilinear"},
            False,
            r"has latents of {'size': .*, expected {'size': \[1, 8, 8, 'bilinear'\]}",
        ),
        ({"train_limit": 12}, False, "has latents of {'images': "),
        ({}, True, "has latents of {'autoencoder': "),
    ],
)
def test_a_folder_of_other_latents_is_refused(write_stripes, autoencoder, tmp_path, options, wider, message):
    root, folder = write_stripes(tmp_path / "data", train=5, test=1), tmp_path / "latents"
    encoded(colour_folders(root), folder, autoencoder)
    autoencoder = save_autoencoder(tmp_path / "wider", latent_channels=4) if wider else autoencoder
    with pytest.raises(DataError, match=f"^model.latents={re.escape(str(folder))}: {message}"):
        encoded(colour_folders(root, **options), folder, autoencoder)
    for damaged in ("", "[1]"):
        (folder / "latents.json").write_text(damaged)
        with pytest.raises(DataError, match=r"latents.json: cannot be read \("):
            encoded(colour_folders(root), folder, autoencoder)


@pytest.mark.slow
def test_a_training_with_cached_latents_is_that_without(generate, write_stripes, autoencoder, tmp_path):
    """But for the rounding; a second training finds them, and a test compares pixels."""
    root, folder = write_stripes(tmp_path / "data", train=8, test=2, side=8), tmp_path / "latents"
    options = {"root": root, "data": {"hflip": 0.5}}
    weights = []
    for name, kept in (("plain", {}), ("first", {"latents": str(folder)}), ("second", {"latents": str(folder)})):
        options |= {"out": tmp_path / name, "model": {"autoencoder": str(autoencoder), **kept}}
        generate("fit", **options).well()
        generate("test", **options, ckpt=last(tmp_path / name)).well()
        weights.append(torch.load(last(tmp_path / name), weights_only=True)["state_dict"])
    plain, first, second = weights
    for key, value in plain.items():  # which training has moved by about 1e-3
        assert (first[key] - value).abs().max() < 1e-4 and torch.equal(first[key], second[key])
    for changed, message in (
        ({"data": {"scale": [0.5, 1.0]}}, "expected null without an autoencoder, or with augmentation but hflip"),
        ({"model": {"latents": str(folder)}}, "expected null without an autoencoder, or"),
    ):
        net = {} if "data" in changed else {"net": {"in_chans": 1}}
        done = generate("fit", **options | changed | net | {"out": tmp_path / "wrong"})
        assert done.status == 1 and len(done.errors) == 1 and message in done.errors[0]


def test_a_network_of_latents_gets_moments_that_have_its_channels(autoencoder):
    net = NDLightDiT(2, in_chans=2, num_classes=3, embed_dim=16, depth=1)
    codec = Latents(None, str(autoencoder))
    moments = torch.cat([torch.ones(3, 2, 4, 4), torch.zeros(3, 2, 4, 4)], 1).half()
    latents = codec.encode(moments)
    torch.testing.assert_close(latents, torch.full((3, 2, 4, 4), (1 - 0.25) * 0.5))
    assert net(latents, torch.zeros(3)).shape == latents.shape

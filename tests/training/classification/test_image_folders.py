"""Class folders of images: a run from files to predictions, odd files, and what is refused."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from PIL import Image
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.data.image.image_transforms import RandAugment
from ndlightnet.training import ImageFolders, ImageTask, Pathfinder
from tests.training.conftest import fit_and_test, last


@pytest.fixture(scope="module")
def trained(tmp_path_factory, stripes, recognise) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("out")
    assert "held-out accuracy" in fit_and_test(recognise, root=stripes, out=out).out
    return out


@pytest.fixture
def copied(stripes, tmp_path) -> Path:
    return Path(shutil.copytree(stripes, tmp_path / "copy"))


def data(root: Path, **options) -> ImageFolders:
    return ImageFolders(str(root), **{"size": 8, "batch_size": 8, "workers": 0} | options)


@pytest.mark.slow
def test_a_small_set_is_learnt(trained):
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["top1"] > 0.95 and metrics["images"] == 30
    assert metrics["tokens"] == 16 and metrics["steps"] == 4 * (108 // 16)
    rows = list(csv.DictReader((trained / "test.csv").open()))
    assert len(rows) == 30 and all(Path(row["file"]).is_file() for row in rows)
    assert [Path(row["file"]).parent.name for row in rows] == [row["truth"] for row in rows]
    for name in ("confusion.png", "test_images.png", "attribution.png", "curves.png"):
        assert matplotlib.image.imread(trained / name).std() > 0.05


@pytest.mark.slow
def test_predictions_of_a_folder_with_odd_files(trained, stripes, tmp_path, recognise):
    """Palettes, alpha, 16 bits, other sizes: predicted. Damaged: listed at the end, also if all are."""
    new = tmp_path / "new" / "deep" / "er"
    new.mkdir(parents=True)
    for kind in ("columns", "plain", "rows"):
        Image.open(stripes / "test" / kind / "000.png").resize((50, 30)).save(new / f"{kind}.webp")
    image = Image.open(stripes / "test" / "rows" / "001.png")
    image.convert("P").save(new / "rows palette.png")
    image.convert("RGBA").save(new / "rows=alpha.png")
    Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(new / "rows deep.png")
    (new / "cut.jpg").write_bytes(b"\xff\xd8\xff")
    done = recognise("predict", input=tmp_path / "new", out=tmp_path / "out", ckpt=last(trained))
    assert done.status == 1 and len(done.errors) == 1 and f"{new / 'cut.jpg'}: cannot be read" in done.errors[0]
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    assert len(rows) == 6 and all(Path(row["file"]).name.startswith(row["prediction"]) for row in rows)
    for row in rows:
        assert sum(float(row[name]) for name in ("columns", "plain", "rows")) == pytest.approx(1)
    assert matplotlib.image.imread(tmp_path / "out" / "predictions.png").std() > 0.05
    for file in {*new.iterdir()} - {new / "cut.jpg"}:
        file.unlink()
    done = recognise("predict", input=tmp_path / "new", out=tmp_path / "none", ckpt=last(trained))
    assert done.status == 1 and len(done.errors) == 1 and "cut.jpg: cannot be read" in done.errors[0]
    assert (tmp_path / "none" / "predictions.csv").read_text() == "file,prediction,columns,plain,rows\n"


@pytest.mark.slow
def test_bad_files_in_a_run(copied, tmp_path, recognise):
    """Each is named once in training, and as a failure in the test; without a good one the test ends."""
    for split in ("train", "test"):
        (copied / split / "rows" / "003.png").write_bytes(b"damaged")
    places, data = {"root": copied, "out": tmp_path / "out"}, {"workers": 2, "validation": 0, "batch_size": 8}
    done = recognise("fit", "--trainer.max_epochs=2", **places, data=data).well()
    assert len(done.notes) == 1 and "train/rows/003.png: cannot be read" in done.notes[0]
    done = recognise("test", **places, ckpt=last(tmp_path / "out"))
    assert done.status == 1 and len(done.errors) == 1 and "over 29 images" in done.out
    assert "test/rows/003.png: cannot be read" in done.errors[0]
    for file in (copied / "test").rglob("*.png"):
        file.write_bytes(b"damaged")
    done = recognise("test", **places, ckpt=last(tmp_path / "out"))
    assert done.status == 1 and done.errors == [f"error: {copied}: no file of the test could be read"]


def test_a_set_of_12_bits_in_16_gets_one_note(tmp_path, capsys):
    for folder in ("train/a", "train/b", "val/a"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((8, 8), 4095 - number, np.uint16)).save(tmp_path / folder / f"{number}.png")
    data(tmp_path).setup("fit")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {tmp_path / 'train'}: the brightest pixel of 6 16-bit images ")


@pytest.mark.slow
def test_a_checkpoint_of_other_classes(trained, copied, recognise, tmp_path):
    """Of another number, and of other names."""
    places = {"root": copied, "out": tmp_path / "out", "ckpt": last(trained)}
    for split in ("train", "test"):
        (copied / split / "plain").rename(copied / split / "zebra")
    (error,) = recognise("test", **places).errors
    assert "zebra" in error and "plain" in error
    for split in ("train", "test"):
        shutil.rmtree(copied / split / "zebra")
    (error,) = recognise("test", **places, net={"num_classes": 2}).errors
    assert "the checkpoint of another network: num_classes is 3 there, 2 here" in error
    (error,) = recognise("test", **places).errors
    assert "expected a network with num_classes=2" in error


def test_networks_of_other_libraries_are_tried_before_a_training(stripes):
    images = data(stripes)
    images.setup("fit")

    def tried(net: nn.Module) -> nn.Module:
        task = ImageTask(net)
        task._trainer = SimpleNamespace(datamodule=images, precision_plugin=Precision())
        task.try_network()
        return net

    net = tried(nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.BatchNorm1d(3)))
    assert net.training and net[2].training and net[2].num_batches_tracked == 0
    for width, line in (
        (8, r"model\.net=Linear: output \(1, 3, 8, 3\) of an image, expected \(1, 3\)"),
        (9, r"model\.net=Linear: cannot take images of \(3, 8, 8\) \(.*shapes cannot be mult"),
    ):
        with pytest.raises(DataError, match=line):
            tried(nn.Linear(width, 3))


def test_a_name_that_timm_does_not_know(stripes, tmp_path, recognise):
    pytest.importorskip("timm")
    net = ("--model.net=timm.create_model", "--model.net.model_name=resnet10tt")
    done = recognise("fit", *net, root=stripes, out=tmp_path)
    assert done.status == 1 and done.errors == ["error: RuntimeError: Unknown model (resnet10tt)"]


def test_a_validation_without_a_readable_file(copied, tmp_path, recognise):
    for kind in ("columns", "rows"):
        (copied / "val" / kind).mkdir(parents=True)
        (copied / "val" / kind / "0.png").write_bytes(b"damaged")
    places = {"root": copied, "out": tmp_path / "out"}
    done = recognise("fit", "--trainer.max_epochs=1", "--trainer.num_sanity_val_steps=0", **places)
    assert done.status == 1 and done.errors == [f"error: {copied}: no file of the validation could be read"]
    shutil.rmtree(copied / "val")
    done = recognise("validate", "--data.init_args.validation=0", **places)
    assert done.status == 1 and done.errors == [f"error: {copied}: validate: there is nothing to validate with"]


def test_batches_are_bytes_until_they_are_on_the_device(stripes):
    images = data(stripes, validation=0.2)
    images.setup("fit")
    assert images.classes == ("columns", "plain", "rows") and images.space == (8, 8)
    assert (len(images.train_set), len(images.val_set)) == (96, 24)
    labels = images.val_set.files.labels.tolist()
    assert [labels.count(label) for label in range(3)] == [8, 8, 8]
    assert not {*images.val_set.files.names} & {*images.train_set.files.names}
    batch = next(iter(images.train_dataloader()))
    assert batch[0].dtype == torch.uint8 and batch[0].shape == (8, 3, 8, 8)
    x, labels, numbers = images.on_after_batch_transfer(batch, 0)
    assert x.dtype == torch.float32 and labels.dtype == numbers.dtype == torch.int64
    assert torch.equal(images.to_pixels(x), batch[0])
    assert torch.equal(images.from_pixels(batch[0]), x) and batch[0].dtype == torch.uint8
    pixels = batch[0][:, 0].float() / 255
    assert torch.allclose(x[:, 0], (pixels - 0.485) / 0.229, atol=1e-5)
    assert images.to_pixels(torch.full((1, 3, 2, 2), 99.0)).unique().tolist() == [255]


def test_grey_images_of_two_sides(stripes):
    images = data(stripes, size=[6, 10], channels=1)
    images.setup("fit")
    assert (images.space, images.channels) == ((6, 10), 1)
    batch = next(iter(images.val_dataloader()))
    x, *_ = images.on_after_batch_transfer(batch, 0)
    assert x.shape[1:] == (1, 6, 10) and torch.equal(images.to_pixels(x), batch[0])


def test_options_reach_the_transforms(stripes):
    """The border that `crop_pct` leaves out, the colour of erased boxes, crops of one scale."""
    mean = {"mean": [0.2, 0.4, 0.6], "std": [1.0] * 3}
    images = data(stripes, padding=2, random_erasing=1.0, crop_pct=0.5, mixup=0.3, cutmix=0.7, **mean)
    framed = Image.new("RGB", (16, 16), "white")
    framed.paste((9, 9, 9), (4, 4, 12, 12))
    assert images.evaluate(framed).unique().tolist() == [9]
    erased = images.augment(Image.new("RGB", (8, 8), "white")).flatten(1).T.unique(dim=0)
    assert erased.tolist() == [[51, 102, 153], [255, 255, 255]]
    cells = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    colours = {(51, 102, 153), *map(tuple, cells.reshape(-1, 3).tolist())}
    pixels = images.augment(Image.fromarray(cells)).flatten(1).T.tolist()
    assert {*map(tuple, pixels)} <= colours  # a crop of another size would mix them
    images.setup("fit")
    ways = {type(way).__name__: way.alpha for way in images.mixing.transforms}
    assert ways == {"MixUp": 0.3, "CutMix": 0.7}


def test_a_folder_for_validation(copied):
    shutil.copytree(copied / "test", copied / "val")
    images = data(copied, validation=0.5)
    images.setup("fit")
    assert (len(images.train_set), len(images.val_set)) == (120, 30)
    (copied / "val" / "rows").rename(copied / "val" / "ant")
    with pytest.raises(DataError, match=r"val/ant: a class that training lacks, it has \['colu"):
        data(copied).setup("fit")


def test_a_share_of_the_training_images(copied):
    """As many of each class as can be, the same ones each time; validation keeps all of its own."""
    images = data(copied, validation=0.5, train_limit=9)
    images.setup("fit")
    assert images.train_set.files.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert len(images.val_set) == 60
    with pytest.raises(DataError, match=r"train_limit=2, no sample of a class is left"):
        data(copied, train_limit=2).setup("fit")
    with pytest.raises(DataError, match=r"train_limit=121.*expected 1 or more of 120"):
        data(copied, validation=0, train_limit=121).setup("fit")


def test_a_test_needs_no_training_images(copied):
    shutil.rmtree(copied / "train")
    images = data(copied)
    images.setup("test")
    assert images.classes == ("columns", "plain", "rows") and len(images.test_set) == 30
    with pytest.raises(DataError, match="train: no such folder"):
        images.setup("fit")


@pytest.mark.parametrize(
    "options, line",
    [
        ({"size": 0}, r"data\.size: 0, expected one or two numbers above 0"),
        ({"size": [4, 5, 6]}, r"data\.size: \[4, 5, 6\], expected"),
        ({"channels": 2}, r"data\.channels: 2, expected 3 \(RGB\) or 1"),
        ({"batch_size": 0}, r"data\.batch_size: 0, expected 1 or more"),
        ({"workers": -1}, r"data\.workers: -1, expected 0 or more processes"),
        ({"randaugment": RandAugment(-1)}, r"data\.randaugment: .*expected num_ops 0 or more"),
        ({"hflip": 2}, r"data\.hflip: 2, expected a fraction"),
        ({"mixup": -1}, r"data\.mixup: -1, expected 0 or more"),
        ({"scale": (0.5, 0.1)}, r"data\.scale: \(0\.5, 0\.1\), expected two fractions"),
        ({"crop_pct": 0}, r"data\.crop_pct: 0, expected a fraction above 0"),
        ({"mean": [0.5]}, r"data\.mean, data\.std: .*expected 3 for each"),
        ({"std": [0.0, 1, 1]}, r"data\.mean, data\.std: .*std above 0"),
    ],
)
def test_bad_options(options, line):
    with pytest.raises(DataError, match=line):
        data(Path("x"), **options)


def test_folders_that_cannot_be_used(copied):
    with pytest.raises(DataError, match=r"nowhere: no such folder, expected one with train/CLASS"):
        data(Path("nowhere")).setup("fit")
    with pytest.raises(DataError, match=r"validation=1\.0 leaves no image of a class"):
        data(copied, validation=1.0).setup("fit")
    shutil.rmtree(copied / "test")
    with pytest.raises(DataError, match="test: no such folder"):
        data(copied).setup("test")
    for kind in ("plain", "rows"):
        shutil.rmtree(copied / "train" / kind)
    with pytest.raises(DataError, match=r"has the classes \['columns'\], expected two or more"):
        data(copied).setup("fit")


def test_pathfinder_is_drawn_and_read_whole(tmp_path):
    """In grey, no pixel is cut off or scaled, in training either."""
    read = Pathfinder(str(tmp_path / "set"), 24, (20, 4), 4, 2, hflip=0.0, batch_size=4, workers=0)
    read.prepare_data()
    read.setup("fit")
    assert read.classes == ("apart", "joined") and (len(read.train_set), len(read.val_set)) == (18, 2)
    for samples in (read.train_set, read.val_set):
        for n in range(len(samples)):
            pixels = np.asarray(Image.open(samples.files.path(n)))
            assert torch.equal(samples[n].image, torch.from_numpy(pixels.copy())[None])

"""Pictures in nnU-Net's layout: read, segmented in two axes, written in their own format."""

import json
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk
import torch
from PIL import Image

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.datasets import find_inputs, read_dataset
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume
from ndlightnet.training.segmentation.plan import plan
from tests.training.conftest import fit_and_test, last

SIZES = ((40, 30), (33, 47), (38, 41))  # width, height


def draw(folder: Path, ending: str = ".png", mode: str = "RGB") -> Path:
    """Bright discs (class 1) on noise; the last case is for `test`."""
    rng = np.random.default_rng(0)
    for number, (wide, high) in enumerate(SIZES):
        kind = "Ts" if number == 2 else "Tr"
        y, x = np.mgrid[:high, :wide]
        label = ((x - wide * 0.3) ** 2 + (y - high * 0.6) ** 2 < 60).astype(np.uint8)
        image = rng.integers(0, 60, (high, wide, len(mode))) + 150 * label[..., None]
        for what, cells, end in (("images", image.squeeze(), f"_0000{ending}"), ("labels", label, ending)):
            path = folder / f"{what}{kind}" / f"c{number}{end}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(cells.astype(np.uint8)).save(path, dpi=(200, 100))
    listing = {"channel_names": dict(enumerate(mode)), "labels": {"background": 0, "disc": 1}}
    listing |= {"numTraining": 2, "file_ending": ending}
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


def options(root: Path, out: Path, channels: int = 3) -> dict[str, object]:
    data = {"patch": [24, 24], "augment": {"flip_axes": [0, 1]}, "batches": 20}
    net = {"dims": 2, "in_channels": channels, "out_channels": 2}
    return {"out": out, "root": root, "data": data, "net": net, "model": {"window": [24, 24], "lr": 0.01}}


@pytest.mark.slow
def test_fit_test_predict(segment, tmp_path):
    root, out = draw(tmp_path / "set"), tmp_path / "out"
    places = options(root, out)
    fit_and_test(segment, "--trainer.max_epochs=3", **places)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["cases"][0]["name"] == "c2" and metrics["mean_dice"] > 0.8
    segment("predict", **places, ckpt=last(out), input=root / "imagesTs").well()
    with Image.open(out / "predictions" / "labels" / "c2.png") as image:
        labels = np.array(image)
        assert image.mode == "L" and image.size == SIZES[2]
    with Image.open(root / "labelsTs" / "c2.png") as image:
        truth = np.array(image)
    dice = 2 * (labels & truth).sum() / (labels.sum() + truth.sum())
    assert dice == pytest.approx(metrics["mean_dice"], abs=1e-5)  # in place, not mirrored
    assert (out / "predictions" / "c2.png").is_file()  # the picture of the case
    Image.open(root / "imagesTs" / "c2_0000.png").save(tmp_path / "c2.tif")
    segment("predict", **places, ckpt=last(out), input=tmp_path / "c2.tif").well()
    with Image.open(out / "predictions" / "labels" / "c2.tif") as image:
        np.testing.assert_array_equal(np.array(image), labels)


def test_cases_are_read_as_they_lie(tmp_path):
    folder = read_dataset(draw(tmp_path))
    assert (len(folder.training), len(folder.test), folder.channels) == (2, 1, ("R", "G", "B"))
    volume = Volume.read(folder.training[0], 2, 3)
    with Image.open(folder.training[0].images[0]) as image:
        cells = np.array(image)
    assert volume.image.shape == (3, 40, 30, 1)
    np.testing.assert_array_equal(volume.image.numpy()[:, :, :, 0].T, cells)
    labels = volume.label[0].numpy()
    assert 0 < labels.sum() < 200
    volume.save_labels(torch.from_numpy(300 * labels), tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        np.testing.assert_array_equal(np.array(image), 300 * labels[:, :, 0].T)
    with pytest.raises(ValueError, match=r"written as \.png, got x\.nii\.gz"):
        volume.save_labels(labels, tmp_path / "x.nii.gz")
    series = np.zeros((40, 30, 1, 3), np.uint8)  # a picture has no frames
    with pytest.raises(ValueError, match=r"labels have shape \(40, 30, 1, 3\), .*\.png has \(40, 30, 1\)$"):
        volume.save_labels(series, tmp_path / "new" / "x.png")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("ending, mode", [(".png", "RGB"), (".tif", "L")])
def test_labels_are_written_in_the_format_of_the_picture(tmp_path, ending, mode):
    volume = Volume.read(read_dataset(draw(tmp_path, ending, mode)).training[0], 2, len(mode))
    for factor, depth in ((1, "L"), (300, "I;16")):
        volume.save_labels(factor * volume.label[0].int(), tmp_path / f"x{ending}")
        with Image.open(tmp_path / f"x{ending}") as image:
            np.testing.assert_array_equal(np.array(image), factor * volume.label[0, :, :, 0].int().numpy().T)
            assert image.mode == depth and image.info["dpi"] == pytest.approx((200, 100), rel=1e-3)


def read(path: Path, image: Image.Image | np.ndarray, **options: object) -> Volume:
    """The volume of an image, or of cells of 16 bits, in a file."""
    if isinstance(image, Image.Image):
        image.save(path, **options)
    else:
        sitk.WriteImage(sitk.GetImageFromArray(image, isVector=True), path)
    return Volume.read(Case("x", (path,), None))


def test_palettes_alpha_and_depth(tmp_path):
    cells = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = Image.fromarray(cells)
    palette.putpalette([255 - i // 3 for i in range(768)])
    colours = read(tmp_path / "p.png", palette)
    np.testing.assert_array_equal(colours.image[2, :, :, 0].numpy().T, 255 - cells)
    assert len(colours.image) == 3 and "palette, taken as RGB" in colours.notes[0]
    labelled = Volume.read(Case("p", (tmp_path / "p.png",), tmp_path / "p.png"))
    np.testing.assert_array_equal(labelled.label[0, :, :, 0].numpy().T, cells)
    clear = read(tmp_path / "a.png", Image.new("RGBA", (4, 3), (1, 2, 3, 4)))
    assert clear.image[:, 0, 0, 0].tolist() == [1, 2, 3] and "alpha" in clear.notes[0]
    for name, deep in (("d.png", cells.astype(np.uint16) * 5000), ("f.tif", cells.astype(np.float32) / 8)):
        np.testing.assert_array_equal(read(tmp_path / name, Image.fromarray(deep)).image[0, :, :, 0].numpy().T, deep)


@pytest.mark.parametrize("ending", [".png", ".tif"])
@pytest.mark.parametrize("channels", [3, 4])
def test_colours_of_16_bits_keep_them(tmp_path, ending, channels):
    cells = np.random.default_rng(0).integers(0, 2**16, (3, 4, channels), np.uint16)
    volume = read(tmp_path / f"x{ending}", cells)
    np.testing.assert_array_equal(volume.image[..., 0].numpy().T, cells[..., :3])
    assert len(volume.notes) == channels - 3  # that alpha is left out


def test_what_cannot_be_used_is_one_line(tmp_path):
    bad = tmp_path / "x.png"
    with pytest.raises(DataError, match=f"^{bad}: has 16 bits a channel, expected 8"):  # grey with alpha
        read(bad, np.ones((3, 4, 2), np.uint16))
    with pytest.raises(DataError, match=f"^{bad}: is not a NIfTI.*data.patch of 2"):
        find_inputs(bad)
    assert [case.name for case in find_inputs(bad, pictures=True)] == ["x"]
    files = tmp_path / "a_0000.png", tmp_path / "a_0001.png"
    for file, size in zip(files, [(6, 4), (6, 5)], strict=True):
        Image.new("L", size).save(file)
    with pytest.raises(DataError, match=f"^{files[1]}: is 6 x 5 pixels, {files[0]} is 6 x 4; expected one size"):
        Volume.read(Case("a", files, None))


def test_numbered_files_are_channels_if_grey_and_cases_if_coloured(tmp_path):
    for number in range(3):
        Image.new("RGB", (4, 3)).save(tmp_path / f"IMG_{number:04}.jpg")
    cases = find_inputs(tmp_path, 3, pictures=True)
    assert [case.name for case in cases] == ["IMG_0000", "IMG_0001", "IMG_0002"]
    assert all(len(case.images) == 1 for case in cases)
    for number in range(3):
        Image.new("L", (4, 3)).save(tmp_path / f"IMG_{number:04}.jpg")
    (case,) = find_inputs(tmp_path, 3, pictures=True)
    assert case.name == "IMG" and len(case.images) == 3


def test_plan_says_that_it_is_for_volumes(tmp_path):
    with pytest.raises(DataError, match="holds pictures, expected volumes"):
        plan(str(draw(tmp_path / "set")), str(tmp_path / "out"))


@pytest.mark.slow
def test_grey_is_not_colour_and_volumes_are_no_pictures(tmp_path, segment, decathlon):
    root = draw(tmp_path / "set")
    Image.new("L", SIZES[0]).save(root / "imagesTr" / "c0_0000.png")
    done = segment("fit", **options(root, tmp_path / "out"))
    assert done.errors == [f"error: {root}/imagesTr/c0_0000.png: has 1 channels, expected 3"]
    done = segment("fit", **options(decathlon, tmp_path / "out", 1))
    assert "slices, expected a picture for data.patch of 2 sizes" in done.errors[0]


@pytest.mark.parametrize("ending, turn", [(".png", 6), (".jpg", 3), (".tif", 3)])
def test_an_orientation_tag_turns_the_picture_upright(tmp_path, ending, turn):
    """Of a TIFF that lies on its side: tests/data/image."""
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40)
    tag = Image.Exif()
    tag[0x0112] = turn
    volume = read(tmp_path / f"a_0000{ending}", image, exif=tag)
    upright = np.asarray(image.transpose({3: Image.ROTATE_180, 6: Image.ROTATE_270}[turn]))
    cells = np.asarray(volume.image)[0, :, :, 0].T
    assert cells.shape == upright.shape and np.abs(cells - upright).max() < 30  # JPEG
    assert "turned upright" in " ".join(volume.notes)

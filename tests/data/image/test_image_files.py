"""What all readers of pictures share: polarity, depth, size; a folder of good and bad files."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.data.image import image_transforms
from ndlightnet.data.image.image_folder import find_images, note_dark, read_image
from ndlightnet.data.volume import file_grid as grid
from ndlightnet.data.volume.formats import open_file
from ndlightnet.data.volume.image_planes import has_colours, open_label, open_picture

from ..refusals import refuses
from .picture_files import COLOURS, RAMP, write_sbit, write_tiff


def numbers(path: Path, label: bool = False) -> np.ndarray:
    """Return what segmentation reads: (height, width[, channels])."""
    opened, read = (open_label if label else open_picture)(path)
    channels = [read(slice(None), channel)[..., 0].T for channel in range(opened.shape[3])]
    return channels[0] if len(channels) == 1 else np.stack(channels, -1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_larger_number_is_brighter_in_every_tiff(tmp_path, bits, photometric, order, packed):
    most = 2**bits - 1
    stored = np.linspace(0, most, 24).round().astype(np.uint16 if bits > 8 else np.uint8)
    stored = stored.reshape(4, 6)
    path = write_tiff(tmp_path / "a.tif", stored, bits, photometric, order, packed)
    bright = stored if photometric == 1 else most - stored
    expected = (bright.astype(float) * 255 / most).round()
    np.testing.assert_array_equal(read_image(path, 1), expected)
    scale = {1: 1, 16: 65535}.get(bits, 255)  # Pillow spreads 2 and 4 bits over 8
    np.testing.assert_array_equal(numbers(path), (bright.astype(float) * scale / most).round())
    opened, _ = open_label(path)
    assert any("white as 0" in note for note in opened.notes) is (photometric == 0)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    "cells, bits, photometric, words",
    [
        (RAMP / np.float32(255), 32, 0, "has white as 0 in floats, expected black as 0"),
        (RAMP.astype(np.uint16), 16, None, "has no PhotometricInterpretation, expected 0 or 1"),
        (RAMP, 8, None, "has no PhotometricInterpretation, expected 0 or 1"),
        (RAMP.astype(np.int8), 8, 1, "has signed numbers of 8 bits, expected unsigned ones"),
        (RAMP.astype(np.int8), 8, 0, "cannot be read"),
        (RAMP.astype(np.int16), 16, 0, "cannot be read"),
    ],
)
def test_tiffs_without_a_known_white_are_refused(tmp_path, cells, bits, photometric, words, order):
    path = write_tiff(tmp_path / "a.tif", cells, bits, photometric, order)
    for read in (lambda: read_image(path, 1), lambda: open_file(path)):
        refuses(read, path, words)


@pytest.mark.parametrize("bits", [9, 10, 12, 14])
def test_the_bits_that_count_fill_8(tmp_path, bits):
    """Those of an sBIT chunk: numbers up to 2^bits - 1, or scaled to 16 bits as PNG asks, also dark ones; and 12 bits
    in a TIFF."""
    most = 2**bits - 1
    raw = np.linspace(0, most, 24).round().astype(np.uint16).reshape(4, 6)
    expected = (raw * (255 / most)).round()
    np.testing.assert_array_equal(read_image(write_sbit(tmp_path / "a.png", raw, bits), 1), expected)
    np.testing.assert_array_equal(numbers(tmp_path / "a.png"), raw)  # segmentation keeps them
    spread = (raw * (65535 / most)).round().astype(np.uint16)
    for cells in (spread, raw << (16 - bits), spread[spread < 2**bits][None]):
        image = read_image(write_sbit(tmp_path / "b.png", cells, bits), 1)
        np.testing.assert_array_equal(image, (cells * (255 / 65535)).round())
    if bits == 12:
        path = write_tiff(tmp_path / "a.tif", raw, 12, 1)
        np.testing.assert_array_equal(read_image(path, 1), expected)


def test_a_set_that_hardly_uses_its_16_bits_gets_one_note(tmp_path):
    deep = np.linspace(0, 4095, 24).round().astype(np.uint16).reshape(4, 6)
    Image.fromarray(RAMP).save(tmp_path / "8bit.png")
    write_sbit(tmp_path / "bits.png", deep, 12)
    for number in range(3):
        Image.fromarray(deep * 16).save(tmp_path / f"{number}.png")

    def noted() -> list[str]:
        notes: list[str] = []
        note_dark(find_images(tmp_path), notes)
        return notes

    assert noted() == []
    for path in tmp_path.glob("*.png"):
        if path.name not in ("8bit.png", "bits.png"):
            Image.fromarray(deep).save(path)
    assert noted() == []  # one file tells its bits, and is bright
    (tmp_path / "bits.png").write_text("damaged")
    (line,) = noted()
    assert line.startswith(f"{tmp_path}: the brightest pixel of 3 16-bit images becomes 16 of 255")


@pytest.mark.parametrize("ending", ["png", "tif", "bmp", "jpg", "webp"])
def test_the_memory_limits_the_size_and_not_pillow(tmp_path, monkeypatch, ending):
    path = tmp_path / f"a.{ending}"
    Image.new("RGB", (6, 4), "white").save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    image = read_image(path, 3)
    assert image.size == (6, 4) and image.getextrema() == ((255, 255),) * 3
    crop = image_transforms.training((2, 2), "bilinear", scale=(0.9, 1), ratio=(1.4, 1.6))
    assert torch.equal(crop(image), torch.full((3, 2, 2), 255, dtype=torch.uint8))
    assert (numbers(path) == 255).all() and has_colours(path)
    assert Image.MAX_IMAGE_PIXELS == 5
    monkeypatch.setattr(grid, "MEMORY", 4 * 72)  # float32
    read_image(path, 3)
    monkeypatch.setattr(grid, "MEMORY", 4 * 72 - 1)
    for read in (lambda: read_image(path, 3), lambda: open_picture(path)):
        refuses(read, path, "its header claims 6 x 4 x 3 .* memory can")


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK"])
def test_a_label_is_grey_or_of_equal_colours(tmp_path, mode):
    path = tmp_path / "a.tif"
    if mode != "CMYK":  # which mixes greys of several inks
        Image.fromarray(RAMP).convert(mode).save(path)
        np.testing.assert_array_equal(numbers(path, label=True), RAMP)
    if mode not in ("L", "LA"):
        Image.fromarray(COLOURS).convert(mode).save(path)
        refuses(lambda: open_label(path), path, "is a label in colours, expected whole numbers")


def test_a_label_with_a_palette_of_other_greys_gets_a_note(tmp_path):
    image = Image.fromarray(RAMP // 10)
    for greys, noted in (([*range(256)], False), ([*range(255, -1, -1)], True)):
        image.putpalette([grey for grey in greys for _ in range(3)])
        image.save(tmp_path / "a.png")
        np.testing.assert_array_equal(numbers(tmp_path / "a.png", label=True), RAMP // 10)
        notes = open_label(tmp_path / "a.png")[0].notes
        assert any("of which the indices are taken" in note for note in notes) is noted


def good_pictures(folder: Path) -> dict[str, tuple[np.ndarray, int]]:
    """Write files; return for each its cells as RGB, and by how much JPEG may be off."""
    cells_of: dict[str, tuple[np.ndarray, int]] = {}

    def put(name: str, image: Image.Image, cells: np.ndarray, off: int = 0, **options: object) -> None:
        image.save(folder / name, **options)
        cells_of[name] = (np.broadcast_to(cells if cells.ndim == 3 else cells[..., None], (4, 6, 3)), off)

    grey, colour = Image.fromarray(RAMP), Image.fromarray(COLOURS)
    for ending in ("png", "bmp", "tif", "webp"):
        put(f"grey.{ending}", grey, RAMP, lossless=True)
        put(f"colour.{ending}", colour, COLOURS, lossless=True)
    put("opaque.png", colour.convert("RGBA"), COLOURS)
    put("clear.png", Image.new("RGBA", (6, 4)), np.full((4, 6), 255))
    palette = Image.fromarray(RAMP // 10)
    palette.putpalette([x for n in range(256) for x in (n, 255 - n, 7)])
    indexed = np.stack([RAMP // 10, 255 - RAMP // 10, np.full_like(RAMP, 7)], -1)
    for ending in ("png", "tif", "bmp"):
        put(f"palette.{ending}", palette, indexed)
    deep = RAMP.astype(np.uint16) * 257
    for ending in ("png", "tif"):
        put(f"deep.{ending}", Image.fromarray(deep), RAMP)
        put(f"bit.{ending}", Image.fromarray(RAMP > 99), (RAMP > 99) * 255)
    put("float.tif", Image.fromarray(RAMP / np.float32(255)), RAMP)
    put("grey.JPG", Image.new("L", (6, 4), 99), np.full((4, 6), 99), off=3)
    put("cmyk.jpg", Image.new("RGB", (6, 4), (9, 99, 199)).convert("CMYK"), np.full((4, 6, 3), (9, 99, 199)), off=9)
    pages = {"format": "MPO", "save_all": True, "append_images": [Image.new("L", (3, 2))]}
    put("phone.jpg", Image.new("L", (6, 4), 50), np.full((4, 6), 50), off=3, **pages)
    raw = np.linspace(0, 4095, 24).round().astype(np.uint16).reshape(4, 6)
    write_sbit(folder / "sbit.png", raw, 12)
    cells_of["sbit.png"] = np.stack([(raw / 4095 * 255).round()] * 3, -1), 0
    return cells_of


def bad_pictures(folder: Path) -> dict[str, str]:
    """Write files; return what is wrong with each."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    noise.save(png, "PNG")
    noise.save(jpeg, "JPEG")
    contents = {"text.png": b"hello", "empty.tif": b"", "head.png": png.getvalue()[:20]}
    contents |= {"cut.png": png.getvalue()[:3000], "cut.jpg": jpeg.getvalue()[:1000]}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    grey = Image.fromarray(RAMP)
    for name, kind in (("pages.tif", "TIFF"), ("moving.png", "GIF")):
        grey.save(folder / name, kind, save_all=True, append_images=[Image.fromarray(255 - RAMP)])
    exif = Image.Exif()
    exif[0x0112] = 6
    grey.save(folder / "side.tif", exif=exif)
    huge = bytearray((folder / "grey.bmp").read_bytes())
    huge[18:26] = (2**30).to_bytes(4, "little") * 2
    (folder / "huge.bmp").write_bytes(huge)
    return {
        **dict.fromkeys(contents, "cannot be read"),
        "pages.tif": "has 2 pages",
        "moving.png": "has 2 pages",
        "side.tif": "orientation tag 6",
        "huge.bmp": "its header claims 1073741824 x",
    }


def test_a_folder_of_good_and_bad_pictures(tmp_path):
    good, bad = good_pictures(tmp_path), bad_pictures(tmp_path)
    files = find_images(tmp_path)
    assert len(files) == len(good) + len(bad)
    for path in map(files.path, range(len(files))):
        if path.name in good:
            cells, off = good[path.name]
            read = np.asarray(read_image(path, 3)).astype(int)
            assert read.shape == cells.shape and np.abs(read - cells).max() <= off, path.name
            continue
        line = refuses(lambda path=path: read_image(path, 3), path, bad[path.name])
        if path.suffix != ".bmp":  # segmentation's words are the same
            assert refuses(lambda path=path: open_file(path), path) == line

"""Files of pictures as Pillow opens them, for all readers: one page, of any size, upright, bright
where the numbers are large."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume import file_grid

T = TypeVar("T")
GREY = ("1", "L", "I", "F", "I;16", "I;16L", "I;16B")  # Pillow's modes of one channel
BITS, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
SIGNED = (2,)  # of SAMPLE_FORMAT
LIMIT = Lock()  # of Pillow's limit, which is one for the process

# grey of 16 bits with white as 0, which Pillow knows in the other byte order only
TiffImagePlugin.OPEN_INFO.setdefault((TiffImagePlugin.MM, 0, (1,), 1, (16,), ()), ("I;16B", "I;16B"))


def of_any_size(act: Callable[..., T], *arguments: Any) -> T:
    """Return act(*arguments), without Pillow's limit of 179 million pixels if that stops it."""
    try:
        return act(*arguments)
    except Image.DecompressionBombError:
        with LIMIT:
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                return act(*arguments)
            finally:
                Image.MAX_IMAGE_PIXELS = limit


@contextmanager
def open_image(path: Path) -> Iterator[Any]:
    """Yield Pillow's image of a file, not decoded: see `decode`. Of a photograph with previews (MPO) it is the first.
    DataError for several pages, for more pixels than this machine's memory holds as float32, and for TIFFs that lie on
    their side, whose white is 0 in floats or is not told, or that have signed numbers of 8 bits."""
    opened: Any = of_any_size(Image.open, path)
    with opened as file:
        if (pages := getattr(file, "n_frames", 1)) > 1 and file.format != "MPO":
            raise DataError(f"{path}: has {pages} pages, expected a picture of one")
        shape = (*file.size, len(file.getbands()))
        file_grid.check_size(path, shape, 4, file_grid.MEMORY, "this machine's memory")
        if file.format == "TIFF":
            if (turn := orientation(file)) > 4:  # Pillow 13.0 swaps its sides twice
                raise DataError(f"{path}: orientation tag {turn}, expected an upright TIFF")
            if file.mode in GREY and PHOTOMETRIC not in file.tag_v2:
                raise DataError(f"{path}: has no PhotometricInterpretation, expected 0 or 1")
            if white_is_zero(file) and file.mode == "F":
                raise DataError(f"{path}: has white as 0 in floats, expected black as 0")
            if file.mode == "L" and file.tag_v2.get(SAMPLE_FORMAT) == SIGNED:
                raise DataError(f"{path}: has signed numbers of 8 bits, expected unsigned ones")
        yield file


def decode(file: Any) -> Any:
    """Return an image of `open_image` with its pixels, upright as its tag says, with white above
    black: of 16 bits Pillow leaves the numbers of a TIFF whose white is 0."""
    turned = orientation(file) != 1
    of_any_size(file.load)  # turns some TIFFs, which then have no tag
    image = ImageOps.exif_transpose(file) if turned else file
    if white_is_zero(file) and image.mode.startswith("I;16"):
        image = Image.fromarray(65535 - np.asarray(image))
    return image


def orientation(file: Any) -> int:
    """Return the EXIF tag of an opened image; this decodes a PNG."""
    return int(file.getexif().get(ExifTags.Base.Orientation, 1))


def white_is_zero(file: Any) -> bool:
    """Return whether an opened image is a grey TIFF whose smallest number is white."""
    return file.format == "TIFF" and file.tag_v2.get(PHOTOMETRIC) == 0


def has_deep_colours(file: Any) -> bool:
    """Return whether an opened image, not decoded yet, has several channels of more than 8 bits,
    which Pillow reads as 8."""
    if file.mode in GREY:
        return False
    if file.format == "TIFF":
        return max(file.tag_v2.get(BITS, (1,))) > 8
    return any(";16" in str(tile.args) for tile in file.tile)


def largest_of(file: Any, path: Path, cells: Any) -> int:
    """Return the number that is white in the grey `cells` of an image of 16 bits: 65,535, or less
    where the file says that fewer bits count (BitsPerSample of TIFF, sBIT of PNG)."""
    if file.format == "TIFF":
        return 2 ** min(16, *file.tag_v2.get(BITS, (16,))) - 1
    bits = _significant_bits(path) if file.format == "PNG" else 16
    # PNG asks for numbers that are scaled to 16 bits: of dark ones the last bits are then 0, or 1
    # where they were rounded
    unscaled = cells.max() < 2**bits and (cells % 2 ** (16 - bits) > 1).any()
    return 2**bits - 1 if unscaled else 65535


def _significant_bits(path: Path) -> int:
    """Return what the sBIT chunk of a grey PNG of 16 bits says, 16 if there is none."""
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            size, kind = struct.unpack(">I4s", head)
            if kind == b"sBIT" and size == 1 and 0 < (bits := file.read(1)[0]) < 16:
                return int(bits)
            if kind in (b"sBIT", b"IDAT"):
                break
            file.seek(size + 4, 1)
    return 16

"""Reader of pictures (PNG, TIFF, JPEG) as volumes of one slice, and the writer of their labels, by Pillow. SimpleITK
reads only colours of 16 bits, which Pillow would cut to 8: of a label's palette it gives the colours, not the
indices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ndlightnet.data.errors import DataError
from ndlightnet.data.image.image_files import GREY, decode, has_deep_colours, open_image, orientation, white_is_zero
from ndlightnet.data.volume.file_grid import FileGrid, Read

OPAQUE = {"RGBA": "RGB", "LA": "L", "La": "L", "RGBa": "RGB", "PA": "P"}
TOO_DEEP = "has 16 bits a channel, expected 8, or RGB or RGBA without an orientation tag"


def open_picture(path: Path, _: Sequence[Path] = (), label: bool = False) -> tuple[FileGrid, Read]:
    """Open a picture as (x to the right, y down, 1, channels). A pixel counts as 1 mm, as in nnU-Net; the resolution
    (dpi) of a file is written to its labels again. An alpha channel is left out. Of a palette an image (label=False)
    takes the colours, as RGB, and a label the indices. A label in RGB whose three colours are equal is grey.

    Colours of 16 bits a channel keep them. Raises DataError for a label in colours, for what `open_image` refuses, and
    for colours of 16 bits that are not RGB or RGBA or that an orientation tag turns.
    """
    with open_image(path) as file:
        kind, deep = file.format, has_deep_colours(file)  # before a tag is read, which decodes
        turned = orientation(file) != 1
        if deep and (turned or file.mode not in ("RGB", "RGBA")):
            raise DataError(f"{path}: {TOO_DEEP}")
        image = decode(file)
        notes, mode = [], image.mode
        if mode in OPAQUE:
            notes.append(f"{path}: has an alpha channel, which is left out")
            mode = OPAQUE[mode]
        if mode not in (*GREY, "RGB", *["P"] * label):
            what = "a palette" if mode == "P" else f"the colours {mode}"
            notes.append(f"{path}: has {what}, taken as RGB")
            mode = "RGB"
        cells = _read_16_bits(path) if deep else np.asarray(image if mode == image.mode else image.convert(mode))
        dpi = file.info.get("dpi")
        if turned:
            notes.append(f"{path}: turned upright, as its orientation tag says")
        if label and white_is_zero(file):
            notes.append(f"{path}: has white as 0, taken inverted: white is the largest label")
    if label and cells.ndim == 3:
        if (cells != cells[..., :1]).any():
            raise DataError(f"{path}: is a label in colours, expected whole numbers: grey or the indices of a palette")
        cells = cells[..., 0]
    if mode == "P":
        palette = np.reshape(image.getpalette("RGB"), (-1, 3))
        used = np.intersect1d(cells, np.arange(len(palette)))  # a palette may be too short
        colours = palette[used]
        if (colours == colours[:, :1]).all() and (colours[:, 0] != used).any():
            notes.append(f"{path}: has a palette of greys, of which the indices are taken")
    if cells.dtype == bool:
        cells = cells.astype(np.uint8)
    cells = cells.reshape(*cells.shape[:2], 1, -1).swapaxes(0, 1)

    def write(labels: NDArray[Any], file: Path) -> None:
        plane = labels[:, :, 0].T
        picture = Image.fromarray(plane.astype(np.uint8 if plane.max() < 256 else np.uint16))
        options: dict[str, Any] = {} if dpi is None else {"dpi": tuple(map(float, dpi))}
        picture.save(file, format="TIFF" if kind == "TIFF" else "PNG", **options)

    read: Read = lambda z, channel: cells[:, :, z, channel]  # noqa: E731
    ending = ".tif" if kind == "TIFF" else ".png"
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])  # as ITK's: x runs to the left, y to the back
    return FileGrid(path, cells.shape, affine, tuple(notes), write=write, ending=ending), read


open_label = partial(open_picture, label=True)


def has_colours(path: Path) -> bool:
    """Return whether a file holds several channels, or a palette. A broken file has none."""
    with suppress(Exception), open_image(path) as file:  # decoders raise exceptions of many classes
        return OPAQUE.get(file.mode, file.mode) not in GREY
    return False


def _read_16_bits(path: Path) -> NDArray[np.uint16]:
    """Return RGB or RGBA as RGB (height, width, 3)."""
    import SimpleITK as sitk

    try:
        cells = sitk.GetArrayFromImage(sitk.ReadImage(str(path)))
    except RuntimeError as error:  # grey with alpha, which Pillow calls RGBA
        raise DataError(f"{path}: {TOO_DEEP}") from error
    if cells.dtype != np.uint16 or cells.ndim != 3 or cells.shape[2] not in (3, 4):
        raise DataError(f"{path}: {TOO_DEEP}")
    return np.asarray(cells[..., :3])

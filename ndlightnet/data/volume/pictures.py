"""Reader of pictures (PNG, TIFF, JPEG) as volumes of one slice, and the writer of their labels, by
Pillow. SimpleITK is not used: it gives the colours of a label's palette, not its indices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume import grid
from ndlightnet.data.volume.grid import FileGrid, Read, check_size

OPAQUE = {"RGBA": "RGB", "LA": "L", "La": "L", "RGBa": "RGB", "PA": "P"}
ORIENTATION = 0x0112  # the EXIF tag
READ_AS_THEY_ARE = ("1", "L", "P", "I", "F", "RGB", "I;16", "I;16L", "I;16B")


def open_picture(path: Path, _: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    """Open a picture as (x to the right, y down, 1, channels). A pixel counts as 1 mm, as in
    nnU-Net; the resolution (dpi) of a file is written to its labels again. A palette's indices are
    taken, an alpha channel is left out."""
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        if (pages := getattr(file, "n_frames", 1)) > 1:
            raise DataError(f"{path}: has {pages} pages, expected a picture of one")
        check_size(path, (*file.size, len(file.getbands())), 4, grid.MEMORY, "this machine")
        kind, orientation = file.format, file.getexif().get(ORIENTATION, 1)
        turned = orientation != 1
        if kind == "TIFF" and orientation > 4:  # Pillow 13.0 swaps its sides twice
            raise DataError(f"{path}: orientation tag {orientation}, expected an upright TIFF")
        file.load()  # turns some TIFFs, which then have no tag
        image: Any = ImageOps.exif_transpose(file) if turned else file
        notes, mode = [], image.mode
        if mode in OPAQUE:
            notes.append(f"{path}: has an alpha channel, which is left out")
            mode = OPAQUE[mode]
        elif mode not in READ_AS_THEY_ARE:
            notes.append(f"{path}: has the colours {mode}, taken as RGB")
            mode = "RGB"
        cells = np.asarray(image if mode == image.mode else image.convert(mode))
        dpi = image.info.get("dpi")
        if turned:
            notes.append(f"{path}: turned upright, as its orientation tag says")
    if cells.dtype == bool:
        cells = cells.astype(np.uint8)
    cells = cells.reshape(*cells.shape[:2], 1, -1).swapaxes(0, 1)

    def write(labels: NDArray[Any], file: Path) -> None:
        plane = labels[:, :, 0].T
        made = Image.fromarray(plane.astype(np.uint8 if plane.max() < 256 else np.uint16))
        how: dict[str, Any] = {} if dpi is None else {"dpi": tuple(map(float, dpi))}
        made.save(file, format="TIFF" if kind == "TIFF" else "PNG", **how)

    read: Read = lambda z, channel: cells[:, :, z, channel]  # noqa: E731
    ending = ".tif" if kind == "TIFF" else ".png"
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])  # as ITK's: x runs to the left, y to the back
    return FileGrid(path, cells.shape, affine, tuple(notes), write=write, ending=ending), read

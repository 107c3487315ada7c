"""Files of pictures that Pillow does not write."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

RAMP = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
COLOURS = np.stack([RAMP, 255 - RAMP, np.full_like(RAMP, 100)], axis=-1)


def write_tiff(
    path: Path, cells: np.ndarray, bits: int, photometric: int | None, order: str = "<", packed: bool = False
) -> Path:
    """Write grey cells (height, width) as a TIFF of `bits` a pixel. photometric: 0 white is zero,
    1 black is zero, None: no tag. order: "<" or ">". packed: with deflate."""
    height, width = cells.shape
    if bits < 8 or bits == 12:
        lines = (cells[..., None] >> np.arange(bits)[::-1] & 1).reshape(height, -1)
        data = np.packbits(lines.astype(np.uint8), axis=1).tobytes()
    else:
        data = cells.astype(cells.dtype.newbyteorder(order)).tobytes()
    data = zlib.compress(data) if packed else data
    kind = {"u": 1, "i": 2, "f": 3}[cells.dtype.kind]
    tags = {256: width, 257: height, 258: bits, 259: 8 if packed else 1, 262: photometric}
    tags |= {273: 8, 277: 1, 278: height, 279: len(data), 339: kind}
    entries = [(tag, value) for tag, value in tags.items() if value is not None]
    data += bytes(len(data) % 2)
    out = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(data)) + data
    out += struct.pack(order + "H", len(entries))
    for tag, value in entries:
        out += struct.pack(order + "HHII", tag, 4, 1, value)
    path.write_bytes(out + bytes(4))
    return path


def write_sbit(path: Path, cells: np.ndarray, bits: int) -> Path:
    """Write grey cells of 16 bits as a PNG whose sBIT chunk names `bits`."""
    Image.fromarray(cells).save(path)
    data, chunk = path.read_bytes(), b"sBIT" + bytes([bits])
    chunk = struct.pack(">I", 1) + chunk + struct.pack(">I", zlib.crc32(chunk))
    path.write_bytes(data[:33] + chunk + data[33:])
    return path

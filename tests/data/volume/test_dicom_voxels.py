"""Every transfer syntax: the voxels are those that were encoded, or the error names the syntax."""

import io
import re
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.encaps import encapsulate, get_frame
from pydicom.uid import UID

from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import refuses, write_series

CLASSES = {"CT": "1.2.840.10008.5.1.4.1.1.2", "MR": "1.2.840.10008.5.1.4.1.1.4", "PT": "1.2.840.10008.5.1.4.1.1.128"}
JPEG = "1.2.840.10008.1.2.4."


def lossless_jpeg(values: np.ndarray, bits: int, predictor: int) -> bytes:
    """values (y, x), unsigned, as one stream of JPEG process 14 (ITU T.81, annex H). Every category of differences has
    a Huffman code of 5 bits."""
    rows, columns = values.shape
    v = values.astype(int)
    west, north, corner = (np.roll(v, shift, (0, 1)) for shift in ((0, 1), (1, 0), (1, 1)))
    slopes = west + (north - corner >> 1), north + (west - corner >> 1)
    guess = [west, north, corner, west + north - corner, *slopes, west + north >> 1][predictor - 1]
    guess[0], guess[1:, 0], guess[0, 0] = west[0], north[1:, 0], 1 << bits - 1
    stream = ""
    for step in ((v - guess + 2**15) % 2**16 - 2**15).ravel():
        size = int(abs(step)).bit_length()
        stream += f"{size:05b}"
        if 0 < size < 16:
            stream += f"{int(step) if step > 0 else int(step) + 2**size - 1:0{size}b}"
    stream += "1" * (-len(stream) % 8)
    code = int(stream, 2).to_bytes(len(stream) // 8, "big").replace(b"\xff", b"\xff\0")

    def segment(marker: int, content: bytes) -> bytes:
        return bytes([255, marker]) + (len(content) + 2).to_bytes(2, "big") + content

    frame = bytes([bits, *divmod(rows, 256), *divmod(columns, 256), 1, 1, 0x11, 0])
    table = bytes([0, 0, 0, 0, 0, 17, *[0] * 11, *range(17)])
    scan = bytes([1, 1, 0, predictor, 0, 0])
    head = b"\xff\xd8" + segment(0xC3, frame) + segment(0xC4, table) + segment(0xDA, scan)
    return head + code + b"\xff\xd9"


def write_encoded(folder, values, bits, syntax, code=None, **tags) -> Path:
    """A slice of stored values (y, x) in a transfer syntax; pydicom encodes it if there is no `code`."""
    (file,) = write_series(folder, values.T[..., None].astype(int)).iterdir()
    data = pydicom.dcmread(file)
    data.BitsAllocated, data.BitsStored, data.HighBit = 8 if bits <= 8 else 16, bits, bits - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    for tag, value in tags.items():
        setattr(data, tag, value)
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = CLASSES[data.Modality]
    data.PixelData = values.tobytes()
    if code is not None:
        data.PixelData = encapsulate([code])
        data["PixelData"].VR = "OB"
    elif UID(syntax).is_compressed and not UID(syntax).is_deflated:
        data.compress(syntax)
    data.file_meta.TransferSyntaxUID = UID(syntax)
    data.save_as(file)
    return folder


def ramp(bits: int, signed: bool) -> np.ndarray:
    """(y, x) values over the whole range, with both ends."""
    low = -(2 ** (bits - 1)) if signed else 0
    values = np.linspace(low, low + 2**bits - 1, 37 * 33).round().reshape(37, 33)
    values[3:16] = values[3:16, ::-1]
    return values.astype(f"{'i' if signed else 'u'}{1 if bits <= 8 else 2}")


def read(folder: Path) -> np.ndarray:
    return Volume.read(Case("x", (folder,), None)).image[0, ..., 0].numpy().T


PLAIN = [f"1.2.840.10008.1.2{end}" for end in ("", ".1", ".1.99", ".5")]
EXACT = dict.fromkeys([*PLAIN, f"{JPEG}90", f"{JPEG}80"]) | {f"{JPEG}70": 1}
EXACT |= {f"{JPEG}57, predictor {n}": n for n in range(2, 8)}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("syntax", EXACT)
def test_lossless(tmp_path: Path, syntax: str, bits: int, signed: bool) -> None:
    """Rescaled once, whatever the class: SimpleITK rescales CT and PET by itself, not MR."""
    values, predictor = ramp(bits, signed), EXACT[syntax]
    unsigned = values.astype(int) % 2**bits  # what the stream of a signed image holds
    code = None if predictor is None else lossless_jpeg(unsigned, bits, predictor)
    modality, slope, intercept = {8: ("CT", 1, -1024), 12: ("MR", 0.5, 3), 16: ("PT", 2.5, 0)}[bits]
    tags = {"Modality": modality, "RescaleSlope": slope, "RescaleIntercept": intercept}
    folder = write_encoded(tmp_path / "s", values, bits, syntax.split(",")[0], code, **tags)
    np.testing.assert_array_equal(read(folder), values * slope + float(intercept))


def lossy_jpeg(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def test_lossy(tmp_path: Path) -> None:
    """... as other decoders read them: Pillow, CharLS, and libjpeg for 12 bits."""
    values = ramp(8, signed=False)
    code = lossy_jpeg(values)
    expected = np.asarray(Image.open(io.BytesIO(code)), float)
    folder = write_encoded(tmp_path / "8", values, 8, f"{JPEG}50", code)
    np.testing.assert_allclose(read(folder), expected - 1024, atol=1)

    values = ramp(12, signed=False)
    folder = write_encoded(tmp_path / "near", values, 12, f"{JPEG}81")
    np.testing.assert_allclose(read(folder), values - 1024.0, atol=4)

    path = pydicom.data.get_testdata_file("JPGExtended.dcm", download=False)
    image = pydicom.dcmread(path)
    code = get_frame(image.PixelData, 0, number_of_frames=1)
    values = np.zeros((image.Rows, image.Columns), np.uint16)
    folder = write_encoded(tmp_path / "12", values, 12, f"{JPEG}51", code, RescaleIntercept=0)
    expected = [[1, 6, 15, 48, 53, 1], [1, 9, 27, 46, 25, 1], [1, 1, 23, 18, 1, 1]]
    np.testing.assert_allclose(read(folder)[200:800:200, ::50], expected, atol=1)


@pytest.mark.parametrize("syntax", [f"{JPEG}{n}" for n in (50, 57, 80)])
def test_damaged_streams_are_refused(tmp_path: Path, syntax: str) -> None:
    """A decoder of JPEG fills what is missing, and takes the size of the stream."""
    values = ramp(8, signed=False)
    code = {"50": lossy_jpeg, "57": lambda v: lossless_jpeg(v, 8, 1), "80": None}[syntax[-2:]]
    folder = write_encoded(tmp_path / "s", values, 8, syntax, code and code(values))
    (file,) = folder.iterdir()
    data = pydicom.dcmread(file)
    stream = get_frame(data.PixelData, 0, number_of_frames=1).rstrip(b"\0")
    half, name = stream[: len(stream) // 2], UID(syntax).name
    for spoilt in (half, half + bytes(len(stream) - len(half))):
        data.PixelData = encapsulate([spoilt])
        data.save_as(file)
        refuses(lambda: read(folder), file, re.escape(f"its PixelData ({name}) is cut short"))
    data.PixelData = encapsulate([stream[:20] + stream[-20:]])
    data.save_as(file)
    refuses(lambda: read(folder), file, re.escape(f"its PixelData ({name}) cannot be decoded"))
    data.PixelData, data.Rows = encapsulate([stream]), 41
    data.save_as(file)
    words = "its PixelData has 37 rows and 33 columns, expected 41 and 33|cannot be decoded"
    refuses(lambda: read(folder), file, words)


def test_a_file_that_ends_within_its_jpeg_2000_stream(tmp_path: Path) -> None:
    folder = write_encoded(tmp_path / "s", ramp(8, signed=False), 8, f"{JPEG}90")
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    refuses(lambda: read(folder), file, "has no PixelData, or is cut short before it")


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2.4.94", "1.2.840.10008.1.2.4.102", "1.2.3"])
def test_a_syntax_without_a_decoder_is_named(tmp_path: Path, syntax: str) -> None:
    folder = write_encoded(tmp_path / "s", ramp(8, signed=False), 8, syntax, b"\0\0")
    words = re.escape(f"TransferSyntaxUID is {syntax} (") + r".*\), expected .* or JPEG 2000"
    refuses(lambda: read(folder), folder / "00.dcm", words)

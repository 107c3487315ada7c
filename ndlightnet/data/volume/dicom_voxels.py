"""Voxels of DICOM files. pydicom decodes them, but for JPEG and JPEG-LS: there it needs packages that are not
installed, and SimpleITK has decoders of all their processes."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.encaps import encapsulate, get_frame
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_rescale
from pydicom.pixels.utils import pixel_array
from pydicom.uid import JPEGLSTransferSyntaxes, JPEGTransferSyntaxes, SecondaryCaptureImageStorage, generate_uid

from ndlightnet.data.errors import DataError, readable

JPEG = (*JPEGTransferSyntaxes, *JPEGLSTransferSyntaxes)
END = b"\xff\xd9"  # marker of the end of a JPEG or JPEG-LS stream
STORED = ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation")


def read_voxels(header: Any) -> NDArray[Any]:
    """Return the voxels (x, y) of one slice with its rescale slope and intercept applied. DataError names the file, and
    a transfer syntax that cannot be decoded."""
    file = Path(header.filename)
    with readable(file):
        source = header if "PixelData" in header else pydicom.dcmread(file)
        if source.get("PixelData") is None:
            raise DataError(f"{file}: has no PixelData, or is cut short before it")
        return np.asarray(apply_rescale(_stored(file, source), source)).T


def _stored(file: Path, source: Any) -> NDArray[Any]:
    """Return the stored values (y, x)."""
    syntax = source.file_meta.TransferSyntaxUID
    if syntax in JPEG:
        return _jpeg(file, source)
    try:
        get_decoder(syntax)
    except NotImplementedError:
        expected = "uncompressed voxels or RLE, JPEG, JPEG-LS or JPEG 2000"
        raise DataError(f"{file}: TransferSyntaxUID is {syntax} ({syntax.name}), expected {expected}") from None
    return pixel_array(source)


def _jpeg(file: Path, source: Any) -> NDArray[Any]:
    """Return the stored values (y, x) as SimpleITK decodes them. It reads files only, and applies the rescale of some
    classes of objects: it gets a file of the stored values alone."""
    import SimpleITK as sitk

    syntax = source.file_meta.TransferSyntaxUID
    code = get_frame(source.PixelData, 0, number_of_frames=1)
    if END not in code[-10:]:  # padding may follow; the decoder fills what is missing
        raise DataError(f"{file}: its PixelData ({syntax.name}) is cut short")
    plain = pydicom.Dataset()
    plain.file_meta = pydicom.dataset.FileMetaDataset()
    plain.file_meta.TransferSyntaxUID = syntax
    plain.SOPClassUID, plain.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    for tag in STORED:
        setattr(plain, tag, source[tag].value)
    plain.PhotometricInterpretation, plain.PixelData = "MONOCHROME2", encapsulate([code])
    with TemporaryDirectory() as folder:
        copy = Path(folder, "slice.dcm")
        plain.save_as(copy, enforce_file_format=True)
        try:
            image: Any = sitk.ReadImage(str(copy), imageIO="GDCMImageIO")
        except RuntimeError as error:  # its message tells no more than that
            raise DataError(f"{file}: its PixelData ({syntax.name}) cannot be decoded") from error
    values: NDArray[Any] = sitk.GetArrayFromImage(image)
    rows, columns = values.shape[-2:]
    if (rows, columns) != (source.Rows, source.Columns):
        expected = f"{source.Rows} and {source.Columns}"
        raise DataError(f"{file}: its PixelData has {rows} rows and {columns} columns, expected {expected}")
    return values.reshape(rows, columns)

"""Reader of NRRD and MetaImage files, by SimpleITK."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.volume import grid
from ndlightnet.data.volume.grid import NO_SIDES, FileGrid, Read, check_size, four_axes


def open_itk(path: Path, _: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    import SimpleITK as sitk

    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
        claimed = (*reader.GetSize(), reader.GetNumberOfComponents())
        check_size(path, claimed, 4, grid.MEMORY, "this machine's memory")  # as float32
        image: Any = reader.Execute()
    except RuntimeError as error:  # begins with 100 or more characters of source location
        raise RuntimeError(str(error).rpartition("ERROR: ")[2]) from error

    def voxels() -> NDArray[Any]:
        """Return a view (x, y, [z, [channels]]); not stored: it does not keep the image alive."""
        view = sitk.GetArrayViewFromImage(image)
        if image.GetNumberOfComponentsPerPixel() > 1:
            view = np.moveaxis(view, -1, 0)
        return np.asarray(view.T)

    shape = four_axes(path, voxels().shape, voxels().dtype)
    notes = []
    axes = min(image.GetDimension(), 3)
    spacing, origin, turn = np.ones(3), np.zeros(3), np.eye(3)
    spacing[:axes], origin[:axes] = image.GetSpacing()[:axes], image.GetOrigin()[:axes]
    turn[:axes, :axes] = np.reshape(image.GetDirection(), [image.GetDimension()] * 2)[:axes, :axes]
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn * spacing, origin
    affine[:2] *= -1  # ITK's x and y run to the left and to the back
    if axes == 2:
        notes.append(f"{path}: is a plane, taken as one slice of 1 mm")
    if path.suffix.lower() == ".nrrd" and not image.HasMetaDataKey("NRRD_space"):
        notes.append(f"{path}: has no field 'space': {NO_SIDES}")
    read: Read = lambda z, channel: voxels().reshape(shape)[:, :, z, channel]  # noqa: E731
    return FileGrid(path, shape, affine, tuple(notes)), read

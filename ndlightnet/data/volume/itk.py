"""Reader of NRRD and MetaImage files, by SimpleITK."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.volume import file_grid
from ndlightnet.data.volume.file_grid import FileGrid, Read


def open_itk(path: Path, _: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    import SimpleITK as sitk

    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
        claimed = (*reader.GetSize(), reader.GetNumberOfComponents())
        file_grid.check_size(path, claimed, 4, file_grid.MEMORY, "this machine's memory")  # as float32
        image: Any = reader.Execute()
    except RuntimeError as error:  # begins with 100 or more characters of source location
        raise RuntimeError(str(error).rpartition("ERROR: ")[2]) from error

    def voxels() -> NDArray[Any]:
        """Return a view (x, y, [z, [channels]]); not stored: it does not keep the image alive."""
        view = sitk.GetArrayViewFromImage(image)
        if image.GetNumberOfComponentsPerPixel() > 1:
            view = np.moveaxis(view, -1, 0)
        return np.asarray(view.T)

    shape = file_grid.four_axes(path, voxels().shape, voxels().dtype)
    notes: list[str] = []
    axes = min(image.GetDimension(), 3)
    spacing, origin, turn = np.ones(3), np.zeros(3), np.eye(3)
    spacing[:axes], origin[:axes] = image.GetSpacing()[:axes], image.GetOrigin()[:axes]
    turn[:axes, :axes] = np.reshape(image.GetDirection(), [image.GetDimension()] * 2)[:axes, :axes]
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn * spacing, origin
    affine[:2] *= -1  # ITK's x and y run to the left and to the back
    units = _units(path, image)
    mm = np.ones(3)
    mm[:axes] = [file_grid.millimetres(path, unit, notes) for unit in units[:axes]]
    affine[:3] *= mm[:, None]
    step = file_grid.seconds(image.GetSpacing()[3], units[3]) if image.GetDimension() == 4 else None
    if axes == 2:
        notes.append(f"{path}: is a plane, taken as one slice of 1 mm")
    if path.suffix.lower() == ".nrrd" and not image.HasMetaDataKey("NRRD_space"):
        notes.append(f"{path}: has no field 'space': {file_grid.NO_SIDES}")
    read: Read = lambda z, channel: voxels().reshape(shape)[:, :, z, channel]  # noqa: E731
    notes = list(dict.fromkeys(notes))  # one for all axes
    return FileGrid(path, shape, affine, tuple(notes), time_step=step, unit=mm.min()), read


def _units(path: Path, image: Any) -> list[str]:
    """Return the unit of each axis, "" where there is none. ITK takes every length for mm."""
    dims = image.GetDimension()
    space: list[str] = []
    if path.suffix.lower() == ".nrrd":  # ITK gives the units of axes, but not those of the space
        with path.open("rb") as file:
            for line in iter(file.readline, b""):
                if not line.strip():
                    break  # what follows are voxels
                if line.lower().startswith(b"space units:"):
                    space = re.findall('"([^"]*)"', line.decode("utf-8", "replace"))
    keys = ["ITK_VoxelUnits", *(f"NRRD_units[{axis}]" for axis in range(dims))]
    unit_of_all, *of_axes = (image.GetMetaData(key) if image.HasMetaDataKey(key) else "" for key in keys)
    return [*space, *[unit or unit_of_all for unit in of_axes[len(space) :]]]

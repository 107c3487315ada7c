"""Moving phantoms: small labelled series of CT volumes over time, in which time decides.

Nodules of one size and one density lie in soft tissue: some move to and fro as with breathing, the others do not.
Vessels of one calibre fill with contrast agent of one density: arteries early, veins some frames later; before, they
cannot be told from the tissue around them. All are labelled in every frame, so that a single frame says where a nodule
is but not of which kind, and shows a vessel late or not at all. Noise is about a third of a nodule's contrast.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.made.drawn_set import Drawn, Recipe, draw_cases, place_in_scanner

LABELS = ("background", "still nodule", "moving nodule", "artery", "vein")
STILL, MOVING, ARTERY, VEIN = range(1, 5)
VERSION = 1  # see Recipe
FRAMES = 8
TIME_STEP = 0.5  # seconds between frames
TISSUE, NODULE, BLOOD = 40.0, 75.0, 110.0  # HU; what nodules and filled vessels add to the tissue
NOISE = 25.0  # HU

Floats = NDArray[np.float64]


def make_moving_phantoms(folder: Path, training: int = 24, test: int = 8, seed: int = 0, progress: bool = True) -> Path:
    """Writes `training + test` labelled series into `folder` and returns it, see `draw_cases`.

    Images are int16 Hounsfield units, labels uint8, (x, y, z, frames): about (28, 28, 20) voxels of 4 x 4 x 5 mm and
    eight frames, half a second apart; the axes run to the right, front and head in some cases and to the left, back and
    head in the others.
    """
    description = "Drawn series of CT volumes in which motion and time tell the labels"
    recipe = Recipe("moving_phantom", VERSION, description, LABELS, draw_moving_phantom, TIME_STEP)
    return draw_cases(folder, recipe, training, test, seed, progress)


def draw_moving_phantom(rng: np.random.Generator) -> Drawn:
    """Draw a series: image (x, y, z, frames), HU; label of this shape; affine (4, 4), voxel indices to RAS mm."""
    shape = np.array([28, 28, 20]) + rng.integers(-2, 3, 3)
    spacing = np.array([*[rng.uniform(3.8, 4.2)] * 2, rng.uniform(4.6, 5.2)]).round(3)
    lines = [s * (np.arange(n) - (n - 1) / 2) for n, s in zip(shape, spacing, strict=True)]
    xyz = np.stack(np.meshgrid(*lines, indexing="ij"), -1)  # mm from the centre
    extent = shape * spacing / 2
    inside = ((xyz / extent) ** 2).sum(-1) < 0.95
    image = np.repeat(np.where(inside, TISSUE, -90.0)[..., None], FRAMES, -1)
    label = np.zeros(image.shape, np.uint8)

    arrival = rng.uniform(0.5, 1.5)  # frame in which arteries begin to fill
    for number, late in ((ARTERY, 0.0), (VEIN, rng.uniform(2.5, 3.5))):
        for _ in range(2):
            full = np.clip(np.arange(FRAMES) - arrival - late, 0, 1)
            cells = _tube(xyz, extent, rng) & inside
            image[cells] = TISSUE + BLOOD * full
            label[cells] = number
    centres: list[Floats] = []
    for number in (STILL, MOVING, STILL, MOVING):
        centre = _apart(centres, extent, rng)
        radius = rng.uniform(10, 13)  # mm
        path = np.zeros((FRAMES, 3))
        if number == MOVING:
            way = rng.normal(size=3)
            phase = 2 * np.pi * (np.arange(FRAMES) / rng.uniform(6, 10) + rng.random())
            path = np.sin(phase)[:, None] * way / np.linalg.norm(way) * rng.uniform(6, 9)
        for frame, moved in enumerate(centre + path):
            cells = (((xyz - moved) / radius) ** 2).sum(-1) < 1
            image[cells, frame] = TISSUE + NODULE
            label[cells, frame] = number

    image = image + rng.normal(0, NOISE, image.shape)
    return place_in_scanner(image, label, spacing, rng)


def _tube(xyz: Floats, extent: Floats, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return the cells of a bent tube through the body: bool (x, y, z)."""
    way, side = rng.normal(size=(2, 3))
    way /= np.linalg.norm(way)
    side -= (side @ way) * way
    side *= rng.uniform(5, 12) / np.linalg.norm(side)
    along = np.linspace(-1.2, 1.2, 60) * extent.max()
    points = rng.uniform(-0.45, 0.45, 3) * extent + along[:, None] * way
    points += np.sin(along / 25 + rng.uniform(0, 6))[:, None] * side
    squares = ((xyz[..., None, :] - points) ** 2).sum(-1).min(-1)
    return np.asarray(squares < rng.uniform(5.5, 7) ** 2)


def _apart(centres: list[Floats], extent: Floats, rng: np.random.Generator) -> Floats:
    """Draw the centre of a nodule in the body, and append it: about 34 mm or more from the others, so that they do not
    meet on their ways."""
    least = 34.0
    while True:
        centre = rng.uniform(-0.62, 0.62, 3) * extent
        free = all(np.linalg.norm(centre - centre_before) > least for centre_before in centres)
        if free and ((centre / extent) ** 2).sum() < 0.6:
            centres.append(centre)
            return centre
        least *= 0.999  # so that it ends

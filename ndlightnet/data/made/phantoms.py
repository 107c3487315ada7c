"""Labelled CT phantoms: a torso of ellipsoids and tubes, drawn anew for every case.

A small data set that needs no download, in the Medical Segmentation Decathlon's layout. The organs differ from case to
case in size, position, tilt and contrast; unlabelled ribs, heart, vessels, stomach and bowel share their intensities
with the labelled ones, so a threshold does not solve it.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import avg_pool3d, interpolate

from ndlightnet.data.made.drawn_set import Drawn, Recipe, draw_cases, place_in_scanner

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Triple = tuple[float, float, float]  # along x, y, z

LABELS = ("background", "body", "spine", "lungs", "liver", "spleen", "kidneys")
BODY, SPINE, LUNGS, LIVER, SPLEEN, KIDNEYS = range(1, 7)
VERSION = 1  # see Recipe
WOBBLE = 5.0  # mm: how far the smooth random warp moves an outline


def make_phantoms(folder: Path, training: int = 24, test: int = 6, seed: int = 0, progress: bool = True) -> Path:
    """Writes `training + test` labelled CT phantoms into `folder` and returns it, see `draw_cases`.

    Images are int16 Hounsfield units, labels uint8, about (64, 52, 40) voxels of 5-6 x 5-6 x 6-8 mm; the axes run to
    the right, front and head in some cases and to the left, back and head in the others.
    """
    recipe = Recipe("phantom", VERSION, "Drawn torso CT with six labelled regions", LABELS, draw_phantom)
    return draw_cases(folder, recipe, training, test, seed, progress)


def draw_phantom(rng: np.random.Generator) -> Drawn:
    """Draw a phantom: image (x, y, z), HU; label (x, y, z); affine (4, 4), indices to RAS mm."""
    shape = np.array([64, 52, 40]) + rng.integers(-3, 4, 3)
    in_plane = rng.uniform(5.3, 5.9)
    spacing = np.array([in_plane, in_plane, rng.uniform(6.2, 7.6)]).round(3)

    canvas = Canvas(rng, shape, spacing)
    draw_torso(canvas, rng)

    # A scanner's voxel is the mean over its volume; a reader's label is what fills most of it.
    image = _blocks(canvas.hu).mean(-1)
    votes = _blocks(canvas.label)
    label = np.stack([(votes == n).sum(-1) for n in range(len(LABELS))]).argmax(0).astype(np.uint8)
    # Reconstruction correlates the noise of neighbouring voxels.
    white = torch.from_numpy(rng.normal(size=image.shape))[None, None]
    noise = (white + 2 * avg_pool3d(white, 3, 1, 1))[0, 0].numpy()
    image = np.clip(image + noise / noise.std() * rng.uniform(8, 22), -1024, 3071)

    return place_in_scanner(image, label, spacing, rng)


def _blocks(fine: NDArray[Any]) -> NDArray[Any]:
    """Return the fine cells of every voxel: (2x, 2y, 2z) -> (x, y, z, 8)."""
    x, y, z = (n // 2 for n in fine.shape)
    cells = fine.reshape(x, 2, y, 2, z, 2).transpose(0, 2, 4, 1, 3, 5)
    return cells.reshape(x, y, z, 8)


class Canvas:
    """A grid at twice the resolution, in the patient's mm: x to the right, y to the front, z to the head.

    The patient lies slightly rotated in the scanner and every outline is warped by a smooth random field.
    """

    def __init__(self, rng: np.random.Generator, shape: NDArray[np.int64], spacing: NDArray[np.float64]) -> None:
        self.rng = rng
        self.shape = 2 * shape
        self.step = spacing / 2
        self.turn = _rotation(rng.normal(0, [2.0, 2.0, 4.0]))
        self.first = -self.step * (self.shape - 1) / 2
        axes = [f + s * np.arange(n) for f, s, n in zip(self.first, self.step, self.shape, strict=True)]
        places = np.stack(np.meshgrid(*axes, indexing="ij"))
        turned = np.einsum("ij,jxyz->ixyz", self.turn, places).astype(np.float32)
        self.xyz: Floats = turned + np.stack([self.texture(60.0, WOBBLE / 2) for _ in range(3)])
        self.hu: Floats = np.full(tuple(self.shape), -1000.0, np.float32)
        self.label: NDArray[np.uint8] = np.zeros(tuple(self.shape), np.uint8)

    def texture(self, grain: float, strength: float) -> Floats:
        """Return a smooth random field: blobs of about `grain` mm, deviation `strength`."""
        coarse = np.maximum(2, self.shape * self.step / grain).astype(int) + 1
        field = torch.from_numpy(self.rng.normal(0, strength, tuple(coarse)).astype(np.float32))
        size = tuple(int(n) for n in self.shape)
        fine = interpolate(field[None, None], size, mode="trilinear", align_corners=True)
        return np.asarray(fine[0, 0].numpy(), np.float32)

    def paint(self, mask: Mask, hu: float | Floats, label: int, box: Any = ...) -> None:
        """Fill `mask`, a mask of the grid or of a box in it, with `hu` and `label`."""
        self.hu[box][mask] = np.broadcast_to(hu, self.hu.shape)[box][mask]
        self.label[box][mask] = label

    def ellipsoid(
        self,
        centre: Triple,
        radii: Triple,
        hu: float | Floats,
        label: int,
        tilt: Triple = (0, 0, 0),
        within: Mask | bool = True,
    ) -> Mask:
        """Paint an ellipsoid (mm; tilt: degrees about x, y, z) cut to the mask `within`; return its mask."""
        # Only the cells around it are computed: most organs are small against the grid.
        reach = max(radii) + 3 * WOBBLE
        middle = (self.turn.T @ np.array(centre) - self.first) / self.step
        low = np.clip(middle - reach / self.step, 0, self.shape).astype(int)
        high = np.clip(middle + reach / self.step + 2, 0, self.shape).astype(int)
        box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        away = self.xyz[(slice(None), *box)] - np.array(centre, np.float32)[:, None, None, None]
        to_unit = (_rotation(np.array(tilt, float)).T / np.array(radii)[:, None]).astype(np.float32)
        mask = np.zeros(tuple(self.shape), bool)
        mask[box] = (np.einsum("ij,jxyz->ixyz", to_unit, away) ** 2).sum(0) < 1
        mask &= within
        self.paint(mask[box], hu, label, box)
        return mask


def _rotation(degrees: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation matrix (3, 3) about x, then y, then z."""
    matrix = np.eye(3)
    for axis, angle in enumerate(np.deg2rad(degrees)):
        i, j = (axis + 1) % 3, (axis + 2) % 3
        turn = np.eye(3)
        turn[i, i] = turn[j, j] = math.cos(angle)
        turn[j, i] = math.sin(angle)
        turn[i, j] = -turn[j, i]
        matrix = turn @ matrix
    return matrix


def draw_torso(canvas: Canvas, rng: np.random.Generator) -> None:
    """Paints table, body, bones and organs, later ones over earlier ones. Numbers in mm and HU."""
    x, y, z = canvas.xyz

    def vary(value: float, fraction: float = 0.1) -> float:
        return float(value * rng.uniform(1 - fraction, 1 + fraction))

    def near(place: Triple, by: float = 5.0) -> Triple:
        x, y, z = (np.array(place) + rng.uniform(-by, by, 3)).tolist()
        return x, y, z

    contrast = float(rng.choice([0.0, 0.5, 1.0])) * vary(1.0, 0.2)  # none, late, or portal venous
    wide, deep = vary(152, 0.06), vary(104, 0.06)
    rim = rng.uniform(8, 22)
    dome = rng.uniform(25, 50)  # height of the diaphragm
    blotches = canvas.texture(14.0, 1.0)

    # The table is a thin shell under the back.
    under = -deep - rng.uniform(3, 7)
    bed = y - 0.0012 * x**2
    canvas.paint((bed < under) & (bed > under - 22) & (np.abs(x) < 150), -890.0, 0)
    canvas.paint((bed < under) & (bed > under - 5) & (np.abs(x) < 150), -150.0, 0)

    # Skin, fat, muscle, then the space that the organs lie in. The waist is narrower.
    girth = 1 + 0.06 * np.cos((z - 100) / 55) + 0.03 * np.sin(z / 60)

    def torso(less: float) -> Mask:
        across, along = np.abs(x) / (girth * wide - less), np.abs(y) / (deep - 0.8 * less)
        filled: Mask = across**2.3 + along**2.3 < 1
        return filled

    canvas.paint(torso(0.0), 20.0, BODY)
    canvas.paint(torso(3.0), -105 + 6 * blotches, BODY)
    canvas.paint(torso(rim), 52 + 6 * blotches, BODY)
    cavity = torso(rim + 13)
    chest = cavity & (z > dome - 55)
    canvas.paint(cavity, -70 + 25 * canvas.texture(25.0, 1.0), BODY)

    # Ribs run down towards the front; they are bone, but not the spine.
    slant = z + 0.35 * y
    spaced = np.abs((slant + rng.uniform(0, 26)) % 26 - 13) < 5.0
    shell = torso(rim + 5) & ~torso(rim + 12) & (z > dome - 65) & (y < 0.8 * deep)
    canvas.paint(shell & spaced, vary(420, 0.2), BODY)

    # Lungs fill the chest above the two domes of the diaphragm and beside the mediastinum.
    def above(side: int) -> Mask:
        top = dome if side > 0 else dome - 12  # the liver pushes the right one up
        fall = ((x - side * 62) / 75) ** 2 + ((y - 10) / 90) ** 2
        over: Mask = z > top - 45 * fall
        return over

    air = vary(-850, 0.04) + 30 * blotches + 25 * canvas.texture(9.0, 1.0)
    middle = rng.uniform(18, 26)
    for side in (1, -1):
        lung = chest & above(side) & torso(rim + 15) & (side * x > middle + 0.0022 * (y + 25) ** 2)
        canvas.paint(lung, air, LUNGS)
        for _ in range(7):  # vessels, unlabelled by hand: they count as lung
            place = near((side * 58, -5, dome + 65), 42)
            radii = (rng.uniform(3, 5), rng.uniform(3, 5), rng.uniform(15, 30))
            tilt = tuple(rng.uniform(-50, 50, 2))
            canvas.ellipsoid(place, radii, vary(20.0), LUNGS, (tilt[0], tilt[1], 0), within=lung)
    between = chest & (z > dome) & (canvas.label == BODY) & (np.abs(x) < 28) & (y < 60)
    canvas.paint(between, 35 + 10 * blotches, BODY)
    blood = 45 + 130 * contrast
    heart = near((-22, 25, dome + 32), 6)
    size = (vary(50), vary(40), vary(42))
    canvas.ellipsoid(heart, size, 48.0 + 20 * contrast, BODY, (0, -25, 25))
    chambers = (0.6 * size[0], 0.6 * size[1], 0.65 * size[2])
    canvas.ellipsoid(heart, chambers, blood, BODY, (0, -25, 25))

    below = cavity & ~above(1)
    under_left = cavity & ~above(-1)
    soft = 5 * blotches
    parenchyma = 58 + 52 * contrast + rng.normal(0, 5) + soft
    lower = rng.uniform(-6, 6)
    right_lobe = (vary(70), vary(82), vary(76))
    canvas.ellipsoid((66, 8, dome - 62 + lower), right_lobe, parenchyma, LIVER, (0, 14, 8), below)
    left_lobe = (vary(72), vary(36), vary(34))
    canvas.ellipsoid(near((2, 38, dome - 52)), left_lobe, parenchyma, LIVER, (0, 10, -8), below)
    canvas.ellipsoid(near((48, 48, dome - 100)), (13, 15, 22), vary(8.0), BODY)  # gall bladder
    place = near((-62, 22, dome - 60), 8)
    size = (vary(38), vary(46), vary(40))
    canvas.ellipsoid(place, size, 25 + soft, BODY, (0, 0, -25), under_left)
    gas = under_left & (y > place[1] + rng.uniform(4, 22))  # gas rises to the front of the stomach
    canvas.ellipsoid(place, (34, 42, 36), -920.0, BODY, (0, 0, -25), gas)
    pulp = 50 + 68 * contrast + rng.normal(0, 5) + soft
    place = near((rim + 41 - wide, -36, dome - 58), 6)  # against the wall on the left
    size = (vary(28, 0.15), vary(44, 0.15), vary(48, 0.15))
    canvas.ellipsoid(place, size, pulp, SPLEEN, (15, 0, 20), under_left)

    # Bowel: loops with fluid or gas, and the colon up both flanks.
    for _ in range(int(rng.integers(16, 24))):
        centre = (rng.uniform(-85, 85), rng.uniform(0, 62), rng.uniform(-150, dome - 115))
        radii = (rng.uniform(12, 30), rng.uniform(11, 17), rng.uniform(10, 17))
        tilt = (float(rng.uniform(-40, 40)), float(rng.uniform(-40, 40)), float(rng.uniform(-60, 60)))
        canvas.ellipsoid(centre, radii, vary(38.0, 0.4), BODY, tilt, cavity)
        if rng.random() < 0.35:
            bubble = (centre[0], centre[1] + 4, centre[2])
            canvas.ellipsoid(bubble, (0.6 * radii[0], 7, 8), -880.0, BODY, tilt, cavity)
    for side in (1, -1):
        flank = near((side * 0.68 * wide, -5, dome - 150), 6)
        canvas.ellipsoid(flank, (19, 21, 62), 30 + 12 * blotches, BODY, within=cavity)
        canvas.ellipsoid(flank, (11, 13, 50), -750 + 90 * blotches, BODY, within=cavity)

    # The spine bends, and everything beside it follows: u, v are the distances from its middle, w
    # the height above the middle of the nearest vertebra.
    bend, lean, curve = rng.uniform(-7, 7), rng.uniform(-0.04, 0.04), rng.uniform(6, 14)
    row = rng.uniform(27, 32)

    def midline(height: Any) -> tuple[Any, Any]:
        forward = curve * np.cos((height + 90) / 70) - 0.44 * deep
        return bend * np.sin(height / 80) + lean * height, forward

    u, v = x - midline(z)[0], y - midline(z)[1]
    w = (z + rng.uniform(0, row)) % row - row / 2

    def ellipse(across: float, along: float, radius: float, depth: float) -> Mask:
        filled: Mask = ((u - across) / radius) ** 2 + ((v - along) / depth) ** 2 < 1
        return filled

    flesh = 55 + soft
    canvas.paint(cavity & (ellipse(33, -30, 25, 17) | ellipse(-33, -30, 25, 17)), flesh, BODY)
    psoas = cavity & (z < -50) & (ellipse(36, 0, 15, 17) | ellipse(-36, 0, 15, 17))
    canvas.paint(psoas, flesh, BODY)

    kidney = 32 + 150 * contrast + rng.normal(0, 4)
    for side, lift in ((1, -12), (-1, 0)):
        height = dome - 118 + lift
        beside, level = (float(value) for value in midline(height))
        centre = near((beside + side * 62, level - 4, height), 7)
        radii = (vary(27, 0.15), vary(25, 0.15), vary(50, 0.15))
        tilt = (-8.0, side * 12.0, side * -25.0)
        outer = canvas.ellipsoid(centre, radii, kidney + soft, KIDNEYS, tilt, cavity)
        inner = (0.62 * radii[0], 0.58 * radii[1], 0.72 * radii[2])
        canvas.ellipsoid(centre, inner, 0.75 * kidney + soft, KIDNEYS, tilt, outer)
        hilum = (centre[0] - side * 17, centre[1] + 8, centre[2])
        canvas.ellipsoid(hilum, (14, 8, 17), -60.0, BODY, tilt, outer)  # fat of the sinus

    canvas.paint(ellipse(-9, 31, 11, 11) & (z < dome + 75), 45 + 170 * contrast, BODY)  # aorta
    canvas.paint(ellipse(19, 30, 12, 10) & (z < dome - 10), 42 + 100 * contrast, BODY)  # vena cava
    marrow, bone = vary(190, 0.2), vary(560, 0.15)
    tall = 0.4 * row
    canvas.paint(ellipse(0, 0, 19, 15.5), 95.0, SPINE)  # discs, where no vertebra goes over them
    canvas.paint(ellipse(0, 0, 22, 17) & (np.abs(w) < tall), bone, SPINE)
    inside = ellipse(0, 0, 18.5, 13.5) & (np.abs(w) < tall - 3)
    canvas.paint(inside, marrow + 20 * blotches, SPINE)
    canvas.paint(ellipse(0, -23, 17, 14) & (np.abs(w) < tall), bone, SPINE)
    spinous = (u / 5) ** 2 + ((v + 42) / 17) ** 2 + ((w + 5) / 10) ** 2 < 1
    transverse = (u / 41) ** 2 + ((v + 26) / 5.5) ** 2 + (w / 7) ** 2 < 1
    canvas.paint(spinous | transverse, 0.8 * bone, SPINE)
    canvas.paint(ellipse(0, -23, 9.5, 8), 28.0, BODY)  # canal

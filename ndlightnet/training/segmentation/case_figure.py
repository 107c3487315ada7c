"""A picture of a case: its three planes, or three frames of a series over time, with the image, the truth, the
prediction, the errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.training.report.figures import COLORS, save_figure
from ndlightnet.training.segmentation.metrics import boxes

PLANES = ("sagittal", "coronal", "axial")  # by the axis that they cut
EDGES = ("A", "R", "R")  # side of the body at the left edge of each: front, right, right
# distinct for colour-blind people, too, and from the grey image and the colours of classes
ERRORS = {"false negative": "#00E5FF", "false positive": "#FF1744", "wrong class": "#D500F9"}
NAMED = 12  # classes in the legend, at most
FRAMES = 3  # of a series over time: the first, the middle one and the last
GROUND, INK = "#101010", "#E8E8E8"


def color_of(number: int) -> NDArray[np.float64]:
    """Return RGB in 0..1 of a foreground class, equal in all pictures; they repeat after 21."""
    turn, hue = divmod(number - 1, len(COLORS) - 1)
    base = np.array(to_rgb(COLORS[1 + hue]))
    return (base, 0.45 + 0.55 * base, 0.6 * base)[turn % 3]


def best_slices(labels: NDArray[Any], classes: int) -> list[int]:
    """Return, for each axis, the index of the plane that shows the labels best; without labels the middle. A class
    counts by its area relative to its largest one, so that small classes count.
    """
    fractions = [np.zeros(length) for length in labels.shape]
    for number, box in enumerate(boxes(labels, classes), 1):
        if box is None:
            continue
        mask = labels[box] == number
        for axis, fraction in enumerate(fractions):
            area = mask.sum(tuple(a for a in range(mask.ndim) if a != axis))
            fraction[box[axis]] += area / area.max()
    return [int(s.argmax()) if s.any() else len(s) // 2 for s in fractions]


def cut(volume: NDArray[Any], axis: int, index: int) -> NDArray[Any]:
    """Return a plane of a volume (x, y, z) in RAS order, as radiologists view it: axial from the feet with the front
    up, coronal from the front and sagittal from the left with the head up."""
    plane: NDArray[Any] = np.take(volume, index, axis)[::-1, ::-1].T
    return plane


def error_of(truth: NDArray[Any], prediction: NDArray[Any]) -> NDArray[np.intp]:
    """Return 0 where right, else 1 + the index in ERRORS (false negative, false positive, ...)."""
    wrong = [(truth > 0) & (prediction == 0), (truth == 0) & (prediction > 0)]
    return np.select([truth == prediction, *wrong], [0, 1, 2], 3)


def save_case(
    path: Path,
    title: str,
    image: Tensor,
    truth: Tensor | None,
    prediction: Tensor,
    spacing: Sequence[float],
    names: Sequence[str],
    time_step: float | None = None,
    picture: bool = False,
) -> None:
    """Write a PNG: a row for each plane (axial, coronal, sagittal), with the image, the truth, the prediction and their
    errors; without truth the image and the prediction. Of a series over time the rows are the axial plane in its first,
    middle and last frame.

    image: (x, y, z) or (frames, x, y, z) in RAS order, of any values; truth, prediction: integers of its shape.
    spacing: edges of a voxel (mm). names: of the classes, names[0] the background's. time_step: seconds between frames.
    picture: no plane of a body is named. The planes are those that show the truth best, or the prediction if there is
    none; a plane one voxel wide is left out. Raises ValueError for shapes that differ, DataError if the file cannot be
    written.
    """
    volumes: dict[str, NDArray[Any]] = {}
    for name, volume in (("image", image), ("truth", truth), ("prediction", prediction)):
        if volume is not None and volume.shape != image.shape:
            raise ValueError(f"{name}: expected the image's shape {tuple(image.shape)}, got {tuple(volume.shape)}")
        if volume is not None:
            volumes[name] = volume.cpu().numpy()
    columns = [*volumes]
    if "truth" in volumes:
        columns.append("errors")
    best_shown = "prediction" if truth is None or not truth.any() else "truth"
    slices = best_slices(volumes[best_shown], len(names))[-3:]
    space, frames = image.shape[-3:], len(image) if image.ndim == 4 else 0
    axes = [a for a in (2, 1, 0) if min(space[:a] + space[a + 1 :]) > 1] or [2]
    indices: list[tuple[int, ...]] = [()] * len(axes)  # of the frame that a row shows
    if frames:
        chosen = np.linspace(0, frames - 1, min(FRAMES, frames)).round().astype(int).tolist()
        axes, indices = [axes[0]] * len(chosen), [(frame,) for frame in chosen]
    size = [n * s for n, s in zip(space, spacing, strict=True)]  # mm
    wide, high = [size[1], size[0], size[0]], [size[2], size[2], size[1]]
    inch = min(3 / max(wide[a] for a in axes), 9 / sum(high[a] for a in axes))  # inches per mm
    heights = [max(0.3, inch * high[a]) for a in axes]
    with matplotlib.rc_context({"font.size": 9, "text.color": INK}):
        size_of_figure = (3.1 * len(columns) + 0.3, sum(heights) + 0.2 * len(axes) + 1)
        figure = Figure(size_of_figure, facecolor=GROUND, layout="constrained")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        grid = figure.subplots(len(axes), len(columns), squeeze=False, height_ratios=heights)
        pixels = np.zeros(len(names), int)  # pixels of each class
        for number, (row, frame, axis) in enumerate(zip(grid, indices, axes, strict=True)):
            cuts = {name: cut(volume[frame], axis, slices[axis]) for name, volume in volumes.items()}
            low, top = np.percentile(cuts["image"], (0.5, 99.5))
            for panel, column in zip(row, columns, strict=True):
                panel.set_axis_off()
                panel.set(xticks=[], yticks=[])  # hidden ticks would take half of the time
                extent = (0, wide[axis], high[axis], 0)
                panel.imshow(cuts["image"], "gray", vmin=low, vmax=top, extent=extent)
                if column == "errors":
                    wrong = error_of(cuts["truth"], cuts["prediction"])
                    paint(panel, wrong, [to_rgb(c) for c in ERRORS.values()], extent, 0.8)
                elif column != "image":
                    pixels += np.bincount(cuts[column].ravel(), minlength=len(names))
                    paint(panel, cuts[column], [color_of(n) for n in range(1, len(names))], extent, 0.55)
                if number == 0 and column != "image":  # the image's title is the plane
                    panel.set_title(column)
            title = f"{PLANES[axis]} {slices[axis] + 1}/{space[axis]}"
            for at in frame:
                title += f", frame {at + 1}/{frames}"
                title += "" if time_step is None else f", {at * time_step:.3g} s"
            row[0].set_title("image" if picture else title, loc="left")
            if not picture:
                side = row[0].text(0.02, 0.5, EDGES[axis], transform=row[0].transAxes, va="center")
                side.set_bbox({"facecolor": GROUND, "alpha": 0.6, "edgecolor": "none", "pad": 1.5})
        _legend(figure, "outside lower left", legend_of(pixels, names), 6 if "truth" in volumes else 3)
        if "truth" in volumes:
            _legend(figure, "outside upper right", [(name, to_rgb(c)) for name, c in ERRORS.items()], len(ERRORS))
    save_figure(figure, path)


def paint(panel: Any, labels: NDArray[Any], colors: Sequence[Any], extent: Any, alpha: float) -> None:
    """Draw label n in colors[n - 1] over the panel; 0 is transparent."""
    visible, limits = np.ma.masked_equal(labels, 0), {"vmin": 0.5, "vmax": len(colors) + 0.5}
    panel.imshow(visible, ListedColormap(colors), **limits, alpha=alpha, interpolation="nearest", extent=extent)


def legend_of(pixels: NDArray[Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (name, colour) of foreground classes with pixels; of many, those with the most."""
    present = [n for n in range(1, len(names)) if pixels[n]]
    if len(present) <= NAMED:
        return [(names[n], color_of(n)) for n in present]
    most = sorted(sorted(present, key=lambda n: -pixels[n])[: NAMED - 1])
    rest = f"and {len(present) - len(most)} more"
    return [*((names[n], color_of(n)) for n in most), (rest, to_rgb(GROUND))]


def _legend(figure: Figure, place: Any, keys: Sequence[tuple[str, Any]], ncols: int) -> None:
    # matplotlib leaves out names that begin with _, hence the space
    patches = [Patch(color=color, label=f" {name[:28]}") for name, color in keys]
    figure.legend(handles=patches, loc=place, ncols=ncols, frameon=False)

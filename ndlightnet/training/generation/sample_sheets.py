"""Pictures of samples: sheets with a row for each class, animations, a file for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.utils import make_grid

from ndlightnet.data.errors import atomic_write, printable
from ndlightnet.training.classification.answer_figures import projections
from ndlightnet.training.generation.fidelity import Neighbour
from ndlightnet.training.report.figures import panels_of, save_figure

FRAMES = 8  # of a clip in a sheet
COLOUR = 3  # channels
WIDEST = 17  # width / height of a row of a sheet, at most, so that pictures can be seen
LETTERS = 16  # of a caption in an inch: one wider than its row would make the pictures small
WHITE = 255


def is_clip(sample: Tensor) -> bool:
    """Return whether a sample (channels, *space) is a clip in colour, (3, frames, h, w)."""
    return sample.ndim == 4 and len(sample) == COLOUR


def view(sample: Tensor) -> Tensor:
    """Return a picture (3, height, width) uint8 of a sample (channels, *space) uint8: frames of a
    clip side by side, a white line between them, and means over all but two axes of a volume."""
    if is_clip(sample):
        numbers = np.linspace(0, sample.shape[1] - 1, min(FRAMES, sample.shape[1])).round()
        frames = [pad(sample[:, int(number)], (0, 1), value=WHITE) for number in numbers]
        sample = torch.cat(frames, -1)[..., :-1]
    elif sample.ndim != 3:
        picture = torch.from_numpy(projections(sample[0]))
        sample = (picture * 255).round().to(torch.uint8)[None]
    return sample[:1].expand(3, -1, -1) if len(sample) != COLOUR else sample


def save_sheet(path: Path, rows: Sequence[tuple[str, Sequence[Tensor]]]) -> None:
    """Write a picture with a row for each (caption, samples (channels, *space) uint8): as many of
    them as fit, of clips with 8 frames two."""
    strips = [(name, _row([view(one) for one in samples])) for name, samples in rows if samples]
    widest = max(strip.shape[1] for _, strip in strips)
    width = min(9.0, widest / max(len(strip) for _, strip in strips))  # an inch for a square
    room = int(LETTERS * width)
    tall = [width * len(strip) / widest + 0.2 for _, strip in strips]
    figure, axes = panels_of(len(strips), 1, (width, sum(tall)))
    for axis, (name, strip) in zip(axes[:, 0], strips, strict=True):
        missing = ((0, 0), (0, widest - strip.shape[1]), (0, 0))
        axis.imshow(np.pad(strip, missing, constant_values=WHITE), interpolation="nearest")
        axis.axis("off")
        name = printable(name)
        name = name if len(name) <= room else f"{name[: room - 1]}…"
        axis.set_title(name, fontsize=7, loc="left", pad=2)
    save_figure(figure, path)


def save_nearest(
    path: Path, drawn: Sequence[tuple[int, Tensor]], near: Sequence[Sequence[Neighbour]], classes: Sequence[str]
) -> None:
    """Write a sheet of the samples drawn, (label, pixels), each beside the training samples that
    are nearest to it. classes: their names; none: of an unconditional network."""
    rows = []
    for (label, pixels), others in zip(drawn, near, strict=True):
        others = others[: max(1, _columns(view(pixels)) - 1)]
        at = ", ".join(f"{one.distance:.3g}" for one in others)
        caption = f"a sample; its nearest in training at {at}"
        if classes:
            same = sum(one.label == label for one in others)
            caption += f"; {same} of {len(others)} of its class, {classes[label]}"
        rows.append((caption, [pixels, *(one.pixels for one in others)]))
    save_sheet(path, rows)


def _columns(picture: Tensor) -> int:
    """Return how many pictures (3, height, width) of this size a row of a sheet has."""
    return max(1, WIDEST * picture.shape[1] // picture.shape[2])


def _row(pictures: Sequence[Tensor]) -> np.ndarray:
    """Return the first pictures beside each other, further apart than the frames of a clip:
    (height, width, 3) uint8."""
    bordered = [pad(one, (1, 1, 1, 1), value=WHITE) for one in pictures[: _columns(pictures[0])]]
    return np.ascontiguousarray(torch.cat(bordered, -1).permute(1, 2, 0).numpy())


def save_animation(path: Path, clips: Sequence[Tensor], columns: int, fps: int = 8) -> None:
    """Write clips (3, frames, h, w) uint8 beside each other as a GIF that repeats."""
    from PIL import Image

    frames = min(clip.shape[1] for clip in clips)
    pictures = [
        make_grid([clip[:, number] for clip in clips], columns, padding=1, pad_value=WHITE) for number in range(frames)
    ]
    images = [Image.fromarray(np.ascontiguousarray(one.permute(1, 2, 0))) for one in pictures]
    options: dict[str, Any] = {"format": "GIF", "duration": 1000 // fps, "loop": 0}
    with atomic_write(path) as draft:
        images[0].save(draft, save_all=True, append_images=images[1:], **options)


def save_sample(path: Path, sample: Tensor) -> Path:
    """Write a sample (channels, *space) uint8 and return its file, `path` with an ending: .png for
    images, .gif for clips, .nii.gz for other samples of three or four axes, or else .npy."""
    cells = sample.movedim(0, -1).cpu().numpy()
    cells = cells[..., 0] if len(sample) == 1 else cells
    if is_clip(sample):
        path = path.with_name(f"{path.name}.gif")
        save_animation(path, [sample], 1)
    elif sample.ndim == 3 and len(sample) in (1, COLOUR):
        from PIL import Image

        path = path.with_name(f"{path.name}.png")
        with atomic_write(path) as draft:
            Image.fromarray(cells).save(draft, format="PNG")
    elif sample.ndim in (4, 5) and len(sample) == 1:
        import nibabel

        path = path.with_name(f"{path.name}.nii.gz")
        with atomic_write(path) as draft:
            nibabel.save(nibabel.Nifti1Image(cells, np.eye(4)), draft)
    else:
        path = path.with_name(f"{path.name}.npy")
        with atomic_write(path) as draft:
            np.save(draft, sample.cpu().numpy())
    return path

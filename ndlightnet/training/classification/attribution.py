"""What of a sample decided a classifier's answer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

WINDOWS, AT_ONCE = 64, 8  # of a sample; in a batch


def attribution(net: Callable[[Tensor], Tensor], x: Tensor, label: int) -> Tensor:
    """Return how much each cell of a sample (channels, *space) speaks for a class, by occlusion (Zeiler and Fergus,
    2014, arXiv 1311.2901): (*space) float32.

    A window, in all channels, becomes 0, which is the mean of normalised data. What the class's logit loses by that is
    the value of its cells, the mean over the windows that hold a cell: above 0 for the class, below 0 against it.
    Windows are twice as large as the steps between them, of which there are about WINDOWS in all.
    """
    from captum.attr import Occlusion  # here, as a training does not need it

    space = x.shape[1:]
    count = min(16, round(WINDOWS ** (1 / len(space))))  # along each axis
    steps = [max(1, math.ceil(n / count)) for n in space]
    windows = [min(2 * step, n) for step, n in zip(steps, space, strict=True)]
    with torch.no_grad():
        heat: Tensor = Occlusion(net).attribute(
            x[None], (len(x), *windows), (len(x), *steps), baselines=0, target=label, perturbations_per_eval=AT_ONCE
        )
    return heat[0, 0].float()

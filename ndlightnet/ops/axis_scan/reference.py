"""MD-TPE token by token: the specification (LightNet, Eq. 9).

c, lam: coefficients and decays of Eq. 9; h: the state of one axis.
"""

from __future__ import annotations

import torch
from torch import Tensor


def line_scan(x: Tensor, c: Tensor, lam: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return all y_l = c . h_l, and the last h_l = lam h_(l-1) + x_l. x (lines, n, dim), c (dim,
    states), h (lines, dim, states)."""
    y = []
    for l in range(x.shape[1]):
        h = lam * h + x[:, l, :, None]
        y.append((c * h).sum(-1))
    return (torch.stack(y, 1) if y else x), h

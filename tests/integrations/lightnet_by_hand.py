"""LightNet attention written out, for layers in other people's networks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.ops import star


def lightnet(
    m: nn.Module, x: Tensor, grid: tuple[int, ...] = (), prefix: int = 0, mask: Tensor | None = None
) -> Tensor:
    """What a LightNetAttention without position code does to tokens (batch, prefix + grid, dim)."""
    q, k, v = (proj(x).unflatten(-1, (m.heads, -1)).transpose(1, 2) for proj in (m.q_proj, m.k_proj, m.v_proj))
    if mask is not None:
        k = k.masked_fill(~mask[:, None, :, None], -torch.inf)
    y = F.silu(q) @ (k.softmax(2).transpose(2, 3) @ v)
    y = F.layer_norm(y.transpose(1, 2).flatten(2), x.shape[-1:], m.norm.weight, m.norm.bias, 1e-6)
    y = y * m.gate(x).sigmoid()
    if m.local_values is not None:
        values = m.v_proj(x)
        if mask is not None:
            values = values * mask[..., None]
        near = neighbours(values[:, prefix:], m.local_values.weight, grid)
        y = y + torch.cat([torch.zeros_like(values[:, :prefix]), F.silu(near)], 1)
    return m.o_proj(y)


def neighbours(x: Tensor, weight: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Tokens (batch, length, dim) mixed with their neighbours along each axis by torch's depthwise convolution."""
    axes, dim = len(grid), x.shape[-1]
    kernel = torch.zeros(dim, 1, *[3] * axes, dtype=x.dtype)
    for tap, offset in zip(weight, star(axes, 1, False), strict=True):
        kernel[(slice(None), 0, *(1 - o for o in offset))] = tap
    convolution = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[axes]
    image = x.transpose(1, 2).unflatten(2, grid)
    return convolution(image, kernel, padding=1, groups=dim).flatten(2).transpose(1, 2)

"""What jobs of worker.py share."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ndlightnet.parallel import split_sizes


def slab(x: Tensor, dim: int, multiple: int = 1) -> Tensor:
    sizes = split_sizes(x.shape[dim], dist.get_world_size(), multiple)
    return x.split(sizes, dim)[dist.get_rank()]


def error_of(found: Tensor, expected: Tensor, largest: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return ((found - expected).abs().max() / largest.abs().max()).item()

"""What a training step of NDLightNet costs on many GPUs that share each sample: bytes, time.

A slab's process sends, in a step forward and backward, for each sample:
  attention     in each layer its States to all others, twice
  local mixing  in each layer its first and last planes to its neighbours, twice
  MD-TPE        all its tokens, but for its own share of the channels, four times
and for all samples its gradients, once (a ring all-reduce: twice their bytes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

TOKEN = 466e-9  # seconds of a training step for each token on one H200
# Bytes a second that a GPU sends within a host, as NCCL's kernels did between two and four H200s, and to other hosts;
# of copies before and after, and the seconds of a message, fitted to what a step took there beyond a GPU's own work
# (strong scaling, two GPUs 5.9 ms, four 7.1; four, weak scaling, 14.6; of the model: 6.0, 7.7, 13.5). FAR, FAR_LATENCY
# and HOST are assumed.
NEAR, FAR, COPIES = 300e9, 50e9, 320e9
HOST = 8  # GPUs
LATENCY, FAR_LATENCY = 15e-6, 40e-6


@dataclass(frozen=True)
class Network:
    """dim, depth, head_dim: of NDLightNet. parameters: their number. radius: of local mixing.
    element: bytes of a number of the values (2 under autocast)."""

    dim: int = 384
    depth: int = 12
    head_dim: int = 32
    parameters: int = 21_746_314  # on volumes, ten classes, a token for each cell
    radius: int = 1
    element: int = 2


def sent(net: Network, grid: tuple[int, ...], slabs: int, batch: int = 1) -> dict[str, float]:
    """Return the bytes that the process of a slab in the middle of a grid of tokens, split along its first axis,
    sends in a step; at the ends of the grid (slabs=2: everywhere) it has one neighbour."""
    heads = net.dim // net.head_dim
    state = heads * (2 * net.head_dim + 2 * net.head_dim**2) * 4
    plane, tokens = math.prod(grid[1:]), math.prod(grid) / slabs
    sides = min(2, slabs - 1)
    return {
        "attention": batch * 2 * net.depth * state * (slabs - 1),
        "local mixing": batch * 2 * net.depth * sides * net.radius * plane * net.dim * net.element,
        "MD-TPE": batch * 4 * tokens * net.dim * net.element * (slabs - 1) / slabs,
        "gradients": 2 * net.parameters * 4 * (slabs - 1) / slabs,
    }


def step(net: Network, grid: tuple[int, ...], slabs: int, batch: int = 1) -> dict[str, float]:
    """Return the predicted seconds of a step on a grid of tokens, and what they are made of."""
    compute = TOKEN * batch * math.prod(grid) / slabs
    speed, latency = (FAR, FAR_LATENCY) if slabs > HOST else (NEAR, LATENCY)
    # neighbours are on one host but for two; halo and States of a layer, both ways; MD-TPE
    messages = 4 * net.depth + 4 + 1 if slabs > 1 else 0
    exchange = sum(sent(net, grid, slabs, batch).values()) * (1 / speed + 1 / COPIES) + messages * latency
    return {"seconds": compute + exchange, "compute": compute, "exchange": exchange}


def predictions(gpus: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return predictions for grids that grow with the GPUs."""
    net, runs = Network(), []
    for slabs in gpus:
        grid = (128 * slabs, 64, 64)
        costs = step(net, grid, slabs)
        megabytes = {f"{name}, MB": number / 1e6 for name, number in sent(net, grid, slabs).items()}
        head = {"gpus": slabs, "step, ms": 1e3 * costs["seconds"], "exchange, ms": 1e3 * costs["exchange"]}
        runs.append({**head, "efficiency": costs["compute"] / costs["seconds"], **megabytes})
    return runs

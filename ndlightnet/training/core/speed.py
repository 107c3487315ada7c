"""Gradient checkpointing, the same for every network."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.nn import Block


def checkpoint_blocks(net: nn.Module) -> None:
    """Switch on gradient checkpointing: in training the activations within a block are computed again in the backward
    pass instead of stored. The names of parameters stay. ValueError for a network without blocks."""
    enable: Any = getattr(net, "set_grad_checkpointing", None)
    if enable is not None:
        enable()
        return
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    if not blocks:
        raise ValueError(
            f"grad_checkpointing=True: {type(net).__name__} has no blocks, expected a network with "
            "ndlightnet.nn.Block or a method set_grad_checkpointing"
        )
    for block in blocks:
        block.forward = partial(_forward, block)  # type: ignore[method-assign]


def _forward(block: Block, *inputs: Any, **named: Any) -> Any:
    forward = type(block).forward
    if not block.training:
        return forward(block, *inputs, **named)
    return checkpoint(forward, block, *inputs, use_reentrant=False, **named)

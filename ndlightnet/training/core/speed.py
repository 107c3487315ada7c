"""Gradient checkpointing, the same for every network, and a note of what runs without a kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.nn import MDTPE, Block
from ndlightnet.training.report.results import log_rank_zero


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


def note_torch_lines(net: nn.Module) -> None:
    """Print a note at the first call of an MD-TPE whose lines its kernel does not take, for each in a network."""
    for module in net.modules():
        if isinstance(module, MDTPE):
            hooks: list[Any] = []
            note = partial(_note_torch_lines, hooks)
            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))


def _note_torch_lines(hooks: list[Any], module: MDTPE, inputs: Any, named: dict[str, Any]) -> None:
    hooks.pop().remove()
    arguments = dict(zip(("x", "mask", "layout", "dtype"), inputs, strict=False)) | named
    arguments.pop("mask", None)
    runs = module.implementation(**arguments)
    if "lines of" in runs:
        log_rank_zero([f"MD-TPE runs in {runs}; it is slower than the kernel"])

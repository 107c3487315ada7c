"""Initial values: what constructors draw, `reset_parameters` draws again, in the same order.

A module sets the parameters and buffers that it holds itself in `reset_own`, and calls it last in
its constructor. So `to_empty` and `reset_parameters` make of a module built on device "meta" the
module that its constructor makes, number by number with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Device = torch.device | str | None
Space = tuple[int, ...]  # shape of a frame


class Initialized(nn.Module):
    """Base class of modules that can be initialised again."""

    def reset_own(self) -> None:
        """Set the parameters and buffers of the module itself, not those of its parts."""

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers as the constructor does, those of parts as well."""
        reset(self)


def owners(*modules: nn.Module, leave_out: Sequence[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of all modules within, parts before wholes, without those to leave out and what is within
    them. A module is left out, too, if all its parameters are those of an earlier one."""
    done = {*leave_out}
    yielded: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in done:
            return
        done.add(module)
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}".removeprefix("."), child)
        direct = {id(p) for p in module.parameters(recurse=False)}
        if not direct or not direct <= yielded:
            yield name, module
        yielded.update(direct)

    for module in modules:
        yield from visit("", module)


def reset(*modules: nn.Module, leave_out: Sequence[nn.Module] = ()) -> None:
    """Initialise modules, and all within them but those to leave out, as their constructors do. Raises ValueError for a
    module that holds parameters and cannot: it has neither `reset_own` nor `reset_parameters`."""
    for name, module in owners(*modules, leave_out=leave_out):
        if isinstance(module, Initialized):
            module.reset_own()
            continue
        # torch's nn.MultiheadAttention has an underscore
        again: Any = getattr(module, "reset_parameters", None)
        again = again or getattr(module, "_reset_parameters", None)
        held = next(module.parameters(recurse=False), None) is not None
        if again is not None:
            again()
        elif held and not isinstance(module, nn.ParameterList | nn.ParameterDict):  # their owner's
            raise ValueError(f"{name}: {type(module).__name__} holds parameters and has no reset_parameters")


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy a value into a parameter, which may be sharded (a DTensor): each process has the whole
    value then, that of the first one counts."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(value, sharded.device_mesh, sharded.placements)
    parameter.copy_(value)

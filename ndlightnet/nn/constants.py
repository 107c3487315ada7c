"""Constant buffers: they follow from a module's arguments and are not in its state dict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Constants(nn.Module, ABC):
    """Base class of modules with constant buffers, which no state dict holds.

    `to_empty` leaves such buffers uninitialised, and `load_state_dict(assign=True)` leaves them on device meta; this
    class computes them again after both. A subclass defines `constants` and calls `register_constants`.
    """

    @abstractmethod
    def constants(self) -> dict[str, Tensor]:
        """Return the constant tensors by name."""

    def register_constants(self) -> None:
        for name, value in self.constants().items():
            self.register_buffer(name, value, persistent=False)
        self.register_load_state_dict_post_hook(_materialize)

    def reset_constants(self) -> None:
        """Compute the constants again, in place."""
        for name in self.constants():
            getattr(self, name).copy_(self._fresh(name))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = {name: getattr(self, name) for name in self.constants()}
        super()._apply(fn, recurse)
        for name, value in before.items():
            now = getattr(self, name)
            if not now.is_meta:
                setattr(self, name, (self._fresh(name) if value.is_meta else value).to(now))
        return self

    def _fresh(self, name: str) -> Tensor:
        with torch.device("cpu"):  # whatever default device a caller has set
            return self.constants()[name]


def _materialize(module: nn.Module, _: Any) -> None:
    """Compute constants that are on meta. A function, so that modules with this hook pickle."""
    assert isinstance(module, Constants)
    device = next(module.parameters()).device
    for name in module.constants():
        if getattr(module, name).is_meta and device.type != "meta":
            setattr(module, name, module._fresh(name).to(device))

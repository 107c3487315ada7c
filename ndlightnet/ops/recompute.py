"""Tensors that autograd does not keep for the operators that read them: the nodes that returned them
compute them again, from what they keep for their own gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ndlightnet.ops.plain import plain

MOST = 4  # results that are computed again for one, so that of a long chain of residuals some are kept


def recomputable(y: Tensor, function: Callable[[Any], Tensor], source: Tensor | None = None) -> Tensor:
    """Return y, the output of an autograd.Function, which `function` computes again from its context. source: an input
    that may be `dropped`."""
    if _may_hook() and y.grad_fn is not None:
        node: Any = y.grad_fn
        node.recompute = function, y._version, 1 + _results(source)
    return y


def _results(x: Tensor | None) -> int:
    """Return how many results are computed again for x, 0 if it is kept."""
    node: Any = None if x is None else x.grad_fn
    _, version, results = getattr(node, "recompute", (None, None, 0))
    return results if x is not None and x._version == version and results <= MOST else 0


def dropped(x: Tensor | None) -> AbstractContextManager[Any]:
    """Context in which operators that read x keep its node in its place, if x is `recomputable`."""
    if x is None or not (_may_hook() and _results(x)):
        return nullcontext()
    node: Any = x.grad_fn
    same = _place(x)

    def pack(saved: Tensor) -> Any:
        if _place(saved) == same:
            return None
        return saved, saved._version

    def unpack(packed: Any) -> Tensor:
        if packed is None:
            with torch.no_grad():
                y: Tensor = node.recompute[0](node)
                return y
        saved, version = packed
        if saved._version != version:  # as torch does without hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(saved.shape)} is at version {saved._version}, expected version {version}"
            )
        kept: Tensor = saved
        return kept

    return saved_tensors_hooks(pack, unpack)


def _place(x: Tensor) -> tuple[Any, ...]:
    # no data_ptr: tensors without numbers (meta, fake) have none
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def _may_hook() -> bool:
    """Return whether to say what is kept: hooks of others (checkpointing, offloading) decide
    before, and torch.compile by itself."""
    if torch.compiler.is_compiling() or plain() or not torch.is_grad_enabled():
        return False
    autograd: Any = torch._C._autograd
    if autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return False
    return autograd._top_saved_tensors_default_hooks(False) is None

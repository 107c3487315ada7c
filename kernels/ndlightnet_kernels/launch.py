"""Kernel launches at little cost for the host.

At every launch Triton inspects each argument to find the compiled program, which takes longer than a small kernel. The
program depends on shapes, dtypes, strides and the addresses' alignment alone. So the plan of a call is made once for
its shapes (`remembered`), and its launches store the programs that Triton found (`Launch`).

While a graph is lowered (`lowering`), launches are recorded in the graph instead, so that what is
made of it contains the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # of a launch, not of the kernel
MOST = 4096  # largest number of plans in memory

Plan = TypeVar("Plan")
_plans: dict[Hashable, Any] = {}
_lowered: ContextVar[bool] = ContextVar("lowered", default=False)


@contextmanager
def lowering() -> Iterator[None]:
    """Record launches in the graph that is traced, rather than run them."""
    before = _lowered.set(True)
    try:
        yield
    finally:
        _lowered.reset(before)


def lowered() -> bool:
    """Return whether launches are recorded: tensors have no addresses, sizes may be symbols."""
    return _lowered.get()


def remembered(key: Hashable, make: Callable[[], Plan]) -> Plan:
    """Return the result of `make`, cached by `key`, which holds all that the result depends on."""
    if _lowered.get():
        return make()
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


class Launch:
    """A kernel with its grid and all arguments except the tensors, which come first in its signature. Call it with the
    tensors, None for one that is absent. Their shapes, strides, dtypes and device must be the same at every call."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        names = kernel.arg_names
        tensors = next(i for i, name in enumerate(names) if name in arguments)
        self.kernel, self.grid = kernel, (*grid, *[1] * (3 - len(grid)))
        self.rest = tuple(arguments.pop(name) for name in names[tensors:])
        self.options = arguments
        self.programs: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if INTERPRETED:
            self.kernel[self.grid](*tensors, *self.rest, **self.options)
            return
        if _lowered.get():
            self._record(*tensors)
            return
        alignment = tuple([-1 if x is None else x.data_ptr() & 15 for x in tensors])
        program = self.programs.get(alignment)
        if program is None:
            compiled = self.kernel[self.grid](*tensors, *self.rest, **self.options)
            if hasattr(compiled, "result"):  # a compilation in another thread
                compiled = compiled.result()
            if compiled is not None:
                self.programs[alignment] = compiled[self.grid]
            return
        program(*tensors, *self.rest)

    def _record(self, *tensors: Tensor | None) -> None:
        config = triton.Config({}, **{k: v for k, v in self.options.items() if k in OPTIONS})
        constants = {k: v for k, v in self.options.items() if k not in OPTIONS}
        kernel = triton.autotune([config], key=[])(self.kernel)
        torch.library.wrap_triton(kernel)[self.grid](*tensors, *self.rest, **constants)

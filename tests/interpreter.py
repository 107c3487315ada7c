"""Triton's interpreter, with less work for each call of a device function.

For every such call it patches all of triton.language anew, a third of the time of the kernel tests
on a CPU. Once in a launch is enough. Where Triton has another interpreter nothing is changed.
"""

from inspect import ismodule
from typing import Any


def patch_language_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    launcher: Any = getattr(interpreter, "GridExecutor", None)
    device_function: Any = getattr(interpreter, "InterpretedFunction", None)
    if launcher is None or not hasattr(device_function, "rewrite"):
        return
    patched: set[str] = set()  # modules, in the launch that runs
    used: dict[Any, set[str]] = {}  # modules that a device function uses
    launch, call = launcher.__call__, device_function.__call__
    language = {module.__name__ for module in (tl, tl.core)}

    def first_unpatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_if_needed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in used:
            modules = {v.__name__ for v in self.fn.__globals__.values() if ismodule(v)}
            used[self.fn] = modules & language
        if used[self.fn] <= patched:
            try:
                return self.rewrite()(*args, **kwargs)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
        patched.update(used[self.fn])
        return call(self, *args, **kwargs)

    launcher.__call__, device_function.__call__ = first_unpatch, patch_if_needed

"""Triton's interpreter, with less work for each call of a device function and for each operation.

For every such call it patches all of triton.language anew, a third of the time of the kernel tests
on a CPU. Once in a launch is enough. About half of what remains are types and shapes, which it
checks and writes as text for each of thousands of tensors, and a search for integers that overflow,
whose result it drops (device_assert without debug). Where Triton has another interpreter nothing is changed.
"""

from contextlib import suppress
from dataclasses import replace
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
    with suppress(AttributeError, ImportError, TypeError):  # raised before anything is changed
        remember_types()


def remember_types() -> None:
    """Work out once what follows from a type or a shape alone."""
    import triton.language.core as core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_type, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}  # attributes of types of blocks
    tensors: dict[str, dict[str, Any]] = {}  # those of tensors that follow from the name of a type
    numpy_types: dict[str, Any] = {}

    def unwrap_if_constexpr(x: Any) -> Any:
        return x if type(x) is int else unwrap(x)

    def equal_types(self: Any, dtype: Any) -> Any:
        return self is dtype or equal(self, dtype)

    def init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(unwrap_if_constexpr, shape))
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        self.__dict__ |= blocks[key]
        self.element_ty = element_ty

    def init_tensor_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, handle, type)
            tensors[type.name] = vars(self) | {"handle": None}
        self.__dict__ |= tensors[type.name]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        shapes = [x.type.shape if x.type.is_block() else None for x in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] is shapes[1] else broadcast(self, lhs, rhs)

    def numpy_type_once(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    builder = interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=False)
    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrap_if_constexpr, equal_types
    core.block_type.__init__, core.tensor.__init__ = init_block_once, init_tensor_once
    TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype = broadcast_if_needed, numpy_type_once
    builder.options = options

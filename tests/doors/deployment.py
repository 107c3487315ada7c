"""Doors to other runtimes and to torch.func: each asserts equal values, or raises the reason."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call, grad, jvp, vmap

from .door_models import Case, output

BEYOND = 2e-5  # roundings of 6e-8 that a few hundred operations grow; outputs are of order 1
EXACT = 1e-10  # float64: 1e-16 likewise, for gradients of up to some hundreds


def _dynamic(case: Case) -> tuple[dict[int, Any], ...]:
    """The batch and all sizes but that of the channels, of each input."""
    first = 2 if case.takes == "cells" else 1
    sizes = dict.fromkeys(range(first, first + len(case.sizes[0])), Dim.DYNAMIC)
    return tuple({0: Dim.DYNAMIC, **sizes} for _ in case.inputs())


def _program(case: Case, model: nn.Module) -> Any:
    with torch.no_grad():
        return torch.export.export(model, case.inputs(), dynamic_shapes=_dynamic(case))


@torch.no_grad()
def _agree(case: Case, model: nn.Module, run: Callable[..., Any], sizes: int | None = None) -> None:
    """`run` is the model at the traced size, at the others, and for other batches."""
    for at, batch in [*zip(range(len(case.sizes)), (2, 1, 3, 2, 1, 1), strict=True)][:sizes]:
        inputs = case.inputs(at, batch)
        actual, expected = output(run, *inputs), output(model, *inputs)
        assert actual.shape == expected.shape and expected.abs().max() > 0.01
        assert (actual - expected).abs().max() < BEYOND, (batch, case.sizes[at])


def _same(actual: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < bound * (1 + b.abs().max())


def compile(case: Case, tmp_path: Path) -> None:
    """One graph, forward and backward; what Inductor makes of it is tested elsewhere."""
    model, inputs = case.make().eval(), case.inputs()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual, expected = output(compiled, *inputs), output(model, *inputs)
    assert (actual - expected).abs().max() < BEYOND
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.autograd.grad(y.square().sum(), weights, materialize_grads=True) for y in (actual, expected)]
    _same(*grads, 10 * BEYOND)


def export(case: Case, tmp_path: Path) -> None:
    """The exported program in torch, and the ONNX file made of it in onnxruntime."""
    model, path = case.make().eval(), tmp_path / "model.onnx"
    program = _program(case, model)
    _agree(case, model, program.module())
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    file = torch.onnx.export(program, case.inputs(), dynamo=True, verbose=False, optimize=False)
    assert file is not None
    file.save(str(path))
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    _agree(case, model, run)


def aoti(case: Case, tmp_path: Path) -> None:
    """AOTInductor's code, compiled without optimisation, which takes most of g++'s time."""
    if not shutil.which("g++"):
        pytest.skip("AOTInductor needs a C++ compiler")
    model, path = case.make().eval(), str(tmp_path / "model.pt2")
    options = {"aot_inductor.debug_compile": True}
    torch._inductor.aoti_compile_and_package(_program(case, model), package_path=path, inductor_configs=options)
    _agree(case, model, torch._inductor.aoti_load_package(path))


def trace(case: Case, tmp_path: Path) -> None:
    """A TorchScript file, at the traced size: another size is another trace."""
    model, path = case.make().eval(), str(tmp_path / "model.pt")
    torch.jit.save(torch.jit.trace(model, case.inputs(), check_trace=False), path)
    _agree(case, model, torch.jit.load(path), sizes=1)


def func(case: Case, tmp_path: Path) -> None:
    """Gradients of single samples as a loop gives them; forward mode against reverse mode."""
    model = case.make().eval().double()
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    inputs = [x.double() if x.is_floating_point() else x for x in case.inputs()]

    def call(weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return output(lambda *x: functional_call(model, weights, x), *inputs)

    def loss(weights: dict[str, Tensor], *sample: Tensor) -> Tensor:
        return call(weights, *(x[None] for x in sample)).sin().sum()

    def by_autograd(function: Callable[[dict[str, Tensor]], Tensor]) -> tuple[Tensor, ...]:
        learnt = {name: p.clone().requires_grad_() for name, p in weights.items()}
        return torch.autograd.grad(function(learnt), [*learnt.values()], materialize_grads=True)

    each = vmap(grad(loss), (None, *(0 for _ in inputs)))(weights, *inputs)
    for at in range(2):
        sample = [x[at] for x in inputs]
        expected = by_autograd(lambda weights, sample=sample: loss(weights, *sample))
        _same([*grad(loss)(weights, *sample).values()], expected, EXACT)
        _same([each[name][at] for name in weights], expected, EXACT)
    ways = {name: torch.randn_like(p) for name, p in weights.items()}
    y, forward = jvp(lambda weights: call(weights, *inputs), (weights,), (ways,))
    weight = torch.randn_like(y)
    back = by_autograd(lambda weights: (call(weights, *inputs) * weight).sum())
    reverse = [(a * b).sum() for a, b in zip(back, ways.values(), strict=True)]
    scale = EXACT * (1 + sum(term.abs() for term in reverse))
    assert ((forward * weight).sum() - sum(reverse)).abs() < scale

"""What the kernels' operators promise to PyTorch: schemas, compilation, autocast, CUDA graphs."""

import copy

import pytest
import torch
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.ops import (
    Lrpe,
    attention_step,
    global_attention,
    read,
    summarize,
)

from .cases import DEVICE, Case, Problem
from .yardstick import ours, rms

forms = pytest.mark.parametrize("form", ["global", "causal"])
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


class Recorder(TorchDispatchMode):
    """The first call of each of our operators: arguments as given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "ndlightnet":
            self.calls.setdefault(op, (args, kwargs or {}))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [None, "cosine"])
def test_opcheck(kind):
    """Schema, fake implementation, autograd and dynamic shapes of all operators that run."""
    problem = Problem.random(Case((3, 3), 5, 3, kind, "holes", past=True))
    leaves = {name: x.requires_grad_() for name, x in problem.leaves.items()}
    problem, forward, backward = problem._replace(leaves=leaves), Recorder(), Recorder()
    with forward:
        outputs = [*ours(problem, "global", "triton").values()]
        outputs += ours(problem, "causal", "triton").values()
        place = kind and Lrpe(leaves["theta"], (1,), kind)
        token = [leaves[name][:, 0] for name in "qkv"]
        out, state = attention_step(*token, problem.state(), lrpe=place, impl="triton")
        outputs += [out, *state]
    with backward:
        sum(x.square().sum() for x in outputs if x.requires_grad).backward()
    assert forward.calls and backward.calls
    for recorder in (forward, backward):
        for op, arguments in recorder.calls.items():

            def leaf(x, recorder=recorder):
                return x.detach().clone().requires_grad_(recorder is forward and x.requires_grad)

            args, kwargs = tree_map_only(torch.Tensor, leaf, arguments)
            torch.library.opcheck(op, args, kwargs)


@forms
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(close, close_grads, form, backend, dynamic):
    torch._dynamo.reset()
    layer = LightNetAttention(24, heads=2, impl="triton").to(DEVICE)
    options = {"causal": form == "causal"}
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (9, 70, 17) if dynamic else (17,):
        x = torch.randn(2, length, 24, device=DEVICE, requires_grad=True)
        mask = torch.rand(2, length, device=DEVICE) < 0.8
        actual, expected = compiled(x, mask=mask, **options), layer(x, mask=mask, **options)
        close(actual, expected, 1e-5)
        close_grads(actual, expected, (x, *layer.parameters()), 1e-5)


def test_compile_the_step(close):
    torch._dynamo.reset()
    layer = LightNetAttention(24, heads=2, impl="triton").to(DEVICE)
    compiled = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    state = other = layer.init_state(2, DEVICE)
    with torch.no_grad():
        for t in range(3):
            x, at = torch.randn(2, 24, device=DEVICE), torch.tensor(t, device=DEVICE)
            actual, state = compiled(x, state, at)
            expected, other = layer.step(x, other, at)
            close(actual, expected, 1e-5)


@forms
def test_autocast_of_a_layer(form):
    """No worse than twice the torch implementation in the same autocast, and one rounding."""
    layer = LightNetAttention(32, heads=2, impl="triton").to(DEVICE)
    plain, double = copy.deepcopy(layer), copy.deepcopy(layer).double()
    plain.impl = double.impl = "torch"
    x, results = torch.randn(2, 19, 32, device=DEVICE), []
    for model in (layer, plain, double):
        kind = torch.float64 if model is double else torch.float32
        y = x.to(kind).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=model is not double):
            out = model(y, causal=form == "causal")
        loss = (out * torch.linspace(-1, 1, 32, device=DEVICE)).sum()
        names = ["out", "x", *(name for name, _ in model.named_parameters())]
        grads = grad(loss, (y, *model.parameters()))
        results.append(dict(zip(names, (out.detach(), *grads), strict=True)))
    unit = torch.finfo(torch.bfloat16).eps / 2
    scale = max(rms(x) for name, x in results[2].items() if name.startswith("k_proj"))
    for name, exact in results[2].items():
        actual, low = results[0][name], results[1][name]
        assert actual.dtype == low.dtype
        band = unit * max(rms(exact), scale * name.startswith("k_proj"))
        assert rms(actual - exact) <= 2 * rms(low - exact) + band, name


@forms
def test_autocast_does_not_touch_float32_inputs(form):
    problem = Problem.random(Case((9,), 16, 16))
    plain = ours(problem, form, "triton")["out"]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cast = ours(problem, form, "triton")["out"]
    assert cast.dtype == torch.float32 and torch.equal(cast, plain)


def everything(problem, form):
    """Outputs and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in problem.leaves.items()}
    outputs = list(ours(problem._replace(leaves=leaves), form, "triton").values())
    total = sum(x.float().sin().sum() for x in outputs if x.requires_grad)
    used = [x for name, x in leaves.items() if form == "causal" or name not in ("sum", "memory")]
    return [*outputs, *grad(total, used)]


@forms
@pytest.mark.parametrize(
    "case",
    [
        Case((10, 7), 16, 16, "cosine", "holes", past=True),
        pytest.param(
            Case((64, 64), 64, 64, "cosine", "holes", torch.bfloat16, shared=True, heads=8),
            marks=pytest.mark.gpu,
        ),
    ],
    ids=str,
)
def test_the_same_bits_every_time(form, case):
    """By default, without torch's deterministic mode; theta's gradient sums over samples too."""
    problem = Problem.random(case)
    first, *others = (everything(problem, form) for _ in range(4 if DEVICE.type == "cuda" else 2))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@forms
def test_cuda_graph(form):
    """Forward and backward captured once, replayed on other numbers."""
    problem = Problem.random(Case((10, 7), 16, 16, "cosine", "holes", torch.bfloat16, past=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            everything(problem, form)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(problem, form)
    other = Problem.random(problem.case)
    for name, x in problem.leaves.items():
        x.copy_(other.leaves[name])
    problem.mask.copy_(other.mask)
    problem.top.copy_(other.top)
    graph.replay()
    for a, b in zip(captured, everything(problem, form), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [1, 2])
def test_a_length_not_seen_before_neither_compiles_nor_tunes(monkeypatch, axes):
    import triton
    from triton.runtime.autotuner import Autotuner

    def run(shape):
        problem = Problem.random(Case(shape, 64, 64, "cosine", "holes", torch.bfloat16, past=True))
        everything(problem, "global")
        everything(problem, "causal")

    compiled = []
    hook = lambda **told: bool(compiled.append(told["repr"]))  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    run((777,) if axes == 1 else (21, 37))
    assert compiled or DEVICE.type == "cpu"
    compiled.clear()

    def refuse(*args, **options):
        raise AssertionError("tuned again")

    monkeypatch.setattr(Autotuner, "_bench", refuse)
    lengths = [(1,), (16,), (1000,), (1024,), (4099,)]
    grids = [(1, 1), (4, 4), (8, 125), (32, 32), (1, 4099)]
    for shape in lengths if axes == 1 else grids:
        run(shape)
        assert not compiled, f"{shape}: {compiled}"


def test_a_source_is_summed_once_for_many_reads():
    """summarize and read are separate operators: a State can be kept, and read again."""
    problem = Problem.random(Case((9,), 5, 3))
    q, k, v = problem.leaves.values()
    state = summarize(k, v, impl="triton")
    for queries in (q, q[:, :2], q.flip(1)):
        expected = (
            global_attention(queries, k, v, impl="triton")
            if queries.shape == q.shape
            else (read(q, state, impl="triton")[:, :2])
        )
        assert torch.equal(read(queries, state, impl="triton"), expected)

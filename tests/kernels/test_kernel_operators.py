"""What the kernels' operators promise to PyTorch: schemas, compilation, autocast, CUDA graphs."""

import copy

import pytest
import torch
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ndlightnet.nn.mixers import LightNetAttention, lightnet
from ndlightnet.ops import Position, attention_step, global_attention, instance_norm_silu, norm_gate
from ndlightnet.ops.lightnet import layer

from .kernel_cases import DEVICE, Case, Problem
from .yardstick import Plain, ours, rms

forms = pytest.mark.parametrize("form", ["global", "causal"])
every_form = pytest.mark.parametrize("form", ["global", "causal", "frames"])


# What is left out takes the interpreter long, and compiling for any length covers it
CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor"]
CHECKS += ["test_aot_dispatch_dynamic"] if DEVICE.type == "cuda" else []


class Recorder(TorchDispatchMode):
    """The first call of each of our operators: arguments as given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "ndlightnet":
            self.calls.setdefault(op, (args, kwargs or {}))
        return op(*args, **(kwargs or {}))


class Zeros(TorchDispatchMode):
    """Counts tensors that are filled with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.__name__.split(".")[0] in ("zeros", "zeros_like", "new_zeros", "zero_")
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("learn", [False, True])
def test_outputs_without_a_gradient_cost_nothing(learn):
    """No zeros in their place: of a State for each sample, of every row's mean and deviation."""
    q, k, v = (torch.randn(2, 6, 1, 4, device=DEVICE, requires_grad=True) for _ in range(3))
    theta = torch.rand(1, 4, device=DEVICE, requires_grad=learn)
    y = global_attention(q, k, v, position=Position(theta, (2, 3), "cosine"), impl="triton")
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    z = norm_gate(q[..., 0, :], k[..., 0, :], weight, weight, impl="triton")
    n = instance_norm_silu(q, *torch.ones(2, 6, device=DEVICE), k, impl="triton")
    for out, inputs in ((y, [q, k, v, *[theta] * learn]), (z, [q, k, weight]), (n, [q, k])):
        with Zeros() as zeros:
            grad(out, inputs, torch.ones_like(out))
        assert zeros.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cosine", pytest.param(None, marks=pytest.mark.gpu)])
def test_opcheck(kind):
    """Schema, fake implementation, autograd and dynamic shapes of all operators that run."""
    case = Case((2, 2), 5, 3, kind, kind and "holes", past=True, batch=1, heads=1, forget=(0.3,))
    problem, forward, backward, plain = Problem.random(case), Recorder(), Recorder(), Recorder()
    leaves = {name: x.requires_grad_() for name, x in problem.leaves.items()}
    with forward:
        outputs = []
        for form in ("global", "causal", "frames", "state", "read"):
            outputs += ours(problem, form, "triton").values()
    with backward:
        sum(x.square().sum() for x in outputs if x.requires_grad).backward()
    with plain, torch.no_grad():
        place = kind and Position(leaves["theta"], (1,), kind)
        token = [leaves[name][:, 0] for name in "qkv"]
        attention_step(*token, problem.state(), position=place, impl="triton")
    assert forward.calls and backward.calls and plain.calls
    names = {op.__name__ for recorder in (forward, backward) for op in recorder.calls}
    assert {"sliding_merge.default", "sliding_merge_backward.default"} <= names
    for recorder in (forward, backward, plain):
        for op, arguments in recorder.calls.items():
            if recorder is not forward and op in forward.calls:
                continue

            def leaf(x, learnt=recorder is forward):
                return x.detach().clone().requires_grad_(learnt and x.requires_grad)

            args, kwargs = tree_map_only(torch.Tensor, leaf, arguments)
            torch.library.opcheck(op, args, kwargs, test_utils=CHECKS)


def compiles(close, close_grads, form, lengths, lrpe="cosine", batch=2, **options):
    torch._dynamo.reset()
    # 8 channels: torch 2.11 pads rows of 6 and then keeps the first length's strides
    window = 2 if form == "frames" else None
    layer = LightNetAttention(8, heads=1, lrpe=lrpe, window=window, impl="triton").to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True, **options)
    for length in lengths:
        shape = (3, length) if form == "frames" else (length,)
        x = torch.randn(batch, *shape, 8, device=DEVICE, requires_grad=True)
        mask = torch.rand(batch, *shape, device=DEVICE) < 0.8
        actual, expected = (f(x, mask=mask, causal=form != "global") for f in (compiled, layer))
        close(actual, expected, 1e-5)
        if length == lengths[0] or DEVICE.type == "cuda":
            close_grads(actual, expected, (x, *layer.parameters()), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form, lrpe", [("global", "cosine"), ("causal", None)])
def test_compile_without_a_graph_break(close, close_grads, form, lrpe):
    """For lengths unknown when compiled."""
    compiles(close, close_grads, form, (3, 5), lrpe, 1, dynamic=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 4])
def test_compile_frames_without_a_graph_break(close, close_grads, heads):
    """In groups with one head, whose States weigh more than tokens."""
    torch._dynamo.reset()
    layer = LightNetAttention(8, heads=heads, lrpe=None, impl="triton").to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 2, 2, 8, device=DEVICE, requires_grad=True)
    actual, expected = (f(x, causal=True) for f in (compiled, layer))
    close(actual, expected, 1e-5)
    close_grads(actual, expected, (x, *layer.parameters()), 1e-5)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_with_inductor(close, close_grads, form, dynamic, mode):
    compiles(close, close_grads, form, (9, 70, 17), dynamic=dynamic, mode=mode)


@pytest.mark.slow
def test_compile_the_step(close):
    torch._dynamo.reset()
    layer = LightNetAttention(6, heads=1, impl="triton").to(DEVICE)
    backend = "aot_eager" if DEVICE.type == "cpu" else "inductor"
    compiled = torch.compile(layer.advance, fullgraph=True, backend=backend)
    state = other = layer.init_state(2, DEVICE)
    with torch.no_grad():
        for t in range(2):
            x, at = torch.randn(2, 1, 6, device=DEVICE), torch.tensor([t, t + 5], device=DEVICE)
            actual, state = compiled(x, state, at)
            expected, other = layer.advance(x, other, at)
            close(actual, expected, 1e-5)


# The layer's function, the form of the yardstick, and a grid of 9 tokens
LAYERS = {
    "global": ("begin_global_attention", "global", (9,)),
    "causal": ("axis_causal_attention", "causal", (9,)),
    "frames": ("axis_causal_attention", "frames", (3, 3)),
}


def roundly(name, form):
    """The layer's attention by the yardstick where its inputs are in low precision."""
    exactly = getattr(lightnet, name)

    def attention(q, k, v, *frames, mask=None, position=None, impl="auto", **options):
        if impl != "torch" or q.dtype == torch.float64:
            return exactly(q, k, v, *frames, mask=mask, position=position, impl=impl, **options)
        batch, _, heads, dim = q.shape
        case = Case(position.shape, dim, v.shape[-1], position.kind, None, q.dtype, batch=batch, heads=heads)
        problem = Problem(case, {"q": q, "k": k, "v": v, "theta": position.theta}, mask, None)
        with torch.autocast(DEVICE.type, enabled=False):
            out = Plain(problem)(form)["out"]
        return (out, None) if frames else lambda: out

    return attention


@pytest.mark.slow
@pytest.mark.parametrize("form", LAYERS)
def test_autocast_of_a_layer(monkeypatch, form):
    """No worse than twice the yardstick in the same autocast, and one rounding."""
    name, form, shape = LAYERS[form]
    for module in (lightnet, layer) if form == "global" else (lightnet,):
        monkeypatch.setattr(module, name, roundly(name, form))
    fused = LightNetAttention(10, heads=1, impl="triton").to(DEVICE)
    plain, double = copy.deepcopy(fused), copy.deepcopy(fused).double()
    plain.impl = double.impl = "torch"
    x, results = torch.randn(2, *shape, 10, device=DEVICE), []
    for model in (fused, plain, double):
        kind = torch.float64 if model is double else torch.float32
        y = x.to(kind).requires_grad_()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=model is not double):
            out = model(y, causal=form != "global")
        loss = (out * torch.linspace(-1, 1, 10, device=DEVICE)).sum()
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
    problem = Problem.random(Case((5,), 5, 3, batch=1, heads=1))
    plain = ours(problem, form, "triton")["out"]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cast = ours(problem, form, "triton")["out"]
    assert cast.dtype == torch.float32 and torch.equal(cast, plain)


def everything(problem, form):
    """Outputs and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in problem.leaves.items()}
    outputs = list(ours(problem._replace(leaves=leaves), form, "triton").values())
    total = sum(x.float().sin().sum() for x in outputs if x.requires_grad)
    used = [x for name, x in leaves.items() if form != "global" or name not in ("sum", "memory")]
    return [*outputs, *grad(total, used)]


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize(
    "case",
    [
        Case((10, 7), 5, 3, "cosine", "holes", past=True),
        Case((64, 64), 64, 64, "cosine", "holes", torch.bfloat16, shared=True, heads=8),
    ],
    ids=str,
)
def test_the_same_bits_every_time(form, case):
    """By default, without torch's deterministic mode; theta's gradient sums over samples too."""
    problem = Problem.random(case)
    first, *others = (everything(problem, form) for _ in range(5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@every_form
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
        problem = Problem.random(Case(shape, 64, 60, "cosine", "holes", torch.bfloat16, past=True))
        everything(problem, "global")
        everything(problem, "causal")
        if axes > 1:  # with one axis it is the causal form
            everything(problem, "frames")

    compiled = []
    hook = lambda **told: bool(compiled.append(told["repr"]))  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    for shape in [(777,)] if axes == 1 else [(21, 37), (5, 64)]:  # rows of whole runs are a program of their own
        run(shape)
    assert compiled  # the hook works: no other test has values of 60 channels
    compiled.clear()

    def refuse(*args, **options):
        raise AssertionError("tuned again")

    monkeypatch.setattr(Autotuner, "_bench", refuse)
    lengths = [(1,), (16,), (1000,), (1024,), (4099,)]
    grids = [(1, 1), (4, 4), (8, 125), (32, 32), (1, 4099)]
    for shape in lengths if axes == 1 else grids:
        run(shape)
        assert not compiled, f"{shape}: {compiled}"

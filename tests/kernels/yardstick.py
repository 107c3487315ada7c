"""The kernels' yardstick: the same formulas in low precision and in plain torch; the comparison.

A result is right if its error against float64 is at most twice that of `Plain`, in the mean and at
the worst place, plus a band: see `judge`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ndlightnet import ops

from .kernel_cases import Case, Problem, corner
from .low_precision import Plain, ages, kept

Results = dict[str, Tensor]


class Poison:
    """Within it, memory that torch hands out unwritten is NaN (integers: the largest number)."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(3).isnan().all()

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


# What the whole source at once is compared with: its parts, and what is done token by token
WHOLE = {"merged": "state", "segments": "causal", "steps": "causal"}


def ours(problem: Problem, form: str, impl: str) -> dict[str, Tensor]:
    """The library's public functions."""
    c, place, mask, state = problem.case, problem.place(), problem.mask, problem.state()
    q, k, v = (problem.leaves.get(name) for name in "qkv")
    if form == "read":
        return {"out": ops.read(q, state, position=place, impl=impl)}
    if form == "state":
        return ops.summarize(k, v, mask=mask, position=place, impl=impl)._asdict()
    if form == "global":
        return {"out": ops.global_attention(q, k, v, mask=mask, position=place, impl=impl)}
    if form == "cross":
        state = ops.summarize(k, v, mask=mask, position=place, impl=impl)
        target = None if place is None else ops.Position(place.theta, c.target, c.kind)
        return {"out": ops.read(q, state, position=target, impl=impl)}
    if form == "causal":
        out, state = ops.causal_attention(
            q, k, v, mask=mask, position=place, state=state, forget=problem.fade(), impl=impl
        )
        return {"out": out, **state._asdict()}
    if form == "frames":
        past = {"state": state, "window": c.window, "forget": problem.fade()}
        out, state = ops.axis_causal_attention(q, k, v, c.shape[0], mask=mask, position=place, impl=impl, **past)
        return {"out": out} if c.window == 1 else {"out": out, **state._asdict()}

    # parts of one axis: views, at other addresses and strides
    cuts = range(c.length + 1) if form == "steps" else (0, 1, c.length)
    out = []
    for i, j in pairwise(cuts):
        first = i if place is None or place.offset is None else i + place.offset[0]
        shifted = None if place is None else ops.Position(place.theta, (j - i,), c.kind, offset=(first,))
        x, y, keep = k[:, i:j], v[:, i:j], None if mask is None else mask[:, i:j]
        if form == "merged":
            part = ops.summarize(x, y, mask=keep, position=shifted, impl=impl)
            state = part if state is None else ops.merge(state, part)
        elif form == "segments":
            options = {"mask": keep, "position": shifted, "forget": problem.fade(), "impl": impl}
            now, state = ops.causal_attention(q[:, i:j], x, y, state=state, **options)
            out.append(now)
        else:
            if state is None:
                state = ops.State.empty(c.batch, c.heads, c.dim, c.value_dim, place is not None, device=k.device)
            now, state = ops.attention_step(q[:, i], x[:, 0], y[:, 0], state, position=shifted, impl=impl)
            out.append(now[:, None])
    outputs = {"out": torch.cat(out, 1)} if out else {}
    return outputs | state._asdict()


def after_frames(problem: Problem, k: Tensor) -> Tensor:
    """The maximum of the axis-causal form's last State, from logits k without the padding."""
    c = problem.case
    tops = k.unflatten(1, (c.shape[0], -1)).amax(2)
    if problem.top is not None:
        past = problem.top.double()
        tops = torch.cat([past if c.window else past[:, None], tops], 1)
    fade = torch.as_tensor(problem.fade(), dtype=tops.dtype, device=k.device).reshape(-1, 1)
    tops = tops - ages(c, tops)[-1, :, None, None] * fade
    return tops.amax(1) if c.window is None else kept(c, tops, -torch.inf)


def rescaled(problem: Problem, outputs: Results) -> Results:
    """Sum and memory in float64 relative to the true maximum of the logits.

    A State's `max` is a reference that the kernels may choose; "reach": how far from the maximum.
    """
    if "max" not in outputs:
        return outputs
    c, k = problem.case, problem.leaves["k"].detach().double()
    if problem.mask is not None:
        k = k.masked_fill(~problem.mask[..., None, None], -torch.inf)
    top = outputs["max"].double()
    if c.window is not None or c.forget:
        peak = after_frames(problem, k)
    else:
        tops = [k] if problem.state() is None else [k, problem.top.double()[:, None]]
        peak = torch.cat(tops, 1).amax(1)
    assert torch.equal(top == -torch.inf, peak == -torch.inf)
    gap = torch.where(top == -torch.inf, 0, top - peak)
    scale = torch.cat([gap.exp()] * (c.rows // c.dim), -1)
    return {
        **{name: x for name, x in outputs.items() if name != "max"},
        "sum": outputs["sum"].double() * gap.exp(),
        "memory": outputs["memory"].double() * scale[..., None],
        "reach": gap.abs().max(),
    }


def evaluate(function: Callable[[Problem], Results], problem: Problem, pulls: Results | None) -> Results:
    """Outputs, and the gradients ("dq", ...) of the leaves where those of the outputs are given.

    Empty `pulls` are filled with random ones; None stands for no gradients.
    """
    if pulls is None:
        with torch.no_grad():
            return {"reach": torch.zeros(())} | rescaled(problem, function(problem))
    leaves = {name: x.detach().requires_grad_() for name, x in problem.leaves.items()}
    outputs = rescaled(problem, function(problem._replace(leaves=leaves)))
    reach = outputs.pop("reach", torch.zeros(()))
    if not pulls:
        pulls |= {name: torch.randn_like(x) for name, x in outputs.items()}
    given = [pulls[name].to(x.dtype) for name, x in outputs.items()]
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given)
    outputs |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in outputs.items()} | {"reach": reach}


def sizes(problem: Problem, form: str, pulls: Results, exact: Results) -> Results:
    """How large the terms are that a result is the sum of, where they may cancel: elsewhere the result itself.

    k: p * (the pull on p through the memory) - p * (that through the sum), which are equal for one
    token. theta: at every token coordinate * pull; queries and keys almost cancel far out.
    """
    c, leaves = problem.case, dict(problem.double().leaves)
    theta = leaves.pop("theta", None)
    if theta is not None:
        for name in {"q", "k"} & set(leaves):
            leaves[f"theta_{name}"] = theta.expand(leaves[name].shape[1], c.heads, -1)
    problem, detach = problem._replace(leaves=leaves), "dk" in exact
    terms = evaluate(lambda p: Plain(p, detach)(form), problem, pulls)
    found = dict(exact)
    if "dk" in exact:
        found["dk"] = torch.maximum(terms["dk"].abs(), exact["dk"].abs())
    if theta is not None and "dtheta" in exact:
        squares = sum(x.square().sum(0) for n, x in terms.items() if n.startswith("dtheta_"))
        found["dtheta"] = squares.sum_to_size(theta.shape).sqrt()
    return found


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def largest(x: Tensor) -> float:
    return x.double().abs().max().item()


def judge(
    name: str, actual: Tensor, exact: Tensor, low: Tensor, terms: Tensor, case: Case, reach: float, rounded: bool
) -> None:
    """Twice the yardstick's error, in the mean and at the worst place, plus a band.

    The band: the yardstick is exact by luck in places (one token, a power of two), so one rounding
    of the terms is added, and what float32 loses in a sum of n terms: 4 sqrt(n) roundings, which a
    sum in any order keeps with probability 0.999 if roundings are independent. A State relative to
    a reference `reach` away from the maximum has exponents of that size, and as many roundings. Its
    sum is float32 whatever the inputs, but for that of the causal form (`rounded`), which is made
    of operands as the memory is.
    """
    assert actual.shape == exact.shape and actual.dtype == low.dtype, name
    assert actual.isfinite().all(), f"{name} is not finite"
    dtype = torch.float32 if name == "sum" and not rounded else case.dtype
    unit, single = (torch.finfo(d).eps / 2 for d in (dtype, torch.float32))
    band = unit + (4 * (case.length + case.rows) ** 0.5 + reach) * single
    for norm in (rms, largest):
        error, allowed = norm(actual - exact), 2 * norm(low - exact) + band * norm(terms)
        assert error <= allowed, f"{name}: {norm.__name__} {error:.2e} > {allowed:.2e}"


def compare_with_torch(
    names: Iterable[str], actual: Sequence[Tensor], low: Sequence[Tensor], exact: Sequence[Tensor], exponent: float = 0
) -> None:
    """Error against float64: at most twice torch's in the inputs' precision, and one step of the largest value
    (Triton's interpreter cuts bfloat16 where the GPU rounds). exponent: the largest number whose exponential is
    taken, which float32 rounds at its size."""
    for name, (a, b, c) in zip(names, zip(actual, low, exact, strict=True), strict=False):
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all(), name
        steps = 1 + exponent * (a.dtype == torch.float32)
        rounding = steps * torch.finfo(a.dtype).eps * largest(c)
        error, allowed = largest(a - c), largest(b - c)
        assert error <= 2 * allowed + rounding, f"{name}: {error:.2e}, torch {allowed:.2e}"


def with_gradients(function: Callable[..., Tensor], pull: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return function(*inputs), and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, pull.to(y.dtype))


def check_operator(
    names: Iterable[str], operator: Callable[..., Tensor], pull: Tensor, *inputs: Tensor, exponent: float = 0
) -> None:
    """Compare the kernels of operator(*inputs, impl=impl) with torch, by values and gradients."""

    def results(impl: str, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return with_gradients(partial(operator, impl=impl), *(x.to(dtype or x.dtype) for x in (pull, *inputs)))

    compare_with_torch(names, results("triton"), results("torch"), results("torch", torch.float64), exponent)


def single(outputs: Results) -> Results:
    """States are float32 whatever the inputs."""
    assert all(x.dtype == torch.float32 for name, x in outputs.items() if name != "out")
    return outputs


def check(case: Case, form: str, full: bool = False, grads: bool = True) -> None:
    """Outputs and all gradients of one form in the kernels.

    full: sizes at which the references see the corners only, in chunks. grads=False: sizes at which
    the yardstick's backward does not fit.
    """
    problem, whole = Problem.random(case), WHOLE.get(form, form)
    unused = {"state": "q", "read": "kv"}.get(whole, "")
    past = () if whole in ("causal", "frames", "read") else ("sum", "memory")
    leaves = {n: x for n, x in problem.leaves.items() if n not in (*unused, *past)}
    problem = problem._replace(leaves=leaves)
    pulls: Results | None = {} if grads else None
    with Poison():
        actual = evaluate(lambda p: single(ours(p, form, "triton")), problem, pulls)
    reach = actual.pop("reach").item()
    assert reach < 60, "a State's reference is too far from the maximum for float32"
    # with decay, exponents are as large as that of a chunk
    reach += 32 * torch.as_tensor(case.forget).max().item() * (form != "frames")
    if full:
        problem = problem.corners()
        actual = {name: corner(name, x, case) for name, x in actual.items()}
        pulls = pulls and {name: corner(name, x, case) for name, x in pulls.items()}
    low = evaluate(lambda p: Plain(p)(whole), problem, pulls)
    spec = "torch" if full else "reference"
    exact = evaluate(lambda p: ours(p, whole, spec), problem.double(), pulls)
    terms = exact if pulls is None else sizes(problem, whole, pulls, exact)
    assert {*actual, "reach"} == exact.keys() == low.keys()
    for name, result in actual.items():
        if name != "dtheta" or not full:  # theta's gradient is a sum over samples
            rounded = form in ("causal", "segments")
            judge(name, result, exact[name], low[name], terms[name], problem.case, reach, rounded)

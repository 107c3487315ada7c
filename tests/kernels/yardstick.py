"""The kernels' yardstick: the same formulas in low precision and in plain torch; the comparison.

A result is right if its error against float64 is at most twice that of `Plain`, in the mean and at
the worst place, plus a band: see `judge`.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ndlightnet.ops import (
    Lrpe,
    State,
    attention_step,
    causal_attention,
    global_attention,
    merge,
    read,
    summarize,
)

from .cases import Case, Problem, corner

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
        return {"out": read(q, state, lrpe=place, impl=impl)}
    if form == "state":
        return summarize(k, v, mask=mask, lrpe=place, impl=impl)._asdict()
    if form == "global":
        return {"out": global_attention(q, k, v, mask=mask, lrpe=place, impl=impl)}
    if form == "cross":
        state = summarize(k, v, mask=mask, lrpe=place, impl=impl)
        there = None if place is None else Lrpe(place.theta, c.target, c.kind)
        return {"out": read(q, state, lrpe=there, impl=impl)}
    if form == "causal":
        out, state = causal_attention(q, k, v, mask=mask, lrpe=place, state=state, impl=impl)
        return {"out": out, **state._asdict()}

    # parts of one axis: views, at other addresses and strides
    cuts = range(c.length + 1) if form == "steps" else (0, 1, c.length)
    out = []
    for i, j in pairwise(cuts):
        there = None if place is None else Lrpe(place.theta, (j - i,), c.kind, start=(i,))
        x, y, keep = k[:, i:j], v[:, i:j], None if mask is None else mask[:, i:j]
        if form == "merged":
            part = summarize(x, y, mask=keep, lrpe=there, impl=impl)
            state = part if state is None else merge(state, part)
        elif form == "segments":
            now, state = causal_attention(
                q[:, i:j], x, y, mask=keep, lrpe=there, state=state, impl=impl
            )
            out.append(now)
        else:
            if state is None:
                state = State.empty(
                    c.batch, c.heads, c.dim, c.value_dim, place is not None, device=k.device
                )
            now, state = attention_step(q[:, i], x[:, 0], y[:, 0], state, lrpe=there, impl=impl)
            out.append(now[:, None])
    outputs = {"out": torch.cat(out, 1)} if out else {}
    return outputs | state._asdict()


def weight(x: Tensor) -> Tensor:
    """exp of a difference of logits; -inf - (-inf) weighs nothing."""
    return torch.exp(torch.where(x.isnan(), -torch.inf, x))


class Rounded(torch.autograd.Function):
    """x; its gradient rounded to the digits of a dtype: it is an operand of further products."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.unit = torch.finfo(dtype).eps / 2
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        mantissa, exponent = grad.frexp()
        return torch.ldexp((mantissa / ctx.unit).round() * ctx.unit, exponent), None


class Plain:
    """LightNet attention as a straightforward implementation in the inputs' precision would do it.

    Statistics, angles and sums are float32, and every operand of a matrix product is rounded to
    the dtype of the inputs: queries, exp(k - max), scores, normalised memories, and in the backward
    (autograd through the casts) their gradients. With float64 leaves nothing is rounded: a second
    reference. `detach` leaves out the gradient through the sums: then that of k is the first of the
    two terms whose difference it is.
    """

    CHUNK = 32

    def __init__(self, problem: Problem, detach: bool = False) -> None:
        self.case, self.mask, self.state = problem.case, problem.mask, problem.state()
        self.leaves, self.detach = problem.leaves, detach
        first = next(iter(self.leaves.values()))  # q, k or v
        self.dtype, self.device = first.dtype, first.device
        self.acc = torch.float64 if self.dtype == torch.float64 else torch.float32

    def __call__(self, form: str) -> dict[str, Tensor]:
        if form == "read":
            return {"out": self.read(self.state.sum, self.state.memory)}
        if form == "causal":
            return self.causal()
        state = self.summarize()
        return state if form == "state" else {"out": self.read(state["sum"], state["memory"])}

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.acc)

    def turned(self, of: str) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at every query or key: (length, heads or 1, slots)."""
        c = self.case
        # an angle per token where `sizes` wants the terms of theta's gradient
        theta = self.leaves.get(f"theta_{of}", self.leaves.get("theta")).double()
        other = of == "q" and c.target is not None
        grid = c.target if other else c.shape
        axes = [torch.arange(n, device=theta.device, dtype=torch.float64) for n in grid]
        if c.start is not None and not other:
            axes = [a + s for a, s in zip(axes, c.start, strict=True)]
        places = torch.cartesian_prod(*axes).reshape(-1, len(grid))
        slots = torch.arange(theta.shape[-1], device=theta.device).tensor_split(len(grid))
        place = torch.cat([places[:, [a] * len(part)] for a, part in enumerate(slots)], 1)
        if not other:
            place = torch.cat([place.new_zeros(c.prefix, place.shape[1]), place])
        angle = place[:, None] * theta
        return angle.cos().to(self.acc), angle.sin().to(self.acc)

    def factors(self) -> Tensor:
        """What multiplies exp(k - max): (length, heads or 1, 1 or rows)."""
        c = self.case
        if c.kind is None:
            return torch.ones(1, 1, 1, device=self.device).expand(c.length, 1, 1)
        cos, sin = self.turned("k")
        if c.kind == "rotary":
            odd = cos[..., : c.dim % 2]
            cos = torch.cat([cos, cos, torch.ones_like(odd)], -1)
            sin = torch.cat([sin, sin, torch.zeros_like(odd)], -1)
        return torch.cat([cos, sin], -1)

    def query(self) -> Tensor:
        """What reads a memory [sum p cos v, sum p sin v] / sum p: (batch, length, heads, rows)."""
        x = self.leaves["q"].to(self.acc)
        x = x * x.sigmoid()
        if self.case.kind is None:
            return x
        cos, sin = self.turned("q")
        if self.case.kind == "cosine":
            return torch.cat([x * cos, x * sin], -1)
        half = cos.shape[-1]
        one, two, odd = x.split([half, half, self.case.dim % 2], -1)
        one, two = one * cos - two * sin, two * cos + one * sin
        return torch.cat([one, two, odd, two, -one, torch.zeros_like(odd)], -1)

    def source(self) -> tuple[Tensor, Tensor]:
        k, v = self.leaves["k"].to(self.acc), self.leaves["v"].to(self.acc)
        if self.mask is None:
            return k, v
        hidden = ~self.mask[..., None, None]
        return k.masked_fill(hidden, -torch.inf), v.masked_fill(hidden, 0)

    def wide(self, x: Tensor) -> Tensor:
        return x if self.case.kind is None else torch.cat([x, x], -1)

    def inverse(self, total: Tensor) -> Tensor:
        total = total.detach() if self.detach else total
        return torch.where(total > 0, 1 / torch.where(total > 0, total, 1), 0)

    def normal(self, total: Tensor, memory: Tensor) -> Tensor:
        return self.round(memory * self.wide(self.inverse(total))[..., None])

    def summarize(self) -> dict[str, Tensor]:
        k, v = self.source()
        top = k.amax(1).detach()
        p = weight(k - top[:, None])
        key = self.round(self.wide(p) * self.factors())
        memory = Rounded.apply(torch.einsum("blhr,blhd->bhrd", key, v), self.dtype)
        return {"max": top, "sum": p.sum(1), "memory": memory}

    def read(self, total: Tensor, memory: Tensor) -> Tensor:
        query, memory = self.round(self.query()), self.normal(total, memory)
        return torch.einsum("blhr,bhrd->blhd", query, memory).to(self.dtype)

    def causal(self) -> dict[str, Tensor]:
        c, w, (k, v) = self.case, self.factors().transpose(0, 1), self.source()
        f, k, v = (x.transpose(1, 2) for x in (self.query(), k, v))  # (batch, heads, length, ·)
        empty = State.empty(
            c.batch, c.heads, c.dim, c.value_dim, c.kind is not None, dtype=k.dtype, device=k.device
        )
        top, total, memory = self.state or empty
        out = []
        for first in range(0, c.length, self.CHUNK):
            now = slice(first, first + self.CHUNK)
            x, y, factor = k[:, :, now], v[:, :, now], w[:, None, now]
            peak = torch.maximum(top[:, :, None], x.detach().cummax(2).values)
            gap = x[:, :, None] - peak[:, :, :, None]  # (batch, heads, target, source, dim)
            later = torch.ones(gap.shape[2:4], device=k.device).triu(1) > 0
            p = weight(gap.masked_fill(later[..., None], -torch.inf))
            fall = weight(top[:, :, None] - peak)
            sums = fall * total[:, :, None] + p.sum(3)
            query = f[:, :, now] * self.wide(self.inverse(sums))
            key = self.round(self.wide(p) * factor)
            score = self.round((self.round(query)[:, :, :, None] * key).sum(-1))
            # the memory is rounded normalised, so that float16 holds it
            scale = fall * (total.detach() if self.detach else total)[:, :, None]
            past = self.round(query * self.wide(scale)) @ self.normal(total, memory)
            out.append(score @ y + past)
            top, fall, total = peak[:, :, -1], fall[:, :, -1], sums[:, :, -1]
            key = self.round(self.wide(weight(x - top[:, :, None])) * factor[:, 0])
            added = Rounded.apply(key.transpose(2, 3) @ y, self.dtype)
            memory = memory * self.wide(fall)[..., None] + added
        whole = torch.cat(out, 2).transpose(1, 2)
        return {"out": whole.to(self.dtype), "max": top, "sum": total, "memory": memory}


def rescaled(problem: Problem, outputs: Results) -> Results:
    """Sum and memory in float64 relative to the true maximum of the logits.

    A State's `max` is a reference that the kernels may choose; "reach": how far from the maximum.
    """
    if "max" not in outputs:
        return outputs
    c, k = problem.case, problem.leaves["k"].detach().double()
    if problem.mask is not None:
        k = k.masked_fill(~problem.mask[..., None, None], -torch.inf)
    tops = [k] if problem.state() is None else [k, problem.top.double()[:, None]]
    peak, top = torch.cat(tops, 1).amax(1), outputs["max"].double()
    assert torch.equal(top == -torch.inf, peak == -torch.inf)
    gap = torch.where(top == -torch.inf, 0, top - peak)
    scale = torch.cat([gap.exp()] * (c.rows // c.dim), -1)
    return {
        **{name: x for name, x in outputs.items() if name != "max"},
        "sum": outputs["sum"].double() * gap.exp(),
        "memory": outputs["memory"].double() * scale[..., None],
        "reach": gap.abs().max(),
    }


def evaluate(
    function: Callable[[Problem], Results], problem: Problem, pulls: Results | None
) -> Results:
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
    """How large the terms are that a result is the sum of, where they may cancel: elsewhere the
    result itself.

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
    return x.abs().max().item()


def judge(
    name: str, actual: Tensor, exact: Tensor, low: Tensor, terms: Tensor, case: Case, reach: float,
    rounded: bool,
) -> None:  # fmt: skip
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
    past = () if whole in ("causal", "read") else ("sum", "memory")
    leaves = {n: x for n, x in problem.leaves.items() if n not in (*unused, *past)}
    problem = problem._replace(leaves=leaves)
    pulls: Results | None = {} if grads else None
    with Poison():
        actual = evaluate(lambda p: single(ours(p, form, "triton")), problem, pulls)
    reach = actual.pop("reach").item()
    assert reach < 60, "a State's reference is too far from the maximum for float32"
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

"""The kernels' formulas as a straightforward implementation in low precision would do them."""

import torch
from torch import Tensor

from ndlightnet.ops import State

from .kernel_cases import Case, Problem


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
        fade = torch.as_tensor(problem.fade(), dtype=self.acc, device=self.device)
        self.fade = fade.reshape(-1, 1)  # (1 or heads, 1)

    def __call__(self, form: str) -> dict[str, Tensor]:
        if form == "read":
            return {"out": self.read(self.state.sum, self.state.memory)}
        if form == "causal":
            return self.causal()
        if form == "frames":
            return self.frames()
        state = self.summarize()
        return state if form == "state" else {"out": self.read(state["sum"], state["memory"])}

    def round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.acc)

    def turned(self, of: str) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at every query or key: (..., length, heads or 1, slots)."""
        c = self.case
        # an angle per token where `sizes` wants the terms of theta's gradient
        theta = self.leaves.get(f"theta_{of}", self.leaves.get("theta")).double()
        other = of == "q" and c.target is not None
        grid = c.target if other else c.shape
        axes = [torch.arange(n, device=theta.device, dtype=torch.float64) for n in grid]
        places = torch.cartesian_prod(*axes).reshape(-1, len(grid))
        if c.start is not None and not other:  # (1 or batch, length, axes)
            first = [torch.tensor(s, device=theta.device).reshape(-1, 1) for s in c.start]
            places = places + torch.stack(torch.broadcast_tensors(*first), -1)
        slots = torch.arange(theta.shape[-1], device=theta.device).tensor_split(len(grid))
        place = torch.cat([places[..., [a] * len(part)] for a, part in enumerate(slots)], -1)
        if not other:
            front = place.new_zeros(*place.shape[:-2], c.prefix, place.shape[-1])
            place = torch.cat([front, place], -2)
        angle = place[..., None, :] * theta
        return angle.cos().to(self.acc), angle.sin().to(self.acc)

    def factors(self) -> Tensor:
        """What multiplies exp(k - max): (..., length, heads or 1, 1 or rows)."""
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
        c, w, (k, v) = self.case, self.factors().transpose(-3, -2), self.source()
        f, k, v = (x.transpose(1, 2) for x in (self.query(), k, v))  # (batch, heads, length, ·)
        empty = State.empty(c.batch, c.heads, c.dim, c.value_dim, c.kind is not None, dtype=k.dtype, device=k.device)
        top, total, memory = self.state or empty
        out = []
        for first in range(0, c.length, self.CHUNK):
            now = slice(first, first + self.CHUNK)
            x, y, factor = k[:, :, now], v[:, :, now], w[..., None, now, :]
            # with decay, logits as from the chunk's first token
            age = torch.arange(x.shape[2], device=k.device, dtype=k.dtype)[:, None]
            x, top = x + self.fade[:, None] * age, top - self.fade
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
            key = self.round(self.wide(weight(x - top[:, :, None])) * factor[..., 0, :, :])
            added = Rounded.apply(key.transpose(2, 3) @ y, self.dtype)
            memory = memory * self.wide(fall)[..., None] + added
            top = top - self.fade * age[-1]
        whole = torch.cat(out, 2).transpose(1, 2)
        return {"out": whole.to(self.dtype), "max": top, "sum": total, "memory": memory}

    def frames(self) -> dict[str, Tensor]:
        """A State for each frame, joined in float32; every frame reads the join of what it sees."""
        c, (k, v) = self.case, self.source()
        cut = (c.shape[0], -1)
        k, v, f = (x.unflatten(1, cut) for x in (k, v, self.query()))
        top = k.amax(2).detach()
        p = weight(k - top[:, :, None])
        key = self.round(self.wide(p) * self.factors().unflatten(-3, cut))
        memory = Rounded.apply(torch.einsum("bflhr,bflhd->bfhrd", key, v), self.dtype)
        own = State(top, p.sum(2), memory)
        if self.state is not None:
            past = self.state if c.window else (x[:, None] for x in self.state)
            own = State(*(torch.cat(pair, 1) for pair in zip(past, own, strict=True)))
        age = ages(c, own.max)
        fall = own.max[:, None] - age[..., None, None] * self.fade  # (batch, target, source, ...)
        seen = (age >= 0) & (age < (c.window or age.max() + 1))
        fall = fall.masked_fill(~seen[..., None, None], -torch.inf)
        top = fall.amax(2)
        w = weight(fall - top[:, :, None])
        total = torch.einsum("btshr,bshr->bthr", w, own.sum)
        memory = torch.einsum("btshr,bshrd->bthrd", self.wide(w), own.memory)
        out = torch.einsum("btlhr,bthrd->btlhd", self.round(f), self.normal(total, memory))
        out = {"out": out.flatten(1, 2).to(self.dtype)}
        if c.window == 1:
            return out
        if c.window is None:
            return out | {"max": top[:, -1], "sum": total[:, -1], "memory": memory[:, -1]}
        faded = own.max - age[-1, :, None, None] * self.fade
        fills = zip((faded, own.sum, own.memory), (-torch.inf, 0, 0), strict=True)
        return out | State(*(kept(c, x, fill) for x, fill in fills))._asdict()


def ages(case: Case, sources: Tensor) -> Tensor:
    """(frames, sources) by how many frames sources (batch, sources, ...) lie back."""
    n, every = case.shape[0], torch.arange(sources.shape[1], device=sources.device)
    return every[-n:, None] - every


def kept(case: Case, x: Tensor, fill: float) -> Tensor:
    """The last `window - 1` of (batch, sources, ...), empty ones in front if there are fewer."""
    front = x.new_full((x.shape[0], case.window - 1, *x.shape[2:]), fill)
    return torch.cat([front, x], 1)[:, 1 - case.window :]

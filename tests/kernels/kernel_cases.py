"""The kernel tests' table of cases, and the tensors of one."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ndlightnet.ops import Position, State

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case(NamedTuple):
    """One row of the table."""

    shape: tuple[int, ...]  # the grid of the source, behind `prefix` tokens
    dim: int = 16
    value_dim: int = 16
    kind: str | None = None
    mask: str | None = None
    dtype: torch.dtype = torch.float32
    logits: str = "normal"
    prefix: int = 0
    start: tuple[int | tuple[int, ...], ...] | None = None  # a tuple: of every sample
    shared: bool = False  # one row of angles for all heads
    past: bool = False  # a first State (causal forms)
    target: tuple[int, ...] | None = None  # the grid of the queries, if another
    batch: int = 2
    heads: int = 2
    window: int | None = None  # axis-causal form
    forget: float | tuple[float, ...] = 0.0  # causal forms; a tuple: of every head

    @property
    def length(self) -> int:
        return self.prefix + torch.Size(self.shape).numel()

    @property
    def rows(self) -> int:
        return self.dim * (1 if self.kind is None else 2)

    def __str__(self) -> str:
        default = self._field_defaults
        told = [(n, x) for n, x in self._asdict().items() if n in default and x != default[n]]
        words = [f"{name}={value}".replace("torch.", "") for name, value in told]
        return ",".join(["x".join(map(str, self.shape)), *words]).replace(" ", "")


HALF, BRAIN = torch.float16, torch.bfloat16
DTYPES = [torch.float32, BRAIN, HALF]

# Every row crosses several hardships. Few rows with few heads and channels: the interpreter takes
# 20 ms or more per program, and a GPU compiles every new pair of dims.
CASES = [
    Case((1,), heads=1),
    Case((1,), 5, 3, "cosine", dtype=BRAIN, past=True, heads=1),
    Case((7,), 5, 3, batch=1, heads=1),
    Case((65,), 24, 40, mask="right", past=True, heads=1),
    Case((70,), 5, 3, mask="left", dtype=BRAIN, past=True),
    Case((65,), 9, 7, dtype=HALF, mask="holes", heads=1),
    Case((4, 6), 5, 3, "cosine", past=True),
    Case((9, 8), 5, 3, "cosine", "holes", BRAIN, start=(5, 1000), heads=1),
    Case((3, 1, 5), 6, 4, "rotary", prefix=2, start=(4, 0, 100_000), heads=1),
    Case((3, 11), 6, 4, "rotary", "left", HALF, shared=True, batch=1),
    Case((2, 3, 2, 2), 6, 4, "cosine", "right", prefix=3, shared=True, past=True, batch=1),
    Case((2, 1, 3, 2, 2), 10, 4, "rotary", mask="all", heads=1),
    # several programs share the length, and the first ones see padding only
    Case((260,), 5, 3, mask="late", logits="wide", heads=1),
]


def in_order(case: Case) -> Case:
    """For the causal form: cosine; one sample, but for one row, because that form takes the
    interpreter several times as long."""
    batch = 2 if case.shape == (4, 6) else 1
    return case._replace(kind=case.kind and "cosine", batch=batch)


LOGITS = ["wide", "offset", "up", "down", "climb", "leap", "constant", "jumps", "holes"]

# The sizes of use, on a GPU: a batch of volumes, and every head dim in some dtype
FULL = [
    Case((16, 32, 32), 64, 64, "cosine", None, BRAIN, batch=4, heads=12),
    Case((128, 128), 64, 64, None, "right", HALF, batch=4, heads=12),
    Case((16384,), 64, 64, "cosine", "left", batch=4, heads=12),
    Case((4099,), 16, 16, dtype=HALF, heads=3),
    Case((4099,), 24, 24, "cosine", dtype=BRAIN, heads=3),
    Case((4099,), 32, 32, dtype=BRAIN, heads=3),
    Case((4099,), 48, 48, dtype=HALF, heads=3),
    Case((4099,), 96, 96, "cosine", dtype=BRAIN, heads=3),
    Case((4099,), 128, 128, "cosine", dtype=BRAIN, heads=3),
    Case((4099,), 192, 192, dtype=HALF, heads=3),
    Case((4099,), 256, 256, "cosine", dtype=BRAIN, heads=3),
    Case((4099,), 256, 256, heads=3),
]


def on_gpu(*cases: Case) -> list:
    """Rows that the CPU leaves out."""
    return [pytest.param(case, marks=pytest.mark.gpu, id=str(case)) for case in cases]


def logits(name: str, shape: tuple[int, ...]) -> Tensor:
    """Keys (batch, length, heads, dim): where exp overflows, underflows, or has a wrong anchor."""
    noise = torch.randn(shape)
    t = torch.arange(shape[1])[:, None, None]
    if name == "normal":
        return 2 * noise
    if name == "wide":
        return 300 * noise
    if name == "offset":  # exp2(k * log2(e) - ...) without a difference first is off by 4e-4
        return noise + 5000
    if name == "up":  # every token wipes out all before it
        return noise + 100 * t
    if name == "down":  # only the first token is ever seen
        return noise - 100 * t
    if name == "climb":  # within the range of float32, and hardly
        return noise + 50 * (t >= 0.9 * shape[1])
    if name == "leap":  # beyond it, long after the first tokens
        return noise + 200 * (t >= 0.9 * shape[1])
    if name == "constant":
        return torch.full_like(noise, 7)
    if name == "jumps":  # within a tile of any size, another height in every other channel
        at = torch.tensor([5, 19, 27, 41])
        height = torch.tensor([0, 1000, -1000, 2000, -300])
        channel = 1 - 0.5 * (torch.arange(shape[-1]) % 3)
        return noise + height[(t >= at).sum(-1)][..., None] * channel
    if name == "holes":  # -inf without a mask: some, all of a channel, all of the first tokens
        k = noise.masked_fill(torch.rand(shape) < 0.2, -torch.inf)
        k[..., 1] = -torch.inf
        k[:, : shape[1] // 4] = -torch.inf
        return k
    raise ValueError(name)


def mask_of(name: str | None, batch: int, length: int) -> Tensor | None:
    """Padding of the first sample; the others are complete."""
    if name is None:
        return None
    t = torch.arange(length)
    keep = {
        "left": t >= length // 3,
        "right": t < length - length // 3,
        "holes": torch.rand(length) < 0.6,
        "late": t >= length - 5,
        "all": t < 0,
    }[name]
    return torch.cat([keep[None], torch.ones(batch - 1, length) > 0])


class Problem(NamedTuple):
    """A case and its tensors. `leaves`: what has gradients; `top`: the first State's maximum."""

    case: Case
    leaves: dict[str, Tensor]
    mask: Tensor | None
    top: Tensor | None

    @staticmethod
    def random(case: Case) -> "Problem":
        """Tensors of a case, from the test's seed."""
        target = case.length if case.target is None else torch.Size(case.target).numel()
        lead, heads = (case.batch, case.length, case.heads), 1 if case.shared else case.heads
        with DEVICE:
            q = torch.randn(case.batch, target, case.heads, case.dim)
            k = logits(case.logits, (*lead, case.dim))
            v = torch.randn(*lead, case.value_dim)
            leaves = {"q": q.to(case.dtype), "k": k.to(case.dtype), "v": v.to(case.dtype)}
            if case.kind is not None:
                slots = case.dim // 2 if case.kind == "rotary" else case.dim
                leaves["theta"] = 3 * torch.rand(heads, slots)
            top = None
            if case.past:
                some = () if case.window is None else (case.window - 1,)  # of so many frames
                noise = torch.randn(case.batch, *some, case.heads, case.dim)
                first = leaves["k"][:, 0].float()
                top = noise + (first if case.window is None else first[:, None])
                leaves["sum"] = noise.square() + 1
                leaves["memory"] = torch.randn(*noise.shape[:-1], case.rows, case.value_dim)
                # one channel has seen nothing
                top[..., 0], leaves["sum"][..., 0] = -torch.inf, 0
                leaves["memory"][..., :: case.dim, :] = 0
            return Problem(case, leaves, mask_of(case.mask, *lead[:2]), top)

    def double(self) -> "Problem":
        leaves = {name: x.double() for name, x in self.leaves.items()}
        return self._replace(leaves=leaves, top=None if self.top is None else self.top.double())

    def place(self) -> Position | None:
        c = self.case
        if c.kind is None:
            return None
        start = c.start and tuple(  # the second one as a tensor
            torch.tensor(s, device=DEVICE) if i == 1 or isinstance(s, tuple) else s for i, s in enumerate(c.start)
        )
        return Position(self.leaves["theta"], c.shape, c.kind, c.prefix, start)

    def fade(self) -> float | Tensor:
        """What the axis-causal form forgets."""
        forget = self.case.forget
        if isinstance(forget, float):
            return forget
        kind = torch.promote_types(next(iter(self.leaves.values())).dtype, torch.float32)
        return torch.tensor(forget, dtype=kind, device=DEVICE)

    def state(self) -> State | None:
        if "memory" not in self.leaves:
            return None
        return State(self.top, self.leaves["sum"], self.leaves["memory"])

    def corners(self) -> "Problem":
        """First and last sample and head, which depend on no other (but for theta's gradient)."""
        c = self.case
        leaves = {name: corner(name, x, c) for name, x in self.leaves.items()}
        b, h = (slice(None, None, max(n - 1, 1)) for n in (c.batch, c.heads))
        mask = None if self.mask is None else self.mask[b]
        top = None if self.top is None else corner("max", self.top, c)
        start = c.start and tuple(s[b] if isinstance(s, tuple) else s for s in c.start)
        few = c._replace(
            batch=min(c.batch, 2),
            heads=min(c.heads, 2),
            start=start,
            forget=c.forget[h] if isinstance(c.forget, tuple) else c.forget,
        )
        return Problem(few, leaves, mask, top)


def corner(name: str, x: Tensor, case: Case) -> Tensor:
    """What `Problem.corners` keeps of an input, an output or a gradient."""
    b, h = (slice(None, None, max(n - 1, 1)) for n in (case.batch, case.heads))
    name = name.removeprefix("d")
    if name == "theta":
        return x[:1] if case.shared else x[h]
    apart = name in ("q", "k", "v", "out") or case.window is not None  # heads come third
    return x[b, :, h] if apart else x[b, h]

"""Launch plans of the attention kernels by head_dim, kind and dtype; never tuned at run time."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ndlightnet_kernels.launch import lowered
from ndlightnet_kernels.tiles import cdiv, hint, pad, processors


class Plan(NamedTuple):
    """Launch plan: tokens and key channels of a tile, depth of the load pipeline, warps, programs
    per multiprocessor, and the most registers of a thread (0: the compiler's choice)."""

    block: int
    keys: int
    stages: int
    warps: int
    programs: int
    registers: int = 0

    def options(self) -> dict[str, int]:
        """Return the kernel's constants BL and STAGES, and the options of its launch."""
        most = {"maxnreg": self.registers} if self.registers else {}
        return {"BL": self.block, "STAGES": self.stages, "num_warps": self.warps, **most}

    def rows(self, x: Tensor, columns: int) -> int:
        """Return how many tokens of a tile of `columns` channels of x the program's threads load at once."""
        return min(self.block, self.warps * 32 * (16 // x.element_size()) // columns)


# Plans for heads of up to 64 and up to 128 channels. Measured on one H200 (bf16; 4 x 16384 tokens
# of 12 x 64, 115200 tokens of 24 x 128). With rotary a key column is a pair of channels.
PLANS = {
    ("summarize", "none"): (Plan(64, 64, 3, 4, 3, 168), Plan(64, 64, 3, 8, 2)),
    ("summarize", "cosine"): (Plan(64, 64, 3, 4, 3, 168), Plan(64, 128, 3, 8, 1)),
    ("summarize", "rotary"): (Plan(64, 32, 3, 4, 3, 168), Plan(64, 32, 3, 4, 2)),
    ("read", "none"): (Plan(64, 64, 3, 4, 8, 128), Plan(64, 64, 3, 4, 4, 128)),
    ("read", "cosine"): (Plan(64, 64, 3, 4, 4, 128), Plan(64, 128, 2, 8, 2, 128)),
    ("read", "rotary"): (Plan(64, 64, 3, 4, 4, 128), Plan(64, 128, 3, 4, 2)),
    ("read_backward", "none"): (Plan(64, 32, 3, 4, 4, 128), Plan(64, 64, 2, 8, 2, 128)),
    ("read_backward", "cosine"): (Plan(64, 32, 3, 4, 3, 168), Plan(64, 32, 3, 4, 2)),
    ("read_backward", "cosine learnt"): (Plan(64, 16, 3, 4, 4, 128), Plan(64, 32, 3, 8, 2, 128)),
    ("read_backward", "rotary"): (Plan(64, 32, 3, 4, 3, 168), Plan(64, 16, 3, 4, 3, 168)),
    ("read_backward", "rotary learnt"): (Plan(64, 32, 3, 4, 2), Plan(64, 16, 3, 4, 3, 168)),
    ("summarize_backward", "none"): (Plan(64, 64, 2, 4, 8, 128), Plan(64, 128, 2, 8, 1)),
    ("summarize_backward", "cosine"): (Plan(64, 64, 3, 4, 2), Plan(64, 128, 2, 8, 1)),
    ("summarize_backward", "cosine learnt"): (Plan(64, 64, 2, 4, 4), Plan(64, 128, 1, 8, 1)),
    ("summarize_backward", "rotary"): (Plan(64, 32, 3, 4, 4), Plan(64, 64, 3, 8, 1)),
    ("summarize_backward", "rotary learnt"): (Plan(64, 32, 2, 4, 4), Plan(64, 64, 3, 8, 1)),
}
# Plans for heads of up to 32 channels, where another one is faster than that for 64. Measured on one H200 (bf16; 32,768
# tokens of 12 x 32).
NARROW = {
    ("read_backward", "cosine learnt"): Plan(64, 32, 3, 4, 2),
    ("summarize_backward", "cosine learnt"): Plan(128, 32, 3, 4, 2),
}


def plan(kernel: str, keys: int, values: int, kind: str, size: int = 2, learn: bool = False) -> Plan:
    """Return the launch plan for a memory tile of `keys` x `values` channels, with operands of
    `size` bytes; the plan's `keys` may be fewer. learn: with the gradient of theta."""
    pair = 2 if kind == "rotary" else 1
    most = max(keys, pair * values) if kernel == "read" else max(pair * keys, values)
    if size == 2 and most <= 128:
        learnt = (kernel, f"{kind} learnt")
        key = learnt if learn and learnt in PLANS else (kernel, kind)
        chosen = NARROW[key] if most <= 32 and key in NARROW else PLANS[key][most > 64]
        return chosen._replace(keys=min(keys, chosen.keys))
    # not measured: as many columns as fit, as sums in registers or as operands in shared memory
    interleaved = 1 if kind == "none" else 4 if kind == "rotary" and "summarize" in kernel else 2
    room = 16384 if kernel in ("summarize", "read_backward") else 65536 // size
    if size > 2 and kernel in ("read", "read_backward"):
        room = 8192
    if size > 2 and kernel == "summarize_backward" and interleaved * keys * values > 8192:
        room = 4096
    keys = max(16, min(keys, room // (interleaved * values)))
    return Plan(32 if size > 2 else 64, keys, 1, 8, 4)


def operand_bytes(x: Tensor) -> int:
    """Return the bytes of an element of a product's operand."""
    return 2 if x.dtype == torch.bfloat16 else 4


# -------------------------------------------------------------------------------------- causal
class Chunks(NamedTuple):
    """Launch plan of a causal kernel: tokens of a chunk, warps, and load stages."""

    chunk: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class Causal(NamedTuple):
    """Launch plans of the three kernels of the causal form (dq and dkv with the same chunk), and
    how many programs run on a multiprocessor at once."""

    forward: Chunks
    dq: Chunks
    dkv: Chunks
    programs: int


# Plans by channels of a tile, for bfloat16. Measured on one H200, 4 x 16384 tokens of 12 x 64,
# 6 x 128, 16 x 32, 16 x 16 (with angles: 64 only).
CAUSAL = {
    16: Causal(Chunks(32, 1, 3), Chunks(32, 1, 3), Chunks(32, 1, 3), 8),
    32: Causal(Chunks(32, 2, 3), Chunks(32, 2, 3), Chunks(32, 2, 3), 4),
    64: Causal(Chunks(64, 4, 3), Chunks(32, 4, 3), Chunks(32, 4, 3), 2),
    128: Causal(Chunks(32, 8, 3), Chunks(16, 8, 3), Chunks(16, 8, 3), 1),
}
WITH_ANGLES = {  # plans with angles
    16: Causal(Chunks(32, 2, 3), Chunks(32, 2, 3), Chunks(32, 2, 3), 4),
    32: Causal(Chunks(32, 2, 3), Chunks(32, 2, 3), Chunks(32, 2, 3), 4),
    64: Causal(Chunks(32, 4, 3), Chunks(16, 4, 3), Chunks(16, 4, 3), 2),
    128: CAUSAL[128],
}
FULL = Chunks(32, 8, 1)  # operands of 4 bytes fill the chip with smaller chunks
# The careful form runs rarely, and is larger. Triton would multiply 64 rows by warp groups, and the
# kernel hangs where those are in a `while` (Triton 3.6, not understood).
CAREFUL = Chunks(32, 8, 1)


def causal(k: Tensor, vdim: int, kind: str) -> Causal:
    """Return the plans of the causal form for keys (batch, length, heads, dim)."""
    side = max(pad(k.shape[-1]), pad(vdim))
    if k.dtype != torch.bfloat16 or side > 128:
        return Causal(FULL, FULL, FULL, 2 if side <= 64 else 1)
    return (CAUSAL if kind == "none" else WITH_ANGLES)[side]


class Window(NamedTuple):
    """Launch plans of the three kernels of a window over tokens; all have the same chunk."""

    forward: Chunks
    dq: Chunks
    dkv: Chunks


def windowed(k: Tensor, vdim: int, kind: str) -> Window:
    """Return the plans of a window over keys (batch, length, heads, dim). Not measured: large
    chunks, which take fewer exponentials, where their sums fit into registers."""
    if k.dtype != torch.bfloat16 or max(pad(k.shape[-1]), pad(vdim)) > 64:
        return Window(FULL, FULL, FULL)
    warps = 4 if kind == "none" else 8
    return Window(Chunks(64, 4, 2), Chunks(64, warps, 2), Chunks(64, 8, 2))


def channel_blocks(k: Tensor, vdim: int) -> list[slice]:
    """Split the key channels into blocks that a causal program holds on chip beside the values."""
    most = 128 if k.dtype == torch.bfloat16 else 64
    most = min(most, most * 128 // max(64, vdim))
    return [slice(a, min(a + most, k.shape[-1])) for a in range(0, k.shape[-1], most)]


def split_count(programs: int, at_once: int, tiles: int) -> int:
    """Return into how many splits to cut each of `programs` pieces of `tiles` tiles: the fewest that
    keep six tenths of the card at work, which is enough to keep its memory busy."""

    def share(n: int) -> float:
        return programs * n / (max(1, cdiv(programs * n, at_once)) * at_once)

    options = range(1, max(1, min(8, tiles // 4)) + 1)
    return next((n for n in options if share(n) >= 0.6), max(options, key=share))


MOST_SEGMENTS, BLOCK = 127, 64
START = 200


def _programs(k: Tensor, vdim: int, kind: str) -> tuple[int, int]:
    """Return the rows (batch x heads) of keys (batch, length, heads, dim), and the programs that run at once."""
    return k.shape[0] * k.shape[2], processors(k) * causal(k, vdim, kind).programs


def fills(k: Tensor, vdim: int, kind: str) -> bool:
    """Return whether the rows alone keep the card at work. It does not depend on the length."""
    rows, at_once = _programs(k, vdim, kind)
    return 10 * hint(rows) >= 9 * at_once


def plan_segments(k: Tensor, vdim: int, kind: str) -> tuple[int, int]:
    """Return into how many segments to cut the length of keys (batch, length, heads, dim), and
    their length, a multiple of every chunk. Symbolic shapes get no guard on the length."""
    length, segments = k.shape[1], 1
    rows, at_once = _programs(k, vdim, kind)
    if lowered():
        rows = hint(rows)
    for waves in range(1, 5):  # the fewest that keep nine tenths of the card at work
        segments = max(1, waves * at_once // rows)
        if 10 * segments * rows >= 9 * waves * at_once:
            break
    segments = min(segments, cdiv(length, 4 * BLOCK), MOST_SEGMENTS)
    span = cdiv(cdiv(length, segments), BLOCK) * BLOCK
    return cdiv(length, span), span


# --------------------------------------------------------------------------------------- packs
def tokens_per_split(lengths: Sequence[int], k: Tensor, vdim: int, kind: str) -> int:
    """Return the most tokens of a split for a pack of samples of these `lengths` (keys (1, length,
    heads, dim)): the number with which the splits of all heads, longest first, end soonest. The
    start of a split costs as much as START tokens."""
    chosen = plan("summarize", pad(k.shape[-1]), pad(vdim), kind, operand_bytes(k))
    slots = max(1, chosen.programs * processors(k) // k.shape[2])
    spans = sorted(least << i for least in (2 * BLOCK, 3 * BLOCK) for i in range(1, 13))
    longest = max(lengths, default=0)
    spans = spans[: bisect_left(spans, longest) + 1]  # longer ones cut nothing

    def estimate(span: int) -> float:
        splits = sum(cdiv(n, span) for n in lengths)
        work = (sum(lengths) + START * splits) / slots
        # the last splits end at different times
        return max(work, min(span, longest) + START) + span / 4

    def schedule(span: int) -> int:
        ends = [0] * slots
        for _, _, begin, end, _ in split_table(lengths, span)[0]:
            heapq.heapreplace(ends, ends[0] + end - begin + START)
        return max(ends)

    estimates = {span: estimate(span) for span in spans}
    near = 1.1 * min(estimates.values())  # few, as a schedule takes the host a while
    return min((span for span in spans if estimates[span] <= near), key=schedule)


def split_table(lengths: Sequence[int], span: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the splits of samples that lie end to end, longest first, and the index of each
    sample's first split: `splits` and `first` of Position."""
    splits: list[tuple[int, ...]] = []
    first, begin = [0], 0
    for row, n in enumerate(lengths):
        count = cdiv(n, span)
        step = cdiv(cdiv(n, max(1, count)), BLOCK) * BLOCK
        for at in range(0, n, max(1, step)):
            splits.append((row, len(splits), begin + at, begin + min(at + step, n), begin))
        first.append(len(splits))
        begin += n
    return sorted(splits, key=lambda split: split[2] - split[3]), first

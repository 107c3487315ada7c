"""Sliding merge of the axis-causal form: the State of a window of frames, and its adjoint."""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, pad, scratch, weight

AT_ONCE = tl.constexpr(8)  # States whose loads are in flight at the same time


@triton.jit
def _tiles(states, at, exists, c, tile, stored, DIM, SIZE, BACK):
    """Load reference, sum and memory rows of State `at`; of an empty State if not `exists`. BACK: of
    the State's gradient, whose reference is the negative one."""
    top, total, memory = states
    ref = tl.load(top + at * DIM + c, mask=exists, other=float("-inf"))
    if BACK:
        ref = tl.where(ref > float("-inf"), -ref, ref)
    sm = tl.load(total + at * DIM + c, mask=exists, other=0.0)
    m = tl.load(memory + at[:, None] * SIZE + tile, mask=stored & exists[:, None], other=0.0)
    return ref, sm, m


@triton.jit
def _join(best, sm, m, state):
    ref, sums, tile = state
    high = tl.maximum(best, ref)
    fall, w = weight(best, high), weight(ref, high)
    return high, fall * sm + w * sums, fall[:, None] * m + w[:, None] * tile


@triton.jit(do_not_specialize=["frames", "window", "heads"])
def _sliding_merge(
    top,
    total,
    memory,
    top_in,
    top_out,
    total_out,
    memory_out,
    top_past,
    total_past,
    memory_past,
    frames,
    window,
    heads,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BV: tl.constexpr,
    HALVES: tl.constexpr,
    BC: tl.constexpr,
    BACK: tl.constexpr,
):
    """Merge the last `window` States (batch, frames, heads, ...) up to each frame: one program for BC rows of a block
    of `window` frames. A window is the end of the block before, from some frame on, and the beginning of this block.

    BACK: the adjoint, from the last frame to the first. It merges gradients of merged States
    (`top`: their maxima) to gradients of the States before the merge (`top_in`: their maxima).
    """
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    ROWS: tl.constexpr = HALVES * DIM
    SIZE: tl.constexpr = ROWS * VDIM
    row = tl.program_id(1) * BC + tl.arange(0, BC)
    inside, lead, c = row < ROWS, row < DIM, row % DIM
    tile, stored = row[:, None] * VDIM + vc[None, :], inside[:, None] & (vc < VDIM)[None, :]
    zero, begin = tl.zeros((BC,), tl.int64), tl.program_id(2) * window
    first = bh // heads * frames
    best = tl.full((BC,), float("-inf"), tl.float32)
    sm, m = tl.zeros((BC,), tl.float32), tl.zeros((BC, BV), tl.float32)
    before = min(begin, window - 1)
    states, pasts = (top, total, memory), (top_past, total_past, memory_past)
    for back in range(0, before, AT_ONCE):
        tiles = ()
        for i in tl.static_range(AT_ONCE):
            s = zero + begin - 1 - back - i
            f = frames - 1 - s if BACK else s
            exists = inside & (zero + back + i < before)
            at = (first + f) * heads + bh % heads
            tiles += (_tiles(states, at, exists, c, tile, stored, DIM, SIZE, BACK),)
        for i in tl.static_range(AT_ONCE):
            best, sm, m = _join(best, sm, m, tiles[i])
            s, exists = zero + begin - 1 - back - i, zero + back + i < before
            at = (first + s) * heads + bh % heads
            tl.store(top_past + at * ROWS + row, best, inside & exists)
            tl.store(total_past + at * ROWS + row, sm, inside & exists)
            tl.store(memory_past + at[:, None] * SIZE + tile, m, stored & exists[:, None])
    tl.debug_barrier()  # other threads of the program read what is in `past`
    best = tl.full((BC,), float("-inf"), tl.float32)
    sm, m = tl.zeros((BC,), tl.float32), tl.zeros((BC, BV), tl.float32)
    end = min(begin + window, frames)
    for now in range(begin, end, AT_ONCE):
        tiles, ends = (), ()
        for i in tl.static_range(AT_ONCE):
            s = zero + now + i
            f, exists = frames - 1 - s if BACK else s, inside & (s < end)
            at = (first + f) * heads + bh % heads
            tiles += (_tiles(states, at, exists, c, tile, stored, DIM, SIZE, BACK),)
            past = s - window + 1
            exists = inside & (past >= 0) & (past < begin)
            at = (first + past) * heads + bh % heads
            ends += (_tiles(pasts, at, exists, row, tile, stored, ROWS, SIZE, False),)
        for i in tl.static_range(AT_ONCE):
            best, sm, m = _join(best, sm, m, tiles[i])
            high, sums, rows = _join(best, sm, m, ends[i])
            s = zero + now + i
            f, exists = frames - 1 - s if BACK else s, s < end
            at = (first + f) * heads + bh % heads
            if BACK:
                fall = weight(tl.load(top_in + at * DIM + c, mask=inside & exists, other=float("-inf")), -high)
                sums, rows = fall * sums, fall[:, None] * rows
            else:
                tl.store(top_out + at * DIM + c, high, lead & exists)
            tl.store(total_out + at * DIM + c, sums, lead & exists)
            tl.store(memory_out + at[:, None] * SIZE + tile, rows, stored & exists[:, None])


def _plan(top: Tensor, memory: Tensor, window: int, back: bool) -> Launch:
    (batch, frames, heads, dim), (rows, vdim) = top.shape, memory.shape[-2:]
    some, numbers = max(1, 256 // pad(vdim)), {"frames": frames, "window": window, "heads": heads}
    tile = {"DIM": dim, "VDIM": vdim, "BV": pad(vdim), "HALVES": rows // dim, "BC": some, "BACK": back}
    grid = (batch * heads, cdiv(rows, some), cdiv(frames, window))
    return Launch(_sliding_merge, grid, **numbers, **tile, num_warps=2)


def _run(top: Tensor, total: Tensor, memory: Tensor, top_in: Tensor | None, window: int) -> list[Tensor]:
    (batch, frames, heads, _), (rows, vdim), back = top.shape, memory.shape[-2:], top_in is not None
    launch = remembered(
        ("sliding_merge", top.device, top.dtype, top.shape, memory.shape, window, back),
        lambda: _plan(top, memory, window, back),
    )
    states = [x.contiguous() for x in (top, total, memory)]
    out = [torch.empty_like(x) for x in states]
    # maxima and sums for each row, so that no program reads what another one writes
    sizes = ((rows,), (rows,), (rows, vdim)) if window < frames else ((0,),) * 3
    past = [scratch(top, batch, frames, heads, *size) for size in sizes]
    launch(*states, top_in, *out, *past)
    return out


def sliding_merge(top: Tensor, total: Tensor, memory: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the States of the last `window` frames up to each frame: top, total (batch, frames,
    heads, dim), memory (batch, frames, heads, dim or 2 dim, value_dim), float32."""
    out = _run(top, total, memory, None, window)
    return out[0], out[1], out[2]


def sliding_merge_backward(
    top: Tensor, after: Tensor, dtotal: Tensor, dmemory: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of total and memory. top, after: maxima before and after the merge."""
    out = _run(after, dtotal, dmemory, top.contiguous(), window)
    return out[1], out[2]

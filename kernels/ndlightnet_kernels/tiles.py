"""What the attention kernels share: token tiles, operands of products, features, launch sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels import phases
from ndlightnet_kernels.position import KINDS, Position


@triton.jit
def address(ptr, b, h, t, col, sb, st, sh, UNIT: tl.constexpr):
    """Pointers to rows t and columns col of one head; strides in units of UNIT elements."""
    base = ptr + (b.to(tl.int64) * sb + h.to(tl.int64) * sh) * UNIT
    return base + (t.to(tl.int64) * (st * UNIT))[:, None] + col[None, :]


@triton.jit
def dense(b, h, t, col, length, heads, DIM: tl.constexpr):
    """Where rows t and columns col of a head are in a dense (batch, length, heads, DIM) tensor."""
    base = (b.to(tl.int64) * length * heads + h) * DIM
    return (base + t.to(tl.int64) * (heads * DIM))[:, None] + col[None, :]


@triton.jit
def split_at(splits, part):
    """A part of a pack: sample, place among all parts in order of samples, first token and the one
    after the last, and the sample's first token."""
    at = splits + part * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def part_at(splits, part, b, bh, h, heads, span, length, prefix):
    """Sample of a part, its place among all parts, first token and the one after the last, tokens
    in front of the sample's grid, and its State."""
    if splits is None:
        return b, part, part * span, min(part * span + span, length), prefix, bh
    else:
        row, slot, begin, end, base = split_at(splits, part)
        return row, slot, begin, end, base, row * heads + h


@triton.jit
def valid_tokens(mask, b, t, end, length, MASKED: tl.constexpr):
    """Which tokens are before `end` and not padding."""
    valid = t < end
    if MASKED:
        valid = valid & (tl.load(mask + b * length + t, mask=valid, other=0) != 0)
    return valid


@triton.jit
def load(ptr, b, h, t, c, valid, sb, st, sh, DIM: tl.constexpr, UNIT: tl.constexpr):
    """A tile, 0 where there is nothing to see."""
    here = valid[:, None] & (c < DIM)[None, :]
    return tl.load(address(ptr, b, h, t, c, sb, st, sh, UNIT), mask=here, other=0.0)


@triton.jit
def load_keys(k, b, h, t, kc, end, skb, skt, skh, DIM: tl.constexpr, UNIT: tl.constexpr):
    """Logits, float32, finite where the sample's are: from `end` on those of token `end` - 1. In a
    pack the next sample begins there, whose logits may be larger than what this one can take.
    (Anything but 0 instead of what is not loaded costs three instructions an element.)"""
    at = address(k, b, h, tl.minimum(t, end - 1), kc, skb, skt, skh, UNIT)
    return tl.load(at, mask=(kc < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def hide(x, valid):
    """Logits without those of padding and of tokens beyond the end."""
    return tl.where(valid[:, None], x, float("-inf"))


@triton.jit
def _nearest(x, PRECISION: tl.constexpr):
    """float32 to the nearest that a product keeps: with "tf32" tensor cores would cut the last 13
    bits, "ieee" stands for bfloat16 in the interpreter, which cannot multiply it."""
    if x.dtype == tl.float32 and (PRECISION == "tf32" or PRECISION == "ieee"):
        bits = x.to(tl.int32, bitcast=True)
        if PRECISION == "tf32":
            near = (bits + 0x1000) & -0x2000
        else:
            near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, near.to(tl.float32, bitcast=True), x)
    else:
        return x


@triton.jit
def dot(a, b, acc, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b with float32 sums; both sides rounded to the operand type first."""
    a, b = _nearest(a.to(OPERAND), PRECISION), _nearest(b.to(OPERAND), PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def interleave(a, b, SLOTS: tl.constexpr):
    """Columns a0 b0 a1 b1 ... One product of a interleaved tile costs less than two products."""
    out = tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))
    # the sum keeps Triton 3.6 from reshaping in shared memory, where it crashes for float32, and
    # for tiles that are loaded element by element
    return out + 0.0 if out.dtype == tl.float32 or SLOTS % 2 == 1 else out


@triton.constexpr_function
def even(slots, vdim):
    """`slots` for `interleave`, odd where either is: tiles of odd widths are loaded element by
    element."""
    return slots if vdim % 2 == 0 else 1


@triton.jit
def deinterleave(x):
    """Inverse of `interleave`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def weight(x, top):
    """exp(x - top); 0 where x is -inf. By exp2 and a product: tl.exp spends three instructions more
    on results below 1e-38."""
    return tl.exp2((x - tl.where(top == float("-inf"), 0.0, top)) * 1.4426950408889634)


@triton.jit
def _shift(top):
    return tl.where(top == float("-inf"), 0.0, top) * 1.4426950408889634


@triton.jit
def powers(x, top, OPERAND: tl.constexpr):
    """exp(x - top) of a tile, columns of `top`. For operands of 16 bits with one instruction an
    element less, and off by a factor that a column has in common: see `slip`. (Not every Triton
    contracts product and difference by itself.)"""
    if tl.float32 == OPERAND:
        return weight(x, top[None, :])
    else:
        return tl.exp2(tl.fma(x, 1.4426950408889634, -_shift(top)[None, :]))


@triton.jit
def slip(top, OPERAND: tl.constexpr):
    """The factor from `powers` to exp(x - top): 1 within 1e-7 of `top`, whose product with log2(e)
    was rounded."""
    if tl.float32 == OPERAND:
        return tl.full(top.shape, 1.0, tl.float32)
    else:
        shift = _shift(top)
        off = tl.fma(top, 1.4426950408889634, -shift)
        return tl.exp2(tl.where(top == float("-inf"), 0.0, -off))


@triton.jit
def silu(x):
    """SiLU and its derivative. The square of rsqrt is half the instructions of a division."""
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    s = r * r
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def rope_features(x1, x2, cos, sin, KIND: tl.constexpr):
    """Query features (fa, fb): x itself (0), x cos and x sin (1), the pair rotated (2)."""
    if KIND == 2:
        return x1 * cos - x2 * sin, x1 * sin + x2 * cos
    elif KIND == 1:
        return x1 * cos, x1 * sin
    else:
        return x1, x1


@triton.jit
def rope_features_backward(da, db, cos, sin, KIND: tl.constexpr):
    """Adjoint of `rope_features`."""
    if KIND == 2:
        return da * cos + db * sin, db * cos - da * sin
    elif KIND == 1:
        d = da * cos + db * sin
        return d, d
    else:
        return da, da


@triton.jit
def rows_added(x):
    """(rows, columns) -> (rows / 16, 8, columns). A thread holds rows of a product's result that
    are 8 apart, so these sums cost no exchange."""
    return tl.sum(tl.reshape(x, (x.shape[0] // 16, 2, 8, x.shape[1])), 1)


def strides(*xs: Tensor) -> tuple[list[int], int]:
    """The (batch, token, head) strides of tensors with a dense last axis, in units, and the unit:
    whole vectors of 8 where all strides allow."""
    all_of = [s for x in xs for s in x.stride()[:3]]
    unit = 1 if any(s % 8 for s in all_of) else 8
    return [s // unit for s in all_of], unit


def operand(x: Tensor) -> dict[str, Any]:
    """Type and precision of matrix products. float16 lacks the range of sums, so it goes as tf32,
    which keeps its 10 bits."""
    if x.dtype == torch.bfloat16:
        if x.is_cuda:
            return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
        return {"OPERAND": tl.float32, "PRECISION": "ieee"}
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if x.dtype == torch.float16 else "tf32x3"}


def flags(mask: Tensor | None) -> Tensor | None:
    """A mask as bytes."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def scratch(like: Tensor, *shape: int) -> Tensor:
    """A float32 tensor, unwritten."""
    return like.new_empty(*shape, dtype=torch.float32)  # a tuple costs the host twice as much


def dense_empty(like: Tensor) -> Tensor:
    """A dense tensor of the same shape and dtype, unwritten."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def processors(x: Tensor) -> int:
    """Multiprocessors of the card; a small number for Triton's interpreter."""
    return _processors(x.device) if x.is_cuda else 2


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (triton.cdiv, which kernels can call too, is slow from the host.)"""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


def pad(n: int) -> int:
    """Tile size for n channels: a power of two, 16 at least."""
    return max(16, power_of_2(n))


def split(length: int, rows: int, block: int, programs: int) -> tuple[int, int]:
    """Cut `length` tokens into parts so that rows * parts is about `programs`: (parts, span)."""
    parts = max(1, min(programs // rows, cdiv(length, 4 * block)))
    span = cdiv(cdiv(length, parts), block) * block
    return cdiv(length, span), span


def arguments(where: Position, x: Tensor) -> dict[str, Any]:
    """What the kernels read of a Position but for tensors, for tokens x (batch, length, heads,
    dim)."""
    theta, axes = where.theta, len(where.shape)
    slots = 1 if theta is None else int(theta.shape[1])
    sizes = [int(n) for n in where.shape[1:]] + [None] * (phases.MOST_AXES - max(axes, 1))
    each = int(where.offset is not None and where.offset.shape[0] > 1)
    if where.shapes is not None:
        axes = where.shapes.shape[1]
    return {
        "per_head": int(theta is not None and theta.shape[0] > 1),
        **dict(zip(phases.SIZES, [*sizes, where.prefix, each], strict=True)),
        "KIND": KINDS[where.kind], "AXES": axes,
        "PREFIX": where.prefix > 0 or where.splits is not None,
        "SLOTS": slots, "OFFSET": where.sizes[2], "TOTAL": where.sizes[3] or slots,
        # tokens in front of a grid that starts elsewhere are far from its first cell
        "WIDE": x.dtype == torch.float32 or (where.offset is not None and where.prefix > 0),
    }  # fmt: skip


def dense_rows(x: Tensor) -> Tensor:
    """x with a dense last axis."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def form(*xs: Tensor) -> tuple[Any, ...]:
    """What launches over tensors depend on."""
    return xs[0].device, *[(x.dtype, x.shape, x.stride()) for x in xs]

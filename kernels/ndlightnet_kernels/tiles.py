"""Functions that the attention kernels share: token tiles, operands, features, launch sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels import phases
from ndlightnet_kernels.position import KINDS, FlatPosition

# Arguments of attention kernels that are numbers: another value of one compiles nothing
SIZES = ["length", "span", "n_splits", "segments", "per_segment", "tiles", "window", "chunks", "heads", "per_head"]
SIZES += [*phases.SIZES, *(f"s{x}{axis}" for x in ("q", "k", "v", "o", "dq", "dk", "dv") for axis in "bth")]


# The rows of a head of a tensor (batch, length, heads, columns) are a tuple: pointer, sample, head,
# strides of samples, tokens and heads in units, columns, elements of a unit.
@triton.jit
def address(rows, t, col):
    """Return pointers to rows t and columns col."""
    ptr, b, h, sb, st, sh, _, unit = rows
    base = ptr + (b.to(tl.int64) * sb + h.to(tl.int64) * sh) * unit
    return base + (t.to(tl.int64) * (st * unit))[:, None] + col[None, :]


@triton.jit
def second_channels(rows):
    """Return the rows of the pairs' second channels from those of the first."""
    ptr, b, h, sb, st, sh, width, unit = rows
    return ptr + width, b, h, sb, st, sh, width, unit


@triton.jit
def dense(b, h, t, col, length, heads, DIM: tl.constexpr):
    """Index rows t and columns col of a head in a dense (batch, length, heads, DIM) tensor."""
    base = (b.to(tl.int64) * length * heads + h) * DIM
    return (base + t.to(tl.int64) * (heads * DIM))[:, None] + col[None, :]


@triton.jit
def read_split(splits, split):
    """Read a split of a pack: its sample, its index among all splits in order of samples, its first
    token and the one after the last, and the sample's first token."""
    at = splits + split * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def split_bounds(splits, split, b, bh, h, heads, span, length, prefix):
    """Return the sample of a split, its index among all splits, its first token and the one after the
    last, the number of tokens in front of the sample's grid, and the index of its State."""
    if splits is None:
        return b, split, split * span, min(split * span + span, length), prefix, bh
    else:
        row, slot, begin, end, base = read_split(splits, split)
        return row, slot, begin, end, base, row * heads + h


@triton.jit
def valid_tokens(mask, b, t, end, length):
    """Return which tokens are before `end` and not padding."""
    valid = t < end
    if mask is not None:
        valid = valid & (tl.load(mask + b * length + t, mask=valid, other=0) != 0)
    return valid


@triton.jit
def load(rows, t, c, valid):
    """Load a tile, with 0 for tokens that are not `valid` and columns that do not exist."""
    return tl.load(address(rows, t, c), mask=valid[:, None] & (c < rows[6])[None, :], other=0.0)


@triton.jit
def load_keys(rows, t, kc, end):
    """Load logits as float32, from `end` on those of token `end` - 1: finite where the sample's
    are. In a pack the next sample begins at `end`, and its logits may overflow this one's
    exponents. (A fill value other than 0 would cost three instructions an element.)"""
    at = address(rows, tl.minimum(t, end - 1), kc)
    return tl.load(at, mask=(kc < rows[6])[None, :], other=0.0).to(tl.float32)


@triton.jit
def hide(x, valid):
    """Replace the logits of padding and of tokens beyond the end by -inf."""
    return tl.where(valid[:, None], x, float("-inf"))


@triton.jit
def _nearest(x, PRECISION: tl.constexpr):
    """Round float32 to the nearest value that a product keeps. With "tf32" tensor cores would cut
    the last 13 bits; "ieee" stands for bfloat16 in the interpreter, which cannot multiply it."""
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
def dot(a, b, acc, PRODUCT: tl.constexpr):
    """Return acc + a @ b with float32 sums; both sides are rounded to the operand type first.
    PRODUCT: see `operand`."""
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    PRECISION: tl.constexpr = PRODUCT[1]
    a, b = _nearest(a.to(OPERAND), PRECISION), _nearest(b.to(OPERAND), PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def interleave(a, b, SLOTS: tl.constexpr):
    """Interleave columns: a0 b0 a1 b1 ... One product of this tile costs less than two products."""
    out = tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))
    # adding 0 keeps Triton 3.6 from reshaping in shared memory, where it crashes for float32, and
    # for tiles that are loaded element by element
    return out + 0.0 if out.dtype == tl.float32 or SLOTS % 2 == 1 else out


@triton.constexpr_function
def even(slots, vdim):
    """Return `slots` for `interleave`, odd where either is: tiles of odd widths are loaded element by element."""
    return slots if vdim % 2 == 0 else 1


@triton.jit
def deinterleave(x):
    """Return both tiles of an interleaved one: the inverse of `interleave`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def weight(x, top, decay_exp=None):
    """Return exp(x - top); 0 where x is -inf. It uses exp2 and a product, because tl.exp spends
    three more instructions on results below 1e-38. decay_exp: added to the exponent of 2, after the
    difference, so that it keeps its digits beside large logits."""
    power = (x - tl.where(top == float("-inf"), 0.0, top)) * 1.4426950408889634
    if decay_exp is not None:
        power += decay_exp
    return tl.exp2(power)


@triton.jit
def _shift(top):
    return tl.where(top == float("-inf"), 0.0, top) * 1.4426950408889634


@triton.jit
def powers(x, top, OPERAND: tl.constexpr, decay_exp=None):
    """Return exp(x - top) of a tile, with one `top` for each column. Operands of 16 bits take one
    instruction less for an element, and the result is off by one factor for each column: see
    `slip`. (Not every Triton version fuses the product and the difference by itself.) decay_exp: as in
    `weight`."""
    if tl.float32 == OPERAND:
        return weight(x, top[None, :], decay_exp)
    else:
        power = tl.fma(x, 1.4426950408889634, -_shift(top)[None, :])
        if decay_exp is not None:
            power += decay_exp
        return tl.exp2(power)


@triton.jit
def slip(top, OPERAND: tl.constexpr):
    """Return the factor from `powers` to exp(x - top). It differs from 1 by at most 1e-7 times
    `top`, because the product of `top` and log2(e) was rounded."""
    if tl.float32 == OPERAND:
        return tl.full(top.shape, 1.0, tl.float32)
    else:
        shift = _shift(top)
        off = tl.fma(top, 1.4426950408889634, -shift)
        return tl.exp2(tl.where(top == float("-inf"), 0.0, -off))


@triton.jit
def later(top, lag):
    """Return the maximum of a State whose weights fall by 2^-lag, and the factor from units of the
    old one to the rest of the fall: what rounding takes from the maximum goes into the factor."""
    low = top - lag * 0.6931471805599453
    rest = tl.fma(top - tl.where(low == float("-inf"), 0.0, low), 1.4426950408889634, -lag)
    return low, tl.where(low == float("-inf"), 1.0, tl.exp2(rest))


@triton.jit
def silu(x):
    """Return SiLU and its derivative. The square of rsqrt takes half the instructions of a division."""
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    s = r * r
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def rope_features(x1, x2, cos, sin, KIND: tl.constexpr):
    """Return query features (fa, fb) by KIND: 0 x itself, 1 x cos and x sin, 2 the rotated pair."""
    if KIND == 2:
        return x1 * cos - x2 * sin, x1 * sin + x2 * cos
    elif KIND == 1:
        return x1 * cos, x1 * sin
    else:
        return x1, x1


@triton.jit
def rope_features_backward(da, db, cos, sin, KIND: tl.constexpr):
    """Return the gradients of x1 and x2: the adjoint of `rope_features`."""
    if KIND == 2:
        return da * cos + db * sin, db * cos - da * sin
    elif KIND == 1:
        d = da * cos + db * sin
        return d, d
    else:
        return da, da


@triton.jit
def rows_added(x):
    """Sum rows that are 8 apart: (rows, columns) -> (rows / 16, 8, columns). A thread holds such
    rows of a product's result, so threads exchange nothing for these sums."""
    return tl.sum(tl.reshape(x, (x.shape[0] // 16, 2, 8, x.shape[1])), 1)


def strides(**tensors: Tensor) -> dict[str, int]:
    """Return the (batch, token, head) strides of tensors with a dense last axis, in units, and the
    unit: 8 elements, a whole vector, where all strides are multiples of it, else 1."""
    numbers = [s for x in tensors.values() for s in x.stride()[:3]]
    unit = 1 if any(s % 8 for s in numbers) else 8
    names = (f"s{name}{axis}" for name in tensors for axis in "bth")
    return {"UNIT": unit, **dict(zip(names, (s // unit for s in numbers), strict=True))}


def operand(x: Tensor) -> tuple[bool, str]:
    """Return whether matrix products are of bfloat16, else of float32, and their precision. float16 has too small a
    range for sums, so it is multiplied as tf32, which also has 10 bits. No dtype: a hook of Triton's that is told of
    compilations gets constants as JSON."""
    if x.dtype == torch.bfloat16:
        return (True, "tf32") if x.is_cuda else (False, "ieee")
    return False, "tf32" if x.dtype == torch.float16 else "tf32x3"


def flags(mask: Tensor | None) -> Tensor | None:
    """Return the mask as bytes, or None."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def scratch(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised float32 tensor on the device of `like`."""
    return like.new_empty(*shape, dtype=torch.float32)  # a tuple costs the host twice as much


def dense_empty(like: Tensor) -> Tensor:
    """Return an uninitialised dense tensor of the same shape and dtype."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def processors(x: Tensor) -> int:
    """Return the multiprocessors of the card; a small number for Triton's interpreter."""
    return _processors(x.device) if x.is_cuda else 2


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up. (triton.cdiv, which kernels can call too, is slow on the host.)"""
    return -(-a // b)


def hint(n: Any) -> int:
    """Return a size; of a symbol the size that the graph was traced with. What is chosen by it may
    be slower for other sizes, but must be right for them."""
    return n if isinstance(n, int) else int(n.node.hint or 1)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def pad(n: int) -> int:
    """Return the tile size for n channels: a power of two, at least 16."""
    return max(16, power_of_2(n))


def plan_splits(length: int, rows: int, block: int, programs: int) -> tuple[int, int]:
    """Cut `length` tokens so that rows * count is about `programs`: return (count, span)."""
    count = max(1, min(programs // max(1, hint(rows)), cdiv(hint(length), 4 * block)))
    if count == 1:  # a number, also where the length is a symbol: there is nothing to merge
        return 1, cdiv(length, block) * block
    span = cdiv(cdiv(length, count), block) * block
    return cdiv(length, span), span


def arguments(position: FlatPosition, vdim: int, **tensors: Tensor) -> dict[str, Any]:
    """Return the arguments that kernels over tensors (batch, length, heads, channels) share, those named q, k, v, o in
    the names of strides: strides, sizes, angles, type of products. The first tensor's dtype decides the last two."""
    x = next(iter(tensors.values()))
    _, length, heads, dim = x.shape
    sizes = {"length": length, "heads": heads, "DIM": dim, "VDIM": vdim}
    return {**strides(**tensors), **sizes, **angle_arguments(position, x), "PRODUCT": operand(x)}


def angle_arguments(position: FlatPosition, x: Tensor, wide: bool = False) -> dict[str, Any]:
    """Return the arguments of kernels over tokens x that a Position gives, except tensors. wide:
    with phases of 64 bits in any case."""
    theta, axes = position.theta, len(position.shape)
    slots = 1 if theta is None else int(theta.shape[1])
    sizes = [*position.shape[1:]] + [None] * (phases.MOST_AXES - max(axes, 1))
    each = int(position.offset is not None and position.offset.shape[0] > 1)
    if position.shapes is not None:
        axes = position.shapes.shape[1]
    # with an offset, tokens in front of the grid are far from its first cell
    wide = wide or x.dtype == torch.float32 or (position.offset is not None and position.prefix > 0)
    in_front = position.prefix > 0 or position.splits is not None
    row = position.shape[-1] if axes > 1 and position.shapes is None else 0
    # rotary, with half as many angles, gains nothing by them
    runs = position.kind == "cosine" and isinstance(row, int) and row % phases.RUN.value == 0 and not (wide or in_front)
    slots_of_all = position.sizes[2], position.sizes[3] or slots
    return {
        "per_head": int(theta is not None and theta.shape[0] > 1),
        **dict(zip(phases.SIZES, [*sizes, position.prefix, each], strict=True)),
        "ANGLES": (KINDS[position.kind], axes, slots, *slots_of_all, wide, in_front, runs),
    }


def dense_rows(x: Tensor) -> Tensor:
    """Return x with a dense last axis, copied only if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def form(*xs: Tensor) -> tuple[Any, ...]:
    """Return what launches over tensors depend on: device, dtypes, shapes and strides."""
    return xs[0].device, *[(x.dtype, x.shape, x.stride()) for x in xs]

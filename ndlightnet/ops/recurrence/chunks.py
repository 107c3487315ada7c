"""Shared parts of chunkwise forms: chunks of tokens, and scores with a decay between two tokens.

A weight exp(g_r - g_i), with g the cumulative sum of log decays, has an exponent of 0 or less for
i <= r. It splits into two factors of at most 1 only with an anchor a between the two tokens,
exp(g_r - g_a) exp(g_a - g_i). So a chunk is halved repeatedly: rows of the later half are
multiplied by columns of the earlier half, with the later half's first row as the anchor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from ndlightnet.layout.abstract import exporting
from ndlightnet.ops.plain import transformed

CHUNK = 64  # tokens of a chunk, or the next power of two where there are fewer tokens
SEGMENT = 2**17  # numbers that a step of a form reads on a CPU: as many as its cache holds
PIECE = 2**13  # numbers that take as long as the start of the operations of a further piece, on a CPU
READ = 8  # tokens that take as long as a read of the memory
FLOOR = -30.0  # of log decays in float32: sums of lower ones would lose the digits of small ones


def exact(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, so that sums, decays and memories are not rounded, in the
    backward too. (Device meta has no autocast; torch 2.11 cannot compile a check for autocast. An
    exported graph traces each context as a graph of its own, slowly, so none where none is needed.)
    """
    kind = x.device.type
    if x.is_meta or (exporting() and not torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def work_dtype(v: Tensor) -> torch.dtype:
    """Return the dtype of token-sized products: that of v on a GPU, which sums 16-bit products in
    float32; else float32 or wider. Decays, memories and solutions are never in 16 bits."""
    return v.dtype if v.is_cuda else torch.promote_types(v.dtype, torch.float32)


def matmul_as(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b (batch, chunks, ...) in `dtype`, without float32 copies of 16-bit inputs."""
    if a.is_cuda and a.dtype.itemsize == 2 and dtype == torch.float32 and not transformed():
        out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype)
        return out.unflatten(0, a.shape[:2])
    return a.to(dtype) @ b.to(dtype)


def chunk_of(length: int) -> int:
    """Return the tokens of a chunk of a sequence: a power of two. By comparisons alone, which leave torch.compile one
    graph for all lengths between two powers; an exported graph holds one chunk for any length."""
    chunk = CHUNK
    if exporting() or torch._C._get_tracing_state() is not None:
        return chunk
    while chunk > 1 and 2 * length <= chunk:
        chunk //= 2
    return chunk


def pieces(v: Tensor, memory: Tensor) -> list[slice]:
    """Return the pieces of a sequence that run one after the other, given v (batch, length, heads, value_dim) and the
    first memory (batch, heads, dim, value_dim): on a CPU so many chunks as its cache holds, and tokens behind the last
    whole chunk by themselves, in a smaller one, where that saves time. Elsewhere, and compiled, there is one piece."""
    batch, heads, *sizes = memory.shape
    n, rows, widest = v.shape[1], max(1, batch * heads), max(CHUNK, *sizes)
    cuts = [0]
    if v.is_cpu and not torch.compiler.is_compiling():
        most = CHUNK * max(1, SEGMENT // (rows * widest**2))
        while (left := n - cuts[-1]) > 1:
            size = CHUNK if left > CHUNK else chunk_of(left) // 2
            rest = left % size
            saved = size - chunk_of(rest) - READ
            alone = rest > 0 and saved * rows * widest >= PIECE
            whole = min(most, left - rest if alone else left)
            if whole == left:
                break
            cuts.append(cuts[-1] + whole)
    return [slice(a, b) for a, b in pairwise([*cuts, n])]


def missing(length: int, chunk: int | None = None) -> int:
    """Return how many tokens to add for whole chunks. An exported graph gets two or three more,
    since torch.export takes a number of 1 as a constant."""
    chunk = chunk or chunk_of(length)
    if exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if not statically_known_true(length % chunk == 0):
            return (length // chunk + 3) * chunk - length
    return -length % chunk


def to_chunks(x: Tensor, dtype: torch.dtype, chunk: int | None = None) -> Tensor:
    """Cut (batch, length, heads, dim) to (batch * heads, chunks, chunk, dim), zeros at the end."""
    chunk = chunk or chunk_of(x.shape[1])
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing(x.shape[1], chunk)))
    x = x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).to(dtype)
    return x.flatten(0, 1)


def from_chunks(x: Tensor, like: Tensor) -> Tensor:
    """Invert `to_chunks`, to the dtype and shape of `like` except for the last axis."""
    batch, length, heads = like.shape[:3]
    x = x.unflatten(0, (batch, heads)).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return x[:, :length].to(like.dtype)


def unaliased(x: Tensor) -> Tensor:
    """Return a copy of x if compiling, else x. Where a Function returns a view of a view, torch
    2.11 compiles a gradient of zeros."""
    return x.clone() if torch.compiler.is_compiling() else x


def first_memory(
    name: str, memory: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the memory before the first token in this dtype: zeros if there is none."""
    if memory is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    if tuple(memory.shape) != shape:
        raise ValueError(f"{name} {tuple(memory.shape)}: expected {shape}")
    return memory.to(dtype)


def floor_of(dtype: torch.dtype) -> float:
    return 2 * FLOOR if dtype == torch.float64 else FLOOR


def later_first(x: Tensor) -> Tensor:
    """Return the sums from each token of a chunk to the end of the chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)


class Decay:
    """Cumulative sums g of log decays in chunks (..., chunk, dim or 1), or none, and products with
    their exponentials. Factors have the dtype of the tensor that they multiply."""

    def __init__(self, log: Tensor | None) -> None:
        self.g = self.since_start = None if log is None else log.cumsum(-2)

    @staticmethod
    def of_sums(g: Tensor, start: Tensor) -> Decay:
        """Return a Decay of given sums g; start (..., 1, dim or 1) is the sum before each chunk."""
        out = Decay(None)
        out.g, out.since_start = g, g - start
        return out

    @property
    def scalar(self) -> bool:
        return self.g is None or self.g.shape[-1] == 1

    def into(self, x: Tensor) -> Tensor:
        """Return x decayed from the start of its chunk to its token."""
        return x if self.since_start is None else x * self.since_start.exp().to(x.dtype)

    def out(self, x: Tensor) -> Tensor:
        """Return x decayed from its token to the end of its chunk."""
        return x if self.g is None else x * (self.g[..., -1:, :] - self.g).exp().to(x.dtype)

    def over(self) -> Tensor | None:
        """Return a chunk's decay of a memory (..., dim, value_dim): (..., dim or 1, 1) or None."""
        return None if self.since_start is None else self.since_start[..., -1:, :].mT.exp()

    def scores(self, q: Tensor, k: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a[r, i] = sum_j q[r, j] k[i, j] exp(g[r, j] - g[i, j]) for i <= r, else 0: (...,
        chunk, dim) twice -> (..., chunk, chunk), in `dtype` (default: that of q)."""
        dtype = dtype or q.dtype
        if self.scalar:
            return self._spread(matmul_as(q, k.mT, dtype))
        q, k = q.to(dtype), k.to(dtype)
        a = _times(q[..., None, :], k[..., None])
        for half in _sizes(q.shape[-2]):
            early, late = self._factors(half, dtype)
            a = _join(a, _times(_late(q, half) * late, (_early(k, half) * early).mT))
        return a.squeeze(-3)

    def scores_backward(self, da: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and k from that of `scores`, whose upper triangle is ignored.
        They leave out the terms of its diagonal, da k and da q, which have no decay."""
        if self.scalar:
            da = self._spread(da).tril(-1)
            return da @ k, da.mT @ q
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        for half in _sizes(q.shape[-2]):
            early, late = self._factors(half, q.dtype)
            block = _blocks(da, half)
            _late(dq, half).add_(_times(block, _early(k, half) * early) * late)
            _early(dk, half).add_(_times(block.mT, _late(q, half) * late) * early)
        return dq, dk

    def _factors(self, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return exp(g_anchor - g) of the earlier halves, exp(g - g_anchor) of the later ones."""
        assert self.g is not None
        early, late = _early(self.g, half), _late(self.g, half)
        anchor = late[..., :1, :]
        return (anchor - early).exp().to(dtype), (late - anchor).exp().to(dtype)

    def _spread(self, a: Tensor) -> Tensor:
        """Return a[r, i] exp(g_r - g_i) for i <= r, else 0, for scalar decays."""
        if self.g is None:
            return a.tril()
        low = torch.ones(a.shape[-2:], dtype=torch.bool, device=a.device).tril()
        return (a * (self.g - self.g.mT).masked_fill(~low, -torch.inf).exp().to(a.dtype)).tril()


def _sizes(chunk: int) -> list[int]:
    return [1 << i for i in range(int(chunk).bit_length() - 1)]


def _early(x: Tensor, half: int) -> Tensor:
    """Return the earlier halves (..., pairs, half, dim) of (..., chunk, dim)."""
    return x.unflatten(-2, (-1, 2, half)).select(-3, 0)


def _late(x: Tensor, half: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, half)).select(-3, 1)


def _diagonal(a: Tensor, size: int) -> Tensor:
    """Return the diagonal blocks of (..., chunk, chunk): a view (..., chunk / size, size, size)."""
    a = a.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return a.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _blocks(a: Tensor, half: int) -> Tensor:
    """Return the blocks later rows x earlier columns, as a view (..., pairs, half, half)."""
    return _diagonal(a, 2 * half)[..., half:, :half]


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b. Tiny products are sums, which torch.compile fuses: cuBLAS takes a program for
    each, and there may be a hundred thousand of them."""
    if a.shape[-2] > 4:
        return a @ b
    wide = a.unsqueeze(-2).to(torch.promote_types(a.dtype, torch.float32))
    return (wide * b.mT.unsqueeze(-3)).sum(-1).to(a.dtype)


def _join(blocks: Tensor, below: Tensor) -> Tensor:
    """Join diagonal blocks (..., 2 pairs, size, size) and the block below the first of each pair
    (..., pairs, size, size) to (..., pairs, 2 size, 2 size)."""
    early, late = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    above = torch.nn.functional.pad(early, (0, below.shape[-1]))
    return torch.cat([above, torch.cat([below, late], -1)], -2)


def inverse(lower: Tensor) -> Tensor:
    """Return (I + lower)^-1 for a strictly lower triangle (..., chunk, chunk): row by row in blocks
    of 8, then in blocks that double.

    This is substitution, and as stable; powers of `lower` may be huge where the inverse is not.
    """
    chunk = lower.shape[-1]
    least = min(8, chunk)
    low = _diagonal(lower, least)
    rows = [*torch.eye(least, dtype=low.dtype, device=low.device).expand_as(low).unbind(-2)]
    for row in range(1, least):
        above = torch.stack(rows[:row], -2)
        rows[row] = rows[row] - (low[..., row, :row, None] * above).sum(-2)
    x = torch.stack(rows, -2)
    for half in (size for size in _sizes(chunk) if size >= least):
        early, late = x[..., 0::2, :, :], x[..., 1::2, :, :]
        x = _join(x, -(late @ _blocks(lower, half) @ early))
    return x.squeeze(-3)

"""LAVO: softmax attention to the neighbourhood, and to an orthogonal memory of everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Ragged, per_axis
from ndlightnet.nn.heads import default_heads
from ndlightnet.nn.mixers.mixer import Mixer, check_source
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lavo import WindowSums, amounts, memory_read, past_means, token_mean
from ndlightnet.ops.local import local_attention

Orthogonal = Literal["init", "param"]
Basis = Literal["per_head", "full"]


class LAVOState(NamedTuple):
    """What the causal form remembers; all zeros: of nothing."""

    keys: Tensor  # (batch, window - 1, *space, heads, head_dim): of the last frames
    values: Tensor
    done: Tensor  # the other three: see WindowSums
    pending: Tensor
    frames: Tensor


class LAVO(Mixer):
    """o_proj(merge heads (local + memory) / 2), LAVO (arXiv 2312.11135): softmax attention to
    the neighbourhood with learnt biases, and what the query reads from an orthogonal memory; see
    ndlightnet.ops.local and ndlightnet.ops.lavo.

    The memory compresses the local features of all tokens. In the causal form these are the ones
    of all windows of frames (steps of the first axis) that ended before the token's own window
    began; in the first window the memory is empty and reads 0. Of its own frame a causal token
    sees its neighbourhood.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels. Head dim = dim / heads.
        memories: vectors in a memory, at most the head dim ("full": dim); default: as many, up to
            64.
        basis: "per_head": each head has a memory of its own. "full": one of vectors over the whole
            width, whose channels are shared out among the heads; those of a head are then not
            orthogonal by themselves.
        window: the neighbourhood: |j - i| < window on an axis. One number for all axes, which then
            share a table of biases, or one per axis. "auto": 16 / number of axes, so that not too
            many tokens are near on a volume (9^3); text gains from more than 16 (the paper's best
            is 64). None: no local branch; the memory is of the values, in the causal form of all
            so far.
        orthogonal: "init": the basis starts orthonormal and learns freely, as in the paper.
            "param": it stays orthonormal, by a QR decomposition of the parameter.
        context_dim: channels of the source in the cross form, which has no local branch; a layer
            that is given it has none at all.

    Parameters: 4 dim^2 + memories dim + heads (2 window - 1), the last for each axis if `window`
    is one per axis. Without the local branch: 2 dim^2 + context_dim dim + memories dim.
    """

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        memories: int | None = None,
        basis: Basis = "per_head",
        window: int | Sequence[int] | Literal["auto"] | None = "auto",
        orthogonal: Orthogonal = "init",
        context_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        if basis not in get_args(Basis):
            raise ValueError(f"basis={basis!r}: expected 'per_head' or 'full'")
        self.full = basis == "full"
        wide = dim if self.full else self.head_dim
        rows = min(64, wide) if memories is None else memories
        if not 1 <= rows <= wide:
            what = "width" if self.full else "head dim"
            raise ValueError(
                f"memories={memories}: expected 1 to {wide}, the {what}, since no more vectors can "
                "be orthogonal"
            )
        if orthogonal not in get_args(Orthogonal):
            raise ValueError(f"orthogonal={orthogonal!r}: expected 'init' or 'param'")
        if isinstance(window, str) and window != "auto":
            raise ValueError(f"window={window!r}: expected numbers, 'auto' or None")
        self.orthogonal = orthogonal
        fixed = window if window is None or isinstance(window, int | str) else tuple(window)
        self.window = None if context_dim is not None else fixed
        sizes = self.windows(max(1, len(fixed)) if isinstance(fixed, tuple) else 1) or ()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False) if sizes else None
        self.v_proj = nn.Linear(context_dim or dim, dim, bias=False)
        self.bias = nn.ParameterList(
            nn.init.normal_(torch.empty(self.heads, 2 * size - 1), std=self.head_dim**-0.5)
            for size in sizes
        )
        # one by one, since orthogonal_ takes (heads, memories, head_dim) for a single matrix
        number = 1 if self.full else self.heads
        bases = [nn.init.orthogonal_(torch.empty(rows, wide)) for _ in range(number)]
        self.basis = nn.Parameter(torch.stack(bases))  # (heads or 1, memories, head_dim or dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def windows(self, ndim: int) -> tuple[int, ...] | None:
        """The window on each axis of a grid; None without the local branch."""
        if self.window is None:
            return None
        window = max(2, 16 // ndim) if isinstance(self.window, str) else self.window
        return per_axis("window", window, ndim)

    def bases(self) -> Tensor:
        """(heads, memories, head_dim): the vectors of which the memories are made."""
        basis = self.basis
        if self.orthogonal == "param":
            # a basis vector's sign does not matter to what is read, and QR leaves it open
            basis = torch.linalg.qr(basis.mT.to(accumulator(basis)))[0].mT
        return self._split(basis[0]).transpose(0, 1) if self.full else basis

    def forward(
        self, x: Tensor, *, context: Tensor | None = None, mask: Tensor | None = None,
        causal: bool = False, layout: Ragged | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens (batch, *grid, dim) -> same shape. context: a source (batch, *its grid,
        context_dim) to read instead of x, by the memory alone. mask: bool over the source's tokens
        (batch, *grid), False = padding. causal: along the first axis; without context. layout: of
        samples end to end (x (length, dim), mask (length,)), which are done one after the other."""
        check_source(context, causal, layout)
        if layout is not None:
            return layout.each(self, x, mask, causal=causal)
        source = x if context is None else context
        self._check(source)
        keep = Grid.of(source).flatten_mask(mask)
        if mask is not None:  # even NaN in the padding cannot leak
            source = source.masked_fill(~mask[..., None], 0)
        x = source if context is None else x
        if causal:
            return self._causal(*self._project(x), mask, None)[0]
        if context is None and self.window is not None:
            q, k, v = self._project(x)
            local = self._local(q, k, v, mask, causal=False)
            return self._output(q, token_mean(local.flatten(1, -3), keep)[:, None], local)
        # the mean of the values is the value of the mean
        mean = token_mean(source.flatten(1, -2), keep).to(source.dtype)
        return self._output(self._split(self.q_proj(x)), self._split(self.v_proj(mean))[:, None])

    def _check(self, source: Tensor) -> None:
        if source.shape[-1] != self.v_proj.in_features:
            raise ValueError(
                f"tokens of {source.shape[-1]} channels: expected {self.v_proj.in_features}"
            )

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (batch, *grid, heads, head_dim); without the local branch v instead of k."""
        q, v = self._split(self.q_proj(x)), self._split(self.v_proj(x))
        return q, v if self.k_proj is None else self._split(self.k_proj(x)), v

    def _local(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        ndim = q.ndim - 3
        tables = list(self.bias) if isinstance(self.window, tuple) else [self.bias[0]] * ndim
        return local_attention(q, k, v, self.windows(ndim) or 1, tables, mask=mask, causal=causal)

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sums: WindowSums | None
    ) -> tuple[Tensor, WindowSums]:
        """k, v and mask may begin with frames before those of q, which `sums` is about."""
        windows = self.windows(q.ndim - 3)
        local = None if windows is None else self._local(q, k, v, mask, causal=True)
        shape = (*q.shape[:2], Grid(q.shape[2:-2]).length)
        keep = None if mask is None else mask[:, mask.shape[1] - q.shape[1] :].reshape(shape)
        features = (v if local is None else local).reshape(*shape, *q.shape[-2:])
        window = None if windows is None else windows[0]
        means, sums = past_means(features, window, mask=keep, past=sums)
        return self._output(q, means, local), sums

    def _output(self, q: Tensor, mean: Tensor, local: Tensor | None = None) -> Tensor:
        basis = self.bases()
        h = amounts(basis, mean)
        if self.full:
            h = h.sum(2, keepdim=True).expand_as(h)
        y = memory_read(q.flatten(1, -3), basis, h).reshape(q.shape)
        out: Tensor = self.o_proj((y if local is None else (local + y) / 2).flatten(-2))
        return out

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> LAVOState:
        """The state before the first frame, of shape `space`."""
        weight, reach = self.q_proj.weight, (self.windows(1 + len(space)) or (1,))[0] - 1
        size = (self.heads, self.head_dim)
        tail = torch.zeros(batch, reach, *space, *size, dtype=weight.dtype, device=device)
        total = torch.zeros(batch, *size, dtype=accumulator(weight), device=device)
        frames = torch.zeros(batch, dtype=torch.int64, device=device)
        return LAVOState(tail, tail, total, total, frames)

    def advance(
        self, x: Tensor, state: LAVOState, position: int | Tensor
    ) -> tuple[Tensor, LAVOState]:
        """The next frames (batch, frames, *space, dim) of the causal form. `position` does not
        matter: the state counts the frames that came before."""
        self._check(x)
        q, k, v = self._project(x)
        if state.keys.shape[2:] != k.shape[2:]:
            raise ValueError(
                f"frames of {tuple(x.shape[2:-1])}: expected {tuple(state.keys.shape[2:-2])}, "
                "as in init_state"
            )
        tails, reach = state[:2], state.keys.shape[1]
        k, v = (torch.cat([old.to(new.dtype), new], 1)
                for old, new in zip(tails, (k, v), strict=True))  # fmt: skip
        at = torch.arange(k.shape[1], device=x.device) - reach
        seen = (at >= -state.frames[:, None]).reshape(*k.shape[:2], *[1] * (k.ndim - 4))
        y, sums = self._causal(q, k, v, seen.expand(k.shape[:-2]), WindowSums(*state[2:]))
        k, v = (new[:, x.shape[1] :].to(old.dtype) for old, new in zip(tails, (k, v), strict=True))
        return y, LAVOState(k, v, *sums)

"""Local softmax attention on a grid of any number of axes: each token reads its neighbourhood.

With windows w_a, token i reads the tokens j with |j_a - i_a| < w_a on every axis. The causal form requires j_0 <= i_0
on the first axis; with one axis it reads the last w tokens, itself included. Queries are cut into tiles, which attend
to their keys and a halo of w_a - 1 tokens; all tiles share one call of torch's scaled_dot_product_attention. On one
axis torch's flash attention has a sliding window of its own, which runs where it can (`flash_support`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import per_axis
from ndlightnet.layout.abstract import exporting
from ndlightnet.ops.dispatch import TRANSFORMED, Support
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import plain, softmax_attention, transformed
from ndlightnet_kernels import device_reason

TILE = 64  # queries of a tile, about: fewer copy more of the halo, more compute more unused scores
HAS_WINDOWS = torch.__version__ >= "2.11"  # torch.nn.attention.varlen takes a window
COPIES = 4  # of a key in tiles: with this many or more, the backward pass recomputes the tiles


class _Tiling(NamedTuple):
    """One axis cut into tiles: tile b is the `size` tokens from b * step - lead on."""

    tiles: int
    step: int
    size: int
    lead: int


class _Neighbourhood(NamedTuple):
    """Which keys a query reads, and with what bias: of each axis the tiling, the window and the table, or no tables."""

    tilings: Sequence[_Tiling]
    windows: Sequence[int]
    tables: Sequence[Tensor]
    causal: bool


def _tiling(n: int, window: int, past: int, causal: bool, ndim: int) -> _Tiling:
    """Return the tiling of the keys along an axis of n queries, with `past` keys before them."""
    halo = window - 1
    any_length = exporting() and not isinstance(n, int)  # one graph: each token is a tile
    step = 1 if any_length else max(halo, round(TILE ** (1 / ndim)))
    tiles, size = -(-n // step), step + halo * (1 if causal else 2)
    if not any_length and tiles * step * size >= n * (n + past):  # a single tile has fewer pairs
        return _Tiling(1, n, n + past, past)
    return _Tiling(tiles, step, size, halo)


def _tiles(x: Tensor, tilings: Sequence[_Tiling], past: int = 0) -> Tensor:
    """Cut `(batch, *grid, heads, c)` to `(batch, tiles, heads, tokens of a tile, c)`, 0 outside."""
    ndim, pads = len(tilings), [0, 0, 0, 0]
    for axis, tiling in reversed(list(enumerate(tilings))):
        before = tiling.lead - (past if axis == 0 else 0)
        padded = (tiling.tiles - 1) * tiling.step + tiling.size
        pads += [before, padded - before - x.shape[1 + axis]]
    x = pad(x, pads)
    for axis, tiling in enumerate(tilings):
        x = x.unfold(1 + axis, tiling.size, tiling.step)  # the tokens of the tile go last
    x = x.movedim(ndim + 2, -1)  # then the channels
    return x.flatten(1, ndim).flatten(3, -2)


def _untile(x: Tensor, tilings: Sequence[_Tiling], shape: Sequence[int]) -> Tensor:
    """Invert `_tiles` without a halo: `(batch, tiles, heads, tokens, c)` -> `(batch, *grid, heads, c)`."""
    ndim = len(tilings)
    x = x.unflatten(3, [tiling.size for tiling in tilings]).unflatten(1, [tiling.tiles for tiling in tilings])
    pairs = [d for axis in range(ndim) for d in (1 + axis, 2 + ndim + axis)]
    x = x.permute(0, *pairs, 1 + ndim, 2 + 2 * ndim)
    x = x.reshape(x.shape[0], *(tiling.tiles * tiling.step for tiling in tilings), *x.shape[-2:])
    for axis, n in enumerate(shape):
        x = x.narrow(1 + axis, 0, n)
    return x


def _band(q: Tensor, around: _Neighbourhood) -> Tensor:
    """Return what is added to the scores of every tile: the bias, or -inf outside the
    neighbourhood; (heads or 1, queries of a tile, keys of a tile)."""
    tilings, windows, tables, causal = around
    ndim, total = len(tilings), q.new_zeros(1)
    for axis, (tiling, window) in enumerate(zip(tilings, windows, strict=True)):
        at = torch.arange(tiling.size, device=q.device) - tiling.lead
        offset = at - torch.arange(tiling.step, device=q.device)[:, None]  # j - i
        last = 0 if causal and axis == 0 else window - 1
        far = (offset <= -window) | (offset > last)
        if tables:
            table = tables[axis]
            # an index below 0 would wrap silently, so offsets outside are clamped
            band = table[:, offset.clamp(1 - window, window - 1) + table.shape[1] // 2].to(q.dtype)
        else:
            band = q.new_zeros(1, 1, 1)
        view = [1] * 2 * ndim
        view[axis], view[ndim + axis] = far.shape
        band = band.masked_fill(far, -torch.inf)
        total = total + band.reshape(-1, *view)
    return total.flatten(1, ndim).flatten(2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    around: _Neighbourhood,
    scale: float,
    beside: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attend in all tiles at once."""
    tilings = around.tilings
    shape, dim, past = q.shape[1:-2], q.shape[-1], k.shape[1] - q.shape[1]
    query_tilings = [_Tiling(tiling.tiles, tiling.step, tiling.step, 0) for tiling in tilings]
    present = k.new_ones(1, *k.shape[1:-2], 1, 1)
    if mask is not None:
        present = mask[..., None, None].to(k.dtype)
        v = v.masked_fill(~mask[..., None, None], 0)
    query, key, value = _tiles(q, query_tilings), _tiles(k, tilings, past), _tiles(v, tilings, past)
    # contiguous: torch.export would compare the strides of overlapping tiles, and so fix the length
    real, band = _tiles(present, tilings, past).contiguous(), _band(q, around)
    # Padding is marked by one more channel: 1 in all queries, a large negative number in absent
    # keys, since a mask would be as large as all scores. Absent values are 0, so a token that can
    # read nothing gets 0. Up to 7 channels of zeros: kernels need a multiple of 8 channels.
    least = torch.finfo(k.dtype).max / 4
    marks = ((real - 1) * least).expand(*key.shape[:-1], 1)
    if beside is not None:  # a further key of each query, by its mark alone: the score and what its rounding left
        score, extra = (_tiles(x, query_tilings) for x in (beside[0][..., None].clamp(min=-least), beside[1]))
        rounded = score.to(k.dtype)
        pair = torch.cat([rounded, (score - rounded.to(score.dtype)).to(k.dtype)], -1)
        marks = torch.cat([pad(marks, (0, 1)), pair], 3)
        key, value = torch.cat([key, torch.zeros_like(query)], 3), torch.cat([value, extra.to(v.dtype)], 3)
        diagonal = torch.eye(query.shape[3], dtype=torch.bool, device=q.device)
        itself = band.new_zeros(diagonal.shape).masked_fill(~diagonal, -torch.inf)
        band = torch.cat([band, itself.expand(len(band), -1, -1)], -1)
    zeros = -(dim + marks.shape[-1]) % 8
    key = torch.cat([pad(key, (0, zeros)), marks], -1)
    ones = query.new_ones(()).expand(*query.shape[:-1], marks.shape[-1])
    query = torch.cat([pad(query * scale, (0, zeros)), ones], -1)
    y = softmax_attention(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), attn_mask=band[None], scale=1.0)
    return _untile(y.unflatten(0, query.shape[:2]), query_tilings, shape)


def flash_support(q: Tensor, bias: Sequence[Tensor], mask: Tensor | None) -> Support:
    """Return whether torch's flash attention runs `local_attention`, with the reason if not."""
    if q.ndim != 4:
        return Support(f"{q.ndim - 3} axes: expected one")
    if len(bias) or mask is not None:
        return Support(f"{'biases' if len(bias) else 'a mask'}: expected none")
    if exporting():
        return Support("an exported graph, which could not call it outside Python")
    if not q.is_cuda:
        return Support(f"tensors on {q.device.type}: expected cuda")
    if q.dtype not in (torch.bfloat16, torch.float16):
        return Support(f"{q.dtype}: expected bfloat16 or float16")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return Support(f"{q.shape[-1]} channels a head: expected a multiple of 8, at most 256")
    if transformed():
        return Support(TRANSFORMED)
    if not HAS_WINDOWS:
        return Support(f"torch {torch.__version__}: expected 2.11 or later")
    return Support(device_reason(q.device))


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Sequence[Tensor],
    longest: Sequence[int],
    window: int | None,
    causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Attend with torch's flash attention, samples end to end. It aligns the last query with the last key, as keys
    before the first query need. starts: of the samples' queries and keys, int32. window: None for all tokens."""
    from torch.nn.attention.varlen import varlen_attn

    # a window of all tokens: without one, and not causal, torch would take cuDNN, which plans anew for each pack
    reach = max(longest) if window is None else window - 1
    sides = (reach, 0 if causal else reach)
    inputs: Any = (*(x.flatten(0, 1) for x in (q, k, v)), *starts, *longest)
    y: Any = varlen_attn(*inputs, scale=scale, window_size=sides)
    out: Tensor = y.view(q.shape)
    return out


def attend_in_samples(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    layout: Any,
    causal: bool,
    window: int | None = None,
    bias: Sequence[Tensor] = (),
) -> Tensor:
    """Return attend(grid, q, k, v, mask) for all samples of each grid, tokens (batch, length, heads, dim). Of a pack,
    torch's flash attention takes all samples at once where it can."""
    fits = layout.packed and layout.length and (layout.ndim == 1 or not (causal or window))
    if not fits or not flash_support(q, bias, mask):
        return layout.map_samples(attend, q, k, v, mask)  # type: ignore[no-any-return]
    starts = layout.table(("starts", q.device), lambda: torch.tensor(layout.offsets, dtype=torch.int32).to(q.device))
    return _flash(q, k, v, (starts, starts), [max(layout.lengths)] * 2, window, causal)


def append_frames(
    keys: Tensor, values: Tensor, frames: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Append new frames of a stream to its last ones, for the causal form of `local_attention`.

    keys, values: of the last `window - 1` frames, (batch, window - 1, *space, heads, dim). frames:
    (batch,) number of frames before the new ones; where these are fewer, the first ones are empty.
    k, v: of the new frames. Returns keys and values of all of them, the mask of frames that are not
    empty, (batch, all frames, *space), and the keys and values of the last window - 1 frames.
    """
    if keys.shape[2:] != k.shape[2:]:
        raise ValueError(f"frames of {tuple(k.shape[2:-2])}: expected {tuple(keys.shape[2:-2])}, as in init_state")
    k, v = (torch.cat([old.to(x.dtype), x], 1) for old, x in ((keys, k), (values, v)))
    past, new = keys.shape[1], k.shape[1] - keys.shape[1]
    real = torch.arange(-past, new, device=k.device) >= -frames[:, None]
    real = real.reshape(*k.shape[:2], *[1] * (k.ndim - 4)).expand(k.shape[:-2])
    tail = k[:, new:].to(keys.dtype), v[:, new:].to(values.dtype)
    return k, v, real, tail


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | Sequence[int],
    bias: Sequence[Tensor] = (),
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    beside: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return softmax(scale * q . k + bias) v over each neighbourhood (LAVO, section 3.2 and 3.3).

    q: (batch, *grid, heads, dim). k, v: the same, but in the causal form they may have more frames
    (steps of the first axis): those come before the first one of q. window: one for all axes, or
    one per axis. bias: a table (heads, 2 * size - 1), size >= window, per axis, whose entry
    size - 1 + j_a - i_a is added to a score; empty: no bias. mask: bool (batch, *grid of k), False
    = padding, which is not read. A token that can read nothing gets 0. scale: default dim ** -0.5.
    beside: of a further key of each query, which it alone reads in the same softmax, the score (batch, *grid, heads),
    -inf for none, and the value (batch, *grid, heads, dim).

    Returns (batch, *grid, heads, dim) in the dtype of q. Time: order of length * (neighbourhood
    and halo) * dim. Raises ValueError where a shape or a window does not fit.
    """
    shape, heads, dim = tuple(q.shape[1:-2]), q.shape[-2], q.shape[-1]
    ndim = len(shape)
    if ndim < 1 or k.shape != v.shape or k.ndim != q.ndim or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected (batch, *grid, "
            "heads, dim), k and v on the same grid"
        )
    past = k.shape[1] - shape[0]
    if past < 0 or (past and not causal):
        raise ValueError(f"k with {k.shape[1]} frames, q with {shape[0]}: expected as many, or more if causal")
    windows = per_axis("window", window, ndim)
    tables = list(bias)
    fits = [
        t.shape[0] == heads and t.shape[1] in range(2 * w - 1, t.shape[1] + 1, 2)
        for t, w in zip(tables, windows, strict=False)
    ]
    if tables and (len(tables) != ndim or not all(fits)):
        raise ValueError(
            f"bias {[tuple(t.shape) for t in tables]}: expected a table ({heads}, 2 * window - 1) "
            f"for each window of {windows}, or none"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != k.shape[:-2]):
        raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {tuple(k.shape[:-2])}")
    if beside is not None and [x.shape for x in beside] != [q.shape[:-1], q.shape]:
        sizes = [tuple(x.shape) for x in beside]
        raise ValueError(f"beside {sizes}: expected {tuple(q.shape[:-1])} and {tuple(q.shape)}")
    if q.numel() == 0:
        return empty_result(q, k, v, *tables, *(beside or ()))
    scale = dim**-0.5 if scale is None else scale
    if beside is None and flash_support(q, tables, mask):
        starts = [
            torch.arange(0, (len(x) + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=x.device) for x in (q, k)
        ]
        return _flash(q, k, v, starts, (q.shape[1], k.shape[1]), windows[0], causal, scale)
    tilings = [
        _tiling(n, w, past if axis == 0 else 0, causal and axis == 0, ndim)
        for axis, (n, w) in enumerate(zip(shape, windows, strict=True))
    ]
    inputs = (q, k, v, mask, _Neighbourhood(tilings, windows, tables, causal), scale, beside)
    copies = 1.0
    for tiling, n in zip(tilings, k.shape[1:-2], strict=True):
        copies *= tiling.tiles * tiling.size / n
    if plain() or copies < COPIES:
        return _attend(*inputs)
    # recomputed in the backward pass rather than stored until then
    y: Tensor = checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y

"""Streams: run a causal network frame by frame, with a state that does not grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from ndlightnet.models.graphs import Graphs, clone
from ndlightnet.ops.dtypes import check_tensors
from ndlightnet.parallel import is_sharded, layout_of


class StreamState(NamedTuple):
    """State of a causal network after the frames so far, with a row for each sample."""

    frames: Tensor  # (batch,) int64: frames of tokens so far
    waiting: int  # frames of cells that wait for their patch to fill
    cells: Tensor | None  # (batch, channels, patch - 1, *space), the waiting ones first
    space: tuple[int, ...] | None  # shape of a frame of tokens, None before the first one
    tpe: Tensor | None  # (batch, *space, embed_dim, states), None before the first frame
    layers: tuple[Any, ...]  # state of each mixer, such as an attention State
    total: Tensor  # (batch, embed_dim): sum of all features so far
    tokens: Tensor  # (batch,) number of tokens in `total`


def advance(model: Any, x: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
    """See NDLightNet.advance."""
    model._check(x, None)
    chunk = layout_of(x, x.ndim - model.dims)
    if x.shape[0] != state.frames.shape[0]:
        raise ValueError(f"input of {x.shape[0]} samples, a state of {state.frames.shape[0]}")
    cells, waiting = state.cells, 0
    if model.vocab_size is None:
        patch = model.embed.patch[0]
        if cells is None:
            cells = x.new_zeros(*x.shape[:2], patch - 1, *x.shape[3:])
        if cells.shape[3:] != x.shape[3:]:
            raise ValueError(f"frames of {tuple(x.shape[3:])}: expected {tuple(cells.shape[3:])} as before")
        x = torch.cat([cells[:, :, : state.waiting].to(x.dtype), x], 2)
        waiting = x.shape[2] % patch
        whole = x.shape[2] - waiting
        cells = torch.cat([x[:, :, whole:], cells[:, :, waiting:].to(x.dtype)], 2)
        x = x[:, :, :whole]
    state = state._replace(waiting=waiting, cells=cells)
    # the residual stream stays in the parameters' precision under autocast
    x = model.embed(x).to(model._weight.dtype)
    if x.shape[1] == 0:
        return x, state
    if state.space is None:
        space = tuple(x.shape[2:-1])
        state = state._replace(space=space, **_first(model, x.shape[0], space, x.device))
    layout = chunk.strided(model.slab_multiples, tuple(x.shape[1:-1]))  # frames that waited are as the chunk's
    tpe, layers = state.tpe, []
    if model.tpe is not None:
        x, tpe = model.tpe.advance(x, tpe, layout)
    for block, memory in zip(model.blocks, state.layers, strict=True):
        x, memory = block.advance(x, memory, state.frames, layout)
        layers.append(memory)
    x = model.norm(x)
    total = layout.total(layout.sums(x.flatten(1, -2).to(state.total.dtype)))
    return x, state._replace(
        frames=state.frames + x.shape[1],
        tpe=tpe,
        layers=tuple(layers),
        total=state.total + total,
        tokens=state.tokens + layout.whole.length,
    )


def _first(model: Any, batch: int, space: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return the part of a state that depends on a frame's shape, before the first frame."""
    tpe = None if model.tpe is None else model.tpe.init_state(batch, space, device)
    return {"tpe": tpe, "layers": tuple(b.init_state(batch, device, space) for b in model.blocks)}


class Stream:
    """A causal network that takes frames as they come: see NDLightNet.stream.

    Each sample of the batch is a separate stream, which may begin and pause at any time. All
    tensors of `state` have one row for each stream. No gradients.

    cuda_graph: on a GPU, replay the second and later inputs of one size from a CUDA graph, held for
    the last 8 sizes: Python takes longer than the GPU for a frame of most networks. The network's
    parameters may change in place. While some streams pause nothing is replayed.
    """

    def __init__(self, model: Any, batch_size: int = 1, *, cuda_graph: bool = True) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected 1 or more")
        self.model, self.batch_size = model, batch_size
        self.graphs = Graphs(self._uncached) if cuda_graph else None
        self.parameters = list(model.parameters())
        self.state: StreamState = model.init_state(batch_size)
        self.waiting = [0] * batch_size  # frames of each stream that wait for their patch to fill

    @torch.no_grad()
    def __call__(self, x: Tensor, active: Iterable[bool] | Tensor | None = None) -> Tensor:
        """Map the next frames, (batch, in_chans, frames, *space), to the prediction from all frames
        so far, (batch, num_classes); next tokens (batch, length) of a language model to logits.

        active: (batch,) flags of the streams that these frames belong to; the others pause.
        """
        if self.model.per_token:
            head: Tensor = self.model.forward_head(self.features(x, active))
            return head
        groups = defaultdict(list)
        for row in self._rows(x, active):
            groups[self.waiting[row]].append(row)
        for rows in groups.values():  # those whose patches fill at the same time
            self._push(x, rows)
        return self.prediction()

    @torch.no_grad()
    def features(self, x: Tensor, active: Iterable[bool] | Tensor | None = None) -> Tensor:
        """Map the next frames to the features of the tokens that they complete, (active streams,
        frames of tokens, *grid, embed_dim)."""
        rows = self._rows(x, active)
        if len({self.waiting[row] for row in rows}) > 1:
            raise ValueError(
                f"active={rows}: {self.waiting} frames wait for their patches to fill, so these "
                "streams complete different numbers of tokens; give them apart"
            )
        return self._push(x, rows)

    @torch.no_grad()
    def prediction(self) -> Tensor:
        """Return (batch, num_classes) from all frames so far, by the mean over tokens."""
        mean = self.state.total / self.state.tokens.clamp(min=1)[:, None]
        out: Tensor = self.model.head(mean.to(self.model._weight.dtype))
        return out

    @torch.no_grad()
    def finish(self, active: Iterable[bool] | Tensor | None = None) -> Tensor:
        """Return the prediction including frames that wait for their patch to fill, padded with
        zeros as a whole clip is. Then reset these streams."""
        cells = self.state.cells
        for row in self._rows(None, active):
            if self.waiting[row] and cells is not None:
                missing = cells.shape[2] + 1 - self.waiting[row]
                self._push(cells.new_zeros(*cells.shape[:2], missing, *cells.shape[3:]), [row])
        out = self.prediction()
        self.reset(active)
        return out

    def reset(self, active: Iterable[bool] | Tensor | None = None) -> None:
        """Reset the active streams to the state before their first frame."""
        rows = self._rows(None, active)
        if len(rows) == self.batch_size:
            self.state = self.model.init_state(self.batch_size)
        else:
            self._put(self._fresh(len(rows)), rows)
        for row in rows:
            self.waiting[row] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers, for `torch.save` and `torch.load` with weights_only=True."""
        names, state = self.state._fields, clone(self.state)  # the next frame may overwrite it
        return {
            **dict(zip(names, state, strict=True)),
            "waiting": list(self.waiting),
            "layers": [tree_leaves(memory) for memory in state.layers],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from another stream's `state_dict`, on the model's device."""
        device, space = self.model._weight.device, saved["space"]
        fresh = () if space is None else _first(self.model, 1, tuple(space), device)["layers"]
        if len(saved["layers"]) != len(fresh) or len(saved["waiting"]) != self.batch_size:
            raise ValueError(
                f"a state of {len(saved['layers'])} layers and {len(saved['waiting'])} streams: "
                f"expected {len(fresh)} and {self.batch_size}"
            )
        kinds = [tree_structure(memory) for memory in fresh]
        layers = tuple(map(tree_unflatten, saved["layers"], kinds))
        self.waiting = list(saved["waiting"])
        state = StreamState(**{**saved, "layers": layers, "waiting": 0})
        self.state = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, state)

    def _rows(self, x: Tensor | None, active: Iterable[bool] | Tensor | None) -> list[int]:
        if x is not None:
            check_tensors(input=x)
        flags = [True] * self.batch_size if active is None else [bool(a) for a in active]
        if len(flags) != self.batch_size or (x is not None and x.shape[0] != self.batch_size):
            raise ValueError(
                f"{len(flags)} flags in active, input of {'?' if x is None else x.shape[0]} "
                f"samples: expected {self.batch_size}"
            )
        return [row for row, flag in enumerate(flags) if flag]

    def _push(self, x: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == self.batch_size:
            out, self.state = self._advance(x, self._part(self.state, rows))
            self.waiting = [self.state.waiting] * self.batch_size
            return out
        if self.state.frames.device != x.device:
            raise ValueError(f"input on {x.device}, the stream on {self.state.frames.device}")
        part = self._part(tree_map(lambda s: s[rows] if isinstance(s, Tensor) else s, self.state), rows)
        out, part = advance(self.model, x[rows], part)
        self._put(part, rows)
        for row in rows:
            self.waiting[row] = part.waiting
        return out

    def _advance(self, x: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        # the sizes of slabs come from other processes, or with the chunk
        replayed = x.is_cuda and state.space is not None and not is_sharded()
        graphs = self.graphs if replayed else None
        if graphs is None or torch.cuda.is_current_stream_capturing():
            return advance(self.model, x, state)
        places = tuple(weight.data_ptr() for weight in self.parameters)
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        out: tuple[Tensor, StreamState] = graphs((places, cast, self.model.training), x, state)
        return out

    def _uncached(self, x: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """Call `advance` without autocast's cache: a weight that was cast before a capture would
        not be cast again in the replays."""
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            return advance(self.model, x, state)

    def _part(self, state: StreamState, rows: list[int]) -> StreamState:
        return state._replace(waiting=self.waiting[rows[0]] if rows else 0)

    def _fresh(self, n: int) -> StreamState:
        """Return the state of `n` new streams, with all tensors that the other streams have."""
        fresh: StreamState = self.model.init_state(n)
        cells, space = self.state.cells, self.state.space
        if cells is not None:
            fresh = fresh._replace(cells=cells.new_zeros(n, *cells.shape[1:]))
        if space is not None:
            first = _first(self.model, n, space, self.state.frames.device)
            fresh = fresh._replace(space=space, **first)
        return fresh

    def _put(self, part: StreamState, rows: list[int]) -> None:
        def put(whole: Any, some: Any) -> Any:
            if not isinstance(some, Tensor):
                return whole
            whole = some.new_zeros(self.batch_size, *some.shape[1:]) if whole is None else whole
            index = torch.tensor(rows, dtype=torch.int64, device=some.device)
            return whole.index_copy(0, index, some.to(whole.dtype))

        old = self.state
        if old.space is None and part.space is not None:
            device = part.frames.device
            first = _first(self.model, self.batch_size, part.space, device)
            old = old._replace(space=part.space, **first)
        layers = tuple(tree_map(put, memory, new) for memory, new in zip(old.layers, part.layers, strict=True))
        self.state = StreamState(
            put(old.frames, part.frames),
            0,
            put(old.cells, part.cells),
            old.space,
            put(old.tpe, part.tpe),
            layers,
            put(old.total, part.total),
            put(old.tokens, part.tokens),
        )

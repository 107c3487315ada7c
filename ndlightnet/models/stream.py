"""Streams: run a causal network frame by frame, with a state that does not grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from ndlightnet.models.cuda_graphs import Graphs, clone
from ndlightnet.nn.initial import Space
from ndlightnet.ops.dtypes import check_tensors
from ndlightnet.parallel import is_sharded


class StreamState(NamedTuple):
    """State of a causal network after the frames so far, with a row for each sample."""

    frames: Tensor  # (batch,) int64: frames of tokens so far
    waiting: int  # frames of cells that wait for their patch to fill
    cells: Tensor | None  # (batch, channels, patch - 1, *space), the waiting ones first
    space: Space | None  # shape of a frame of tokens, None before the first one
    tpe: Tensor | None  # (batch, *space, embed_dim, states), None before the first frame
    layers: tuple[Any, ...]  # state of each mixer, such as an attention State
    total: Tensor  # (batch, embed_dim): sum of all features so far
    tokens: Tensor  # (batch,) number of tokens in `total`

    def fill_patches(self, x: Tensor, patch: int) -> tuple[Tensor, StreamState]:
        """Return the whole patches of `patch` frames of the waiting cells and x (batch, channels,
        frames, *space), and the state in which the frames after them wait."""
        cells = x.new_zeros(*x.shape[:2], patch - 1, *x.shape[3:]) if self.cells is None else self.cells
        if cells.shape[3:] != x.shape[3:]:
            raise ValueError(f"frames of {tuple(x.shape[3:])}: expected {tuple(cells.shape[3:])} as before")
        x = torch.cat([cells[:, :, : self.waiting].to(x.dtype), x], 2)
        waiting = x.shape[2] % patch
        end = x.shape[2] - waiting
        cells = torch.cat([x[:, :, end:], cells[:, :, waiting:].to(x.dtype)], 2)
        return x[:, :, :end], self._replace(waiting=waiting, cells=cells)


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
            return self.model.forward_head(self.features(x, active))
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
        return self.model.head(mean.to(self.model._weight.dtype))

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
        fresh = () if space is None else self.model.frame_states(1, tuple(space), device)["layers"]
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
            out, self.state = self._advance(x, self._waiting(self.state, rows))
            self.waiting = [self.state.waiting] * self.batch_size
            return out
        if self.state.frames.device != x.device:
            raise ValueError(f"input on {x.device}, the stream on {self.state.frames.device}")
        active = self._waiting(tree_map(lambda s: s[rows] if isinstance(s, Tensor) else s, self.state), rows)
        out, active = self.model.advance(x[rows], active)
        self._put(active, rows)
        for row in rows:
            self.waiting[row] = active.waiting
        return out

    def _advance(self, x: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        # the sizes of slabs come from other processes, or with the chunk
        replayed = x.is_cuda and state.space is not None and not is_sharded()
        graphs = self.graphs if replayed else None
        if graphs is None or torch.cuda.is_current_stream_capturing():
            return self.model.advance(x, state)
        places = tuple(weight.data_ptr() for weight in self.parameters)
        cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        out: tuple[Tensor, StreamState] = graphs((places, cast, self.model.training), x, state)
        return out

    def _uncached(self, x: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """Call `advance` without autocast's cache: a weight that was cast before a capture would
        not be cast again in the replays."""
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
            return self.model.advance(x, state)

    def _waiting(self, state: StreamState, rows: list[int]) -> StreamState:
        return state._replace(waiting=self.waiting[rows[0]] if rows else 0)

    def _fresh(self, n: int) -> StreamState:
        """Return the state of `n` new streams, with all tensors that the other streams have."""
        fresh: StreamState = self.model.init_state(n)
        cells, space = self.state.cells, self.state.space
        if cells is not None:
            fresh = fresh._replace(cells=cells.new_zeros(n, *cells.shape[1:]))
        if space is not None:
            first = self.model.frame_states(n, space, self.state.frames.device)
            fresh = fresh._replace(space=space, **first)
        return fresh

    def _put(self, new: StreamState, rows: list[int]) -> None:
        """Write the state of some streams into that of all."""

        def put(old: Any, new: Any) -> Any:
            if not isinstance(new, Tensor):
                return old
            old = new.new_zeros(self.batch_size, *new.shape[1:]) if old is None else old
            index = torch.tensor(rows, dtype=torch.int64, device=new.device)
            return old.index_copy(0, index, new.to(old.dtype))

        old = self.state
        if old.space is None and new.space is not None:
            first = self.model.frame_states(self.batch_size, new.space, new.frames.device)
            old = old._replace(space=new.space, **first)
        layers = tuple(tree_map(put, *pair) for pair in zip(old.layers, new.layers, strict=True))
        names = ("frames", "cells", "tpe", "total", "tokens")
        rest = {name: put(getattr(old, name), getattr(new, name)) for name in names}
        self.state = old._replace(waiting=0, layers=layers, **rest)

"""Functions of tensors and steps of streams from CUDA graphs: one launch, not thousands from Python."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
T = TypeVar("T")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for captures: cuBLAS allocates a workspace for every stream."""
    return torch.cuda.Stream(device)


def capture(
    call: Callable[[], T],
    warm_up: Callable[[], object],
    device: torch.device,
    before: torch.cuda.CUDAGraph | None = None,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a CUDA graph of a call, and its result, which every replay overwrites. `warm_up` runs before, three
    times: kernels compile and workspaces are made outside a capture. before: a graph that is always replayed before
    this one, whose memory it reads and shares."""
    graph, current, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), _stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(3):
            warm_up()
    gc.collect()  # freeing an old graph while this one is captured would end the capture
    # what other threads do meanwhile, such as pinning memory, would end a "global" capture
    pool = None if before is None else before.pool()
    with torch.cuda.graph(graph, pool, stream=stream, capture_error_mode="thread_local"):
        result = call()
    current.wait_stream(stream)
    return graph, result


class Replay:
    """A function of tensors, such as a whole step of training, replayed from a CUDA graph; without a GPU it is called.

    The graph has all that the function does on the GPU, exchanges of `shard_grid` included, and must not wait for the
    GPU. It is made by calling the function three times, and what these calls change stays. Random numbers are drawn
    anew in every replay; an optimizer has to be `capturable`, and autocast not to cache weights.

    inputs: of the shapes that later ones have, and the memory that these are copied into.

        replay = Replay(step, x, label)
        loss = replay(next_x, next_label)  # until the next replay, which overwrites it
    """

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.function, self.inputs = function, inputs
        self.graph: torch.cuda.CUDAGraph | None = None
        if inputs[0].is_cuda:
            self.graph, self.output = capture(self.again, self.again, inputs[0].device)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Call the function on inputs; of fewer samples, the rest are those of the call before."""
        for i, (fixed, x) in enumerate(zip(self.inputs, inputs, strict=True)):
            if x.ndim != fixed.ndim or x.shape[1:] != fixed.shape[1:] or x.shape[:1] > fixed.shape[:1]:
                raise ValueError(f"inputs[{i}] {tuple(x.shape)}: expected {tuple(fixed.shape)}, or fewer samples")
        for fixed, x in zip(self.inputs, inputs, strict=True):
            (fixed[: len(x)] if x.ndim else fixed).copy_(x)
        return self.again()

    def again(self) -> Tensor:
        """Call the function on the inputs of the last call."""
        if self.graph is None:
            return self.function(*self.inputs)
        self.graph.replay()
        return self.output


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    x: Tensor
    output: Tensor
    state: Any


def clone(state: Any) -> Any:
    """Copy a state into new tensors."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)


class Graphs:
    """`step(x, state) -> (output, state)`, replayed from a CUDA graph where the same kind of input comes again.

    All graphs share one state, whose tensors every replay overwrites: `clone` what must stay.
    """

    most = 8  # graphs that are held: the most recently used ones

    def __init__(self, step: Step) -> None:
        self.step = step
        self.state: Any = None
        self.captured: dict[Any, Captured | None] = {}  # None: input met once, no graph yet

    def __call__(self, key: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Run or replay a step. key: what it depends on besides `x` and `state`."""
        # tensors that are made in inference mode could not be written outside it
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(x.device):
            if self.state is None or _kinds(self.state) != _kinds(state):
                self.state, self.captured = clone(state), {}
            numbers = (leaf for leaf in tree_leaves(state) if not isinstance(leaf, Tensor))
            key = (key, x.shape, x.dtype, *numbers)
            if key not in self.captured:
                self.captured[key] = None
                if len(self.captured) > self.most:
                    del self.captured[next(iter(self.captured))]
                return self.step(x, state)
            self._write(state)
            captured = self.captured.pop(key) or self._capture(x, state)
            self.captured[key] = captured
            captured.x.copy_(x)
            captured.graph.replay()
            return captured.output.clone(), captured.state

    def _write(self, state: Any) -> None:
        held = [leaf for leaf in tree_leaves(self.state) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        storages = {leaf.untyped_storage().data_ptr() for leaf in held}
        # copies of views of tensors that would be overwritten before the views are read
        tensors = [
            leaf.clone() if all(leaf is not m for m in held) and leaf.untyped_storage().data_ptr() in storages else leaf
            for leaf in tensors
        ]
        for into, leaf in zip(held, tensors, strict=True):
            if into is not leaf:
                into.copy_(leaf)

    def _capture(self, x: Tensor, state: Any) -> Captured:
        x, state = x.clone(), _laid_over(state, self.state)

        def step() -> tuple[Tensor, Any]:
            output, after = self.step(x, state)
            if _kinds(after) != _kinds(state):
                raise RuntimeError("a step of a stream changed the shapes or dtypes of its state")
            self._write(after)
            return output, after

        graph, (output, after) = capture(step, lambda: self.step(x, state), x.device)
        return Captured(graph, x, output, _laid_over(after, self.state))


def _kinds(state: Any) -> list[Any]:
    """Return shapes, dtypes and devices of all tensors."""
    leaves = tree_leaves(state)
    return [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in leaves]


def _laid_over(state: Any, tensors: Any) -> Any:
    """Return `state` with its tensors replaced by those of `tensors`."""
    leaves = iter([leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)])
    return tree_map(lambda x: next(leaves) if isinstance(x, Tensor) else x, state)

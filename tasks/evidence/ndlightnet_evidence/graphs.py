"""Training steps from CUDA graphs: small networks take more time in Python than on the card."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from ndlightnet.training.core.optim import decayed_groups


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for captures: cuBLAS allocates a workspace for every stream."""
    return torch.cuda.Stream(device)


class Replay:
    """A function of fixed tensors, replayed from a CUDA graph if there is a card. The function is
    called three times before the capture; these calls must have no effect on later ones."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        self.function, self.inputs = function, inputs
        self.graph = torch.cuda.CUDAGraph() if inputs[0].is_cuda else None
        if self.graph is None:
            return
        current, device = torch.cuda.current_stream(), inputs[0].device
        # the default stream cannot be captured
        stream = _aside(device) if current == torch.cuda.default_stream() else current
        stream.wait_stream(current)
        gc.collect()  # freeing an old graph while this one is captured would end the capture
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*inputs)
            # torch.cuda.graph would first wait for all streams. A loader's thread that pins memory
            # meanwhile would end a "global" capture.
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.output = function(*inputs)
            finally:
                self.graph.capture_end()
        current.wait_stream(stream)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine[: len(given)].copy_(given)
        if self.graph is None:
            return self.function(*self.inputs)
        self.graph.replay()
        return self.output


class Steps:
    """Steps of AdamW on `loss(*inputs)` with clipped gradients, replayed from one CUDA graph for
    each shape of inputs."""

    def __init__(
        self, net: nn.Module, loss: Callable[..., Tensor], weight_decay: float, clip: float
    ) -> None:
        self.net, self.loss, self.clip = net, loss, clip
        device = next(net.parameters()).device
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            decayed_groups(net, weight_decay), lr=self.rate, capturable=device.type == "cuda"
        )
        self.replays: dict[tuple[torch.Size, ...], Replay] = {}

    def __call__(self, rate: float, *inputs: Tensor) -> Tensor:
        """Do a step and return the loss before it. The next step overwrites this tensor."""
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.replays:
            self.replays[shapes] = self._prepare(inputs)
        self.rate.fill_(rate)
        return self.replays[shapes](*inputs)

    def _prepare(self, inputs: tuple[Tensor, ...]) -> Replay:
        """Capture a step. Its calls change nothing: the rate is 0, and the moments are restored."""
        state = self.optimizer.state
        kept = {p: {k: v.clone() for k, v in values.items()} for p, values in state.items()}
        self.rate.zero_()
        replay = Replay(self._step, *(x.clone() for x in inputs))
        for p, values in state.items():
            for name, value in values.items():
                value.copy_(kept[p][name]) if p in kept else value.zero_()
        return replay

    def _step(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        value = self.loss(*inputs)
        value.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        return value.detach()

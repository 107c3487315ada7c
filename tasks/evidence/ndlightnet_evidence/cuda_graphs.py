"""Training steps from CUDA graphs, and their time: small networks take more time in Python than on the card."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet import Replay
from ndlightnet.training.core.optim import decayed_groups


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes, with what the card does for it."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


class Steps:
    """Steps of AdamW on `loss(*inputs)` with clipped gradients, replayed from one CUDA graph for each shape of inputs.

    decay: of an exponential average of the weights and buffers, held by the network `averaged`, as
    a function of the step. None: `averaged` is the network itself.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[..., Tensor],
        weight_decay: float,
        clip: float,
        decay: Callable[[int], float] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.net, self.loss, self.clip, self.decay = net, loss, clip, decay
        device = next(net.parameters()).device
        self.rate, self.weight = torch.zeros((2,), device=device).unbind()
        self.averaged = deepcopy(net).requires_grad_(False) if decay else net
        self.done = 0
        self.optimizer = torch.optim.AdamW(
            decayed_groups(net, weight_decay), lr=self.rate, betas=betas, capturable=device.type == "cuda"
        )
        self.replays: dict[tuple[torch.Size, ...], Replay] = {}

    def __call__(self, rate: float, *inputs: Tensor) -> Tensor:
        """Do a step and return the loss before it. The next step overwrites this tensor."""
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.replays:
            self.replays[shapes] = self._prepare(inputs)
        self.rate.fill_(rate)
        if self.decay is not None:
            self.weight.fill_(1 - self.decay(self.done))
        self.done += 1
        return self.replays[shapes](*inputs)

    def _prepare(self, inputs: tuple[Tensor, ...]) -> Replay:
        """Capture a step. Its calls change nothing: the rates are 0, moments and buffers are restored."""
        state, buffers = self.optimizer.state, list(self.net.buffers())
        moments = {p: {k: v.clone() for k, v in values.items()} for p, values in state.items()}
        copies = [x.clone() for x in buffers]
        self.rate.zero_()
        self.weight.zero_()
        replay = Replay(self._step, *(x.clone() for x in inputs))
        for p, values in state.items():
            for name, value in values.items():
                value.copy_(moments[p][name]) if p in moments else value.zero_()
        for buffer, value in zip(buffers, copies, strict=True):
            buffer.copy_(value)
        return replay

    def _step(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        value = self.loss(*inputs)
        value.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        if self.decay is not None:
            self._move_average()
        return value.detach()

    @torch.no_grad()
    def _move_average(self) -> None:
        mean = self._floats(self.averaged)
        change = torch._foreach_sub(self._floats(self.net), mean)
        torch._foreach_mul_(change, self.weight)
        torch._foreach_add_(mean, change)

    @staticmethod
    def _floats(net: nn.Module) -> list[Tensor]:
        return [x for x in (*net.parameters(), *net.buffers()) if x.is_floating_point()]

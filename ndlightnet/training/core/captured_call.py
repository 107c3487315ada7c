"""What training calls, forward and backward, from CUDA graphs. Its gradients lie in one tensor, so that no node of
autograd, norm or fill for each parameter takes longer in Python than small networks on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ndlightnet.models.cuda_graphs import capture
from ndlightnet.training.core.costs import Meter

ALIGNED = 16  # numbers, of which each gradient begins at a multiple: kernels read several at once


class CapturedCall:
    """The call of a module with inputs of some shapes; its backward sets the gradients of the module's parameters.

    call: calls the module. inputs: like those of later calls. What is returned, and the gradients, which are not added
    to others, are overwritten by the next call.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self.inputs, self.call, device = [x.clone() for x in inputs], call, inputs[0].device
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.anchor = torch.ones((), device=device, requires_grad=True)  # its presence makes outputs need a gradient
        self.outputs: list[Tensor] = []
        self.roots: list[Tensor] = []  # outputs that need a gradient
        self.grads: list[Tensor | None] = []
        self.flats: list[Tensor] = []  # all gradients, of each dtype
        self.douts: list[Tensor] = []
        meter = Meter(device)
        self.forward_graph, _ = capture(self._forward, self._warm_up, device)
        self.backward_graph, _ = capture(self._backward, lambda: None, device, self.forward_graph)
        self.activations = meter.read()[1] - Meter(device).read()[1]  # bytes that the peak of a replay is without
        self.needed = [y.requires_grad for y in self.outputs]
        self.outputs, self.roots = [y.detach() for y in self.outputs], []  # without their graph of autograd

    @property
    def shapes(self) -> list[torch.Size]:
        return [x.shape for x in self.inputs]

    def __call__(self, *inputs: Tensor) -> Any:
        leaves = _Replayed.apply(self, self.anchor, *inputs)  # type: ignore[no-untyped-call]
        return tree_unflatten(list(leaves), self.spec)

    def clip(self, norm: float) -> None:
        """Scale the gradients down to this norm, as torch.nn.utils.clip_grad_norm_ does."""
        total = torch.nn.utils.get_total_norm(self.flats)
        for flat in self.flats:
            flat.mul_((norm / (total + 1e-6)).clamp(max=1).to(flat.dtype))

    def _forward(self) -> None:
        self.outputs, self.spec = tree_flatten(self.call(*self.inputs))
        self.roots = [y for y in self.outputs if y.requires_grad]

    def _gradients(self) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(self.roots, self.parameters, self.douts, allow_unused=True)  # such as a head

    def _warm_up(self) -> None:
        self._forward()
        if not self.douts:
            self.douts = [torch.zeros_like(y) for y in self.roots]
        grads = self._gradients()
        if not self.flats:
            self._lay_out([g is not None for g in grads])

    def _lay_out(self, used: Sequence[bool]) -> None:
        views: dict[int, Tensor] = {}
        for dtype in {p.dtype for p in self.parameters}:
            members = [p for p, u in zip(self.parameters, used, strict=True) if u and p.dtype == dtype]
            sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in members]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self.anchor.device)
            for p, part in zip(members, flat.split(sizes), strict=True):
                strides = torch.empty_like(p, device="meta").stride()  # AdamW wants those of the parameter
                views[id(p)] = part.as_strided(p.shape, strides, part.storage_offset())
            if members:
                self.flats.append(flat)
        self.grads = [views.get(id(p)) for p in self.parameters]

    def _backward(self) -> None:
        pairs = zip(self.grads, self._gradients(), strict=True)
        places, grads = zip(*[(g, new) for g, new in pairs if g is not None and new is not None], strict=True)
        torch._foreach_copy_(places, grads)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: CapturedCall, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        for fixed, x in zip(captured.inputs, inputs, strict=True):
            fixed.copy_(x)
        captured.forward_graph.replay()
        ctx.captured = captured
        outputs = tuple(y.detach() for y in captured.outputs)
        ctx.mark_non_differentiable(*(y for y, needed in zip(outputs, captured.needed, strict=True) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[None, ...]:
        captured = ctx.captured
        needed = [dout for dout, need in zip(douts, captured.needed, strict=True) if need]
        for fixed, dout in zip(captured.douts, needed, strict=True):
            fixed.copy_(dout)
        captured.backward_graph.replay()
        for p, grad in zip(captured.parameters, captured.grads, strict=True):
            p.grad = grad
        return (None,) * (2 + len(captured.inputs))

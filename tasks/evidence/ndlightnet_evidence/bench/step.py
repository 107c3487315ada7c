"""Benchmark of a training step of NDLightNet-S at 32,768 tokens: time, its parts, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet.layout import Grid
from ndlightnet.models import NDLightNet
from ndlightnet.nn.mixers import LightNetAttention, SoftmaxAttention
from ndlightnet.ops import global_attention
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.rows import Bench, Case
from ndlightnet_evidence.bench.timing import Call, backward_call

PATCH, COMPILED, ALONE = (2, 16, 16), ", blocks compiled", ", without local mixing"


def step(bench: Bench, grid: tuple[int, int, int] = (32, 32, 32), dim: int = 384, depth: int = 12) -> None:
    """Time a step on one clip, weights in float32, autocast to bf16, AdamW; then the parts that the
    kernels speed up: attention (with MD-LRPE) and MD-TPE, forward and backward, as in the step."""
    tokens = grid[0] * grid[1] * grid[2]
    case = Case("training step", 1, tokens, dim // 64, 64)
    mixer = partial(LightNetAttention, impl=bench.impl)
    network = partial(NDLightNet, 3, num_classes=400, patch_size=PATCH, embed_dim=dim, depth=depth)

    def timed(row: str, who: str, prepare: Callable[[], list[Call]]) -> float | None:
        return bench.measure(case._replace(row=row), "fwd+bwd", who, prepare)

    def whole(who: str, mixer: Callable[[int], nn.Module], more: str = "") -> float | None:
        def prepare() -> list[Call]:
            model = network(mixer=mixer).to(bench.device)
            if more == COMPILED:
                torch.compiler.reset()
                for block in model.blocks:  # blocks are alike: compiled once for all
                    block.compile(dynamic=False)
            clip = torch.randn(1, 3, *(n * p for n, p in zip(grid, PATCH, strict=True)))
            work, backward = training(model, clip.to(bench.device))
            memory(bench, f"training step{more}, {who}", backward, tokens)
            return [work]

        return timed(f"training step{more}", who, prepare)

    total = whole("ours", mixer)
    alone = whole("ours", partial(mixer, local=None), ALONE)
    if total and alone:
        bench.facts["local mixing, share of the step"] = (total - alone) / total
    whole("softmax", SoftmaxAttention)
    whole("fla lightnet", peers.FlaMixer)
    fused = whole("ours", mixer, COMPILED)
    model = network(mixer=mixer).to(bench.device)
    kernels = [
        timed("its attention", "ours", lambda: [attention(model, grid)]),
        timed("its MD-TPE", "ours", lambda: [position(model, grid)]),
        timed("its local mixing", "ours", lambda: [neighbours(model, grid)]),
    ]
    for name, whole_ms in (("", total), (COMPILED, fused)):
        if whole_ms and all(kernels):
            share = sum(ms or 0 for ms in kernels) / whole_ms
            bench.facts[f"mixing and position, share of the step{name}"] = share


def training(model: nn.Module, clip: Any) -> tuple[Call, Call]:
    """Return `updates` of a classifier. clip: a batch, packed or not."""
    target = torch.zeros(len(clip), dtype=torch.long, device=next(model.parameters()).device)
    return updates(model, lambda: cross_entropy(model(clip), target))


def updates(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Call, Call]:
    """Return calls of (a step with AdamW, its forward and backward pass) in bf16."""
    device = next(model.parameters()).device
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_cuda or None, capturable=on_cuda)

    def backward() -> None:
        # the cache of cast weights must not outlive a capture
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            value = loss()
        value.backward()

    def work() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return work, backward


def memory(bench: Bench, name: str, backward: Call, tokens: int) -> None:
    """Record the peak memory of the forward and backward pass above weights and gradients."""
    if used := peak(backward, bench.device):
        bench.facts[f"{name}: peak kB a token"] = used / tokens / 1e3


def peak(call: Call, device: torch.device) -> float | None:
    """Return the peak bytes of a call beyond what was allocated before; None without CUDA."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def attention(model: NDLightNet, grid: tuple[int, ...]) -> Call:
    """Return a call of all layers' attention, on separate inputs, with gradients of the angles."""
    calls = []
    block: Any
    for block in model.blocks:
        mixer = block.mixer
        lrpe = mixer.lrpe(grid)
        theta = lrpe.theta.detach().requires_grad_()
        shape = (1, grid[0] * grid[1] * grid[2], mixer.heads, mixer.head_dim)
        q, k, v = (torch.randn(shape, device=theta.device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))

        def run(q: Tensor, k: Tensor, v: Tensor, theta: Tensor, lrpe: Any = lrpe, mixer: Any = mixer) -> Tensor:
            return global_attention(q, k, v, position=lrpe._replace(theta=theta), impl=mixer.impl)

        calls.append(backward_call(run, (q, k, v, theta)))
    return lambda: [call() for call in calls]


def neighbours(model: NDLightNet, grid: tuple[int, ...]) -> Call:
    """Return a call of all layers' local mixing, on separate inputs."""
    calls = []
    block: Any
    for block in model.blocks:
        local = block.mixer.local_values
        x = torch.randn(1, grid[0] * grid[1] * grid[2], model.embed_dim, dtype=torch.bfloat16)
        x = x.to(local.weight.device).requires_grad_()
        calls.append(backward_call(lambda x, _, local=local: local(x, Grid(grid)), (x, local.weight)))
    return lambda: [call() for call in calls]


def position(model: NDLightNet, grid: tuple[int, ...]) -> Call:
    """Return a call of MD-TPE on the residual stream, which is in float32."""
    tpe = model.tpe
    assert tpe is not None
    weights = list(tpe.parameters())
    x = torch.randn(1, *grid, model.embed_dim, device=weights[0].device).requires_grad_()
    return backward_call(lambda x, *_: tpe(x), (x, *weights))

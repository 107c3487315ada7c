"""Times of whole networks: steps of NDLightNet, also on a pack; a diffusion transformer; video frame by frame."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._pytree import tree_leaves

from ndlightnet.layout import Grid, Packed, Ragged
from ndlightnet.models import NDLightDiT, NDLightNet
from ndlightnet.nn.mixers import Identity, LightNetAttention, SoftmaxAttention, WithLocal
from ndlightnet.ops import global_attention
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench import rival_kernels
from ndlightnet_evidence.bench.rows import Bench, Case
from ndlightnet_evidence.bench.timing import Call, backward_call

PATCH, COMPILED, ALONE = (2, 16, 16), ", blocks compiled", ", without local mixing"
SIDES, BATCH, CLASSES = (32, 64, 128), 256, 10  # a batch of 32 x 32 pixels; of larger ones fewer
RECENT, WINDOWS = 16, {"": None, ", window 16": 16}  # frames
FACT = "memory in MB after frames:"


# ----------------------------------------------------------------------------------------- calls
def updates(net: nn.Module, loss: Callable[[], Tensor]) -> tuple[Call, Call]:
    """Return calls of (a step with AdamW, its forward and backward pass) in bf16."""
    device = next(net.parameters()).device
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(net.parameters(), fused=on_cuda or None, capturable=on_cuda)

    def backward() -> None:
        with autocast(device):
            value = loss()
        value.backward()

    def work() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return work, backward


def training(net: nn.Module, clip: Any) -> tuple[Call, Call]:
    """Return `updates` of a classifier. clip: a batch, packed or not."""
    target = torch.zeros(len(clip), dtype=torch.long, device=next(net.parameters()).device)
    return updates(net, lambda: cross_entropy(net(clip), target))


def prediction(run: Callable[..., Any], device: torch.device, *inputs: Any) -> Call:
    def work() -> Any:
        with torch.no_grad(), autocast(device):
            return run(*inputs)

    return work


def autocast(device: torch.device) -> torch.autocast:
    # the cache of cast weights must not outlive a capture
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def record_memory(bench: Bench, name: str, backward: Call, tokens: int) -> None:
    """Record the peak memory of the forward and backward pass above weights and gradients."""
    if bench.device.type == "cuda":
        backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward()
        torch.cuda.synchronize()
        bench.facts[f"{name}: peak kB a token"] = (torch.cuda.max_memory_allocated() - before) / tokens / 1e3


# ------------------------------------------------------------------------------------ NDLightNet
def step(bench: Bench, grid: tuple[int, int, int] = (32, 32, 32), dim: int = 384, depth: int = 12) -> None:
    """Time a step of NDLightNet-S on one clip, weights in float32, autocast to bf16, AdamW; then the parts that the
    kernels speed up: attention (with MD-LRPE) and MD-TPE, forward and backward, as in the step."""
    tokens = math.prod(grid)
    mixer = partial(LightNetAttention, impl=bench.impl)
    network = partial(NDLightNet, 3, num_classes=400, patch_size=PATCH, embed_dim=dim, depth=depth)

    def timed(row: str, who: str, prepare: Callable[[], list[Call]]) -> float | None:
        return bench.measure(Case(row, 1, tokens, dim // 64, 64), "fwd+bwd", who, prepare)

    def time_step(who: str, mixer: Callable[[int], nn.Module], more: str = "") -> float | None:
        def prepare() -> list[Call]:
            net = network(mixer=mixer).to(bench.device)
            if more == COMPILED:
                torch.compiler.reset()
                for block in net.blocks:  # blocks are alike: compiled once for all
                    block.compile(dynamic=False)
            clip = torch.randn(1, 3, *(n * p for n, p in zip(grid, PATCH, strict=True)))
            work, backward = training(net, clip.to(bench.device))
            record_memory(bench, f"training step{more}, {who}", backward, tokens)
            return [work]

        return timed(f"training step{more}", who, prepare)

    total = time_step("ours", mixer)
    alone = time_step("ours", partial(mixer, local=None), ALONE)
    if total and alone:
        bench.facts["local mixing, share of the step"] = (total - alone) / total
    time_step("softmax", SoftmaxAttention)
    time_step("fla lightnet", rival_kernels.FlaMixer)
    fused = time_step("ours", mixer, COMPILED)
    net = network(mixer=mixer).to(bench.device)
    kernels = [
        timed("its attention", "ours", lambda: [in_turn(attention_call(block.mixer, grid) for block in net.blocks)]),
        timed("its MD-TPE", "ours", lambda: [position_call(net, grid)]),
        timed("its local mixing", "ours", lambda: [in_turn(local_call(block.mixer, grid) for block in net.blocks)]),
    ]
    for name, ms in (("", total), (COMPILED, fused)):
        if ms and all(kernels):
            share = sum(kernel or 0 for kernel in kernels) / ms
            bench.facts[f"mixing and position, share of the step{name}"] = share


def in_turn(calls: Iterable[Call]) -> Call:
    work = list(calls)
    return lambda: [call() for call in work]


def attention_call(mixer: Any, grid: tuple[int, ...]) -> Call:
    """Return a call of a layer's attention, with gradients of the angles."""
    position = mixer.lrpe(grid)
    theta = position.theta.detach().requires_grad_()
    shape = (1, math.prod(grid), mixer.heads, mixer.head_dim)
    qkv = [torch.randn(shape, device=theta.device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def run(q: Tensor, k: Tensor, v: Tensor, theta: Tensor) -> Tensor:
        return global_attention(q, k, v, position=position._replace(theta=theta), impl=mixer.impl)

    return backward_call(run, (*qkv, theta))


def local_call(mixer: Any, grid: tuple[int, ...]) -> Call:
    local = mixer.local_values
    x = torch.randn(1, math.prod(grid), local.weight.shape[-1], dtype=torch.bfloat16)
    x = x.to(local.weight.device).requires_grad_()
    return backward_call(lambda x, _: local(x, Grid(grid)), (x, local.weight))


def position_call(net: NDLightNet, grid: tuple[int, ...]) -> Call:
    """Return a call of MD-TPE on the residual stream, which is in float32."""
    tpe = net.tpe
    assert tpe is not None
    weights = list(tpe.parameters())
    x = torch.randn(1, *grid, net.embed_dim, device=weights[0].device).requires_grad_()
    return backward_call(lambda x, *_: tpe(x), (x, *weights))


def pack_step(bench: Bench, shapes: Sequence[tuple[int, ...]], dim: int = 384) -> None:
    """Time forward and backward of a network with one cell a token, packed against dense."""
    layout = Ragged(shapes)
    side = round((layout.length / len(layout)) ** (1 / 3))
    mixer = partial(LightNetAttention, impl=bench.impl)
    for who in ("ours", "dense"):
        tokens = layout.length if who == "ours" else len(layout) * side**3

        def prepare(who: str = who, tokens: int = tokens) -> list[Call]:
            net = NDLightNet(3, 1, 10, patch_size=1, embed_dim=dim, depth=2, mixer=mixer).to(bench.device)
            x: Any = torch.randn(len(layout), 1, side, side, side, device=bench.device)
            if who == "ours":
                x = Packed(torch.randn(layout.length, 1, device=bench.device), layout)
            _, backward = training(net, x)
            record_memory(bench, f"packs: {who}", backward, tokens)
            return [backward]

        case = Case("network, forward and backward", 1, tokens, dim // 64, 64)
        if ms := bench.measure(case, "fwd+bwd", who, prepare):
            bench.facts[f"packs: {who}, us a token, forward and backward"] = 1e3 * ms / tokens


# ------------------------------------------------------------------------------------ NDLightDiT
def generation(bench: Bench, first: int = BATCH, dim: int = 384, depth: int = 12) -> None:
    """Time NDLightDiT, by default S/2, on batches of as many pixels: weights in float32, autocast
    to bf16. "fwd+bwd" is a step of training with AdamW, "fwd" a step of sampling with guidance,
    which calls the network with and without the class."""
    network = partial(NDLightDiT, 2, 3, CLASSES, embed_dim=dim, depth=depth)
    mixer = partial(LightNetAttention, impl=bench.impl)
    rows: dict[str, Callable[[], nn.Module]] = {
        "ours": partial(network, mixer=mixer),
        "without MD-TPE": partial(network, mixer=mixer, tpe=False),
        "without local": partial(network, mixer=partial(mixer, local=None)),
        "softmax": partial(network, mixer=SoftmaxAttention),
        "softmax + local": partial(network, mixer=partial(WithLocal, mixer=SoftmaxAttention)),
        "identity + local": partial(network, mixer=partial(WithLocal, mixer=Identity)),
    }
    for side in bench.some(SIDES):
        batch = max(1, first * SIDES[0] ** 2 // side**2)
        case = Case(f"generation, {side} x {side}", batch, (side // 2) ** 2, dim // 32, 32)
        for who, make in rows.items():
            for direction in ("fwd+bwd", "fwd"):
                prepare = partial(denoising, direction, make, (batch, 3, side, side), bench.device)
                bench.measure(case, direction, who, prepare)
        bench.save(bench)


def denoising(
    direction: str, make: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device
) -> list[Call]:
    net = make().to(device)
    for weight in net.parameters():
        if not weight.any():  # gates and output begin as 0, and products of zeros are faster
            nn.init.normal_(weight, std=0.02)
    x, t = torch.randn(shape, device=device), 1000 * torch.rand(shape[0], device=device)
    y = torch.randint(CLASSES, shape[:1], device=device)
    if direction == "fwd":
        pairs = torch.cat([x, x]), torch.cat([t, t]), torch.cat([torch.full_like(y, CLASSES), y])
        return [prediction(net.eval(), device, *pairs)]
    target = torch.randn_like(x)
    return [updates(net, lambda: mse_loss(net(x, t, y).float(), target))[0]]


# --------------------------------------------------------------------------------------- streams
def stream(
    bench: Bench, size: int = 224, dim: int = 384, depth: int = 12, frames: int = 100_000, at_once: int = 64
) -> None:
    """Time NDLightNet-S, bf16 autocast, on one video: a frame from the State of those before, and
    the last 16 frames anew. Then record the memory over `frames` frames, `at_once` at a time."""
    tokens = (size // PATCH[1]) ** 2

    def network(window: int | None) -> NDLightNet:
        mixer = partial(LightNetAttention, impl=bench.impl, window=window)
        net = NDLightNet(3, 3, 400, patch_size=(1, 16, 16), embed_dim=dim, depth=depth, mixer=mixer, causal=True)
        return net.to(bench.device).eval()

    def clip(frames: int) -> Tensor:
        return torch.randn(1, 3, frames, size, size, device=bench.device)

    def from_state(window: int | None) -> list[Call]:
        net = network(window)
        _, state = prediction(net.advance, bench.device, clip(RECENT + 1), net.init_state(1))()
        return [prediction(net.advance, bench.device, clip(1), state)]

    ways: dict[str, tuple[int, Callable[[], list[Call]]]] = {
        f"one frame of a stream{more}": (tokens, partial(from_state, window)) for more, window in WINDOWS.items()
    }
    anew = f"the last {RECENT} frames anew"
    ways[anew] = (RECENT * tokens, lambda: [prediction(network(None), bench.device, clip(RECENT))])
    for graph in (True, False):
        for name, (length, prepare) in ways.items():
            row = name + ("" if graph else ", without a graph")
            if ms := bench.measure(Case(row, 1, length, dim // 64, 64), "fwd", "ours", prepare, graph=graph):
                bench.facts[f"frames a second, {row}"] = 1e3 / ms
    for more, window in WINDOWS.items():
        long_stream(bench, network(window), clip(at_once), frames, more)


@torch.no_grad()
def long_stream(bench: Bench, net: NDLightNet, clip: Tensor, frames: int, more: str) -> None:
    """Record the memory in use over `frames` frames: of the card, or of the state on a CPU."""
    flow, done, start = net.stream(), 0, time.monotonic()
    for mark in range(1, 51):
        while done < frames * mark // 50:
            with torch.autocast(bench.device.type, torch.bfloat16):
                flow(clip)
            done += clip.shape[2]
        if bench.device.type == "cuda":
            used = torch.cuda.memory_allocated(bench.device)
        else:
            used = sum(x.nbytes for x in tree_leaves(flow.state_dict()) if torch.is_tensor(x))
        bench.facts[f"{FACT} {done}{more}"] = used / 1e6
    rate = done / (time.monotonic() - start)
    bench.facts[f"frames a second, stream{more}, {clip.shape[2]} frames at once"] = rate


def draw_stream(facts: dict[str, float], path: Path) -> None:
    """Draw the memory in use over frames."""
    points: dict[str, list[tuple[int, float]]] = {}
    for fact, value in facts.items():
        if fact.startswith(FACT):
            number, _, window = fact.removeprefix(FACT).partition(", ")
            points.setdefault(window or "all frames", []).append((int(number), value))
    lines = {
        name: plots.Line([n for n, _ in line], torch.tensor([[mb for _, mb in line]])) for name, line in points.items()
    }
    most = max(value for line in points.values() for _, value in line)
    plots.draw(path, [plots.Panel("frames", lines, ylabel="memory in use, MB", ylim=(0, 1.15 * most))])

"""Times of whole networks: steps of NDLightNet and of a diffusion transformer; video frame by frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._pytree import tree_leaves

from ndlightnet.models import NDLightDiT, NDLightNet
from ndlightnet.nn.mixers import Identity, LightNetAttention, SoftmaxAttention, WithLocal, published_mixer, text_mixer
from ndlightnet.training.language.text_task import TextLoss
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench import rival_kernels
from ndlightnet_evidence.bench.rows import Bench, Case
from ndlightnet_evidence.bench.timing import Call

PATCH, COMPILED, CLASSES = (2, 16, 16), ", blocks compiled", 10
WINDOWS = {"all frames": None, "window 16": 16}
SIZES = {"45 M": (512, 6, 2**17), "385 M": (1024, 26, 2**15)}  # of language models: width, depth, tokens in a batch
LENGTHS = (2048, 16384, 131072)  # of their windows
TEXT_MIXERS: dict[str, Callable[[int], nn.Module]] = {
    "ours": text_mixer,
    "as published": published_mixer,
    "softmax": SoftmaxAttention,
    "fla gated delta": rival_kernels.fla_gated_delta_mixer,
}
FACT = "memory in MB after frames:"
Within = Callable[[Call], Call]


def autocast(device: torch.device) -> torch.autocast:
    # the cache of cast weights must not outlive a capture
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


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


def record_memory(bench: Bench, name: str, backward: Call, tokens: int) -> None:
    """Record the peak memory of the forward and backward pass above weights and gradients."""
    if bench.device.type == "cuda":
        bench.facts[f"{name}: peak kB a token"] = peak_bytes(backward) / tokens / 1e3


def peak_bytes(call: Call) -> int:
    """Return the most memory of the CUDA device that a second call takes above that in use before."""
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def step(bench: Bench, grid: tuple[int, int, int] = (32, 32, 32), dim: int = 384, depth: int = 12) -> None:
    """Time a step of NDLightNet-S on one clip, weights in float32, autocast to bf16, AdamW; record its memory."""
    tokens = math.prod(grid)
    ours = partial(LightNetAttention, impl=bench.impl)

    def prepare(row: str, who: str, mixer: Callable[[int], nn.Module], within: Within) -> list[Call]:
        net = NDLightNet(3, num_classes=400, patch_size=PATCH, embed_dim=dim, depth=depth, mixer=mixer)
        net.to(bench.device)
        if row.endswith(COMPILED):
            torch.compiler.reset()
            for block in net.blocks:  # blocks are alike: compiled once for all
                block.compile(dynamic=False)
        clip = torch.randn(1, 3, *(n * p for n, p in zip(grid, PATCH, strict=True))).to(bench.device)
        label = torch.zeros(1, dtype=torch.long, device=bench.device)
        work, backward = map(within, updates(net, lambda: cross_entropy(net(clip), label)))
        record_memory(bench, f"{row}, {who}", backward, tokens)
        return [work]

    rows: tuple[tuple[str, str, Callable[[int], nn.Module]], ...] = (
        ("training step", "ours", ours),
        ("training step", "softmax", SoftmaxAttention),
        ("training step", "fla lightnet", rival_kernels.fla_lightnet_mixer),
        (f"training step{COMPILED}", "ours", ours),
        ("training step, without local mixing", "ours", partial(ours, local=None)),
    )
    for row, who, mixer in rows:
        case = Case(row, 1, tokens, dim // 64, 64)
        backends = rival_kernels.backends(bench.device.type == "cuda" and who == "softmax")
        prepares = {name: partial(prepare, row, who, mixer, within) for name, within in backends.items()}
        bench.fastest(case, "fwd+bwd", who, prepares)


def text(
    bench: Bench, sizes: Mapping[str, tuple[int, int, int]] = SIZES, tokens: int = 2**17, words: int = 50304
) -> None:
    """Time a step of language models, on so many tokens in windows of several lengths; record its memory. sizes:
    (width, depth, most tokens in a batch), of each name."""

    def prepare(name: str, who: str, length: int, mixer: Callable[[int], nn.Module], within: Within) -> list[Call]:
        width, depth, most = sizes[name]
        options: dict[str, Any] = {"mixer": mixer, "tpe": "published" if who == "as published" else True}
        net = NDLightNet(1, vocab_size=words, causal=True, embed_dim=width, depth=depth, **options).to(bench.device)
        windows = torch.randint(words, (max(1, min(tokens, most) // length), length + 1), device=bench.device)
        loss = TextLoss(net)
        work, backward = map(within, updates(net, lambda: loss(windows)))
        record_memory(bench, f"text {name}, {length}, {who}", backward, windows[:, 1:].numel())
        return [work]

    for name, (width, _, most) in sizes.items():
        for length in (n for n in LENGTHS if n <= min(most, tokens)):
            case = Case(f"text, {name}", max(1, min(tokens, most) // length), length, width // 64, 64)
            for who, mixer in TEXT_MIXERS.items():
                backends = rival_kernels.backends(bench.device.type == "cuda" and who == "softmax")
                prepares = {at: partial(prepare, name, who, length, mixer, within) for at, within in backends.items()}
                bench.fastest(case, "fwd+bwd", who, prepares)


def generation(bench: Bench, side: int = 128, batch: int = 16, dim: int = 384, depth: int = 12) -> None:
    """Time a step of training of NDLightDiT, by default S/2: weights in float32, autocast to bf16, AdamW."""
    mixer = partial(LightNetAttention, impl=bench.impl)
    rows: dict[str, dict[str, Any]] = {
        "ours": {"mixer": mixer},
        "without MD-TPE": {"mixer": mixer, "tpe": False},
        "without local": {"mixer": partial(mixer, local=None)},
        "softmax": {"mixer": SoftmaxAttention},
        "identity + local": {"mixer": partial(WithLocal, mixer=Identity)},
    }

    def prepare(options: Mapping[str, Any], within: Within) -> list[Call]:
        net = NDLightDiT(2, 3, CLASSES, embed_dim=dim, depth=depth, **options).to(bench.device)
        for weight in net.parameters():
            if not weight.any():  # gates and output begin as 0, and products of zeros are faster
                nn.init.normal_(weight, std=0.02)
        x, target = torch.randn(2, batch, 3, side, side, device=bench.device)
        t, y = 1000 * torch.rand(batch, device=bench.device), torch.randint(CLASSES, (batch,), device=bench.device)
        return [within(updates(net, lambda: mse_loss(net(x, t, y).float(), target))[0])]

    case = Case(f"generation, {side} x {side}", batch, (side // 2) ** 2, dim // 32, 32)
    for who, options in rows.items():
        backends = rival_kernels.backends(bench.device.type == "cuda" and who == "softmax")
        prepares = {name: partial(prepare, options, within) for name, within in backends.items()}
        bench.fastest(case, "fwd+bwd", who, prepares)


def stream(
    bench: Bench, size: int = 224, dim: int = 384, depth: int = 12, frames: int = 100_000, at_once: int = 64
) -> None:
    """Time a frame of one video from the State of those before, by NDLightNet-S, bf16 autocast; and record the
    memory in use over `frames` frames, `at_once` at a time: of the card, or of the state on a CPU."""

    def network(window: int | None) -> NDLightNet:
        mixer = partial(LightNetAttention, impl=bench.impl, window=window)
        net = NDLightNet(3, 3, 400, patch_size=(1, 16, 16), embed_dim=dim, depth=depth, mixer=mixer, causal=True)
        return net.to(bench.device).eval()

    def clip(frames: int) -> Tensor:
        return torch.randn(1, 3, frames, size, size, device=bench.device)

    def prepare() -> list[Call]:
        net, frame = network(None), clip(1)

        @torch.no_grad()
        def advance(x: Tensor, state: Any) -> Any:
            with autocast(bench.device):
                return net.advance(x, state)

        _, state = advance(clip(17), net.init_state(1))
        return [partial(advance, frame, state)]

    case = Case("one frame of a stream", 1, (size // PATCH[1]) ** 2, dim // 64, 64)
    bench.measure(case, "fwd", "ours", prepare)
    for name, window in WINDOWS.items():
        flow, x = network(window).stream(), clip(at_once)
        for done in range(at_once, frames + at_once, at_once):
            with torch.no_grad(), torch.autocast(bench.device.type, torch.bfloat16):
                flow(x)
            if done * 50 // frames > (done - at_once) * 50 // frames:  # 50 times in all
                bench.facts[f"{FACT} {done}, {name}"] = used(bench.device, flow) / 1e6


def used(device: torch.device, flow: Any) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(x.nbytes for x in tree_leaves(flow.state_dict()) if torch.is_tensor(x))


def draw_stream(facts: dict[str, float], path: Path) -> None:
    """Draw the memory in use over frames."""
    points: dict[str, dict[int, float]] = {name: {} for name in WINDOWS}
    for fact, value in facts.items():
        if fact.startswith(FACT):
            number, name = fact.removeprefix(FACT).split(", ")
            points[name][int(number)] = value
    lines = {name: plots.Line([*line], torch.tensor([[*line.values()]])) for name, line in points.items()}
    most = max(value for line in points.values() for value in line.values())
    plots.draw(path, [plots.Panel("frames", lines, ylabel="memory in use, MB", ylim=(0, 1.15 * most))])

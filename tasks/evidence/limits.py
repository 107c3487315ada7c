"""Measure the largest inputs of one GPU and of several, and what they cost.

    limits=tasks/evidence/limits.py
    python $limits scaling --gpus 1 2   a training step of NDLightNet on one GPU, and shared by two
    python $limits tokens               with how many tokens one GPU trains NDLightNet
    python $limits cubes                the largest cube in training, on one GPU and on all
    python $limits cubes --prediction   the same in prediction
    python $limits windows              a cube predicted whole and in windows: seconds and memory
    python $limits out_of_core          a volume larger than the GPU, predicted slab by slab
    python $limits model                what 8, 64 and 512 GPUs would take, from what one takes a token

Networks are untrained, in bf16, on noise of one channel. Writes COMMAND.json and COMMAND.md to --out.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet import NDLightNet, NDLightUNet, SoftmaxAttention, shard_grid
from ndlightnet.inference import predict_labels
from ndlightnet.training.peers import DynUNet, SegResNet, SwinUNETR
from ndlightnet_evidence import device_memory, processes, runner, shard_model, tables
from ndlightnet_evidence.tables import Run

STRIDES = (2, 2, 2, 2)
GRID = (32, 64, 64)  # tokens of a sample on a GPU in `scaling`
SERIES, SHORT = (64, 64, 64), (8, 64, 64)  # tokens of a frame in `tokens`
SIDE = 32  # voxels: the sides of cubes are multiples of it
WINDOW = 128  # voxels a side of a window
BLOCK = 2**18  # tokens: the largest number of tokens is a multiple of it
NETS: dict[str, Callable[[], nn.Module]] = {
    "NDLightUNet M": lambda: NDLightUNet(3, 1, 3, size="M", strides=STRIDES),
    "NDLightUNet": lambda: NDLightUNet(3, 1, 3, strides=STRIDES),
    "NDLightUNet S": lambda: NDLightUNet(3, 1, 3, size="S", strides=STRIDES),
    "DynUNet": lambda: DynUNet(3, 1, 3, STRIDES, deep_supervision=False),
    "SegResNet": lambda: SegResNet(3, 1, 3),
    "SwinUNETR": lambda: SwinUNETR(3, 1, 3),
}


def network(dims: int, mixer: Any = None) -> nn.Module:
    """Return NDLightNet-S, with a token for each cell."""
    options = {} if mixer is None else {"mixer": mixer}
    return NDLightNet(dims, 1, 10, patch_size=1, **options).cuda().train()


def noise(side: int) -> Tensor:
    return torch.randn(1, 1, side, side, side, device="cuda")


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


# ------------------------------------------------------------------------- one GPU: tokens, windows
def classification_step(net: nn.Module, tokens: int, saving: Any = None) -> Callable[[], None]:
    """Return a step, forward and backward, of a classification of so many tokens. saving: the
    context of the forward, which says where tensors lie until the backward."""
    frame = SERIES if tokens >= math.prod(SERIES) else SHORT
    x = torch.randn(1, 1, tokens // math.prod(frame), *frame, device="cuda")
    label = torch.zeros(1, dtype=torch.long, device="cuda")

    def step() -> None:
        with autocast(), saving or nullcontext():
            loss = cross_entropy(net(x).float(), label)
        loss.backward()
        net.zero_grad(set_to_none=True)

    return step


def tokens(o: Namespace) -> list[Run]:
    """Estimate the largest number of tokens from two smaller ones, and try it with LightNet."""
    runs: list[Run] = []
    rows: list[tuple[str, Any, bool, bool]] = [
        ("LightNet", None, False, False),
        ("LightNet, grad_checkpointing", None, True, False),
        ("softmax attention", SoftmaxAttention, False, False),
        ("softmax attention, grad_checkpointing", SoftmaxAttention, True, False),
        ("LightNet, grad_checkpointing, offload", None, True, True),
    ]
    for row, mixer, checkpointing, offload in rows:
        saving = torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else None
        net: Any = network(4, mixer)
        net.set_grad_checkpointing(checkpointing)
        few, many = (2**15, 2**16) if mixer else (2**18, 2**19)
        (_, bytes_few), (seconds, bytes_many) = (
            device_memory.peak(classification_step(net, count, saving)) for count in (few, many)
        )
        each = (bytes_many - bytes_few) / (many - few)
        largest = int((0.97 * device_memory.total() - bytes_many + each * many) / each) // BLOCK * BLOCK
        if offload:
            sizes = device_memory.saved_bytes(classification_step, net, few)
            while device_memory.pinned(sizes, largest / few) > 0.85 * device_memory.free_host():
                largest -= BLOCK
        run: Run = {"row": row, "tokens": many, "seconds": seconds, "bytes a token": each}
        if not mixer:  # softmax attention would take minutes for one step
            run |= largest_step(net, largest, many, saving)
        runs.append({"most tokens": largest, **run, "measured": not mixer})
        report(runs[-1])
    return runs


def largest_step(net: nn.Module, largest: int, smallest: int, saving: Any) -> Run:
    """Return the largest number of tokens, from `largest` downwards, that does fit."""
    while largest > smallest:
        try:
            seconds, peak = device_memory.peak(classification_step(net, largest, saving))
            return {"most tokens": largest, "seconds of most": seconds, "gb": peak / 1e9}
        except torch.OutOfMemoryError:
            largest -= BLOCK * (1 + largest // 2**22)
    return {}


def windows(o: Namespace) -> list[Run]:
    """Predict cubes whole and in windows that overlap by half, image and labels on the host."""
    runs: list[Run] = []
    for row in o.nets:
        net = NETS[row]().cuda().eval()
        for side in o.sides:
            image = torch.randn(1, side, side, side)
            for window in (None, [WINDOW] * 3):
                run: Run = {"row": row, "side": side, "window": WINDOW if window else "whole"}
                try:
                    with autocast():
                        seconds, peak = device_memory.peak(partial(predict_labels, net, image, window))
                    run |= {"seconds": seconds, "gb": peak / 1e9}
                except RuntimeError as error:  # also of a convolution that is too large
                    run["error"] = str(error).splitlines()[0][:100]
                runs.append(run)
                report(run)
    return runs


def out_of_core(o: Namespace) -> list[Run]:
    runs: list[Run] = []
    for row in o.nets:
        net: Any = NETS[row]().cuda().eval()
        with torch.no_grad(), autocast():
            peaks = [device_memory.peak(partial(net, noise(side)))[1] for side in (192, 256)]
        each = (peaks[1] - peaks[0]) / (256**3 - 192**3)
        for shape in o.shapes:
            volume = torch.randn(1, 1, *shape, device="cuda").cpu()  # faster than on the host
            run: Run = {"row": row, "shape": list(shape), "whole gb": each * volume.numel() / 1e9}
            for call in ("first", "second"):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                with autocast():
                    net.predict_large(volume, then=lambda y: y.argmax(1).byte())
                run[f"seconds, {call}"] = time.perf_counter() - start
                run["card gb"] = torch.cuda.max_memory_allocated() / 1e9
                run["host gb"] = device_memory.process_peak() / 1e9
                run["pinned gb"] = device_memory.pinned_peak() / 1e9
                report(run)
            runs.append(run)
            del volume
    return runs


# -------------------------------------------------------------------- several GPUs: scaling, cubes
def sizes_of(x: Tensor, group: Any) -> list[int]:
    """Return the sizes of the slabs of a grid, which are all as x."""
    return [x.shape[2]] * group.size()


def flat_gradients(net: nn.Module) -> Tensor:
    """Return one tensor for the gradients of all parameters, which are views of it."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in parameters), device="cuda")
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = grad.view(p.shape)
    return flat


def scaled(grid: Sequence[int], batch: int, shared: bool, steps: int = 12) -> Run:
    """Measure a whole training step on `grid` tokens: from a CUDA graph, and eager. shared: these
    are a slab of the samples; else each process has samples of its own, and exchanges nothing."""
    torch.manual_seed(0)
    net = network(len(grid))
    x = torch.randn(batch, 1, *grid, device="cuda")
    label = torch.zeros(batch, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True, capturable=True)
    gradients = flat_gradients(net)
    group = dist.group.WORLD if shared else None

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(net(x).float(), label)
        loss.backward()
        if group is not None:
            dist.all_reduce(gradients, dist.ReduceOp.AVG)
        optimizer.step()
        gradients.zero_()

    def timed(action: Callable[[], Any]) -> float:
        times = []
        for _ in range(steps):
            if dist.is_initialized():
                dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            action()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times[2:])

    with shard_grid(group, sizes=sizes_of(x, group)) if group is not None else nullcontext():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        run: Run = {"eager ms": timed(step)}
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            run["graph ms"] = timed(graph.replay)
        except RuntimeError as error:
            run["graph error"] = str(error).splitlines()[0][:200]
    if dist.is_initialized():
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, step_ms(run))
        run["ms of each"] = " ".join(f"{ms:.1f}" for ms in times)
    return {**run, "gb": torch.cuda.max_memory_allocated() / 1e9}


def step_ms(run: Run) -> float | None:
    return run.get("graph ms", run.get("eager ms"))


def scaling(o: Namespace) -> list[Run]:
    count, (planes, *plane) = max(o.gpus), o.grid
    runs: list[Run] = []
    rows = (
        ("one GPU", 1, planes, False),
        ("each by itself", count, planes, False),
        ("weak", count, planes, True),
        ("strong", count, planes // count, True),
    )
    for row, gpus, size, shared in rows:
        measured = processes.launch(gpus, scaled, grid=[size, *plane], batch=o.batch, shared=shared)
        total = o.batch * size * gpus * math.prod(plane)
        runs.append({"row": row, "gpus": gpus, "tokens": total, **measured})
        alone, together = step_ms(runs[0]), step_ms(measured)
        if alone and together and gpus > 1:
            runs[-1]["efficiency"] = alone * total / runs[0]["tokens"] / gpus / together
        report(runs[-1])
    return runs


def cube(row: str, sides: Sequence[int], prediction: bool, checkpointing: bool, search: bool = False) -> Run:
    """Do a step on cubes of these sides, two times; search: only until one fits."""
    net: Any = NETS[row]().cuda().train(not prediction)
    if checkpointing:
        net.set_grad_checkpointing()
    group = dist.group.WORLD if dist.is_initialized() else None
    gradients = flat_gradients(net)

    def step(x: Tensor) -> None:
        sharded = shard_grid(group, sizes=sizes_of(x, group)) if group is not None else nullcontext()
        with sharded, autocast(), torch.set_grad_enabled(not prediction):
            out = net(x)
        if prediction:
            return
        loss = cross_entropy(out, torch.zeros_like(out[:, 0], dtype=torch.long))
        del out
        loss.backward()
        if group is not None:
            dist.all_reduce(gradients, dist.ReduceOp.AVG)
        gradients.zero_()

    results: Run = {}
    for side in sides:
        x = torch.randn(1, 1, side // (group.size() if group else 1), side, side, device="cuda")
        try:
            seconds, peak = device_memory.peak(partial(step, x))
        except torch.OutOfMemoryError:
            if not search or group is not None:
                raise
            continue
        results[str(side)] = {"seconds": seconds, "gb": peak / 1e9}
        if search:
            break
    return results


def cubes(o: Namespace) -> list[Run]:
    """Search downwards from the side that the memory of small cubes lets expect."""
    runs: list[Run] = []
    for row in o.nets:
        ours = row.startswith("NDL")  # the others neither recompute blocks nor share a cube
        for checkpointing in (False, True) if ours and not o.prediction else (False,):
            for gpus in sorted(set(o.gpus)) if ours else [1]:
                job: Run = {"row": row, "prediction": o.prediction, "checkpointing": checkpointing}
                runs.append({**job, "gpus": gpus, **largest_cube(partial(processes.launch, gpus, cube, **job), gpus)})
                report(runs[-1])
    return runs


def largest_cube(measure: Callable[..., Run], gpus: int) -> Run:
    """Return the largest side at which `measure` has a result, and what that took."""
    small = measure(sides=[128, 192])
    if "error" in small:
        return small
    each = 1e9 * (small["192"]["gb"] - small["128"]["gb"]) / (192**3 - 128**3)
    expected = int((device_memory.total() / each) ** (1 / 3)) // SIDE * SIDE
    sides = list(range(expected, 0, -SIDE))
    # of several processes, not all run out of memory: new ones for each side
    for tried in [[side] for side in sides] if gpus > 1 else [sides]:
        result = measure(sides=tried, search=True)
        if result and "error" not in result:
            ((side, costs),) = result.items()
            return {"bytes a voxel": each, "largest": int(side), **costs}
    return {"bytes a voxel": each, "error": "no side fits"}


def model(o: Namespace) -> list[Run]:
    return shard_model.predictions(shard_model.Network(), shard_model.Machine(token=641e-9), (1, 2, 8, 64, 512))


COMMANDS = {command.__name__: command for command in (scaling, tokens, cubes, windows, out_of_core, model)}


def report(run: Run) -> None:
    print(", ".join(f"{name} {tables.cell(value)}" for name, value in run.items()), flush=True)


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS)[:1])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, torch.cuda.device_count()])
    parser.add_argument("--grid", nargs=3, type=int, default=GRID, help="tokens on a GPU in `scaling`")
    parser.add_argument("--batch", type=int, default=4, help="samples in `scaling`")
    parser.add_argument("--prediction", action="store_true", help="cubes in prediction instead of training")
    parser.add_argument("--sides", nargs="+", type=int, default=[256, 512], help="of cubes in `windows`")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(1024,) * 3], help="such as 2048x1024x896")
    parser.add_argument("--out", type=Path, default=Path("runs/limits"))
    o = parser.parse_args(arguments)
    runs = COMMANDS[o.command](o)
    o.out.mkdir(parents=True, exist_ok=True)
    head = {"date": time.strftime("%Y-%m-%d"), "device": runner.device_name(), "commit": runner.commit()}
    (o.out / f"{o.command}.json").write_text(json.dumps({**head, "runs": runs}, indent=1))
    text = tables.of_records(runs)
    (o.out / f"{o.command}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

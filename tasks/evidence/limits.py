"""Measure the largest inputs of one GPU and of several, and what they cost.

    limits=tasks/evidence/limits.py
    python $limits scaling --gpus 1 2 4   a training step of NDLightNet on one GPU, shared by two and by four
    python $limits scaling --profile    the same with the times of kernels on the first of them
    python $limits cubes                the largest cube in training, on one GPU and on all
    python $limits cubes --prediction   the same in prediction
    python $limits windows              a cube predicted whole and in windows: seconds and memory
    python $limits out_of_core          a volume larger than the GPU, predicted slab by slab
    python $limits model                what 8, 64 and 512 GPUs would take, from what one takes a token

Networks are untrained, in bf16, on noise of one channel. Writes COMMAND.json and COMMAND.md to --out.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet import NDLightNet, NDLightUNet, Replay, shard_grid
from ndlightnet.inference import predict_labels
from ndlightnet.training.peers import DynUNet, SwinUNETR
from ndlightnet_evidence import gpu_processes, kernel_times, runner, shard_model, tables
from ndlightnet_evidence.cuda_graphs import seconds
from ndlightnet_evidence.tables import Run

STRIDES = (2, 2, 2, 2)
STEPS = 12  # of `scaling`, timed
SIDE = 32  # voxels: the sides of cubes are multiples of it, and of what makes slabs equal
LARGE, WINDOW = 512, 128  # voxels a side of the cube and of a window in `windows`
SHAPE = (1024, 1024, 1024)  # of the volume of `out_of_core`
autocast = partial(torch.autocast, "cuda", torch.bfloat16)
NETS: dict[str, Callable[[], nn.Module]] = {
    "NDLightUNet M": lambda: NDLightUNet(3, 1, 3, size="M", strides=STRIDES),
    "NDLightUNet": lambda: NDLightUNet(3, 1, 3, strides=STRIDES),
    "DynUNet": lambda: DynUNet(3, 1, 3, STRIDES, deep_supervision=False),
    "SwinUNETR": lambda: SwinUNETR(3, 1, 3),
}


def costs(action: Callable[[], Any]) -> Run:
    """Return the seconds of the second call, and the most memory of the GPU in both."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    action()
    return {"seconds": seconds(action), "gb": torch.cuda.max_memory_allocated() / 1e9}


# ---------------------------------------------------------------------------------------- one GPU
def windows(o: Namespace) -> Iterator[Run]:
    """Predict a cube whole and in windows that overlap by half, image and labels on the host."""
    image = torch.randn(1, LARGE, LARGE, LARGE)
    for row in o.nets:
        net = NETS[row]().cuda().eval()
        for window in (None, [WINDOW] * 3):
            try:
                with autocast():
                    result = costs(partial(predict_labels, net, image, window))
            except RuntimeError as error:  # also of a convolution that is too large
                result = {"error": str(error).splitlines()[0][:100]}
            yield {"row": row, "side": LARGE, "window": WINDOW if window else "whole", **result}


def out_of_core(o: Namespace) -> Iterator[Run]:
    for row in o.nets:
        net: Any = NETS[row]().cuda().eval()
        volume = torch.randn(1, 1, *SHAPE, device="cuda").cpu()  # faster than on the host
        for call in ("first", "second"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            with autocast():
                net.predict_large(volume, then=lambda y: y.argmax(1).byte())
            yield {
                "row": f"{row}, {call} call",
                "seconds": time.perf_counter() - start,
                "card gb": torch.cuda.max_memory_allocated() / 1e9,
                "host gb": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9,
            }


# -------------------------------------------------------------------- several GPUs: scaling, cubes
def world() -> Any:
    """Return the group of all processes; None if there is one process only."""
    return dist.group.WORLD if dist.is_initialized() else None


def sharded(x: Tensor, group: Any) -> Any:
    """Return the context in which x is a slab of a grid whose slabs are all as large as x."""
    return nullcontext() if group is None else shard_grid(group, sizes=[x.shape[2]] * group.size())


def flat_gradients(net: nn.Module) -> Tensor:
    """Return one tensor for the gradients of all parameters, which are views of it."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in parameters), device="cuda")
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = grad.view(p.shape)
    return flat


def backward(loss: Tensor, gradients: Tensor, group: Any) -> None:
    loss.backward()
    if group is not None:
        dist.all_reduce(gradients, dist.ReduceOp.AVG)


def scaled(grid: Sequence[int], batch: int, profile: bool = False) -> Run:
    """Measure a whole training step of NDLightNet-S on slabs of `grid` tokens: from a CUDA graph, and eager. profile:
    also the kernels of one."""
    torch.manual_seed(0)
    net = NDLightNet(len(grid), 1, 10, patch_size=1).cuda().train()
    x = torch.randn(batch, 1, *grid, device="cuda")
    label = torch.zeros(batch, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True, capturable=True)
    gradients, group = flat_gradients(net), world()

    def step(x: Tensor, label: Tensor) -> Tensor:
        with autocast(cache_enabled=False):  # the cache of cast weights must not outlive a capture
            loss = cross_entropy(net(x).float(), label)
        backward(loss, gradients, group)
        optimizer.step()
        gradients.zero_()
        return loss.detach()

    def timed(action: Callable[[], Any]) -> float:
        times = []
        for _ in range(STEPS):
            if group:
                dist.barrier()
            times.append(seconds(action))
        return 1e3 * statistics.median(times[2:])

    with sharded(x, group):
        again: Callable[[], Any] = partial(step, x, label)
        run: Run = {"eager ms": timed(again)}
        try:
            replay = Replay(step, x, label)
            run["graph ms"], again = timed(replay.again), replay.again
        except RuntimeError as error:
            run["graph error"] = str(error).splitlines()[0][:200]
        if profile:
            run["kernels"] = kernel_times.kernels(again)
    return {**run, "gb": torch.cuda.max_memory_allocated() / 1e9}


def step_ms(run: Run) -> float | None:
    return run.get("graph ms", run.get("eager ms"))


def scaling(o: Namespace) -> Iterator[Run]:
    planes, *plane = o.grid
    shares = [("one GPU", 1, planes)]
    for count in sorted({n for n in o.gpus if n > 1}):
        shares += [("weak", count, planes), ("strong", count, planes // count)]
    alone, kernels_alone = None, []
    for row, gpus, size in shares:
        run = gpu_processes.launch(gpus, scaled, grid=[size, *plane], batch=o.batch, profile=o.profile)
        kernels = run.pop("kernels", [])
        run = {"row": row, "gpus": gpus, "tokens": o.batch * size * gpus * math.prod(plane), **run}
        if kernels:
            run |= kernel_times.sums(kernels)
            print(f"{row}, {gpus} GPUs:\n{kernel_times.table(kernels, kernels_alone, size / planes)}", flush=True)
            kernels_alone = kernels_alone or kernels
        alone, together = alone or run, step_ms(run)
        if gpus > 1 and together and (ms := step_ms(alone)):
            run["efficiency"] = ms * run["tokens"] / alone["tokens"] / gpus / together
        yield run


def cube(row: str, sides: Sequence[int], prediction: bool, checkpointing: bool, search: bool = False) -> Run:
    """Do a step on cubes of these sides, two times; search: only until one fits."""
    net: Any = NETS[row]().cuda().train(not prediction)
    if checkpointing:
        net.set_grad_checkpointing()
    gradients, group = flat_gradients(net), world()

    def step(x: Tensor) -> None:
        with sharded(x, group), autocast(), torch.set_grad_enabled(not prediction):
            out = net(x)
        if not prediction:
            loss = cross_entropy(out, torch.zeros_like(out[:, 0], dtype=torch.long))
            del out
            backward(loss, gradients, group)
            gradients.zero_()

    results: Run = {}
    for side in sides:
        x = torch.randn(1, 1, side // (group.size() if group else 1), side, side, device="cuda")
        try:
            results[str(side)] = costs(partial(step, x))
        except torch.OutOfMemoryError:
            if not search or group is not None:
                raise
            continue
        if search:
            break
    return results


def cubes(o: Namespace) -> Iterator[Run]:
    """Search downwards from the side that the memory of small cubes lets expect."""
    for row in o.nets:
        ours = row.startswith("NDL")  # the others neither recompute blocks nor share a cube
        for checkpointing in (False, True) if ours and not o.prediction else (False,):
            for gpus in sorted(set(o.gpus)) if ours else [1]:
                job: Run = {"row": row, "prediction": o.prediction, "checkpointing": checkpointing}
                yield {**job, "gpus": gpus, **largest_cube(partial(gpu_processes.launch, gpus, cube, **job), gpus)}


def largest_cube(measure: Callable[..., Run], gpus: int) -> Run:
    """Return the largest side at which `measure` has a result, and what that took."""
    small = measure(sides=[128, 192])
    if "error" in small:
        return small
    each = 1e9 * (small["192"]["gb"] - small["128"]["gb"]) / (192**3 - 128**3)
    memory = torch.cuda.get_device_properties(0).total_memory
    unit = math.lcm(SIDE, gpus * 2 ** len(STRIDES))
    expected = int((memory / each) ** (1 / 3)) // unit * unit
    sides = list(range(expected, 0, -unit))
    # of several processes, not all run out of memory: new ones for each side
    for tried in [[side] for side in sides] if gpus > 1 else [sides]:
        result = measure(sides=tried, search=True)
        if result and "error" not in result:
            ((side, measured),) = result.items()
            return {"bytes a voxel": each, "largest": int(side), **measured}
    return {"bytes a voxel": each, "error": "no side fits"}


def model(o: Namespace) -> Iterator[Run]:
    yield from shard_model.predictions((1, 2, 8, 64, 512))


COMMANDS = {command.__name__: command for command in (scaling, cubes, windows, out_of_core, model)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS)[:1])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, torch.cuda.device_count()])
    parser.add_argument("--grid", nargs="+", type=int, default=(32, 64, 64), help="of `scaling`: tokens on a GPU")
    parser.add_argument("--batch", type=int, default=4, help="of `scaling`: samples")
    parser.add_argument("--profile", action="store_true", help="of `scaling`: times of kernels on the first GPU")
    parser.add_argument("--prediction", action="store_true", help="cubes in prediction instead of training")
    parser.add_argument("--out", type=Path, default=Path("runs/limits"))
    o = parser.parse_args(arguments)
    runs = []
    for run in COMMANDS[o.command](o):
        runs.append(run)
        print(", ".join(f"{name} {tables.cell(value)}" for name, value in run.items()), flush=True)
    head = {"date": time.strftime("%Y-%m-%d"), "device": runner.device_name(), "commit": runner.commit()}
    o.out.mkdir(parents=True, exist_ok=True)
    (o.out / f"{o.command}.json").write_text(json.dumps({**head, "runs": runs}, indent=1))
    text = tables.of_records(runs)
    (o.out / f"{o.command}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

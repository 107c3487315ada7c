"""Measure what one sample needs that is shared by several GPUs, or larger than one of them.

    shards=tasks/evidence/shards.py
    python $shards scaling      a training step of NDLightNet on one GPU and on all
    python $shards tokens       with how many tokens one GPU trains NDLightNet
    python $shards cubes        the largest cube in training, on one GPU and on all
    python $shards out_of_core  a volume that is larger than the GPU: seconds and memory
    python $shards model        what 8, 64 and 512 GPUs would take, from what one takes a token

Networks are untrained, in bf16, on noise of one channel. Writes JSON and a table to --out.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndlightnet import NDLightNet, NDLightUNet, SoftmaxAttention, shard_grid
from ndlightnet.parallel import Processes
from ndlightnet.training.peers import DynUNet
from ndlightnet_evidence import memory, processes, runner, shard_model, tables

Run = dict[str, Any]
STRIDES = (2, 2, 2, 2)
GRID = (32, 64, 64)  # tokens of a sample on a GPU in `scaling`
SERIES, SHORT = (64, 64, 64), (8, 64, 64)  # tokens of a frame in `tokens`
NETS: dict[str, Callable[[], nn.Module]] = {
    "NDLightUNet M": lambda: NDLightUNet(3, 1, 3, size="M", strides=STRIDES),
    "NDLightUNet": lambda: NDLightUNet(3, 1, 3, strides=STRIDES),
    "DynUNet": lambda: DynUNet(3, 1, 3, STRIDES, deep_supervision=False),
}


def network(dims: int, mixer: Any = None) -> nn.Module:
    """Return NDLightNet-S, with a token for each cell."""
    more = {} if mixer is None else {"mixer": mixer}
    return NDLightNet(dims, 1, 10, patch_size=1, **more).cuda().train()


# ------------------------------------------------------------------------------------ one process
def classified(net: nn.Module, tokens: int, kept: Any = None) -> Callable[[], None]:
    """Return a step, forward and backward, of a classification of so many tokens. kept: where the
    forward keeps tensors for the backward."""
    frame = SERIES if tokens >= math.prod(SERIES) else SHORT
    x = torch.randn(1, 1, tokens // math.prod(frame), *frame, device="cuda")
    label = torch.zeros(1, dtype=torch.long, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16), kept or nullcontext():
            loss = nn.functional.cross_entropy(net(x).float(), label)
        loss.backward()
        net.zero_grad(set_to_none=True)

    return step


def segmented(net: nn.Module, grads: Tensor, x: Tensor, group: Any = None) -> None:
    """Run a step, forward and backward, of a segmentation of slabs x; gradients are averaged."""
    sharded = shard_grid(group, sizes=even(x, group)) if group is not None else nullcontext()
    with sharded, torch.autocast("cuda", torch.bfloat16):
        out = net(x)
    loss = nn.functional.cross_entropy(out, torch.zeros_like(out[:, 0], dtype=torch.long))
    del out
    loss.backward()
    if group is not None:
        dist.all_reduce(grads, dist.ReduceOp.AVG)
    grads.zero_()


def even(x: Tensor, group: Any) -> list[int]:
    """Return the sizes of slabs that are all as x."""
    return [x.shape[2]] * group.size()


def gradients(net: nn.Module) -> Tensor:
    """Return one tensor for the gradients of all parameters, which are views of it."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in parameters), device="cuda")
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = grad.view(p.shape)
    return flat


def tokens(o: Any) -> list[Run]:
    runs = []
    rows: list[tuple[str, Any, bool, bool]] = [
        ("LightNet", None, False, False),
        ("LightNet, grad_checkpointing", None, True, False),
        ("softmax attention", SoftmaxAttention, False, False),
        ("softmax attention, grad_checkpointing", SoftmaxAttention, True, False),
        ("LightNet, grad_checkpointing, offload", None, True, True),
    ]
    for row, mixer, checkpointing, offload in [row for row in rows if o.row in ("", row[0])]:
        kept = torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else None
        net: Any = network(4, mixer)
        net.set_grad_checkpointing(checkpointing)
        few, many = (2**15, 2**16) if mixer else (2**18, 2**19)
        points = [memory.peak(classified(net, n, kept)) for n in (few, many)]
        each = (points[1][1] - points[0][1]) / (many - few)
        fixed = points[1][1] - each * many
        run = {"row": row, "tokens": many, "seconds": points[1][0], "bytes a token": each}
        most = int((0.97 * memory.of_device() - fixed) / each) // 2**18 * 2**18
        sizes = memory.kept(classified, net, few) if offload else []
        while memory.pinned(sizes, most / few) > 0.85 * memory.free():
            most -= 2**18
        if not mixer:  # softmax attention would take minutes for one step
            while most > many:
                try:
                    seconds, held = memory.peak(classified(net, most, kept))
                except torch.OutOfMemoryError:
                    most -= 2**18 * (1 + most // 2**22)
                    continue
                run |= {"seconds of most": seconds, "gb": held / 1e9}
                break
        runs.append({**run, "most tokens": most, "measured": not mixer})
        say(runs[-1])
    return runs


def out_of_core(o: Any) -> list[Run]:
    runs = []
    for row in o.nets:
        net: Any = NETS[row]().cuda().eval()
        small = torch.randn(1, 1, 96, 80, 72)
        # TF32's rounding differs from one form of a convolution to another
        with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
            whole = net(small.cuda()).cpu()
            parts = net.predict_large(small, 5)
        error = ((whole - parts).abs().max() / whole.abs().max()).item()
        runs.append({"row": row, "shape": list(small.shape[2:]), "error of float32": error})
        say(runs[-1])
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            per = [memory.peak(partial(net, noise(side)))[1] for side in (192, 256)]
        each = (per[1] - per[0]) / (256**3 - 192**3)
        for shape in o.shapes:
            volume = torch.randn(1, 1, *shape, device="cuda").cpu()  # faster than on the host
            run: Run = {"row": row, "shape": list(shape), "whole gb": each * volume.numel() / 1e9}
            run["cards of the whole"] = run["whole gb"] * 1e9 / memory.of_device()
            for call in ("first", "second")[: o.calls]:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                with torch.autocast("cuda", torch.bfloat16):
                    labels = net.predict_large(volume, o.slabs, then=lambda y: y.argmax(1).byte())
                run[f"seconds, {call}"] = time.perf_counter() - start
                run["card gb"] = torch.cuda.max_memory_allocated() / 1e9
                run["host gb"] = memory.of_process() / 1e9
                run["pinned gb"] = memory.pinned_peak() / 1e9
                run["labels"] = labels.flatten()[:: 10**6].bincount(minlength=3).tolist()
                say(run)
            runs.append(run)
            del volume, labels
    return runs


def noise(side: int) -> Tensor:
    return torch.randn(1, 1, side, side, side, device="cuda")


# -------------------------------------------------------------------------------- several processes
def launch(count: int, job: str, **options: Any) -> Run:
    return processes.launch(__file__, count, {"job": job, **options})


class Counted(Processes):
    """Counts the bytes that a process sends to others."""

    bytes_sent: int = 0

    def all_to_all_single(self, flat: Tensor, *sizes: list[int]) -> tuple[Tensor, Any]:
        Counted.bytes_sent += flat.numel() * flat.element_size()
        return super().all_to_all_single(flat, *sizes)


def scaled(grid: Sequence[int], batch: int, shared: bool, steps: int = 12) -> Run:
    """Measure a whole training step on `grid` tokens: from a CUDA graph, and eager. shared: these
    are a slab of the samples; else each process has samples of its own, and exchanges nothing."""
    import ndlightnet.parallel.shard as shard

    shard.Processes = Counted  # type: ignore[attr-defined, misc]
    torch.manual_seed(0)
    net = network(len(grid))
    x = torch.randn(batch, 1, *grid, device="cuda")
    label = torch.zeros(batch, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True, capturable=True)
    grads = gradients(net)
    group = dist.group.WORLD if shared else None

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(net(x).float(), label)
        loss.backward()
        if group is not None:
            dist.all_reduce(grads, dist.ReduceOp.AVG)
        optimizer.step()
        grads.zero_()

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

    with shard_grid(group, sizes=even(x, group)) if group is not None else nullcontext():
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        Counted.bytes_sent = 0
        step()
        sent = Counted.bytes_sent
        found: Run = {"eager ms": timed(step), "mb sent": sent / 1e6}
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
            found["graph ms"] = timed(graph.replay)
        except RuntimeError as error:
            found["graph error"] = str(error).splitlines()[0][:200]
    if dist.is_initialized():
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, found.get("graph ms", found["eager ms"]))
        found["ms of each"] = " ".join(f"{ms:.1f}" for ms in each)
    return {**found, "gb": torch.cuda.max_memory_allocated() / 1e9}


def cube(row: str, sides: Sequence[int], checkpointing: bool, search: bool = False) -> Run:
    """Train on cubes of these sides; search: only until one fits."""
    net: Any = NETS[row]().cuda().train()
    if checkpointing:
        net.set_grad_checkpointing()
    several = dist.is_initialized()
    count = dist.get_world_size() if several else 1
    grads = gradients(net)
    found: Run = {}
    for side in sides:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(1, 1, side // count, side, side, device="cuda")
        try:
            for _ in range(2):
                torch.cuda.synchronize()
                start = time.perf_counter()
                segmented(net, grads, x, dist.group.WORLD if several else None)
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            grads.zero_()
            if not search or several:
                raise
            continue
        gb = torch.cuda.max_memory_allocated() / 1e9
        found[str(side)] = {"seconds": time.perf_counter() - start, "gb": gb}
        if search:
            break
    return found


def scaling(o: Any) -> list[Run]:
    count, (first, *rest) = torch.cuda.device_count(), o.grid
    runs = []
    rows = (
        ("one GPU", 1, first, False),
        ("each by itself", count, first, False),
        ("weak", count, first, True),
        ("strong", count, first // count, True),
    )
    for what, gpus, size, shared in rows:
        found = launch(gpus, "scaled", grid=[size, *rest], batch=o.batch, shared=shared)
        total = o.batch * size * gpus * math.prod(rest)
        runs.append({"what": what, "gpus": gpus, "tokens": total, **found})
        alone = runs[0].get("graph ms", runs[0].get("eager ms"))
        mine = found.get("graph ms", found.get("eager ms"))
        if alone and mine and gpus > 1:
            runs[-1]["efficiency"] = alone * total / runs[0]["tokens"] / gpus / mine
        say(runs[-1])
    return runs


def cubes(o: Any) -> list[Run]:
    """Search downwards from the side that the memory of small cubes lets expect."""
    runs: list[Run] = []
    for row in o.nets:
        ours = row.startswith("NDL")
        for checkpointing in map(bool, o.checkpointing) if ours else (False,):
            for gpus in o.gpus if ours else [1]:
                how: Run = {"row": row, "checkpointing": checkpointing}
                points = launch(gpus, "cube", sides=[128, 192], **how)
                run: Run = {**how, "gpus": gpus}
                runs.append(run)
                if "error" in points:
                    run |= points
                    continue
                each = 1e9 * (points["192"]["gb"] - points["128"]["gb"]) / (192**3 - 128**3)
                first = int((memory.of_device() / each) ** (1 / 3)) // 32 * 32
                run["bytes a voxel"] = each
                sides = list(range(first, 0, -32))
                # of several processes, not all run out of memory: new ones for each side
                for some in [[side] for side in sides] if gpus > 1 else [sides]:
                    found = launch(gpus, "cube", sides=some, search=True, **how)
                    if "error" not in found and found:
                        ((side, values),) = found.items()
                        run |= {"largest": int(side), **values}
                        break
                say(run)
    return runs


def model(o: Any) -> list[Run]:
    return shard_model.table(shard_model.Network(), shard_model.Machine(o.ns * 1e-9), (1, 2, 8, 64, 512))


def say(run: Run) -> None:
    print(", ".join(f"{name} {_cell(value)}" for name, value in run.items()), flush=True)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scaling", "tokens", "cubes", "out_of_core", "model"])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS)[:1])
    parser.add_argument("--grid", nargs=3, type=int, default=GRID, help="tokens on a GPU")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[(1024,) * 3])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, torch.cuda.device_count()])
    parser.add_argument("--ns", type=float, default=641, help="nanoseconds a token, of one GPU")
    parser.add_argument("--row", default="", help="of `tokens`: one of them")
    parser.add_argument("--checkpointing", nargs="+", type=int, default=[0, 1], help="of `cubes`")
    parser.add_argument("--slabs", type=int)
    parser.add_argument("--calls", type=int, default=2, help="of each prediction out of core")
    parser.add_argument("--out", type=Path, default=Path("runs/shards"))
    o = parser.parse_args(arguments)
    runs = globals()[o.what](o)
    o.out.mkdir(parents=True, exist_ok=True)
    told = {"date": time.strftime("%Y-%m-%d"), "device": runner.device_name(), "commit": runner.commit(), "runs": runs}
    (o.out / f"{o.what}.json").write_text(json.dumps(told, indent=1))
    names = list(dict.fromkeys(name for run in runs for name in run))
    rows = [[_cell(run[name]) if name in run else "" for name in names] for run in runs]
    (o.out / f"{o.what}.md").write_text(tables.markdown(names, rows))
    print((o.out / f"{o.what}.md").read_text())


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        processes.answer({"scaled": scaled, "cube": cube}, sys.argv[2], Path(sys.argv[3]))
    else:
        main()

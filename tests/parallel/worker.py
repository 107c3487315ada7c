"""One of several processes: `python -m tests.parallel.worker FOLDER RANK COUNT JOB`.

Writes a JSON file of its results to FOLDER. The job "session" starts all sessions, each on so many processes, which
are forked: what they import takes seconds."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.backends.debugging  # before the fork: `compiled` needs it
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ndlightnet import NDLightNet, NDLightUNet, Replay, shard_grid
from ndlightnet.parallel import Processes
from ndlightnet.parallel import slab as slabs
from tests.processes import SECONDS

from .rare import anomaly, empty_batch, out_of_memory, refused, sequences, twice
from .sharded_networks import CASES, FLOAT32, Case, error_of, gradient_error, gradients, slab

TIMEOUT = 20  # seconds


def against_whole(
    case: Case, axis: int, dtype: torch.dtype, checkpointing: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """Return the largest errors of outputs and gradients, relative to the largest number of each
    kind, against the whole on this process."""
    torch.manual_seed(0)
    net: Any = case.make().to(device, dtype).train()
    if checkpointing:
        net.set_grad_checkpointing()
    if case.words:
        x = torch.randint(case.words, (2, *case.shape)).to(device)
        first, dim = 1, 1
    else:
        x = torch.randn(2, *case.shape, dtype=dtype).to(device).requires_grad_()
        first, dim = 2, 2 + axis
    masks, slab_masks = {}, {}
    if case.masked:
        mask = torch.ones(2, *case.shape[1:], dtype=torch.bool, device=device)
        mask[0, ..., -5:], mask[1, -3:] = False, False
        masks, slab_masks = {"mask": mask}, {"mask": slab(mask, 1 + axis, case.multiple)}

    def outputs(y: Any) -> list[Tensor]:
        return y if isinstance(y, list) else [y]

    expected = outputs(net(x, **masks))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=dtype).to(device) for y in expected]
    grads = gradients(net, torch.stack([(y * w).sum() for y, w in zip(expected, weights, strict=True)]).sum())
    slab_x = slab(x.detach(), dim, case.multiple).clone()
    slab_x.requires_grad_(slab_x.is_floating_point())
    with shard_grid(dist.group.WORLD, axis=axis) as grid:
        actual = outputs(net(slab_x, **slab_masks))
        loss: Any = 0.0
        errors = {"output": 0.0}
        for y, z, w in zip(expected, actual, weights, strict=True):
            per_cell = y.ndim > 2  # classes of a sample are the same on all processes
            if per_cell:
                at = sum(_sizes(z, first + axis)[: dist.get_rank()])
                y, w = (t.narrow(first + axis, at, z.shape[first + axis]) for t in (y, w))
            errors["output"] = max(errors["output"], error_of(z, y, y))
            loss = loss + (grid.total((z * w).sum()) if per_cell else (z * w).sum())
    errors["parameters"] = gradient_error(gradients(net, loss), grads)  # also outside of it
    if slab_x.requires_grad:
        assert x.grad is not None and slab_x.grad is not None
        grad = slab_x.grad / dist.get_world_size()
        errors["input"] = error_of(grad, slab(x.grad, dim, case.multiple), x.grad)
    return errors


def _sizes(x: Tensor, dim: int) -> list[int]:
    size = torch.tensor([x.shape[dim]], device=x.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    return [int(n) for n in sizes]


def all_cases() -> dict[str, Any]:
    """Two processes take the axes of a case, three the first one: in float64, and two those of FLOAT32 in float32."""
    errors: dict[str, Any] = {}
    count = dist.get_world_size()
    for name, case in CASES.items():
        for axis in case.axes if count == 2 else [0]:
            errors[f"{name}, axis {axis}, float64"] = against_whole(case, axis, torch.float64)
    for name in FLOAT32 if count == 2 else ():
        errors[f"{name}, axis 0, float32"] = against_whole(CASES[name], 0, torch.float32)
    return errors


def recomputed() -> dict[str, Any]:
    names = ("video, windows that forget", "U-Net M")
    return {name: against_whole(CASES[name], 1, torch.float64, True) for name in names}


def on_gpus() -> dict[str, Any]:
    """The kernels, against the kernels for the whole, in float32 without TF32."""
    torch.backends.cudnn.allow_tf32 = False
    errors = {}
    for name in ("volume", "volume, rotary, no MD-TPE", "volume, masked", "video, causal", "U-Net M", "U-Net, series"):
        for axis in (0, 1):
            errors[f"{name}, axis {axis}"] = against_whole(CASES[name], axis, torch.float32, device="cuda")
    errors["U-Net M, grad_checkpointing"] = against_whole(CASES["U-Net M"], 0, torch.float32, True, device="cuda")
    return errors


def replayed(device: str = "cuda") -> dict[str, Any]:
    """Steps of a sharded network from a CUDA graph, against steps without one."""
    torch.manual_seed(0)
    net: Any = NDLightNet(3, 1, 5, patch_size=2, embed_dim=32, depth=2).to(device)
    plain, batches = copy.deepcopy(net), torch.randn(6, 2, 1, 8, 12, 6).to(device)
    with shard_grid(dist.group.WORLD) as grid:

        def step(net: Any, x: Tensor) -> Tensor:
            loss = net(grid.slab(x, 2)).square().mean()
            net.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in net.parameters():
                    dist.all_reduce(p.grad.div_(dist.get_world_size()))
                    p.sub_(0.1 * p.grad)
            return loss.detach()

        replay = Replay(partial(step, net), batches[0].clone())
        if device == "cuda":  # the steps before the capture
            losses = [step(plain, batches[0]) for _ in range(3)]
        losses = [(replay(x).clone(), step(plain, x)) for x in batches[1:]]
    own, others = (torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (net, plain))
    return {
        "losses": {str(i): error_of(a, b, b) for i, (a, b) in enumerate(losses)},
        "weights": {"": error_of(own, others, others)},
    }


def stream() -> dict[str, Any]:
    """Frames that are split along space, in chunks of several sizes."""
    torch.manual_seed(0)
    net = NDLightNet(3, 1, 5, patch_size=2, embed_dim=32, depth=2, causal=True).double().eval()
    clip = torch.randn(2, 1, 12, 9, 10, dtype=torch.float64)
    errors = {}
    for axis in (1, 2):
        with torch.no_grad(), shard_grid(dist.group.WORLD, axis=axis):
            running = net.stream(batch_size=2)
            for chunk in slab(clip, 2 + axis, 2).split([1, 5, 2, 4], 2):
                last = running(chunk)
        errors[f"axis {axis}"] = {"output": error_of(last, net(clip), net(clip))}
    return errors


def packs() -> dict[str, Any]:
    """Samples of different shapes, a slab of each on every process: outputs and gradients."""
    errors = {}
    shapes = [(1, 8, 5, 4), (1, 9, 6, 7), (1, 5, 8, 9)]
    for causal in (False, True):
        for axis in (0, 1):
            torch.manual_seed(0)
            net = NDLightNet(3, 1, 5, patch_size=2, embed_dim=32, depth=2, tpe_states=8, causal=causal).double()
            samples = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            expected: Any = net(net.pack(samples))
            weight = torch.randn_like(expected)
            grads = gradients(net, (expected * weight).sum())
            with shard_grid(dist.group.WORLD, axis=axis):
                y: Any = net(net.pack([slab(x, 1 + axis, 2) for x in samples]))
            error = gradient_error(gradients(net, (y * weight).sum()), grads)
            errors[f"causal={causal}, axis {axis}"] = {"output": error_of(y, expected, expected), "parameters": error}
    return errors


def beside() -> dict[str, Any]:
    """DDP and FSDP2 over four processes, which share two samples, beside the grid."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "grid"))
    errors = {}
    torch.manual_seed(0)
    x, label = torch.randn(2, 1, 12, 8, dtype=torch.float64), torch.tensor([1, 3])
    plain = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=2, tpe_states=8).double()
    expected = gradients(plain, nn.functional.cross_entropy(plain(x), label))
    for kind in ("ddp", "fsdp2"):
        net = copy.deepcopy(plain)
        model: Any = net
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(net)
        else:
            for block in net.blocks:
                fully_shard(block)
            fully_shard(net)
        row = slice(mesh.get_local_rank("data"), mesh.get_local_rank("data") + 1)
        with shard_grid(mesh["grid"]) as grid:
            logits = model(grid.slab(x[row], 2))
        grads = gradients(net, nn.functional.cross_entropy(logits, label[row]))
        grads = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        errors[kind] = {"parameters": gradient_error(grads, expected, mean=False)}
    return errors


def counted() -> dict[str, Any]:
    """Bytes that this process sends in a step, in float32 and under autocast, and how many
    transfers are under way at most, forward and backward."""
    sent, counts = 0, {}
    real = Processes.all_to_all_single
    under_way: list[int] = [0]  # after each beginning and end

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work
            under_way.append(under_way[-1] + 1)

        def wait(self) -> None:
            self.work.wait()
            under_way.append(under_way[-1] - 1)

    def all_to_all_single(self: Processes, flat: Tensor, *sizes: Any) -> tuple[Tensor, Any]:
        nonlocal sent
        sent += flat.numel() * flat.element_size()
        out, work = real(self, flat, *sizes)
        return out, Watched(work)

    net = NDLightNet(3, 1, 5, patch_size=1, embed_dim=64, depth=3, tpe_states=8)
    part, slabs.PART = slabs.PART, 2**24  # MD-TPE's samples at once: States and planes are what may be under way
    Processes.all_to_all_single = all_to_all_single  # type: ignore[method-assign]
    for name, cast in (("float32", False), ("bfloat16", True)):
        sent = 0
        with shard_grid(dist.group.WORLD) as grid, torch.autocast("cpu", torch.bfloat16, cast):
            x = grid.slab(torch.randn(2, 1, 12, 5, 4))
            loss = net(x).float().sum()
            forward = len(under_way)
            loss.backward()
        counts[name] = sent
        counts[f"{name}, under way"] = [max(under_way[:forward]), max(under_way[forward:])]
        assert under_way[-1] == under_way[forward - 1] == 0
        under_way[:] = [0]
    Processes.all_to_all_single = real  # type: ignore[method-assign]
    slabs.PART = part
    return counts


def autocast() -> dict[str, Any]:
    """Errors under autocast of the whole and of slabs, in the mean, against float64."""
    torch.manual_seed(0)
    net = CASES["volume"].make()
    x = torch.randn(4, 1, 12, 10, 14)

    def step(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net(x)
        flat = torch.cat([grad.flatten() for grad in gradients(net, y.square().sum()).values()]).double()
        dist.all_reduce(flat)
        return y.detach().double(), flat / 2

    exact = step(copy.deepcopy(net).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        results = {"whole": step(net, x)}
        with shard_grid(dist.group.WORLD) as grid:
            results["slabs"] = step(net, grid.slab(x, 2))
    return {
        name: [(y - y0).square().mean().sqrt().item() for y, y0 in zip(result, exact, strict=True)]
        for name, result in results.items()
    }


def compiled() -> dict[str, Any]:
    """One graph, with the exchanges in it, of a causal network, also differentiated, and of one with convolutions and
    global attention."""
    torch.manual_seed(0)
    unet = NDLightUNet(2, 1, 3, widths=(8, 16), convs=(1, 0), depths=(0, 1))
    signal = NDLightNet(1, 1, 3, patch_size=2, embed_dim=16, depth=1, tpe_states=4, causal=True)
    errors = {}
    for name, net, shape, backend in (("signal", signal, (1, 22), "aot_eager"), ("images", unet, (1, 10, 6), "eager")):
        with shard_grid(dist.group.WORLD) as grid:
            torch.manual_seed(0)
            x = grid.slab(torch.randn(2, *shape), 2)
            y = net(x)
            plain = gradients(net, y.sum())
            z = torch.compile(net, backend=backend, fullgraph=True)(x)
            grads = gradients(net, z.sum())
        errors[name] = {"output": error_of(z, y, y), "parameters": gradient_error(grads, plain, mean=False)}
    return errors


def killed() -> dict[str, Any]:
    """The second process ends in a step; the others tell what they then see, and how soon."""
    net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=1)
    start = time.monotonic()
    try:
        with shard_grid(dist.group.WORLD):
            for step in range(1000):
                if step == 3:
                    start = time.monotonic()
                    if dist.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                net(torch.randn(1, 1, 4, 8)).sum().backward()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {}


PAIR = (all_cases, recomputed, stream, packs, counted, autocast, compiled)
RARE = (twice, sequences, anomaly, empty_batch, out_of_memory, refused)
# a number of processes, and what they do one after the other
SESSIONS = {
    "two": (2, (*PAIR, *RARE)),
    "three": (3, (all_cases, sequences)),
    "four": (4, (beside,)),
    "killed": (3, (killed,)),
}


def run_rank(folder: Path, rank: int, count: int, jobs: Any, backend: str = "gloo", timeout: int = 2 * SECONDS) -> None:
    """Do jobs as one of `count` processes."""
    torch.set_num_threads(1)
    slabs.PART = 1  # each sample is an exchange of its own; of this process, tests import this module
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        # a stall is for the runner to see, before gloo makes a failure of it
        timeout=timedelta(seconds=timeout),
    )
    results = {job.__name__: job() for job in jobs}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    if killed not in jobs:
        dist.barrier()
        dist.destroy_process_group()


def session(folder: Path) -> dict[str, Any]:
    """Return the results of all processes of each session."""
    context: Any = multiprocessing.get_context("fork")
    results = {}
    for name, (count, jobs) in SESSIONS.items():
        session_folder = folder / name
        session_folder.mkdir()
        options = ("gloo", TIMEOUT) if name == "killed" else ()
        arguments = [(session_folder, i, count, jobs, *options) for i in range(count)]
        ranks = [context.Process(target=run_rank, args=each, daemon=True) for each in arguments]
        for process in ranks:
            process.start()
        failures, codes = int(name == "killed"), [None]
        while None in codes and sum(map(bool, codes)) <= failures:
            time.sleep(0.05)
            codes = [process.exitcode for process in ranks]
        if sum(map(bool, codes)) != failures:
            sys.exit(f"{name}: exit codes {codes}")  # and ends the others
        results[name] = [json.loads(file.read_text()) for file in sorted(session_folder.glob("*.json"))]
    return results


if __name__ == "__main__":
    folder, rank, count, job = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if job == "session":
        (folder / "0.json").write_text(json.dumps(session(folder)))
    else:
        torch.cuda.set_device(rank)
        run_rank(folder, rank, count, ({"on_gpus": on_gpus, "replayed": replayed}[job],), "nccl")

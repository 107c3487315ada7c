"""One of several processes: `python -m tests.parallel.worker FOLDER RANK COUNT JOB`.

Writes a JSON file of what it found to FOLDER."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ndlightnet import NDLightNet, shard_grid
from ndlightnet.parallel import Processes
from tests.processes import SECONDS

from .rare import anomaly, empty_batch, out_of_memory, refused, sequences, twice
from .sharded_networks import CASES, Case, error_of, slab

TIMEOUT = 20  # seconds


def outputs(y: Any) -> list[Tensor]:
    return list(y) if isinstance(y, list) else [y]


def against_whole(
    case: Case, axis: int, dtype: torch.dtype, checkpointing: bool = False, device: str = "cpu"
) -> dict[str, float]:
    """Return the largest errors of outputs and gradients, relative to the largest number of each
    kind, against the whole on this process."""
    torch.manual_seed(0)
    net = case.make().to(device, dtype).train()
    if checkpointing:
        net.set_grad_checkpointing()  # type: ignore[operator]
    if case.words:
        x = torch.randint(case.words, (2, *case.shape)).to(device)
        first, dim = 1, 1
    else:
        x = torch.randn(2, *case.shape, dtype=dtype).to(device).requires_grad_()
        first, dim = 2, 2 + axis
    given, local = {}, {}
    if case.masked:
        mask = torch.ones(2, *case.shape[1:], dtype=torch.bool, device=device)
        mask[0, ..., -5:], mask[1, -3:] = False, False
        given, local = {"mask": mask}, {"mask": slab(mask, 1 + axis, case.multiple)}
    whole = outputs(net(x, **given))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=dtype).to(device) for y in whole]
    sum((y * w).sum() for y, w in zip(whole, weights, strict=True)).backward()
    expected = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    part = slab(x.detach(), dim, case.multiple).clone()
    part.requires_grad_(part.is_floating_point())
    with shard_grid(dist.group.WORLD, axis=axis) as grid:
        found = outputs(net(part, **local))
        loss: Any = 0.0
        errors = {"output": 0.0}
        for y, z, w in zip(whole, found, weights, strict=True):
            per_cell = y.ndim > 2  # classes of a sample are the same on all processes
            if per_cell:
                at = [0, *torch.tensor(_sizes(z, first, axis)).cumsum(0).tolist()][dist.get_rank()]
                y, w = (t.narrow(first + axis, at, z.shape[first + axis]) for t in (y, w))
            errors["output"] = max(errors["output"], error_of(z, y, y))
            loss = loss + (grid.total((z * w).sum()) if per_cell else (z * w).sum())
    loss.backward()  # also outside of it
    largest = torch.stack([g.abs().max() for g in expected.values()]).max()
    errors["parameters"] = 0.0
    for name, p in net.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
        wanted = expected.get(name, torch.zeros_like(p))
        errors["parameters"] = max(errors["parameters"], error_of(grad, wanted, largest))
    if part.requires_grad:
        assert x.grad is not None and part.grad is not None
        grad = part.grad / dist.get_world_size()
        errors["input"] = error_of(grad, slab(x.grad, dim, case.multiple), x.grad)
    return errors


def _sizes(x: Tensor, first: int, axis: int) -> list[int]:
    own = torch.tensor([x.shape[first + axis]], device=x.device)
    sizes = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    return [int(n) for n in sizes]


def all_cases() -> dict[str, Any]:
    """Two processes take all axes, three the first one: in float64, and two the first one in float32."""
    errors: dict[str, Any] = {}
    count = dist.get_world_size()
    for name, case in CASES.items():
        for axis in case.axes if count == 2 else [0]:
            errors[f"{name}, axis {axis}, float64"] = against_whole(case, axis, torch.float64)
        if count == 2:
            errors[f"{name}, axis 0, float32"] = against_whole(case, 0, torch.float32)
    return errors


def recomputed() -> dict[str, Any]:
    names = ("video, windows that forget", "U-Net M")
    return {name: against_whole(CASES[name], 1, torch.float64, True) for name in names}


def on_gpus() -> dict[str, Any]:
    """The kernels, against the kernels for the whole, in float32 without TF32."""
    torch.backends.cudnn.allow_tf32 = False
    found = {}
    for name in ("volume, masked", "video, causal", "U-Net M", "U-Net, series"):
        for axis in (0, 1):
            errors = against_whole(CASES[name], axis, torch.float32, device="cuda")
            found[f"{name}, axis {axis}, float32"] = errors
            print(f"{name}, axis {axis}", errors, flush=True)
    again = against_whole(CASES["U-Net M"], 0, torch.float32, True, device="cuda")
    print("U-Net M, grad_checkpointing, axis 0", again, flush=True)
    return {**found, "U-Net M, grad_checkpointing, axis 0, float32": again}


def stream() -> dict[str, Any]:
    """Frames that are split along space, in chunks of several sizes."""
    torch.manual_seed(0)
    net = NDLightNet(3, 1, 5, patch_size=2, embed_dim=32, depth=2, causal=True).double().eval()
    clip = torch.randn(2, 1, 12, 9, 10, dtype=torch.float64)
    found = {}
    for axis in (1, 2):
        with torch.no_grad(), shard_grid(dist.group.WORLD, axis=axis):
            running = net.stream(batch_size=2)
            for chunk in slab(clip, 2 + axis, 2).split([1, 5, 2, 4], 2):
                last = running(chunk)
        found[f"axis {axis}"] = error_of(last, net(clip), net(clip))
    return found


def packs() -> dict[str, Any]:
    """Samples of different shapes, a slab of each on every process: outputs and gradients."""
    found = {}
    shapes = [(1, 12, 9, 8), (1, 17, 6, 7), (1, 9, 8, 9)]
    for causal in (False, True):
        for axis in (0, 1):
            torch.manual_seed(0)
            net = NDLightNet(3, 1, 5, patch_size=2, embed_dim=32, depth=2, tpe_states=8, causal=causal).double()
            samples = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            whole = net(net.pack(samples))
            weight = torch.randn(whole.shape, dtype=torch.float64)
            (whole * weight).sum().backward()
            expected = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
            net.zero_grad()
            with shard_grid(dist.group.WORLD, axis=axis):
                y = net(net.pack([slab(x, 1 + axis, 2) for x in samples]))
            (y * weight).sum().backward()
            errors = {"output": error_of(y, whole, whole)}
            largest = torch.stack([g.abs().max() for g in expected]).max()
            for p, wanted in zip(net.parameters(), expected, strict=True):
                assert p.grad is not None
                dist.all_reduce(p.grad)
                error = error_of(p.grad / dist.get_world_size(), wanted, largest)
                errors["parameters"] = max(errors.get("parameters", 0.0), error)
            found[f"causal={causal}, axis {axis}"] = errors
    return found


def beside() -> dict[str, Any]:
    """DDP and FSDP2 over four processes, which share two samples, beside the grid."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "grid"))
    found = {}
    torch.manual_seed(0)
    x, label = torch.randn(2, 1, 12, 8, dtype=torch.float64), torch.tensor([1, 3])
    plain = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=2, tpe_states=8).double()
    nn.functional.cross_entropy(plain(x), label).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    largest = torch.stack([g.abs().max() for g in expected.values() if g is not None]).max()
    for kind in ("ddp", "fsdp2"):
        net = copy.deepcopy(plain)
        net.zero_grad()
        model: Any = net
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(net)
        else:
            for block in net.blocks:
                fully_shard(block)
            fully_shard(net)
        own = slice(mesh.get_local_rank("data"), mesh.get_local_rank("data") + 1)
        with shard_grid(mesh["grid"]) as grid:
            logits = model(grid.slab(x[own], 2))
        nn.functional.cross_entropy(logits, label[own]).backward()
        found[kind] = 0.0
        for name, p in net.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[kind] = max(found[kind], error_of(grad, expected[name], largest))
    return found


def counted() -> dict[str, Any]:
    """Bytes that this process sends in a step, in float32 and under autocast, and how many
    transfers are under way at most, forward and backward."""
    sent, found = 0, {}
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
    Processes.all_to_all_single = all_to_all_single  # type: ignore[method-assign]
    for name, cast in (("float32", False), ("bfloat16", True)):
        sent = 0
        with shard_grid(dist.group.WORLD) as grid, torch.autocast("cpu", torch.bfloat16, cast):
            x = grid.slab(torch.randn(2, 1, 12, 5, 4))
            loss = net(x).float().sum()
            forward = len(under_way)
            loss.backward()
        found[name] = sent
        found[f"{name}, under way"] = [max(under_way[:forward]), max(under_way[forward:])]
        assert under_way[-1] == under_way[forward - 1] == 0
        under_way[:] = [0]
    Processes.all_to_all_single = real  # type: ignore[method-assign]
    return found


def autocast() -> dict[str, Any]:
    """Errors under autocast of the whole and of parts, in the mean, against float64."""
    torch.manual_seed(0)
    net = CASES["volume"].make()
    x = torch.randn(4, 1, 12, 10, 14)

    def step(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        net.zero_grad()
        y = net(x)
        y.square().sum().backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
        return y.detach().double(), torch.cat([grad.flatten().double() for grad in grads]) / 2

    exact = step(copy.deepcopy(net).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        whole = step(net, x)
        with shard_grid(dist.group.WORLD) as grid:
            parts = step(net, grid.slab(x, 2))
    return {
        name: [(y - y0).square().mean().sqrt().item() for y, y0 in zip(found, exact, strict=True)]
        for name, found in (("whole", whole), ("parts", parts))
    }


def compiled() -> dict[str, Any]:
    """One graph, with the exchanges in it, of each network."""
    found = {}
    for name in ("signal", "U-Net, images"):
        torch.manual_seed(0)
        case = CASES[name]
        net = case.make()
        with shard_grid(dist.group.WORLD) as grid:
            x = grid.slab(torch.randn(2, *case.shape), case.multiple)
            y = net(x)
            y.sum().backward()
            plain = [p.grad for p in net.parameters() if p.grad is not None]
            net.zero_grad()
            z = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
            z.sum().backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        largest = torch.stack([g.abs().max() for g in plain]).max()
        worst = max(error_of(a, b, largest) for a, b in zip(grads, plain, strict=True))
        found[name] = {"output": error_of(z, y, y), "parameters": worst}
    return found


def killed() -> dict[str, Any]:
    """The second process ends in a step; the others tell what they then see, and how soon."""
    net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=2)
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


# what processes do one after the other, by their number: each costs seconds to start
SESSIONS = {
    2: (
        all_cases,
        recomputed,
        stream,
        packs,
        counted,
        autocast,
        compiled,
        twice,
        sequences,
        anomaly,
        empty_batch,
        out_of_memory,
        refused,
    ),
    3: (all_cases, sequences),
    4: (beside,),
}


def session() -> dict[str, Any]:
    return {job.__name__: job() for job in SESSIONS[dist.get_world_size()]}


if __name__ == "__main__":
    folder, rank, count, job = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if job == "on_gpus":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if job == "on_gpus" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        # a stall is for the runner to see, before gloo makes a failure of it
        timeout=timedelta(seconds=TIMEOUT if job == "killed" else 2 * SECONDS),
    )
    found = globals()[job]()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if job != "killed":
        dist.barrier()
        dist.destroy_process_group()

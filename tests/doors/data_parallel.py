"""DDP and FSDP2 on two processes (gloo, CPU): gradients, a step and checkpoints as of one process.

One pair of processes tries one model of each kind once for a whole run of pytest, another pair all other models; a
door looks its cell up.
"""

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ndlightnet.models.hub import Pretrained
from tests.processes import run_once

from .door_models import CASES, KINDS, Case, output

RANKS = 2
# of the largest number: sums of at most 1e6 float64 terms, of which one process adds up all, two half of them each
TOLERANCE = 1e6 * torch.finfo(torch.float64).eps


def ddp(case: Case, tmp_path: Path) -> None:
    """Gradients are those of the joint batch, also if each process has samples of another size."""
    _look_up("ddp", case, tmp_path)


def fsdp2(case: Case, tmp_path: Path) -> None:
    """So they are with parameters split among the processes; checkpoints load whole and split."""
    _look_up("fsdp2", case, tmp_path)


def _look_up(door: str, case: Case, tmp_path: Path) -> None:
    ranks = run_once("tests.doors.data_parallel", tmp_path, RANKS, "kinds" if case.name in KINDS else "others")
    assert [cells[f"{door}, {case.name}"] for cells in ranks] == [None] * RANKS


def _inputs(case: Case, at: int, batch: int) -> tuple[Tensor, ...]:
    torch.manual_seed(at)
    return tuple(x.double() if x.is_floating_point() else x for x in case.inputs(at, batch))


def _loss(model: nn.Module, inputs: tuple[Tensor, ...], share: slice) -> Tensor:
    """Return a sum over samples with fixed random weights, so that losses of parts add up."""
    out = output(model, *(x[share] for x in inputs))
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(len(inputs[0]), *out.shape[1:], generator=generator, dtype=out.dtype)
    return (out * weight[share]).sum() / len(inputs[0])


def _same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    scale = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        assert actual[name].shape == x.shape, name
        error = (actual[name] - x).abs().max().item()
        assert error <= TOLERANCE * scale, f"{name}: error {error / scale:.1e}"


def _grads(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, grad in grads.items() if grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}


def _two_steps(plain: nn.Module, model: nn.Module, case: Case, rank: int) -> None:
    """Train `model`, the parallel copy of `plain`, for two steps and compare; the second one with
    samples of another size on each process."""
    share = slice(2 * rank, 2 * rank + 2)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    rates = [torch.optim.SGD(m.parameters(), 1e-3) for m in (plain, model)]
    for step in range(2):
        for optimiser in rates:
            optimiser.zero_grad()
        if step == 0:
            inputs = _inputs(case, 0, 2 * RANKS)
            _loss(plain, inputs, slice(None)).backward()
            (_loss(model, inputs, share) * RANKS).backward()  # processes' gradients are averaged
        else:
            for at in range(RANKS):
                (_loss(plain, _inputs(case, at, 2), slice(None)) / RANKS).backward()
            _loss(model, _inputs(case, rank, 2), slice(None)).backward()
        _same(_grads(inner), _grads(plain))
        for optimiser in rates:
            optimiser.step()


def _try_ddp(case: Case, rank: int, folder: Path) -> None:
    plain = case.make().double()
    _two_steps(plain, DistributedDataParallel(copy.deepcopy(plain)), case, rank)


def _split(model: nn.Module) -> nn.Module:
    """Split the parameters among the processes, block by block."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)][::-1]:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def _try_fsdp2(case: Case, rank: int, folder: Path) -> None:
    plain = case.make().double()
    model = _split(copy.deepcopy(plain))
    _two_steps(plain, model, case, rank)

    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    torch.manual_seed(1)
    loaded = _split(case.make().double())
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state["model"])
    if isinstance(loaded, Pretrained):
        with pytest.raises(ValueError, match="is split among processes"):
            loaded.save_pretrained(folder / "pretrained")
        assert not (folder / "pretrained").exists()
    full_state = get_model_state_dict(loaded, options=StateDictOptions(full_state_dict=True))
    if rank == 0:  # which alone is given the full one
        joined = case.make().double()
        joined.load_state_dict(full_state)
        _same(dict(joined.named_parameters()), dict(plain.named_parameters()))
    inputs = _inputs(case, 1, 2)
    with torch.no_grad():
        ours, theirs = (_loss(m, inputs, slice(None)) for m in (loaded, plain))
    _same({"loss": ours}, {"loss": theirs})


def main(folder: Path, rank: int, models: str) -> None:
    """Try every cell, and write its error or None to FOLDER/RANK.json."""
    errors: dict[str, str | None] = {}
    chosen = [case for case in CASES.values() if (case.name in KINDS) == (models == "kinds")]
    for door, tried in {"ddp": _try_ddp, "fsdp2": _try_fsdp2}.items():
        for i, case in enumerate(chosen):
            torch.manual_seed(0)  # the same parameters in all processes
            cell = folder / f"{door}{i}"
            # a group for each cell: a process that fails in one leaves the other there, not later
            dist.init_process_group(
                "gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30), init_method=f"file://{cell}.store"
            )
            try:
                tried(case, rank, cell)
                errors[f"{door}, {case.name}"] = None
            except Exception as error:
                errors[f"{door}, {case.name}"] = f"{type(error).__name__}: {error}"
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4])

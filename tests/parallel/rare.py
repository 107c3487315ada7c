"""Jobs of worker.py: rare uses, and wrong ones."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ndlightnet import NDLightDiT, NDLightNet, NDLightUNet, pack, shard_grid
from ndlightnet.layout import pack_points
from ndlightnet.parallel import Processes

from .sharded_networks import CASES, error_of, gradient_error, gradients, slab


def twice() -> dict[str, Any]:
    """Errors of the gradient of a penalty on the gradient of the input."""
    errors: dict[str, Any] = {}
    count = dist.get_world_size()

    def gradient(loss: Any, x: Any) -> Any:
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    for name, axis in (
        ("volume", 0),
        ("video, causal", 0),
        ("video, causal", 1),
        ("U-Net, images", 0),
        ("video, windows that forget", 1),
    ):
        case = CASES[name]
        torch.manual_seed(0)
        net: Any = case.make().double().train()
        x = torch.randn(2, *case.shape, dtype=torch.float64, requires_grad=True)
        expected = gradients(net, gradient(net(x).square().sum(), x).square().sum())
        slab_x = slab(x.detach(), 2 + axis, case.multiple).clone().requires_grad_()
        with shard_grid(dist.group.WORLD, axis=axis) as grid:
            y = net(slab_x)
            squares = y.square().sum()
            dx = gradient(grid.total(squares) if y.ndim > 2 else squares, slab_x) / count
            grads = gradients(net, grid.total(dx.square().sum()))
        errors[f"{name}, axis {axis}"] = {"parameters": gradient_error(grads, expected)}
    return errors


def sequences() -> dict[str, Any]:
    """Inputs of random sizes one after the other in one context: slabs that `slab` cuts, some cut
    before an earlier network is called, slabs that each process loads, and packs. A process often
    has the same own size while those of others change."""
    torch.manual_seed(0)
    signal = NDLightNet(1, 1, 0, patch_size=1, embed_dim=32, depth=1).double()
    image = NDLightUNet(2, 1, 3, widths=(8, 16), strides=(4,)).double()
    random, count = Random(0), dist.get_world_size()
    errors: dict[str, list[float]] = {"cut": [], "loaded": [], "packed": [], "planes": []}
    kinds = random.choices([*errors], k=60)
    multiples = [4 if kind == "planes" else 1 for kind in kinds]
    inputs = [
        torch.randn(1, 1, random.randrange(4 * count + 4, 4 * count + 9), *[8] * (kind == "planes")).double()
        for kind in kinds
    ]
    with torch.no_grad():
        expected = [
            image(x) if kind == "planes" else signal.forward_features(x) for kind, x in zip(kinds, inputs, strict=True)
        ]
        with shard_grid(dist.group.WORLD) as grid:
            slabs = [
                slab(x, 2) if kind == "loaded" else grid.slab(x, multiple)
                for kind, x, multiple in zip(kinds, inputs, multiples, strict=True)
            ]
            for kind, x, y, multiple in zip(kinds, slabs, expected, multiples, strict=True):
                if kind == "planes":
                    out, dim = image(x), 2
                elif kind == "packed":
                    out, dim = signal.forward_features(signal.pack([x[0]])).values[None], 1
                else:
                    out, dim = signal.forward_features(x), 1
                errors[kind].append(error_of(out, slab(y, dim, multiple), y))
                grid.slab(torch.zeros(1, 1, 4 * count))  # an input that no network takes
    assert min(map(len, errors.values())) >= 5
    return {kind: {"output": max(each)} for kind, each in errors.items()}


def anomaly() -> dict[str, Any]:
    """Anomaly detection reads each node's gradients at once; unwritten memory is NaN here."""
    torch.manual_seed(0)
    net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=2).double()
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.autograd.set_detect_anomaly(True):
        expected = gradients(net, net(x).sum())
        with shard_grid(dist.group.WORLD) as grid:
            actual = gradients(net, net(grid.slab(x, 2)).sum())
    torch.use_deterministic_algorithms(False)
    return {"anomaly": {"parameters": gradient_error(actual, expected)}}


def empty_batch() -> dict[str, Any]:
    """Return how many parameters have no gradient."""
    missing = {}
    for name in ("image", "video, causal", "U-Net M", "U-Net, series"):
        case = CASES[name]
        net = case.make()
        with shard_grid(dist.group.WORLD) as grid:
            net(grid.slab(torch.zeros(0, *case.shape), case.multiple)).sum().backward()
        missing[name] = {"parameters": float(sum(p.grad is None for p in net.parameters() if p.requires_grad))}
    return missing


def out_of_memory() -> dict[str, str]:
    """Return what is raised where the memory for what is received is missing."""

    class Full(Processes):
        def all_to_all_single(self, *sizes: Any) -> Any:
            raise torch.OutOfMemoryError("full")

    try:
        Full(dist.group.WORLD).all_gather(torch.zeros(3))
    except RuntimeError as error:
        return {"error": type(error).__name__}
    return {}


def refused() -> dict[str, Any]:
    """Return the message of each wrong use, by a name."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=1)
    soft = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=1, mixer="SoftmaxAttention")
    stem = NDLightNet(2, 1, 5, patch_size=2, embed_dim=32, depth=1, stem_blocks=1)
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("data", "grid"))
    world, even = dist.group.WORLD, torch.randn(1, 1, 4, 8)
    dit = partial(NDLightDiT(2, 1, patch_size=2, embed_dim=32, depth=1), t=0.0)
    points = NDLightNet(3, 3, 5, patch_size=1, embed_dim=32, depth=1, tpe=False, mixer="SoftmaxAttention")
    uses: dict[str, Any] = {
        "another size": (net, world, 0, torch.randn(1, 1, 4, 8 + 2 * rank)),
        "another batch": (net, world, 0, torch.randn(1 + rank, 1, 4, 8)),
        "named sizes": (net, world, 0, torch.randn(1, 1, 4, 8)),
        "not whole patches": (net, world, 0, torch.randn(1, 1, 3, 8)),
        "no such axis": (net, world, 2, even),
        "all dimensions": (net, mesh, 0, even),
        "no group": (net, "grid", 0, even),
        "another mixer": (soft, world, 0, even),
        "a stem": (stem, world, 0, even),
        "a diffusion": (dit, world, 0, even),
        "points": (points, world, 0, pack_points([torch.randn(4, 3)])),
        "no tokens": (net, world, 0, torch.randn(1, 1, 4 * rank, 8)),
        "no tokens of a sample": (net, world, 0, pack([torch.randn(1, 4 * rank, 8)], 2)),
    }
    messages: dict[str, Any] = {}
    for name, (model, group, axis, x) in uses.items():
        try:
            with shard_grid(group, axis=axis, sizes=(3, 5) if name == "named sizes" else None):
                model(x)
        except (ValueError, TypeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    for name, shape in (("inputs", (1, 1, 8, 8 + 2 * rank)), ("batches", (1 + rank, 1, 8, 8))):
        try:
            with shard_grid(world) as grid:
                net(grid.slab(torch.randn(shape), 2))
        except ValueError as error:
            messages[f"different {name}"] = f"{type(error).__name__}: {error}"
    block: Any = net.blocks[0]
    torch.manual_seed(1)  # processes have drawn differently
    tokens = torch.randn(1, 6 * count, 4, 32)
    with shard_grid(mesh["grid"]):
        messages["one dimension"] = str(tuple(net(even).shape))
        layer_out = block(slab(tokens, 1))  # a layer by itself
    messages["a layer"] = error_of(layer_out, slab(block(tokens), 1), layer_out)
    return messages

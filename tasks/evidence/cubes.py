"""Measure how large a volume one card takes, and its costs: whole, in windows, in training.

    cubes=tasks/evidence/cubes.py
    python $cubes                     times and memory of cubes of 256 and 512 voxels
    python $cubes --largest           and the largest cubes for prediction and training
    python $cubes --classes 100       memory of the host: read, predict and write 512^3
    python $cubes --trained CONFIG    how much the answer in windows differs from the whole

Networks are untrained, in bf16, on noise of one channel. With --trained the network is the last
checkpoint of a `fit`, on its first held-out volume, repeated in mirrored copies until the cube is
full, in windows of its training patch. Writes table.md, runs.csv and runs.json under --out.
"""

from __future__ import annotations

import gc
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch import nn

from ndlightnet import Identity, NDLightUNet
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.transforms import Intensity, Prepare
from ndlightnet.data.volume.volume import Volume
from ndlightnet.inference import predict_labels
from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.core.cli import task_cli
from ndlightnet.training.peers import DynUNet, SegResNet, SwinUNETR
from ndlightnet.training.segmentation.metrics import dice_of
from ndlightnet_evidence import runner, tables
from ndlightnet_evidence.runner import Run

HIDDEN = ("run_seconds", "date", "commit", "device", "options")  # no columns of the table
STEP = 32  # voxels: resolution of the search for the largest cube
NETS: dict[str, Callable[[int], nn.Module]] = {
    "NDLightUNet": lambda classes: NDLightUNet(3, 1, classes, strides=(2, 2, 2, 2)),
    "NDLightUNet M": lambda classes: NDLightUNet(3, 1, classes, size="M", strides=(2, 2, 2, 2)),
    "NDLightUNet S": lambda classes: NDLightUNet(3, 1, classes, size="S", strides=(2, 2, 2, 2)),
    "NDLightUNet without mixer": lambda classes: NDLightUNet(
        3, 1, classes, strides=(2, 2, 2, 2), mixer=Identity, tpe=False
    ),
    "DynUNet": lambda classes: DynUNet(3, 1, classes, (2, 2, 2, 2), deep_supervision=False),
    "SegResNet": lambda classes: SegResNet(3, 1, classes),
    "SwinUNETR": lambda classes: SwinUNETR(3, 1, classes),
}


def measured(action: Callable[[], Any], repeats: int = 1) -> dict[str, float]:
    """Return seconds (the fastest of `repeats` after a warm-up) and peak GB of the card."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times[1:] or times), "gb": torch.cuda.max_memory_allocated() / 1e9}


def tried(action: Callable[[], Any], repeats: int = 1) -> dict[str, Any]:
    """Return `measured`, or why the card cannot do it."""
    try:
        return measured(action, repeats)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0][:120]
        return {"limit": "out of memory" if "out of memory" in text else text}


def forward(net: nn.Module, side: int) -> None:
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        net.eval()(torch.randn(1, 1, side, side, side, device="cuda"))


def step(net: nn.Module, side: int) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        out = net.train()(torch.randn(1, 1, side, side, side, device="cuda"))
    nn.functional.cross_entropy(out, torch.zeros_like(out[:, 0], dtype=torch.long)).backward()
    net.zero_grad(set_to_none=True)


def windows(net: nn.Module, image: torch.Tensor, window: Sequence[int] | None) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return predict_labels(net.eval(), image, window)


def largest(action: Callable[[nn.Module, int], None], net: nn.Module) -> dict[str, Any]:
    """Return the largest side that works, by bisection in STEPs, its GB, and why the next fails."""
    low, high = 0, 64  # in STEPs; low works
    best: dict[str, Any] = {}
    while high - low > 1:
        middle = (low + high) // 2 if low else min(8, high - 1)
        found = tried(partial(action, net, STEP * middle), 0 if low else 1)
        if "limit" in found:
            high, best = middle, {**best, "next": found["limit"]}
        else:
            low, best = middle, {**best, "largest": STEP * middle, "gb": found.get("gb")}
        torch.cuda.empty_cache()
    return best


def peak_of(action: Callable[[], Any]) -> int:
    """Return the peak memory of this process in the call, minus that before, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory in use
    before = held("VmRSS")
    action()
    return held("VmHWM") - before


def held(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def whole_way(classes: int, side: int, window: int) -> dict[str, Any]:
    """Measure a prediction with so many classes: read a scan, prepare, predict, write labels."""
    device = runner.device().type
    net = NETS["NDLightUNet S"](classes).to(device).eval()

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            volume = Volume.read(case)
            image = Prepare([Intensity(-1000, 1000, 0, 500)])(volume)["image"]
            labels = predict_labels(net, image, [window] * 3, onto=volume.onto(image))
            volume.save_labels(volume.from_ras(labels), path.with_name("labels.nii.gz"))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan.nii"
        voxels = np.random.default_rng(0).integers(-1000, 1000, (side, side, side), np.int16)
        nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1.0, 1, 1, 1])), path)
        del voxels
        with torch.autocast(device, torch.bfloat16):  # what is loaded once is not counted
            predict_labels(net, torch.randn(1, window, window, window), [window] * 3)
        case, start = Case("scan", (path,), None), time.perf_counter()
        peak = peak_of(run)
    return {
        "classes": classes,
        "window": window,
        "seconds": time.perf_counter() - start,
        "host_gb": peak / 1e9,
        "inputs": peak / (4 * side**3),
    }


@cache
def trained(config: Path) -> tuple[nn.Module, list[int], torch.Tensor]:
    """Return the network of a `fit`, its patch's shape, and a volume (channels, x, y, z) for it."""
    made = task_cli(SegmentationTask, VolumeData, ["--config", str(config)], run=False)
    net, data = made.model.net, made.datamodule
    last = Path(made.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    saved = torch.load(last, map_location="cpu", weights_only=True)
    made.model.load_state_dict(saved["state_dict"])
    data.setup("validate")
    return net.eval(), list(data.patch), data.val_set[0]["image"].as_tensor()


def cube(image: torch.Tensor, side: int) -> torch.Tensor:
    """Fill (channels, side, side, side) with mirrored copies of an image (channels, *space)."""
    for axis, cells in enumerate(image.shape[1:], start=1):
        there = torch.arange(side) % (2 * cells)
        image = image.index_select(axis, torch.minimum(there, 2 * cells - 1 - there))
    return image


def two_ways(net: nn.Module, image: torch.Tensor, window: list[int]) -> dict[str, Any]:
    """Return time and memory of prediction whole and in windows, the share of voxels whose labels
    differ, and the Dice between both, the mean of the classes that either finds."""
    found: dict[str, torch.Tensor] = {}
    both: dict[str, Any] = {}
    net.cuda()
    for what, shape in (("whole", None), ("windows", window)):
        costs = tried(lambda: found.update({what: windows(net, image, shape)}))  # noqa: B023
        both |= {f"{name}, {what}": value for name, value in costs.items()}
    if len(found) < 2:
        return both
    whole, parts = (found[what].long() for what in ("whole", "windows"))
    classes = int(torch.maximum(whole.max(), parts.max())) + 1
    dice = dice_of(whole[None], parts[None], classes)
    differ = (whole != parts).double().mean().item()
    return {**both, "differ": differ, "dice": dice[dice.isfinite()].mean().item()}


def run(o: Namespace, who: Run) -> Run:
    what, side = who["what"], who.get("side", 0)
    if o.classes:
        return whole_way(o.classes, side, o.window)
    if o.trained:
        net, patch, image = trained(o.trained)
        return two_ways(net, cube(image, side), patch)
    net = NETS[who["row"]](3).cuda()
    if what.startswith("largest"):
        return largest(step if what == "largest training" else forward, net)
    window = None if what == "whole" else [o.window] * 3
    return tried(partial(windows, net, torch.randn(1, side, side, side), window))


def planned(o: Namespace) -> list[Run]:
    if o.classes or o.trained:
        row, what = ("NDLightUNet S", "from file to file") if o.classes else (str(o.trained), "both")
        return [{"row": row, "side": side, "what": what} for side in o.sides]
    ways = ("whole", f"windows of {o.window}")
    limits = ("largest prediction", "largest training") if o.largest else ()
    return [
        who
        for row in o.nets
        for who in (
            *({"row": row, "side": side, "what": what} for side in o.sides for what in ways),
            *({"row": row, "what": what} for what in limits),
        )
    ]


def cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table(runs: list[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run if name not in HIDDEN)
    return tables.markdown([*names], [[cell(run.get(name)) for name in names] for run in runs])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--sides", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--classes", type=int, default=0)
    parser.add_argument("--trained", type=Path, metavar="CONFIG")
    runner.add_options(parser, "runs/cubes", seeds=None)
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/cubes")
    runner.compare(
        o,
        planned(o),
        partial(run, o),
        table=table,
        say=lambda run: ", ".join(f"{name} {cell(value)}" for name, value in run.items()),
    )


if __name__ == "__main__":
    main()

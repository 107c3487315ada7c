"""How large a volume one card takes, and what it costs: whole, in windows, in training.

python tasks/evidence/cubes.py                          times and memory of cubes of 256 and 512 voxels
python tasks/evidence/cubes.py --largest                and the largest cubes for prediction and training
python tasks/evidence/cubes.py --classes 100            memory of the host: read, predict and write 512^3
python tasks/evidence/cubes.py --trained CONFIG         how much the answer in windows differs from the whole

Networks are untrained, bf16, on noise; one channel. With --trained it is the last checkpoint of a
`fit`, on its first held-out volume, repeated in mirrored copies until the cube is full, in windows
of its training patch. Writes cubes.json under --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch import nn

from ndlightnet import Identity, NDLightUNet
from ndlightnet.data.errors import whole_file
from ndlightnet.data.volume_transforms import Intensity, Prepare, file_grid, to_file
from ndlightnet.data.volumes import Case, load_case, save_labels
from ndlightnet.inference import predict_labels
from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.cases import dice_of
from ndlightnet.training.cli import task_cli
from ndlightnet.training.peers import DynUNet, SegResNet, SwinUNETR

STEP = 32  # voxels by which the largest cube is looked for
NETS: dict[str, Callable[[int], nn.Module]] = {
    "NDLightUNet M": lambda classes: NDLightUNet(3, 1, classes, strides=(2, 2, 2, 2)),
    "NDLightUNet S": lambda classes: NDLightUNet(3, 1, classes, size="S", strides=(2, 2, 2, 2)),
    "without mixer": lambda classes: NDLightUNet(
        3, 1, classes, strides=(2, 2, 2, 2), mixer=Identity, tpe=False
    ),
    "DynUNet": lambda classes: DynUNet(3, 1, classes, (2, 2, 2, 2), deep_supervision=False),
    "SegResNet": lambda classes: SegResNet(3, 1, classes),
    "SwinUNETR": lambda classes: SwinUNETR(3, 1, classes),
}


def measured(action: Callable[[], Any], repeats: int = 1) -> dict[str, float]:
    """Seconds (the fastest of `repeats` after one that does not count) and peak GB of the card."""
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
    """`measured`, or what went wrong."""
    try:
        return measured(action, repeats)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0][:120]
        return {"error": "out of memory" if "out of memory" in text else text}


def forward(net: nn.Module, side: int) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            net.eval()(torch.randn(1, 1, side, side, side, device="cuda"))

    return run


def windows(net: nn.Module, side: int, window: int | None) -> Callable[[], Any]:
    image = torch.randn(1, side, side, side)

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            predict_labels(net.eval(), image, window and [window] * 3)

    return run


def step(net: nn.Module, side: int) -> Callable[[], Any]:
    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = net.train()(torch.randn(1, 1, side, side, side, device="cuda"))
        nn.functional.cross_entropy(out, torch.zeros_like(out[:, 0], dtype=torch.long)).backward()
        net.zero_grad(set_to_none=True)

    return run


def largest(make: Callable[[nn.Module, int], Callable[[], Any]], net: nn.Module) -> dict[str, Any]:
    """The largest side that works, by bisection in STEPs, with its time and memory."""
    low, high, best = 0, 64, {}  # in STEPs; low works
    while high - low > 1:
        middle = (low + high) // 2 if low else min(8, high - 1)
        found = tried(make(net, STEP * middle), 0 if low else 1)
        if "error" in found:
            high, best = middle, {**best, "next": found["error"]}
        else:
            low, best = middle, {**best, "side": STEP * middle, "gb": found.get("gb")}
        torch.cuda.empty_cache()
    return best


class HostMemory:
    """The most that this process holds while the block runs, over what it held before, in bytes."""

    def __enter__(self) -> HostMemory:
        gc.collect()
        self.before = self.peak = self._now()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.bytes = self.peak - self.before

    def _watch(self) -> None:
        while not self.over.wait(0.01):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def whole_way(classes: int, side: int, window: int) -> dict[str, Any]:
    """Read a scan, prepare and predict it with so many classes, write the labels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = NETS["NDLightUNet S"](classes).to(device).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan.nii"
        voxels = np.random.default_rng(0).integers(-1000, 1000, (side, side, side), np.int16)
        nibabel.save(nibabel.Nifti1Image(voxels, np.diag([1.0, 1, 1, 1])), path)
        del voxels
        small = torch.randn(1, window, window, window)
        with torch.autocast(device, torch.bfloat16):  # what is loaded once is not counted
            predict_labels(net, small, [window] * 3)
        case, start = Case("scan", (path,), None), time.perf_counter()
        with HostMemory() as host, torch.autocast(device, torch.bfloat16):
            data = Prepare([Intensity(-1000, 1000, 0, 500)])(load_case(case))
            labels = predict_labels(net, data["image"], [window] * 3, onto=file_grid(data))
            save_labels(to_file(labels, data), case, Path(folder) / "labels.nii.gz")
    return {
        "classes": classes, "side": side, "window": window, "device": device,
        "seconds": time.perf_counter() - start, "host_gb": host.bytes / 1e9,
        "inputs": host.bytes / (4 * side**3),
    }  # fmt: skip


def trained(config: Path) -> tuple[nn.Module, list[int], torch.Tensor]:
    """The network of a `fit`, the shape of its patch, and a volume (channels, x, y, z) for it."""
    made = task_cli(SegmentationTask, VolumeData, ["--config", str(config)], run=False)
    net, data = made.model.net, made.datamodule
    last = Path(made.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    saved = torch.load(last, map_location="cpu", weights_only=True)
    made.model.load_state_dict(saved["state_dict"])
    data.setup("validate")
    return net.eval(), list(data.patch), data.val_set[0]["image"].as_tensor()


def cube(image: torch.Tensor, side: int) -> torch.Tensor:
    """(channels, *space) -> (channels, side, side, side), filled with mirrored copies."""
    for axis, cells in enumerate(image.shape[1:], start=1):
        there = torch.arange(side) % (2 * cells)
        image = image.index_select(axis, torch.minimum(there, 2 * cells - 1 - there))
    return image


def two_ways(net: nn.Module, image: torch.Tensor, window: list[int]) -> dict[str, Any]:
    """Time and memory of both ways, the share of voxels that they name differently, and the Dice
    between them, the mean of the classes that either finds."""
    found: dict[str, torch.Tensor] = {}

    def run(what: str, shape: list[int] | None) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            found[what] = predict_labels(net, image, shape)

    net.cuda()
    rows = {
        what: tried(partial(run, what, shape))
        for what, shape in (("whole", None), ("windows", window))
    }
    if len(found) < 2:
        return rows
    whole, parts = (found[what].long() for what in ("whole", "windows"))
    classes = int(torch.maximum(whole.max(), parts.max())) + 1
    dice = dice_of(whole[None], parts[None], classes)
    differ = (whole != parts).double().mean().item()
    return {**rows, "window": window, "differ": differ, "dice": dice[dice.isfinite()].mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--sides", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--classes", type=int, default=0)
    parser.add_argument("--trained", type=Path, metavar="CONFIG")
    parser.add_argument("--out", type=Path, default=Path("runs/cubes"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []

    def keep(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        with whole_file(options.out / "cubes.json") as draft:
            draft.write_text(json.dumps(rows, indent=1))

    if options.classes:
        for side in options.sides:
            keep(**whole_way(options.classes, side, options.window))
        return
    if options.trained:
        net, patch, image = trained(options.trained)
        for side in options.sides:
            keep(side=side, **two_ways(net, cube(image, side), patch))
        return
    for name in options.nets:
        net = NETS[name](3).cuda()
        for side in options.sides:
            keep(net=name, side=side, what="whole", **tried(windows(net, side, None)))
            in_windows = tried(windows(net, side, options.window))
            keep(net=name, side=side, what=f"windows of {options.window}", **in_windows)
        if options.largest:
            keep(net=name, what="largest prediction", **largest(forward, net))
            keep(net=name, what="largest training", **largest(step, net))
        del net


if __name__ == "__main__":
    main()

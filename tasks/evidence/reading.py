"""Measure how quickly videos are read for training: the start, clips a second, memory.

    python tasks/evidence/reading.py                 10,000 short videos and 40 long ones
    python tasks/evidence/reading.py --short 1000 --long 4 --seconds 5

The videos are drawn here (H.264, 320 x 240 pixels, 25 frames a second): a few of each kind, under
many names. Every row is one process that builds a VideoData of 16 frames of 112 x 112, with all of
its augmentation, and asks for batches for some seconds, without a network. "first visit" decodes,
"held" takes from the cache what was decoded before. Writes table.md and reading.json under --out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.media import write_video
from ndlightnet.data.video import video_decoders
from ndlightnet_evidence import runner, tables

DRAWN, WIDTH, HEIGHT, FPS = 4, 320, 240, 25  # DRAWN: different videos of each kind
HEAD = ("videos", "reader", "workers", "cache, GB", "start, s", "first batch, s", "clips/s", "memory, GB")


def pictures(frames: int, rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    """Yield a textured ground over which a few bright discs move."""
    ground = rng.integers(60, 140, (HEIGHT // 8, WIDTH // 8, 3)).repeat(8, 0).repeat(8, 1)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    starts, speeds = rng.uniform(0, HEIGHT, (4, 2)), rng.uniform(-3, 3, (4, 2))
    for t in range(frames):
        picture = ground.astype(np.uint8)
        for start, speed in zip(starts, speeds, strict=True):
            cy, cx = (start + speed * t) % (HEIGHT, WIDTH)
            picture[(y - cy) ** 2 + (x - cx) ** 2 < 400] = 230
        yield picture


def make(folder: Path, count: int, seconds: float) -> None:
    """Make train/{a,b} of `count` videos in all, and test/{a,b} of one each."""
    rng, drawn = np.random.default_rng(0), folder / "drawn"
    drawn.mkdir(parents=True)
    some = [drawn / f"{n}.mp4" for n in range(min(DRAWN, count))]
    for path in some:
        write_video(path, pictures(round(seconds * FPS), rng), FPS, keys=FPS)
    for part, number in (("train", count), ("test", 2)):
        for n in range(number):
            to = folder / part / "ab"[n % 2] / f"{n:06}.mp4"
            to.parent.mkdir(parents=True, exist_ok=True)
            os.link(some[n % len(some)], to)


def memory() -> int:
    """Return the bytes of this process and its children that lie in memory, shared pages once."""
    own, total = os.getpid(), 0
    for process in [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Read batches in this process; return what it took."""
    import torch

    from ndlightnet.data.video import video_files as video
    from ndlightnet.training import VideoData

    only = tuple(d for d in video.decoders() if d.__name__ == given["reader"])  # PyAV: none
    vars(video)["decoders"] = lambda: only
    torch.manual_seed(0)
    began = time.perf_counter()
    data = VideoData(
        given["root"],
        batch_size=8,
        workers=given["workers"],
        cache_gb=given["cache"],
        validation=0,
        hflip=True,
        color_jitter=0.5,
        repeats=1000,
    )
    data.setup("fit")
    start = time.perf_counter() - began
    batches = iter(data.train_dataloader())
    next(batches)
    first, count = time.perf_counter() - began, 0
    if given["held"]:
        for _ in range(2 * len(data.train_set) // 8 + 2 * given["workers"]):
            next(batches)
    began, peak = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < given["seconds"]:
        count += len(next(batches)[0])
        peak = max(peak, memory()) if count % 64 == 0 else peak
    return {**given, "start": start, "first": first, "rate": count / passed, "memory": max(peak, memory()) / 1e9}


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=10_000, help="videos of 2 s")
    parser.add_argument("--long", type=int, default=40, help="videos of 5 min")
    parser.add_argument("--seconds", type=float, default=20, help="of each row")
    parser.add_argument("--out", type=Path, default=Path("runs/reading"))
    parser.add_argument("--row", help="measure this row only, JSON, and print it")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.row:
        print(json.dumps(measure(json.loads(options.row))))
        return 0
    runs = []
    with tempfile.TemporaryDirectory() as place:
        short, few, long = (Path(place) / name for name in ("short", "few", "long"))
        make(short, options.short, 2)
        make(few, min(48, options.short), 2)
        if options.long:
            make(long, options.long, 300)
        rows = [
            (f"{options.short:,} of 2 s, first visit", short, "PyAV", workers, cache, False)
            for workers in (1, 2)
            for cache in (4.0, 0.0)
        ]
        rows += [("48 of 2 s, held", few, "PyAV", workers, 4.0, True) for workers in (1, 2)]
        rows += [
            (f"{options.long} of 5 min, first visit", long, reader, 1, 0.0, False)
            for reader in ("PyAV", *(d.__name__ for d in video_decoders.decoders()))
            if options.long
        ]
        for name, root, reader, workers, cache, held in rows:
            row = {
                "videos": name,
                "root": str(root),
                "reader": reader,
                "workers": workers,
                "cache": cache,
                "held": held,
                "seconds": options.seconds,
            }
            done = subprocess.run(
                [sys.executable, __file__, "--row", json.dumps(row)],
                check=True,
                capture_output=True,
                text=True,
                env=runner.environment(),
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(runs[-1], flush=True)
    body = [
        [
            run["videos"],
            run["reader"],
            str(run["workers"]),
            f"{run['cache']:g}",
            *(f"{run[key]:.2f}" for key in ("start", "first")),
            f"{run['rate']:.1f}",
            f"{run['memory']:.2f}",
        ]
        for run in runs
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reading.json").write_text(json.dumps(runs, indent=2) + "\n")
    (options.out / "table.md").write_text(tables.markdown(HEAD, body))
    print(tables.markdown(HEAD, body))
    return 0


if __name__ == "__main__":
    sys.exit(main())

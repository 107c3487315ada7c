"""The same network with one thing changed, same data, same budget, several seeds: a table.

python tasks/evidence/compare.py tasks/ct_segmentation.py configs/hippocampus.yaml --seeds 0 1 2 --jobs 5
python tasks/evidence/compare.py tasks/video_cls.py configs/surveillance.yaml --rows LightNet "single frame"
python tasks/evidence/compare.py tasks/image_cls.py configs/adrenal.yaml --rows Mamba "Mamba axes" GLA
python tasks/evidence/compare.py tasks/image_cls.py configs/fashion_mnist.yaml --family --jobs 16 --minutes 9
python tasks/evidence/compare.py tasks/ct_segmentation.py configs/hippocampus.yaml --checkpoint best \
    --rows tasks/evidence/configs/volumes/*.yaml --folds 5

A row is one of those named below, a mixer of the catalogue (ndlightnet.nn.mixers), or a file
NAME.yaml that is laid over the config; its row is called NAME. A mixer that reads tokens in turn
covers a grid as told: `NAME raster`, `NAME both`, `NAME axes`. --family is all of these; --resume
keeps the results that are under --out.

Every run is a `fit` to the end of its schedule and one `test`, in a process of its own, on one GPU
if there are any: of the last checkpoint, or of the one that was best on the held-out part of the
training set. With --folds every row is trained on each fold, with one seed, and tested on what the
fold leaves out. What follows `--` goes to all of them. Writes table.md and runs.json under --out
after every run. Times are worth comparing only where no GPU has two jobs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ndlightnet.data.errors import whole_file
from ndlightnet.nn import mixers

NET = "--model.net.init_args"
SCANS = ("raster", "both", "axes")


def mixer(name: str, **init_args: Any) -> str:
    """The argument that puts a mixer of the catalogue in place of the config's."""
    value = {"class_path": f"{mixers.__name__}.{name}", "init_args": init_args}
    return f"{NET}.mixer={json.dumps(value)}"


ROWS: dict[str, list[str]] = {
    "LightNet": [],
    "softmax attention": [mixer("SoftmaxAttention")],
    "identity mixer": [mixer("Identity")],
    "LAVO, window 64": [mixer("LAVO", window=64)],
    "without MD-TPE": [f"{NET}.tpe=false"],
    "without MD-LRPE": [mixer("LightNetAttention", lrpe=None)],
    "axis-causal": ["--model.causal=true"],
    "axis-causal, window 4": ["--model.causal=true", mixer("LightNetAttention", window=4)],
    "single frame": ["--data.init_args.frames=1"],
    "padded": ["--data.init_args.batching=padded"],
}
MEASURES = ("mean_dice", "mean_hd95_mm", "top1", "balanced_accuracy", "auc", "bits_per_byte", "mse",
            "mae", "step_ms", "latency_ms", "train_seconds", "padded_share",
            "peak_memory_gb")  # fmt: skip
# of one process: the first task imports what the second one needs, too
SCRIPTS = """
import gc, json, os, runpy, sys
for task, *arguments in json.loads(sys.argv[1]):
    print("\\n==", arguments[0], flush=True)
    sys.argv, sys.path[0] = [task, *arguments], os.path.dirname(task)
    try:
        runpy.run_path(task, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    gc.collect()  # a network that has been trained must not count in the memory of its test
"""


def scans(name: str) -> tuple[str, ...]:
    """How the mixer of this name can cover a grid; () if it reads all of it at once."""
    takes = inspect.signature(getattr(mixers, name)).parameters
    return SCANS if "scan" in takes else ()


def family() -> list[str]:
    """A row for every mixer of the catalogue and every way to cover a grid."""
    first = ["Identity", "SoftmaxAttention"]
    rest = [name for name in mixers.__all__ if name not in first]
    ways = [f"{name} {scan}" for name in rest for scan in scans(name)]
    return [*first, *(name for name in rest if not scans(name)), *ways]


def overrides(row: str) -> list[str]:
    """What a row changes, as arguments. ValueError if there is no such row."""
    if row in ROWS:
        return ROWS[row]
    if row.endswith(".yaml"):
        if not Path(row).is_file():
            raise ValueError(f"row {row!r}: no such file")
        return ["--config", row]
    name, *way = row.split(" ")
    known = name in mixers.__all__
    if not known or len(way) > 1 or any(scan not in scans(name) for scan in way):
        here = [name, *(f"{name} {scan}" for scan in scans(name))] if known else []
        raise ValueError(f"row {row!r}: expected {', '.join(here or [*ROWS, *mixers.__all__])}")
    return [mixer(name, **({"scan": way[0]} if way else {}))]


def named(rows: list[str]) -> dict[str, list[str]]:
    """The arguments of each row by its name; that of a file is its stem. ValueError for a row that
    there is not, and for two of the same name."""
    found: dict[str, str] = {}
    for row in rows:
        name = Path(row).stem if row.endswith(".yaml") else row
        if found.setdefault(name, row) != row:
            raise ValueError(f"rows {found[name]!r} and {row!r}: expected different names")
    return {name: overrides(row) for name, row in found.items()}


def called(who: dict[str, Any]) -> str:
    return f"seed {who['seed']}" + (f", fold {who['fold']}" if "fold" in who else "")


def gpus() -> list[str]:
    """Those that may be used, as CUDA_VISIBLE_DEVICES names them."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def one_run(options: argparse.Namespace, who: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """Fit and test a row with a seed, and a fold if `who` has one: `who` with its metrics.json, or
    with {"error": ...}."""
    root = given = options.out / f"{who['row'].replace(' ', '_')}-{who['seed']}"
    common = ["--config", str(options.config), *options.rows[who["row"]]]
    common += [f"--seed_everything={who['seed']}", f"--trainer.default_root_dir={given}"]
    if "fold" in who:
        root = given / f"fold_{who['fold']}"  # which the task's command line appends by itself
        fold = {"folds": options.folds, "fold": who["fold"], "test_on": "fold"}
        common += [f"--data.init_args.{key}={value}" for key, value in fold.items()]
    common += options.extra
    root.mkdir(parents=True, exist_ok=True)
    (root / "metrics.json").unlink(missing_ok=True)  # of an earlier run
    checkpoint = f"--ckpt_path={root}/checkpoints/{options.checkpoint}.ckpt"
    stages = [[str(options.task), *command, *common] for command in (["fit"], ["test", checkpoint])]
    own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.jobs))}
    own |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    started = time.monotonic()
    with open(root / "log.txt", "w") as log:
        status = subprocess.run(
            [sys.executable, "-c", SCRIPTS, json.dumps(stages)],
            stdout=log, stderr=log, env={**os.environ, **own}, check=False,
        ).returncode  # fmt: skip
    try:
        if status:
            begun = re.findall("^== (.*)$", (root / "log.txt").read_text(errors="replace"), re.M)
            return {**who, "error": f"{begun[-1]} failed, see {root}/log.txt"}
        metrics = json.loads((root / "metrics.json").read_text())
    except (OSError, ValueError, IndexError) as error:
        return {**who, "error": f"no result ({error}), see {root}/log.txt"}
    return {**who, "seconds": time.monotonic() - started, **metrics}


def all_runs(
    options: argparse.Namespace, wanted: list[dict[str, Any]], done: Callable[[Any], None]
) -> None:
    """Calls `done` with each run as it ends, or as {"missing": True} when no time was left."""
    over = time.monotonic() + 60 * options.minutes
    found = gpus() or [None]
    free: SimpleQueue[str | None] = SimpleQueue()
    for job in range(options.jobs):
        free.put(found[job % len(found)])

    def start(who: dict[str, Any]) -> dict[str, Any]:
        if time.monotonic() >= over:
            return {**who, "missing": True}
        gpu = free.get()
        try:
            return one_run(options, who, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(options.jobs) as pool:
        for run in as_completed(pool.submit(start, who) for who in wanted):
            done(run.result())


def complete(run: dict[str, Any]) -> bool:
    return not run.keys() & {"error", "missing"}


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def table(runs: list[dict[str, Any]], rows: list[str]) -> str:
    """Markdown: what was measured of each row, and what did not come."""

    def failed(row: str) -> str:
        return "failed" if any("error" in run for run in runs if run["row"] == row) else "not run"

    good = [run for run in runs if complete(run) and run["row"] in rows]
    if any("cases" in run for run in good):
        # here, since it takes seconds to import what other tasks do without
        from ndlightnet_evidence.segmentation import segmentation_tables

        made = segmentation_tables(good, rows, failed)
    else:
        made = plain_table(good, rows, failed)
    for kind, said in (("error", "Failed"), ("missing", "Not run, no time was left")):
        these = [f"{run['row']} ({called(run)})" for run in runs if kind in run]
        made += f"\n{said}: {', '.join(these)}.\n" if these else ""
    return made


def plain_table(good: list[dict[str, Any]], rows: list[str], failed: Callable[[str], str]) -> str:
    """Mean and standard deviation over the seeds, and each seed."""
    measures = [m for m in MEASURES if any(m in run for run in good)] or ["result"]
    lines = [f"| | parameters | {' | '.join(measures)} | {measures[0]} per seed |"]
    lines.append("|---|---|" + "---|" * (len(measures) + 1))
    for row in rows:
        mine = sorted((run for run in good if run["row"] == row), key=lambda run: run["seed"])
        if not mine:
            lines.append(f"| {row} | {failed(row)} |" + " |" * (len(measures) + 1))
            continue
        cells = []
        for measure in measures:
            values = [run[measure] for run in mine if run.get(measure) is not None]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "none")
        seeds = ", ".join(number(run.get(measures[0])) for run in mine)
        size = f"{mine[0]['parameters'] / 1e6:.2f} M" if "parameters" in mine[0] else "none"
        lines.append(f"| {row} | {size} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW",
                        help="default: " + ", ".join(list(ROWS)[:5]))  # fmt: skip
    parser.add_argument("--family", action="store_true", help="and a row for each mixer and scan")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2, or 0 with --folds")
    parser.add_argument("--folds", type=int, metavar="N", help="cross-validation with N folds")
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, over all GPUs in turn")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then no run is begun")
    parser.add_argument("--resume", action="store_true", help="do what is not under --out yet")
    parser.add_argument(
        "--out", type=Path, default=None, help="default: runs/compare/CONFIG, or CONFIG-N_folds"
    )
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.extra = arguments[cut + 1 :]
    folded = f"-{options.folds}_folds" if options.folds else ""
    options.out = options.out or Path("runs/compare") / (options.config.stem + folded)
    options.seeds = options.seeds or ([0, 1, 2] if options.folds is None else [0])
    if options.folds is not None and (options.folds < 2 or len(options.seeds) > 1):
        parser.error(
            f"--folds {options.folds}, {len(options.seeds)} seeds: expected 2 or more folds, and "
            "one seed"
        )
    if any(re.match(r"--data\.(init_args\.)?fold\b", given) for given in options.extra):
        parser.error("--data.init_args.fold after --: expected --folds, which takes them all")
    rows = options.rows + (family() if options.family else [])
    try:
        options.rows = named(rows or list(ROWS)[:5])
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    folds = [{"fold": fold} for fold in range(options.folds)] if options.folds else [{}]
    wanted = [{"row": row, "seed": seed, **fold}
              for seed in options.seeds for fold in folds for row in options.rows]  # fmt: skip
    file = options.out / "runs.json"
    known = file.read_text() if options.resume and file.exists() else "[]"
    runs = [run for run in json.loads(known) if complete(run)]
    kept = [{key: run[key] for key in ("row", "seed", "fold") if key in run} for run in runs]
    left = [who for who in wanted if who not in kept]
    total = len(kept) + len(left)

    def save() -> None:
        with whole_file(file) as draft:
            draft.write_text(json.dumps(runs, indent=1))
        (options.out / "table.md").write_text(table(runs, list(options.rows)))

    def done(run: dict[str, Any]) -> None:
        runs.append(run)
        save()
        first = next((f"{m} {number(run[m])}" for m in MEASURES if m in run), "done")
        shown = "no time was left" if "missing" in run else run.get("error", first)
        print(f"[{len(runs)}/{total}] {run['row']}, {called(run)}: {shown}", flush=True)

    save()
    all_runs(options, left, done)
    print((options.out / "table.md").read_text())
    return 1 if any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

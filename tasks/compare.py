"""The same network with one thing changed, same data, same budget, several seeds: a table.

python tasks/compare.py tasks/ct_segmentation.py configs/hippocampus.yaml --seeds 0 1 2 --jobs 5
python tasks/compare.py tasks/video_cls.py configs/surveillance.yaml --rows LightNet "single frame"

Every run is a `fit` to the end of its schedule and one `test`, in a process of its own: of the last
checkpoint, or of the one that was best on the held-out part of the training set. What follows `--`
goes to all of them. Writes table.md and runs.json under --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NET = "--model.net.init_args"
MIXERS = "ndlightnet.nn.mixers"
ROWS: dict[str, list[str]] = {
    "LightNet": [],
    "softmax attention": [f"{NET}.mixer={MIXERS}.SoftmaxAttention"],
    "identity mixer": [f"{NET}.mixer={MIXERS}.Identity"],
    "without MD-TPE": [f"{NET}.tpe=false"],
    "without MD-LRPE": [
        f'{NET}.mixer={{"class_path": "{MIXERS}.LightNetAttention", "init_args": {{"lrpe": null}}}}'
    ],
    "axis-causal": ["--model.causal=true"],
    "axis-causal, window 4": [
        "--model.causal=true",
        f'{NET}.mixer={{"class_path": "{MIXERS}.LightNetAttention", "init_args": {{"window": 4}}}}',
    ],
    "single frame": ["--data.init_args.frames=1"],
    "padded": ["--data.init_args.batching=padded"],
}
MEASURES = ("mean_dice", "mean_hd95_mm", "top1", "balanced_accuracy", "step_ms", "train_seconds",
            "padded_share", "peak_memory_gb")  # fmt: skip


def one_run(options: argparse.Namespace, row: str, seed: int) -> dict[str, Any]:
    """Fit and test one row with one seed; its metrics.json, or {"error": ...}."""
    root = options.out / f"{row.replace(' ', '_')}-{seed}"
    root.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    common = ["--config", str(options.config), f"--seed_everything={seed}",
              f"--trainer.default_root_dir={root}", *ROWS[row], *options.extra]  # fmt: skip
    started = time.monotonic()
    with open(root / "log.txt", "w") as log:
        for command in (
            ["fit"],
            ["test", f"--ckpt_path={root}/checkpoints/{options.checkpoint}.ckpt"],
        ):
            status = subprocess.run(
                [sys.executable, str(options.task), *command, *common],
                stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": threads}, check=False,
            ).returncode  # fmt: skip
            if status:
                return {
                    "row": row,
                    "seed": seed,
                    "error": f"{command[0]} failed, see {root}/log.txt",
                }
    metrics = json.loads((root / "metrics.json").read_text())
    return {"row": row, "seed": seed, "seconds": time.monotonic() - started, **metrics}


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def table(runs: list[dict[str, Any]], rows: list[str]) -> str:
    """Markdown: mean and standard deviation over the seeds, and each seed."""
    good = [run for run in runs if "error" not in run]
    measures = [m for m in MEASURES if any(m in run for run in good)] or ["result"]
    lines = [f"| | parameters | {' | '.join(measures)} | {measures[0]} per seed |"]
    lines.append("|---|---|" + "---|" * (len(measures) + 1))
    for row in rows:
        mine = sorted((run for run in good if run["row"] == row), key=lambda run: run["seed"])
        if not mine:
            lines.append(f"| {row} | failed |" + " |" * (len(measures) + 1))
            continue
        cells = []
        for measure in measures:
            values = [run[measure] for run in mine if run[measure] is not None]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "none")
        seeds = ", ".join(number(run[measures[0]]) for run in mine)
        lines.append(
            f"| {row} | {mine[0]['parameters'] / 1e6:.2f} M | {' | '.join(cells)} | {seeds} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS)[:5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/compare/CONFIG")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.extra = arguments[cut + 1 :]
    options.out = options.out or Path("runs/compare") / options.config.stem
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        wanted = [(row, seed) for seed in options.seeds for row in options.rows]
        for run in pool.map(lambda pair: one_run(options, *pair), wanted):
            runs.append(run)
            shown = run.get("error") or next(f"{m} {number(run[m])}" for m in MEASURES if m in run)
            print(
                f"[{len(runs)}/{len(wanted)}] {run['row']}, seed {run['seed']}: {shown}", flush=True
            )
            (options.out / "runs.json").write_text(json.dumps(runs, indent=1))
            (options.out / "table.md").write_text(table(runs, options.rows))
    print((options.out / "table.md").read_text())
    return 1 if any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare one network with one thing changed, on the same data and budget, over several seeds.

    compare=tasks/evidence/compare.py
    python $compare tasks/ct_segmentation.py configs/hippocampus.yaml --seeds 0 1 2 --jobs 5
    python $compare tasks/image_cls.py configs/adrenal.yaml --rows Mamba "Mamba axes" GLA
    python $compare tasks/ct_segmentation.py configs/hippocampus.yaml --checkpoint best --folds 5 \
        --rows tasks/evidence/configs/volumes/*.yaml

A row is one of those named below, a mixer of the catalogue (ndlightnet.nn.mixers), or a file
NAME.yaml that is laid over the config; its row is called NAME. A mixer that reads tokens one by one
covers a grid by the scan given: `NAME raster`, `NAME both`, `NAME axes`. --resume uses the results
that are under --out.

Every run is a `fit` to the end of its schedule and one `test`, in a separate process, on one GPU if
there are any. It tests the last checkpoint, or the one that was best on the held-out part of the
training set. With --folds every row is trained on each fold, with one seed, and tested on what the
fold leaves out. What follows `--` goes to all runs. Writes table.md, runs.csv and runs.json under
--out after every run. Times are worth comparing only where no GPU has two jobs.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path

from ndlightnet_evidence import runner, tables
from ndlightnet_evidence.catalogue import ROWS, named
from ndlightnet_evidence.runner import RunError
from ndlightnet_evidence.tables import Run

DEFAULT = list(ROWS)[:5]
# run in one process: what the first command imports, the second does not import again
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


def one_run(options: Namespace, spec: Run) -> Run:
    """Fit and test a row with a seed, and a fold if `spec` has one; return its metrics.json."""
    root = folder = options.out / f"{spec['row'].replace(' ', '_')}-{spec['seed']}"
    common = ["--config", str(options.config), *options.rows[spec["row"]]]
    common += [f"--seed_everything={spec['seed']}", f"--trainer.default_root_dir={folder}"]
    if "fold" in spec:
        root = folder / f"fold_{spec['fold']}"  # which the task's command line appends by itself
        fold = {"folds": options.folds, "fold": spec["fold"], "test_on": "fold"}
        common += [f"--data.init_args.{key}={value}" for key, value in fold.items()]
    common += options.extra
    root.mkdir(parents=True, exist_ok=True)
    (root / "metrics.json").unlink(missing_ok=True)  # of an earlier run
    shutil.rmtree(root / "checkpoints", ignore_errors=True)
    checkpoint = f"--ckpt_path={root}/checkpoints/{options.checkpoint}.ckpt"
    stages = [[str(options.task), *command, *common] for command in (["fit"], ["test", checkpoint])]
    command = [sys.executable, "-c", SCRIPTS, json.dumps(stages)]
    with open(root / "log.txt", "w") as log:
        status = subprocess.run(command, stdout=log, stderr=log, env=runner.environment(), check=False).returncode
    try:
        if status:
            begun = re.findall("^== (.*)$", (root / "log.txt").read_text(errors="replace"), re.M)
            raise RunError(f"{begun[-1]} failed, see {root}/log.txt")
        metrics: Run = json.loads((root / "metrics.json").read_text())
    except (OSError, ValueError, IndexError) as error:
        raise RunError(f"no result ({error}), see {root}/log.txt") from error
    return metrics


def table(rows: list[str], runs: list[Run]) -> str:
    if any("cases" in run for run in runs):
        # imported here, since it takes seconds and other tasks do not need it
        from ndlightnet_evidence.segmentation import segmentation_tables

        return segmentation_tables(runs, rows)
    return tables.summary(runs, rows)


def report(run: Run) -> str:
    return next((f"{m} {tables.number(run[m])}" for m in tables.MEASURES if m in run), "done")


def parse(arguments: list[str]) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", nargs="+", default=[], metavar="ROW", help=f"default: {', '.join(DEFAULT)}")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2, or 0 with --folds")
    parser.add_argument("--folds", type=int, metavar="N", help="cross-validation with N folds")
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, over all GPUs in turn")
    runner.add_options(parser, "runs/compare/CONFIG, or CONFIG-N_folds", seeds=None)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.extra = arguments[end + 1 :]
    folded = f"-{options.folds}_folds" if options.folds else ""
    options.out = options.out or Path("runs/compare") / (options.config.stem + folded)
    options.seeds = options.seeds or ([0, 1, 2] if options.folds is None else [0])
    if options.folds is not None and (options.folds < 2 or len(options.seeds) > 1):
        parser.error(f"--folds {options.folds}, {len(options.seeds)} seeds: expected 2 or more folds, and one seed")
    if any(re.match(r"--data\.(init_args\.)?fold\b", argument) for argument in options.extra):
        parser.error("--data.init_args.fold after --: expected --folds, which takes them all")
    try:
        options.rows = named(options.rows or DEFAULT)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    folds: list[Run] = [{"fold": fold} for fold in range(options.folds or 0)] or [{}]
    runs = runner.compare(
        options,
        [{"row": row, "seed": seed, **fold} for seed in options.seeds for fold in folds for row in options.rows],
        partial(one_run, options),
        report=report,
        table=partial(table, list(options.rows)),
        jobs=options.jobs,
    )
    return 1 if any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

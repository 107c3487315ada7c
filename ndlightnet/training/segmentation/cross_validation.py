"""Cross-validation: every training case is predicted by a network that was not trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ndlightnet.training.core.cli import task_cli
from ndlightnet.training.core.options import PLANNED, expect_config
from ndlightnet.training.core.runs import checkpoint_in, resumption
from ndlightnet.training.report.results import log_rank_zero, write_metrics
from ndlightnet.training.segmentation.metrics import MEASURES, metrics_of, write_cases
from ndlightnet.training.segmentation.segmentation_task import SegmentationTask
from ndlightnet.training.segmentation.volume_data import VolumeData


def folds(arguments: list[str]) -> None:
    """Train and test every fold with the arguments of `fit`. Then write cases.csv and metrics.json of all folds
    together. A finished fold is not run again, and an interrupted one is resumed."""
    expect_config(["folds", *arguments], PLANNED)
    rows: dict[str, list[dict[str, float]]] = {}
    scores: list[float] = []
    fold, count, names = 0, 1, ["background"]
    while fold < count:
        root, count = _fold(arguments, fold)
        metrics = json.loads((root / "metrics.json").read_bytes())
        names = ["background", *metrics["dice"]]
        scores.append(float(np.array(metrics["mean_dice"], float)))
        for case in metrics["cases"]:
            measures = np.array([case[key] for key in MEASURES], float).T  # (classes, measures); null becomes NaN
            rows[case["name"]] = [dict(zip(MEASURES, row, strict=True)) for row in measures.tolist()]
        fold += 1
    out, rows = root.parent, dict(sorted(rows.items()))
    write_cases(out / "cases.csv", rows, names)
    write_metrics(out, {**metrics_of(rows, names), "mean_dice_of_folds": scores})
    spread = f"{np.mean(scores):.3f} ± {np.std(scores, ddof=1):.3f}"
    print(f"mean Dice {spread} over {count} folds, {len(rows)} cases; see {out / 'cases.csv'}")


def _fold(arguments: list[str], fold: int) -> tuple[Path, int]:
    """Train and test one fold; return its folder, with metrics.json, and the number of folds."""
    options = [*arguments, f"--data.init_args.fold={fold}", "--data.init_args.test_on=fold"]
    cli_of_fold = task_cli(SegmentationTask, VolumeData, options, run=False)
    root = Path(cli_of_fold.trainer.default_root_dir)
    if not _tested(root):
        task_cli(SegmentationTask, VolumeData, ["fit", *options, *resumption(root)])
        last = checkpoint_in(root, "last", "best")
        # the last checkpoint: the best one was chosen on these cases. With a new trainer: in one
        # that has trained, Lightning's EMA would load the weights that are not averaged
        cli = task_cli(SegmentationTask, VolumeData, ["test", *options, f"--ckpt_path={last}"])
        log_rank_zero(cli.model.notes)
    return root, cli_of_fold.datamodule.folds


def _tested(root: Path) -> bool:
    path = root / "metrics.json"  # `fit` writes it, too
    return path.is_file() and "cases" in json.loads(path.read_bytes())

"""Show what pre-training without labels is worth: a training from scratch, and one that begins with
a checkpoint of tasks/pretrain.py, on shares of the labels.

    python tasks/evidence/labels.py tasks/volume_cls.py configs/adrenal64.yaml \
        --init runs/adrenal64_pretrain/checkpoints/last.ckpt --labels 59 297 1188

Every run is a `fit` to the end of its schedule and a `test`, as those of compare.py; all runs with
as many labels see the same ones. What follows `--` goes to all of them, such as
`--trainer.max_steps=600 --trainer.max_epochs=-1`, as an epoch of few labels is short. Writes
table.md, runs.csv, runs.json and labels.png, measures over the number of labels, under --out.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import compare
from ndlightnet.training.classification.answer_page import MEASURES
from ndlightnet_evidence import plots, runner, tables

DRAWN = ("top1", "balanced_accuracy", "auc")  # measures of the picture, where they were made


def rows(labels: Sequence[int], init: Path) -> dict[str, list[str]]:
    """Return the arguments of each row."""
    starts = {"from scratch": [], "pre-trained": [f"--model.init={init}"]}
    return {
        f"{name}, {count} labels": [f"--data.init_args.train_limit={count}", *given]
        for count in labels
        for name, given in starts.items()
    }


def draw(options: Namespace, runs: Sequence[tables.Run]) -> None:
    """Draw a panel for each measure, the mean and the range over seeds."""
    shown = [measure for measure in DRAWN if any(measure in run for run in runs)]
    picture = plots.figure(4.2 * len(shown) + 2, 4)
    panels = picture.subplots(1, len(shown), squeeze=False)[0]
    for axes, measure in zip(panels, shown, strict=True):
        for index, name in enumerate(("from scratch", "pre-trained")):
            points = []
            for count in sorted(options.labels):
                mine = tables.of_row(runs, f"{name}, {count} labels")
                if found := [run[measure] for run in mine if run.get(measure) is not None]:
                    points.append((count, min(found), sum(found) / len(found), max(found)))
            if points:
                x, low, mean, high = zip(*points, strict=True)
                style = plots.line_style(index)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0)
                axes.plot(x, mean, label=name, **style)
        axes.set_xscale("log")
        axes.set_xticks(options.labels, [str(count) for count in options.labels])
        axes.set(title=MEASURES[measure], xlabel="labelled samples")
    plots.finish(panels)
    plots.legend(picture, panels)
    plots.save(picture, options.out / "labels.png")


def parse() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("--init", type=Path, required=True, help="a checkpoint of pre-training")
    parser.add_argument("--labels", type=int, nargs="+", required=True, help="numbers of labelled samples")
    parser.add_argument("--checkpoint", choices=["last", "best"], default="last")
    runner.add_options(parser, "runs/labels/CONFIG")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    if not options.init.is_file():
        parser.error(f"--init {options.init}: no such file, expected a checkpoint of pre-training")
    options.extra, options.folds = arguments[cut + 1 :], None
    options.out = options.out or Path("runs/labels") / options.config.stem
    options.rows = rows(options.labels, options.init)
    return options


def main() -> int:
    options = parse()
    wanted = [{"row": row, "seed": seed} for seed in options.seeds for row in options.rows]
    runs = runner.compare(
        options,
        wanted,
        partial(compare.one_run, options),
        say=compare.say,
        table=partial(compare.table, list(options.rows)),
        draw=partial(draw, options),
        do=partial(runner.run_all, processes=False),
    )
    return 1 if any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

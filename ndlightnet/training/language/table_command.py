"""The command `table`: trains and tests on each config with each seed, and tabulates the scores, as of GLUE."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ndlightnet.data.errors import atomic_write
from ndlightnet.training.core.cli import task_cli
from ndlightnet.training.core.options import WordsParser, check, check_configs
from ndlightnet.training.core.runs import resumption
from ndlightnet.training.language.sentence_data import SentenceData
from ndlightnet.training.language.text_cls_task import TextClsTask
from ndlightnet.training.report.results import log_rank_zero, write_json

Scores = dict[str, float]


def table(arguments: list[str]) -> None:
    """Train and test on several configs, with several seeds, and write the table of the scores. A finished run is not
    run again. The weights after the last step are tested; no checkpoint is written. Raises DataError for a wrong config
    and for a folder of runs with other options or by another content of a config."""
    parser = WordsParser("text_cls.py table", description="Other options are those of fit, for all runs.")
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="a run is named after its config")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/glue"), help="the folder of the runs and the table")
    chosen, options = parser.parse_known_args(arguments)
    configs = {Path(config).stem: config for config in chosen.configs}
    check("table", chosen.configs, len(configs) == len(chosen.configs), "configs of different names")
    check_configs([f"--config={config}" for config in configs.values()])
    setting = {"options": " ".join(options), **{name: Path(file).read_text("utf-8") for name, file in configs.items()}}
    _check_setting(chosen.out, setting)
    # every task with one seed before the next seed: then it is known how long each takes
    runs = [(name, seed) for seed in chosen.seeds for name in configs]
    folders = {run: chosen.out / f"{run[0]}-{run[1]}" for run in runs}
    scores = {run: done for run in runs if (done := _scores_of(folders[run]))}
    waiting, begun = [run for run in runs if run not in scores], time.monotonic()
    for number, (name, seed) in enumerate(waiting, 1):
        run = _run(folders[name, seed], ["--config", configs[name], f"--seed_everything={seed}", *options])
        scores[name, seed] = run
        values = ", ".join(f"{metric} {100 * value:.1f}" for metric, value in run.items())
        left = timedelta(seconds=round((time.monotonic() - begun) / number * (len(waiting) - number)))
        print(f"{number}/{len(waiting)} {name}, seed {seed}: {values}; about {left} left", file=sys.stderr, flush=True)
        _write(chosen.out, setting, chosen.seeds, scores)
    _write(chosen.out, setting, chosen.seeds, scores)
    print((chosen.out / "table.md").read_text("utf-8"), end="")


def _check_setting(out: Path, setting: dict[str, str]) -> None:
    """Raise DataError if `out` has runs with other options, or of configs that have changed since."""
    path = out / "table.json"
    before = json.loads(path.read_bytes())["setting"] if path.is_file() else {}
    changed = [name for name, text in setting.items() if before.get(name, text) != text]
    was = f"{out} has runs of other {', '.join(changed)}"
    check("--out", was, not changed, f"another folder, or the options {before.get('options')!r} and the same configs")


def _scores_of(folder: Path) -> Scores | None:
    """Return the scores of a run, None if it is not finished. A correlation of equal values, null, counts as 0."""
    path = folder / "metrics.json"  # `fit` writes it, too
    scores = json.loads(path.read_bytes()).get("scores") if path.is_file() else None
    return None if scores is None else {metric: value or 0.0 for metric, value in scores.items()}


def _run(folder: Path, options: list[str]) -> Scores:
    defaults = ("devices=1", "enable_checkpointing=false", "enable_progress_bar=false")
    words = [
        "fit",
        *(f"--trainer.{option}" for option in defaults),
        *options,
        f"--trainer.default_root_dir={folder}",
        *resumption(folder),
    ]
    cli = task_cli(TextClsTask, SentenceData, words)
    cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    log_rank_zero(cli.model.notes)
    del cli
    gc.collect()  # a network that has been trained must not be in the memory of the next
    return _scores_of(folder) or {}


def _write(out: Path, setting: dict[str, str], seeds: list[int], scores: dict[tuple[str, int], Scores]) -> None:
    """Write table.json and table.md. A task counts with the mean of its metrics, as in GLUE; the last line is the mean
    over all tasks for each seed that has all."""

    def spread(values: Sequence[float]) -> str:
        return f"{100 * mean(values):.1f}" + (f" ± {100 * stdev(values):.1f}" if len(values) > 1 else "")

    names, tasks = [*setting][1:], dict[str, Any]()
    lines = [f"| x 100, seeds {', '.join(map(str, seeds))} | metrics | score |", "|---|---|---|"]
    for name in names:
        rows = [scores[name, seed] for seed in seeds if (name, seed) in scores]
        metrics = {key: [row[key] for row in rows] for key in (rows or [{}])[0]}
        tasks[name] = {"metrics": metrics, "score": [mean(row.values()) for row in rows]}
        if rows:
            cells = ", ".join(f"{key} {spread(values)}" for key, values in metrics.items())
            lines.append(f"| {name} | {cells} | {spread(tasks[name]['score'])} |")
    complete = [seed for seed in seeds if all((name, seed) in scores for name in names)]
    means = [mean(mean(scores[name, seed].values()) for name in names) for seed in complete]
    if means:
        lines.append(f"| mean | | {spread(means)} |")
    write_json(out / "table.json", {"setting": setting, "seeds": seeds, "tasks": tasks, "mean": means})
    with atomic_write(out / "table.md") as draft:
        draft.write_text("\n".join(lines) + "\n", "utf-8")

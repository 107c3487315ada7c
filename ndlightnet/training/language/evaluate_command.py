"""The command `evaluate`: zero-shot tasks, in which a language model chooses answers, continuations and sentences."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError, atomic_write, one_line, readable
from ndlightnet.data.folders import files_below, find_root
from ndlightnet.data.text.text_files import ending, open_text
from ndlightnet.data.text.tokenizer import Tokenizer
from ndlightnet.inference.likelihood import encode_pair, in_bfloat16, log_likelihoods
from ndlightnet.training.core.options import WordsParser, check
from ndlightnet.training.language.generate_command import open_model

# the kinds of tasks by the keys that all lines of a file have
KINDS = (
    ("query", "choices", "gold"),
    ("context_options", "continuation", "gold"),
    ("context", "continuation"),
    ("sentence_good", "sentence_bad", "linguistics_term"),
)
COLUMNS = ("n", "accuracy", "stderr", "chance", "acc_norm", "perplexity")


class Example(NamedTuple):
    """A question: its kind, the first of its keys, (context, continuation) of each answer, the number of the right one
    (None: a continuation is to be the most likely one), the answers' lengths in characters if they count, and a name
    beside that of the task."""

    kind: str
    pairs: list[tuple[str, str]]
    gold: int | None
    characters: list[int] | None = None
    group: str = ""


Answer = tuple[Example, list[tuple[float, bool]]]  # and the log-likelihood of each pair, and whether it is greedy


def evaluate_tasks(
    network: NDLightNet, tokenizer: Tokenizer, tasks: dict[str, list[Example]], report: Callable[[int], object]
) -> dict[str, dict[str, float | None]]:
    """Return {task: {column: value}}, with COLUMNS as the LM Evaluation Harness computes them; instead of BLiMP's sets,
    "BLiMP" for all of them, and each of its terms. report: is called with the number of pairs that were read."""
    answers: dict[str, list[Answer]] = {}
    for task, examples in tasks.items():
        pairs = [encode_pair(tokenizer, *pair) for example in examples for pair in example.pairs]
        with in_bfloat16(network):
            scores = iter(log_likelihoods(network, pairs, report=report))
        for example in examples:
            answer = example, [next(scores) for _ in example.pairs]
            for name in ("BLiMP", example.group) if example.group else (task,):
                answers.setdefault(name, []).append(answer)
    return {name: _summary(each) for name, each in answers.items()}


def _summary(answers: Sequence[Answer]) -> dict[str, float | None]:
    n, right, normed = len(answers), 0, 0
    for example, scores in answers:
        sums = [score for score, _ in scores]
        right += scores[0][1] if example.gold is None else sums.index(max(sums)) == example.gold
        if example.characters:
            each = [score / characters for score, characters in zip(sums, example.characters, strict=True)]
            normed += each.index(max(each)) == example.gold
    first, p, mean = answers[0][0], right / n, fmean(scores[0][0] for _, scores in answers)
    return {
        "n": n,
        "accuracy": p,
        "stderr": math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None,
        "chance": None if first.gold is None else fmean(1 / len(example.pairs) for example, _ in answers),
        "acc_norm": normed / n if first.characters else None,
        "perplexity": math.exp(min(-mean, 700)) if first.gold is None else None,
    }


def read_tasks(paths: Sequence[str | Path], limit: int | None = None) -> dict[str, list[Example]]:
    """Return the examples of each task, the first `limit`. paths: files .jsonl, .jsonl.gz or .jsonl.xz of one of KINDS,
    zip files of such, or folders of them. Raises DataError, which names the line."""
    tasks: dict[str, list[Example]] = {}
    for path in map(find_root, paths):
        for place, name, lines in _files(path):
            if name in tasks:
                raise DataError(f"{place}: a second task {name}, expected different names")
            with readable(Path(place)):
                numbered = enumerate(islice(lines, limit), 1)
                examples = [_example(line, f"{place}, line {n}") for n, line in numbered if line.strip()]
            if not examples:
                raise DataError(f"{place}: has no line, expected one or more")
            if len(kinds := {example.kind for example in examples}) > 1:
                raise DataError(f"{place}: has lines with {' and '.join(sorted(kinds))}, expected one kind of task")
            tasks[name] = examples
    return tasks


def _files(path: Path) -> Iterator[tuple[str, str, Iterator[str]]]:
    """Yield (file, task, lines) of the tasks of a path."""
    if path.suffix == ".zip":
        with readable(path), zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".jsonl") and not Path(name).name.startswith("."):
                    with TextIOWrapper(archive.open(name), "utf-8") as lines:
                        yield f"{path}/{name}", Path(name).stem, lines
        return
    files = [Path(entry) for entry in files_below(path)] if path.is_dir() else [path]
    files = [file for file in files if ending(file) == ".jsonl"]
    if not files or not path.exists():
        raise DataError(f"{path}: no such task, expected a file .jsonl[.gz|.xz], a zip of such files or a folder")
    for file in files:
        with readable(file), open_text(file) as (lines, _):
            yield str(file), file.name.partition(".jsonl")[0], lines


def _example(line: str, place: str) -> Example:
    try:
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()  # raises for a lone surrogate
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({one_line(error)})") from error
    keys = next((keys for keys in KINDS if isinstance(fields, dict) and {*keys} <= {*fields}), None)
    if keys is None:
        raise DataError(f"{place}: expected one of the sets of keys {'; '.join(map(', '.join, KINDS))}")
    kind, first, second = keys[0], fields[keys[0]], fields[keys[1]]
    options, text = {"query": (second, first), "context_options": (first, second)}.get(kind, ([first, second], ""))
    good = isinstance(options, list) and len(options) > 1 and all(isinstance(x, str) for x in (*options, text))
    if not good or not all(options):
        raise DataError(f"{place}: expected texts, and two or more to choose from")
    gold = fields.get("gold", 0)
    if type(gold) is not int or not 0 <= gold < len(options):
        raise DataError(f"{place}: gold={gold!r}, expected 0 to {len(options) - 1}")
    if kind == "query":
        return Example(kind, [(text, f" {choice}") for choice in options], gold, [*map(len, options)])
    if kind == "context_options":
        return Example(kind, [(context, f" {text}") for context in options], gold)
    if kind == "context":
        return Example(kind, [(first, f" {second}")], None)
    return Example(kind, [("", f" {sentence}") for sentence in options], 0, None, str(fields["linguistics_term"]))


def evaluate(arguments: list[str]) -> int:
    """Measure a language model zero-shot: multiple choice, continuations, pairs of sentences. Raises DataError."""
    parser = WordsParser("text_lm.py evaluate", description="Zero-shot scores of a language model.")
    add = parser.add_argument
    add("run", help="a checkpoint, or a run's folder")
    add("tasks", nargs="+", help="files .jsonl[.gz|.xz] of tasks, folders of them, or BLiMP's zip")
    add("--out", type=Path, help="write the results there, as JSON")
    add("--limit", type=int, help="take so many examples of each task only")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    options = parser.parse_args(arguments)
    check("--limit", options.limit, options.limit is None or options.limit > 0, "1 or more")
    tasks = read_tasks(options.tasks, options.limit)
    network, tokenizer = open_model(options.run, options.device)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=sum(len(x.pairs) for examples in tasks.values() for x in examples))
        results = evaluate_tasks(network, tokenizer, tasks, lambda n: progress.advance(bar, n))
    print(f"{'':28}", *(f"{column:>10}" for column in COLUMNS))
    for name, row in results.items():
        cells = ("" if row[x] is None else f"{row[x]:.0f}" if x == "n" else f"{row[x]:.4g}" for x in COLUMNS)
        print(f"{name:28}", *(f"{cell:>10}" for cell in cells))
    if options.out is not None:
        with atomic_write(options.out) as draft:
            draft.write_text(json.dumps({"run": str(options.run), "results": results}, indent=2) + "\n", "utf-8")
    return 0

"""The command `compare`: what it does for a run, its arguments, folds, a run that fails; with a
task that writes to the disk what a task does, and trains nothing."""

import json
from pathlib import Path

import pytest

import compare
from ndlightnet_evidence import runner

# A fold has a folder of its own under the root.
TASK = """
import json, os, sys
from pathlib import Path
options = dict(a.split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a)
fold = options.get("--data.init_args.fold")
root = Path(options["--trainer.default_root_dir"], "" if fold is None else f"fold_{fold}")
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
assert Path(sys.path[0]) == Path(sys.argv[0]).parent and __name__ == "__main__"
print("to stdout"); print("to stderr", file=sys.stderr)
FAULT = options.get("--fault", "")
if FAULT.startswith(sys.argv[1]):
    exec(FAULT.partition(": ")[2])
if sys.argv[1] == "test":
    metrics = {"top1": 0.75, "parameters": 5, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "mean_hd95_mm": None}
    if fold is not None:
        dice = 0.5 + 0.25 * any(a.endswith("better.yaml") for a in sys.argv)
        case = {"name": f"case{fold}", "dice": [dice]}
        metrics = {"mean_dice": dice, "mean_hd95_mm": 2.0, "mean_nsd": 0.5, "hd95_missing": 0,
                   "dice": {"liver": dice}, "cases": [case, {**case, "name": f"{fold}"}],
                   "parameters": 2_000_000, "gflops": 3.0}
    (root / "metrics.json").write_text(json.dumps(metrics))
sys.exit(0)
"""


@pytest.fixture
def command(monkeypatch, tmp_path):
    """command("--rows", ...): the status of compare, as from the command line."""
    (tmp_path / "task.py").write_text(TASK)
    for name in ("base", "plain", "better"):
        (tmp_path / f"{name}.yaml").write_text("model: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "gpus", lambda: ["3", "4"])
    return lambda *arguments: compare.main(["task.py", "base.yaml", "--out", "out", *arguments])


def calls(root: str | Path) -> list[list[str]]:
    return [json.loads(line) for line in Path(root, "calls.jsonl").read_text().splitlines()]


def runs() -> list[dict[str, object]]:
    return json.loads(Path("out/runs.json").read_text())


@pytest.mark.slow
def test_a_run_fits_then_tests_the_last_checkpoint(command, capsys):
    """A file is laid over the config; what follows the dashes goes to both stages."""
    assert command("--rows", "better.yaml", "without MD-TPE", "--seeds", "3", "--", "--x=1") == 0
    rows = {"better": ["--config", "better.yaml"], "without_MD-TPE": ["--model.net.init_args.tpe=false"]}
    for row, changes in rows.items():
        root = f"out/{row}-3"
        common = ["--config", "base.yaml", *changes, "--seed_everything=3", f"--trainer.default_root_dir={root}"]
        checkpoint = f"--ckpt_path={root}/checkpoints/last.ckpt"
        assert calls(root) == [["fit", *common, "--x=1"], ["test", checkpoint, *common, "--x=1"]]
        log = Path(root, "log.txt").read_text()
        assert log.count("to stdout") == log.count("to stderr") == 2
    expected = [("better", 3, "3"), ("without MD-TPE", 3, "3")]
    assert [(run["row"], run["seed"], run["gpu"]) for run in runs()] == expected
    printed = capsys.readouterr().out
    assert Path("out/table.md").read_text() in printed and "[2/2] without MD-TPE, seed 3: mean_hd95_mm none" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, stages, reason",
    [
        ("fit: raise ValueError", 1, "fit failed"),
        ("test: os._exit(9)", 2, "test failed"),
        ("test: sys.exit(0)", 2, "no result ("),
    ],
)
def test_a_run_that_fails_says_why(command, capsys, fault, stages, reason):
    root = Path("out/LightNet-0")
    root.mkdir(parents=True)
    (root / "metrics.json").write_text('{"top1": 1.0}')  # of an earlier run
    assert command("--rows", "LightNet", "--seeds", "0", "--", f"--fault={fault}") == 1
    (run,) = runs()
    assert run["error"].startswith(reason) and run["error"].endswith(f"see {root}/log.txt")
    assert len(calls(root)) == stages and f"seed 0: {reason}" in capsys.readouterr().out


@pytest.mark.slow
def test_every_row_on_every_fold(command, capsys):
    arguments = ("--rows", "plain.yaml", "better.yaml", "--folds", "2", "--checkpoint", "best")
    assert command(*arguments) == 0
    root = Path("out/better-0/fold_1")
    fit, test = calls(root)
    folds = ["--data.init_args.folds=2", "--data.init_args.fold=1", "--data.init_args.test_on=fold"]
    assert fit[1:] == test[2:] and fit[-3:] == folds and "--trainer.default_root_dir=out/better-0" in fit
    assert test[1] == "--ckpt_path=out/better-0/fold_1/checkpoints/best.ckpt"
    order = [("plain", 0, 0), ("better", 0, 0), ("plain", 0, 1), ("better", 0, 1)]
    assert [(run["row"], run["seed"], run["fold"]) for run in runs()] == order
    text = Path("out/table.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    scores, costs = [line for line in lines if line[1:2] == ["better"]]
    assert scores[2:6] == ["0.750 ± 0.000", "0.750 to 0.750", "0.750, 0.750", "+0.250"]
    assert costs[2:4] == ["2.00 M", "3"] and text in capsys.readouterr().out
    assert command(*arguments, "--resume") == 0 and len(calls(root)) == 2  # nothing was left to do


def test_folds_have_a_folder_of_their_own():
    options = compare.parse(["t.py", "x/c.yaml", "--rows", "LightNet", "GLA axes", "--folds", "3"])
    assert list(options.rows) == ["LightNet", "GLA axes"]
    assert options.out == Path("runs/compare/c-3_folds") and options.seeds == [0]
    options = compare.parse(["t.py", "x/c.yaml", "--", "--data.init_args.folds=3"])
    assert list(options.rows) == compare.DEFAULT and options.extra == ["--data.init_args.folds=3"]
    assert options.out == Path("runs/compare/c") and options.seeds == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("--rows LightNet2", "row 'LightNet2': expected "),
        ("--rows gone.yaml", "row 'gone.yaml': no such file"),
        ("--rows plain.yaml ./sub/plain.yaml", "rows 'plain.yaml' and './sub/plain.yaml': expected different names"),
        ("--folds 1", "--folds 1, 1 seeds: expected 2 or more folds, and one seed"),
        ("--folds 3 --seeds 0 1", "--folds 3, 2 seeds: expected 2 or more folds"),
        ("-- --data.init_args.fold=0", "--data.init_args.fold after --: expected --folds"),
        ("-- --data.fold=0", "--data.init_args.fold after --: expected --folds"),
    ],
)
def test_what_is_refused(command, capsys, arguments, text):
    with pytest.raises(SystemExit):
        command(*arguments.split())
    assert text in capsys.readouterr().err and not Path("out").exists()

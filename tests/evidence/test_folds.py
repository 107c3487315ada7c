"""`compare` on segmentation: rows from files, folds, and the tables of finished runs."""

import json
import re
import sys
from pathlib import Path

import compare
import pytest
from ndlightnet_evidence import runner

# What tasks/ct_segmentation.py does to the disk: a fold has a folder of its own under the root.
TASK = """
import json, sys
from pathlib import Path
given = dict(a.split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a)
fold = given.get("--data.init_args.fold")
root = Path(given["--trainer.default_root_dir"])
root = root if fold is None else root / f"fold_{fold}"
root.mkdir(parents=True, exist_ok=True)
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "FAIL" in " ".join(sys.argv):
    sys.exit(1)
if sys.argv[1] == "test":
    dice = 0.5 + 0.25 * any(a.endswith("better.yaml") for a in sys.argv)
    case = {"name": f"case{fold}", "dice": [dice]}
    found = {"mean_dice": dice, "mean_hd95_mm": 2.0, "mean_nsd": 0.5, "hd95_missing": 0,
             "dice": {"liver": dice}, "cases": [case, {**case, "name": f"{fold}"}],
             "parameters": 2_000_000, "gflops": 3.0}
    (root / "metrics.json").write_text(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    for name in ("base", "plain", "better", "FAIL"):
        (tmp_path / f"{name}.yaml").write_text("model: {}\n")
    return tmp_path


@pytest.fixture
def start(monkeypatch, folder):
    """start("--rows", ...): the status of compare in the folder, as from the command line."""

    def run(*arguments: str) -> int:
        given = ["compare.py", "task.py", "base.yaml", "--out", "out", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(runner, "gpus", list)
        return compare.main()

    return run


def calls(root: Path) -> list[list[str]]:
    return [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]


def test_a_file_is_laid_over_the_config(start, folder):
    """Right after it, so that what the runs need of their own stays."""
    assert start("--rows", "better.yaml", "without MD-TPE", "--seeds", "3", "--", "--x=1") == 0
    common = ["--config", "base.yaml", "--config", "better.yaml", "--seed_everything=3",
              "--trainer.default_root_dir=out/better-3", "--x=1"]  # fmt: skip
    checkpoint = "--ckpt_path=out/better-3/checkpoints/last.ckpt"
    root = folder / "out" / "better-3"
    assert calls(root) == [["fit", *common], ["test", checkpoint, *common]]
    runs = json.loads((folder / "out" / "runs.json").read_text())
    assert [(run["row"], run["seed"]) for run in runs] == [("better", 3), ("without MD-TPE", 3)]


def test_every_row_on_every_fold(start, folder, capsys):
    rows = ("--rows", "plain.yaml", "better.yaml")
    assert start(*rows, "--folds", "2", "--checkpoint", "best") == 0
    root = folder / "out" / "better-0" / "fold_1"
    fit, test = calls(root)
    assert fit[1:] == test[2:] and fit[-3:] == [
        "--data.init_args.folds=2", "--data.init_args.fold=1", "--data.init_args.test_on=fold",
    ]  # fmt: skip
    assert "--trainer.default_root_dir=out/better-0" in fit
    assert test[1] == "--ckpt_path=out/better-0/fold_1/checkpoints/best.ckpt"
    assert (root / "log.txt").exists()
    runs = json.loads((folder / "out" / "runs.json").read_text())
    assert [(run["row"], run["seed"], run["fold"]) for run in runs] == [
        ("plain", 0, 0), ("better", 0, 0), ("plain", 0, 1), ("better", 0, 1),
    ]  # fmt: skip
    text = (folder / "out" / "table.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    scores, _, costs = [line for line in lines if line[1:2] == ["better"]]
    assert scores[2:6] == ["0.750 ± 0.000", "0.750 to 0.750", "0.750, 0.750", "+0.250"]
    assert costs[2:4] == ["2.00 M", "3"] and text in capsys.readouterr().out
    (root / "metrics.json").unlink()
    assert start(*rows, "--folds", "2", "--resume") == 0
    assert len(calls(root)) == 2  # nothing was left to do


def test_a_fold_that_fails_is_named(start, folder, capsys):
    assert start("--rows", "plain.yaml", "FAIL.yaml", "--folds", "2", "--seeds", "7") == 1
    out = capsys.readouterr().out
    assert "[2/4] FAIL, seed 7, fold 0: fit failed, see out/FAIL-7/fold_0/log.txt" in out
    text = (folder / "out" / "table.md").read_text()
    assert len(re.findall(r"\| FAIL +\| failed +\|", text)) == 3
    log = "(fit failed, see out/FAIL-7/fold_{}/log.txt)"
    assert text.endswith(
        f"\nFailed: FAIL, seed 7, fold 0 {log.format(0)}; FAIL, seed 7, fold 1 {log.format(1)}.\n"
    )


def test_no_time_was_left(start, folder):
    assert start("--rows", "plain.yaml", "--folds", "2", "--minutes", "0") == 0
    text = (folder / "out" / "table.md").read_text()
    assert "| plain | not run" in text
    assert text.endswith("no time was left: plain, seed 0, fold 0; plain, seed 0, fold 1.\n")


def test_folds_have_a_folder_of_their_own(monkeypatch, folder):
    """So that --resume never takes runs without folds for folds."""
    given = ["compare.py", "task.py", "base.yaml", "--folds", "3", "--minutes", "0", "--rows",
             "plain.yaml"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.chdir(folder)
    assert compare.main() == 0
    runs = json.loads((folder / "runs" / "compare" / "base-3_folds" / "runs.json").read_text())
    assert [run["fold"] for run in runs] == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--rows", "gone.yaml"], "row 'gone.yaml': no such file"),
        (["--rows", "plain.yaml", "./sub/plain.yaml"],
         "rows 'plain.yaml' and './sub/plain.yaml': expected different names"),
        (["--folds", "1"], "--folds 1, 1 seeds: expected 2 or more folds, and one seed"),
        (["--folds", "0"], "--folds 0, "),
        (["--folds", "3", "--seeds", "0", "1"], "--folds 3, 2 seeds: expected 2 or more folds"),
    ],
)  # fmt: skip
def test_what_is_refused(start, folder, capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        start(*arguments)
    assert caught.value.code == 2 and text in capsys.readouterr().err
    assert not (folder / "out").exists()

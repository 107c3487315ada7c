"""The command `compare`: what it does for a run, its arguments, and a run that fails."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import compare
from ndlightnet_evidence import runner


def made(row: str, seed: int, dice: float | None, **more: object) -> dict[str, object]:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **more}


# What a task does to the disk: a fold has a folder of its own under the root.
TASK = """
import json, os, sys
from pathlib import Path
given = dict(a.split("=", 1) for a in sys.argv if a.startswith("--") and "=" in a)
fold = given.get("--data.init_args.fold")
root = Path(given["--trainer.default_root_dir"], "" if fold is None else f"fold_{fold}")
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
assert Path(sys.path[0]) == Path(sys.argv[0]).parent and __name__ == "__main__"
print("to stdout"); print("to stderr", file=sys.stderr)
if "FAIL" in [Path(a).stem for a in sys.argv]:
    END
if sys.argv[1] == "test":
    found = {"top1": 0.75, "parameters": 5, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    if fold is not None:
        dice = 0.5 + 0.25 * any(a.endswith("better.yaml") for a in sys.argv)
        case = {"name": f"case{fold}", "dice": [dice]}
        found = {"mean_dice": dice, "mean_hd95_mm": 2.0, "mean_nsd": 0.5, "hd95_missing": 0,
                 "dice": {"liver": dice}, "cases": [case, {**case, "name": f"{fold}"}],
                 "parameters": 2_000_000, "gflops": 3.0}
    (root / "metrics.json").write_text(json.dumps(found))
sys.exit(0)
"""


def write_task(folder: Path, fail: str = "FAIL", end: str = "sys.exit(1)") -> Path:
    (folder / "task.py").write_text(TASK.replace("FAIL", fail).replace("END", end))
    return folder / "task.py"


def options(tmp_path: Path, *wrong: str) -> Namespace:
    return Namespace(
        task=write_task(tmp_path, *wrong),
        config=tmp_path / "c.yaml",
        out=tmp_path / "out",
        extra=["--trainer.max_epochs=1"],
        checkpoint="last",
        folds=None,
        rows={"LightNet": [], "without MD-TPE": ["--model.net.init_args.tpe=false"]},
    )


def who(row: str, seed: int) -> dict[str, object]:
    return {"row": row, "seed": seed}


def calls(root: Path) -> list[list[str]]:
    return [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]


def test_one_run_fits_then_tests_the_last_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "gpus", lambda: ["3", "4"])
    found = compare.one_run(options(tmp_path), who("without MD-TPE", 7))
    assert found == {"top1": 0.75, "parameters": 5, "gpu": "3"}
    root = tmp_path / "out" / "without_MD-TPE-7"
    common = [
        "--config",
        str(tmp_path / "c.yaml"),
        "--model.net.init_args.tpe=false",
        "--seed_everything=7",
        f"--trainer.default_root_dir={root}",
        "--trainer.max_epochs=1",
    ]
    last = f"--ckpt_path={root}/checkpoints/last.ckpt"
    assert calls(root) == [["fit", *common], ["test", last, *common]]
    log = (root / "log.txt").read_text()
    assert log.count("to stdout") == log.count("to stderr") == 2


@pytest.mark.parametrize("end", ["sys.exit(1)", "raise ValueError", "os._exit(9)"])
@pytest.mark.parametrize("fail, runs", [("fit", 1), ("test", 2)])
def test_one_run_that_fails(tmp_path, fail, runs, end):
    root = tmp_path / "out" / "LightNet-0"
    root.mkdir(parents=True)
    (root / "metrics.json").write_text('{"top1": 1.0}')  # of an earlier run
    with pytest.raises(runner.RunError) as caught:
        compare.one_run(options(tmp_path, fail, end), who("LightNet", 0))
    assert str(caught.value) == f"{fail} failed, see {root}/log.txt"
    assert len(calls(root)) == runs and "to stderr" in (root / "log.txt").read_text()


def test_one_run_without_a_result(tmp_path):
    given = options(tmp_path, "test", "sys.exit(0)")
    (tmp_path / "out" / "LightNet-0").mkdir(parents=True)
    (tmp_path / "out" / "LightNet-0" / "metrics.json").write_text('{"top1": 1.0}')
    with pytest.raises(runner.RunError, match=r"no result \(.*log.txt"):
        compare.one_run(given, who("LightNet", 0))


def start(monkeypatch, tmp_path, *arguments: str, answer=None) -> tuple[int, list]:
    seen = []

    def one_run(options, who):
        row, seed = who["row"], who["seed"]
        seen.append((options, row, seed))
        return answer(row, seed) if answer else made(row, seed, 0.5)

    monkeypatch.setattr(compare, "one_run", one_run)
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.chdir(tmp_path)
    return compare.main(), seen


def test_a_run_with_a_null_is_shown_and_saved(monkeypatch, tmp_path):
    def answer(row, seed):
        return made(row, seed, None if seed else 0.5, mean_hd95_mm=None)

    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "0", "1")
    assert start(monkeypatch, tmp_path, *arguments, answer=answer)[0] == 0
    assert len(json.loads((tmp_path / "runs" / "compare" / "c" / "runs.json").read_text())) == 2


def test_arguments_after_the_dashes_go_to_every_run(monkeypatch, tmp_path, capsys):
    status, seen = start(
        monkeypatch,
        tmp_path,
        "t.py",
        "x/c.yaml",
        "--seeds",
        "3",
        "1",
        "--rows",
        "LightNet",
        "single frame",
        "--",
        "--trainer.max_epochs=2",
        "--data.workers",
        "0",
    )
    assert status == 0
    assert [(row, seed) for _, row, seed in seen] == [
        ("LightNet", 3),
        ("single frame", 3),
        ("LightNet", 1),
        ("single frame", 1),
    ]
    given = seen[0][0]
    assert given.extra == ["--trainer.max_epochs=2", "--data.workers", "0"]
    assert (given.task, given.config, given.jobs) == (Path("t.py"), Path("x/c.yaml"), 1)
    folder = tmp_path / "runs" / "compare" / "c"
    assert len(json.loads((folder / "runs.json").read_text())) == 4
    assert (folder / "table.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("given", ["--data.init_args.fold=0", "--data.fold"])
def test_a_fold_after_the_dashes_is_refused(monkeypatch, tmp_path, capsys, given):
    """The task would write it beside where its checkpoint is looked for, after a whole training."""
    with pytest.raises(SystemExit):
        start(monkeypatch, tmp_path, "t.py", "c.yaml", "--", given)
    assert "--data.init_args.fold after --: expected --folds" in capsys.readouterr().err
    other = "--data.init_args.folds=3"
    assert start(monkeypatch, tmp_path, "t.py", "c.yaml", "--", other)[0] == 0


def test_without_dashes_nothing_is_passed_on(monkeypatch, tmp_path):
    status, seen = start(monkeypatch, tmp_path, "t.py", "c.yaml", "--seeds", "0")
    assert status == 0 and seen[0][0].extra == []
    assert "single frame" not in [row for _, row, _ in seen] and len(seen) == 5


def test_a_failed_run_makes_the_status_1(monkeypatch, tmp_path, capsys):
    def answer(row, seed):
        if seed:
            raise runner.RunError("boom")
        return made(row, seed, 0.5)

    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "0", "1")
    status, _ = start(monkeypatch, tmp_path, *arguments, answer=answer)
    out = capsys.readouterr().out
    assert status == 1 and "[2/2] LightNet, seed 1: boom" in out and "mean_dice 0.500" in out


def test_the_family_as_an_option(monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "family", lambda: ["Identity", "LightNet", "GLA both", "GLA axes"])
    arguments = ("t.py", "c.yaml", "--seeds", "0", "--family", "--rows", "LightNet", "GLA axes")
    _, seen = start(monkeypatch, tmp_path, *arguments)
    assert [row for _, row, _ in seen] == ["LightNet", "GLA axes", "Identity", "GLA both"]


def test_an_unknown_row_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, tmp_path, "t.py", "c.yaml", "--rows", "LightNet2")
    assert caught.value.code == 2 and "row 'LightNet2': expected " in capsys.readouterr().err


# rows from files, and folds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_task(tmp_path)
    for name in ("base", "plain", "better", "FAIL"):
        (tmp_path / f"{name}.yaml").write_text("model: {}\n")
    return tmp_path


@pytest.fixture
def command(monkeypatch, folder):
    """command("--rows", ...): the status of compare in the folder, as from the command line."""

    def run(*arguments: str) -> int:
        given = ["compare.py", "task.py", "base.yaml", "--out", "out", *arguments]
        monkeypatch.setattr(sys, "argv", given)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(runner, "gpus", list)
        return compare.main()

    return run


def test_a_file_is_laid_over_the_config(command, folder):
    """Right after it, so that what the runs need of their own stays."""
    assert command("--rows", "better.yaml", "without MD-TPE", "--seeds", "3", "--", "--x=1") == 0
    common = [
        "--config",
        "base.yaml",
        "--config",
        "better.yaml",
        "--seed_everything=3",
        "--trainer.default_root_dir=out/better-3",
        "--x=1",
    ]
    checkpoint = "--ckpt_path=out/better-3/checkpoints/last.ckpt"
    root = folder / "out" / "better-3"
    assert calls(root) == [["fit", *common], ["test", checkpoint, *common]]
    runs = json.loads((folder / "out" / "runs.json").read_text())
    assert [(run["row"], run["seed"]) for run in runs] == [("better", 3), ("without MD-TPE", 3)]


def test_every_row_on_every_fold(command, folder, capsys):
    rows = ("--rows", "plain.yaml", "better.yaml")
    assert command(*rows, "--folds", "2", "--checkpoint", "best") == 0
    root = folder / "out" / "better-0" / "fold_1"
    fit, test = calls(root)
    assert fit[1:] == test[2:] and fit[-3:] == [
        "--data.init_args.folds=2",
        "--data.init_args.fold=1",
        "--data.init_args.test_on=fold",
    ]
    assert "--trainer.default_root_dir=out/better-0" in fit
    assert test[1] == "--ckpt_path=out/better-0/fold_1/checkpoints/best.ckpt"
    assert (root / "log.txt").exists()
    runs = json.loads((folder / "out" / "runs.json").read_text())
    assert [(run["row"], run["seed"], run["fold"]) for run in runs] == [
        ("plain", 0, 0),
        ("better", 0, 0),
        ("plain", 0, 1),
        ("better", 0, 1),
    ]
    text = (folder / "out" / "table.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    scores, _, costs = [line for line in lines if line[1:2] == ["better"]]
    assert scores[2:6] == ["0.750 ± 0.000", "0.750 to 0.750", "0.750, 0.750", "+0.250"]
    assert costs[2:4] == ["2.00 M", "3"] and text in capsys.readouterr().out
    (root / "metrics.json").unlink()
    assert command(*rows, "--folds", "2", "--checkpoint", "best", "--resume") == 0
    assert len(calls(root)) == 2  # nothing was left to do


def test_a_fold_that_fails_is_named(command, folder, capsys):
    assert command("--rows", "plain.yaml", "FAIL.yaml", "--folds", "2", "--seeds", "7") == 1
    out = capsys.readouterr().out
    assert "[2/4] FAIL, seed 7, fold 0: fit failed, see out/FAIL-7/fold_0/log.txt" in out
    text = (folder / "out" / "table.md").read_text()
    assert len(re.findall(r"\| FAIL +\| failed +\|", text)) == 3
    log = "(fit failed, see out/FAIL-7/fold_{}/log.txt)"
    assert text.endswith(f"\nFailed: FAIL, seed 7, fold 0 {log.format(0)}; FAIL, seed 7, fold 1 {log.format(1)}.\n")


def test_no_time_was_left(command, folder):
    assert command("--rows", "plain.yaml", "--folds", "2", "--minutes", "0") == 0
    text = (folder / "out" / "table.md").read_text()
    assert "| plain | not run" in text
    assert text.endswith("no time was left: plain, seed 0, fold 0; plain, seed 0, fold 1.\n")


def test_folds_have_a_folder_of_their_own(monkeypatch, folder):
    """So that --resume never takes runs without folds for folds."""
    given = ["compare.py", "task.py", "base.yaml", "--folds", "3", "--minutes", "0", "--rows", "plain.yaml"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.chdir(folder)
    assert compare.main() == 0
    runs = json.loads((folder / "runs" / "compare" / "base-3_folds" / "runs.json").read_text())
    assert [run["fold"] for run in runs] == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--rows", "gone.yaml"], "row 'gone.yaml': no such file"),
        (
            ["--rows", "plain.yaml", "./sub/plain.yaml"],
            "rows 'plain.yaml' and './sub/plain.yaml': expected different names",
        ),
        (["--folds", "1"], "--folds 1, 1 seeds: expected 2 or more folds, and one seed"),
        (["--folds", "0"], "--folds 0, "),
        (["--folds", "3", "--seeds", "0", "1"], "--folds 3, 2 seeds: expected 2 or more folds"),
    ],
)
def test_what_is_refused(command, folder, capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    assert caught.value.code == 2 and text in capsys.readouterr().err
    assert not (folder / "out").exists()

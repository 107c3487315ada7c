"""The command `compare`: what it does for a run, its arguments, and a run that fails."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import compare
import pytest
from ndlightnet_evidence import runner


def made(row: str, seed: int, dice: float | None, **more: object) -> dict[str, object]:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **more}


TASK = """
import json, os, sys
from pathlib import Path
option = "--trainer.default_root_dir="
root = next(Path(a[len(option):]) for a in sys.argv if a.startswith(option))
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
assert Path(sys.path[0]) == Path(sys.argv[0]).parent and __name__ == "__main__"
print("to stdout"); print("to stderr", file=sys.stderr)
if sys.argv[1] == "FAIL":
    END
if sys.argv[1] == "test":
    where = {k: os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    found = {"top1": 0.75, "parameters": 5, "process": os.getpid(), "where": where}
    (root / "metrics.json").write_text(json.dumps(found))
sys.exit(0)
"""


def options(tmp_path: Path, fail: str = "nothing", end: str = "sys.exit(1)") -> Namespace:
    task = tmp_path / "task.py"
    task.write_text(TASK.replace("FAIL", fail).replace("END", end))
    return Namespace(
        task=task, config=tmp_path / "c.yaml", out=tmp_path / "out",
        extra=["--trainer.max_epochs=1"], checkpoint="last", folds=None,
        rows={"LightNet": [], "without MD-TPE": ["--model.net.init_args.tpe=false"]},
    )  # fmt: skip


def who(row: str, seed: int) -> dict[str, object]:
    return {"row": row, "seed": seed}


def calls(root: Path) -> list[list[str]]:
    return [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]


def test_one_run_fits_then_tests_the_last_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "gpus", lambda: ["3", "4"])
    found = compare.one_run(options(tmp_path), who("without MD-TPE", 7))
    assert found.pop("process") > 0 and found.pop("where")["CUDA_VISIBLE_DEVICES"] == "3"
    assert found == {"top1": 0.75, "parameters": 5}
    root = tmp_path / "out" / "without_MD-TPE-7"
    common = [
        "--config", str(tmp_path / "c.yaml"), "--model.net.init_args.tpe=false",
        "--seed_everything=7", f"--trainer.default_root_dir={root}", "--trainer.max_epochs=1",
    ]  # fmt: skip
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
        monkeypatch, tmp_path, "t.py", "x/c.yaml", "--seeds", "3", "1",
        "--rows", "LightNet", "single frame", "--", "--trainer.max_epochs=2", "--data.workers", "0",
    )  # fmt: skip
    assert status == 0
    assert [(row, seed) for _, row, seed in seen] == [
        ("LightNet", 3), ("single frame", 3), ("LightNet", 1), ("single frame", 1),
    ]  # fmt: skip
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

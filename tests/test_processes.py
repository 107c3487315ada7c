"""What runs tests on several processes ends in time, whatever they do."""

import time

import pytest

from . import processes

PROGRAM = """
import json, os, pathlib, sys, time
folder, rank, fate = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
if fate == "fails" and rank == 1:
    sys.exit(3)
if fate == "fails" or fate == "stalls" and not folder.name.endswith("_again"):
    os.fork()
    time.sleep(100)
(folder / f"{rank}.json").write_text(json.dumps(rank))
"""


@pytest.fixture
def run_once(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processes, "SECONDS", 3)
    folder = tmp_path / "session" / "test"
    folder.mkdir(parents=True)
    return lambda fate: processes.run_once("program", folder, 2, fate)


@pytest.mark.slow
def test_processes_that_stall_are_run_once_more(run_once, capfd):
    with pytest.warns(UserWarning, match=r"run once more: program .*exit codes \[None, None\]"):
        assert run_once("stalls") == [0, 1]
    assert capfd.readouterr().err.count("(most recent call first)") >= 4  # a stack of each, and of its child
    assert run_once("stalls") == [0, 1]  # without running them again


@pytest.mark.slow
def test_a_failure_ends_the_other_process_and_is_final(run_once):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"program .*exit codes \[None, 3\]"):
        run_once("fails")
    with pytest.raises(AssertionError, match="failed in another test"):
        run_once("fails")
    assert time.monotonic() - start < 3

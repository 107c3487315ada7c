"""The command `ndlightnet`: its doors, their names, and how the process begins."""

import ast
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning import LightningModule

import ndlightnet
from ndlightnet import __main__ as command
from ndlightnet.training.core import cli

ROOT = Path(__file__).parents[1]


def test_help_lists_every_task(capsys):
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, door in command.DOORS.items():
        assert f"  {name}" in out and door.line in out and all(x in out for x in door.commands)


HELP = """
import runpy, sys
from ndlightnet.__main__ import DOORS, main
assert all(main(words) == 0 for words in ([], ["-h"], *([name, "--help"] for name in DOORS)))
sys.argv = ["tasks/text_lm.py", "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 0
sys.exit(", ".join({"torch", "lightning", "jsonargparse", "numpy", "yaml"} & {*sys.modules}) or 0)
"""


def test_help_is_printed_before_anything_large_is_loaded():
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "usage: text_lm.py COMMAND" in done.stdout and "usage: ndlightnet text_lm COMMAND" in done.stdout


@pytest.mark.parametrize("name", command.DOORS)
def test_help_of_a_task_is_what_its_parser_takes(name, monkeypatch, capsys):
    """The commands are those of Lightning's parser, without a prediction that the task refuses, and its own."""
    entry = command.DOORS[name]
    task, data = command._load(entry.task), command._load(entry.data)
    assert command.main([name, "--help"]) == 0
    lines = capsys.readouterr().out.split("commands:\n")[1].split("\n\n")[0].splitlines()
    monkeypatch.setattr(sys, "argv", ["task.py"])
    with pytest.raises(SystemExit):
        cli.task_cli(task, data, ["--help"])
    usage = capsys.readouterr().out.partition("{")[2].partition("}")[0].split(",")
    refused = {"predict"} if task.predict_step is LightningModule.predict_step else set()
    assert [line.split()[0] for line in lines] == [word for word in usage if word not in refused] + [*entry.commands]
    for line, path in zip(lines[len(entry.trainings) :], entry.commands.values(), strict=True):
        assert line.split(maxsplit=1)[1][1:] in " ".join(command._load(path).__doc__.split())


def test_python_m_ndlightnet_ends_with_the_status(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ndlightnet", "image_cl"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(command.__file__, run_name="__main__")
    assert capsys.readouterr().err.startswith("error: image_cl: no such task")


@pytest.mark.parametrize("arguments", [["--version"], ["video_cls", "--version"]])
def test_the_version(arguments, capsys):
    assert command.main(arguments) == 0
    assert capsys.readouterr() == (f"ndlightnet {ndlightnet.__version__}\n", "")


def test_a_task_that_is_none(capsys):
    assert command.main(["video"]) == 2
    assert capsys.readouterr().err == "error: video: no such task; did you mean video_cls?\n"


@pytest.mark.parametrize("name", command.DOORS)
def test_a_door_names_what_is_there(name):
    door = command.DOORS[name]
    assert all(command._load(path) for path in (door.task, door.data, *door.commands.values()))
    assert (command.CONFIGS / f"{door.config}.yaml").is_file()
    script = ROOT / "tasks" / f"{name}.py"
    tree = ast.parse(script.read_text())
    assert ast.get_docstring(tree) and ast.unparse(tree.body[-1].body).endswith(f"door('{name}'))")
    assert len(script.read_text().splitlines()) < 40


def test_a_command_beside_lightnings(monkeypatch, capsys):
    """It is found by name, and given the list of arguments, or options of its own."""

    def listed(arguments):
        print(arguments)
        return 3

    def options(root: str, size: int = 2):
        print(root, size)

    module = SimpleNamespace(listed=listed, options=options)
    monkeypatch.setitem(sys.modules, "ndlightnet.training.others", module)
    commands = {name: f"others:{name}" for name in ("listed", "options")}
    monkeypatch.setitem(command.DOORS, "text_lm", command.DOORS["text_lm"]._replace(commands=commands))
    assert command.main(["text_lm", "listed", "a", "--b"]) == 3
    assert command.main(["text_lm", "options", "here", "--size=5"]) == 0
    assert capsys.readouterr().out == "['a', '--b']\nhere 5\n"


def test_without_the_extra_each_door_names_it(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("ndlightnet.training", "lightning"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)  # as if it were not installed
    for name in command.DOORS:
        assert command.main([name, "fit"]) == 1
    assert command.door(name, ["fit"]) == command.main(["export", "runs/x", "--to", "onnx"]) == 1
    line = 'error: lightning is not installed: pip install "ndlightnet[tasks]"'
    assert capsys.readouterr().err.splitlines() == [line] * (len(command.DOORS) + 2)


def raising(error: Exception):
    def raises(*_: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("name", ["ndlightnet.x", "somebody"])
def test_what_no_extra_brings_is_no_missing_extra(name, monkeypatch):
    lost = ModuleNotFoundError(f"No module named '{name}'", name=name)
    monkeypatch.setattr(cli, "run", raising(lost))
    with pytest.raises(ModuleNotFoundError):
        command.door("text_lm", ["fit"])


def test_no_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert command.main(["--version"]) == 0


class Closed(io.TextIOBase):
    """A file that is written to a pipe without a reader."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        return self.number


@pytest.mark.parametrize("arguments", [[], ["--version"], ["text_lm", "fit"]])
def test_a_closed_pipe_ends_it_without_a_word(arguments, monkeypatch, tmp_path, capsys):
    """Nothing is raised, and what the process still writes at its end goes nowhere."""
    monkeypatch.setattr(cli, "run", lambda *_: print("loss"))
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", Closed(file.fileno()))
        assert command.main(arguments) == 1
        file.write("later")
    assert capsys.readouterr().err == (tmp_path / "out").read_text() == ""


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    monkeypatch.setattr(cli, "run", raising(BrokenPipeError(32, "of a worker")))
    with pytest.raises(BrokenPipeError, match="of a worker"):
        command.door("text_lm", ["fit"])


BEGIN = """
import os, runpy, sys

class Finder:
    def find_spec(name, *_):
        if name == "ndlightnet.training":  # which loads torch
            print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
            sys.exit(0)

sys.meta_path.insert(0, Finder)
sys.argv = ["text_lm.py", "fit", "--config", "x"]
runpy.run_path("tasks/text_lm.py", run_name="__main__")
"""


@pytest.mark.parametrize("environment, expected", [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5")])
def test_a_door_says_how_threads_wait_before_torch_is_loaded(environment, expected):
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"} | environment
    done = subprocess.run([sys.executable, "-c", BEGIN], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{expected} False\n"), done.stderr

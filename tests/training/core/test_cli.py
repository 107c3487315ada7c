"""What stays on the screen."""

import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from ndlightnet import NDLightNet
from ndlightnet.__main__ import CONFIGS, DOORS, door
from ndlightnet.data.errors import DataError
from ndlightnet.training import HandwrittenDigits, ImageTask, SeriesData, SignalData, TextData, VolumeFolders
from ndlightnet.training.core import cli
from ndlightnet.training.core.cli import TaskCLI, quiet
from ndlightnet.training.core.options import expect_config
from tests.training.conftest import last, write_text_run


@pytest.fixture
def messages():
    """What Lightning's loggers let through."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_hints_are_silent_and_the_rest_is_said(messages):
    quiet()
    rank_zero_info("GPU available: True (cuda), used: True")
    rank_zero_info("💡 Tip: For seamless cloud logging, try installing litlogger")
    rank_zero_info("Found current_model_state in the checkpoint. This will be used to initialize")
    rank_zero_info("Time limit reached. Signaling Trainer to stop.")
    assert messages == ["Time limit reached. Signaling Trainer to stop."]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet()
        rank_zero_warn("The 'val_dataloader' does not have many workers which may be a bottleneck.")
        rank_zero_warn("The number of training batches (1) is smaller than the logging interval")
    assert [str(warning.message)[:32] for warning in caught] == ["The number of training batches ("]


@pytest.mark.slow
def test_a_run_says_what_it_trains_and_what_came_out(messages, tmp_path, capsys, monkeypatch):
    """Nothing else: no hint, no warning, no table."""
    monkeypatch.setenv("COLUMNS", "200")
    words = [f"--config={write_text_run(tmp_path)}", "--trainer.callbacks=ndlightnet.training.AveragedWeights"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        ckpt = f"--ckpt_path={last(tmp_path / 'run')}"
        assert door("text_lm", ["fit", *words]) == door("text_lm", ["test", *words, ckpt]) == 0
    ours = [w for w in caught if "jsonargparse" not in str(w.category).lower()]
    assert [str(w.message) for w in ours if w.category is not DeprecationWarning] == []
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"NDLightNet, 4,256 parameters; results in {tmp_path}/run",
        f"checkpoints in {tmp_path}/run/checkpoints: best.ckpt, last.ckpt",
    ]
    assert len(out.splitlines()) == 1 and out.startswith("bits per byte ") and messages == []
    assert door("text_lm", ["test", *words]) == 0  # of random weights
    assert capsys.readouterr().err == ("note: --ckpt_path: test got none and measures the network as it was built\n")


@pytest.mark.parametrize("first", [True, False])
def test_the_first_of_several_processes_tells_what_failed(monkeypatch, capsys, first):
    """The others end well: torchrun would end the first one, which may still write pictures."""
    model = SimpleNamespace(notes=["one"], failures=["a.png: damaged"], summary="29 images")
    done = SimpleNamespace(model=model, trainer=SimpleNamespace(is_global_zero=first))
    monkeypatch.setattr(cli, "task_cli", lambda *_: done)
    assert cli.run(object, object, Path("none"), arguments=["test", "--model.net=x"]) == int(first)
    printed = ("29 images\n", "note: one\nerror: a.png: damaged\n") if first else ("", "")
    assert capsys.readouterr() == printed


def test_a_command_without_a_config_names_that_of_its_door(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, entry in DOORS.items():
        line = f"fit: got no config, expected one, such as --config {CONFIGS / entry.config}.yaml"
        assert door(name, ["fit", "--model.lr=1"]) == 1 and capsys.readouterr().err == f"error: {line}\n"
    for words in (["-c", "x"], ["--config=x"], ["--model.net=x"], ["--model", "x"], ["--data.help", "x"], ["--help"]):
        expect_config(["fit", *words], "x")
    for command in ("folds", "bundle"):
        assert door("ct_segmentation", [command, "--out=x"]) == 1
        line = f"error: {command}: got no config, expected one, such as --config runs/NAME/plan.yaml\n"
        assert capsys.readouterr().err == line
    monkeypatch.chdir(CONFIGS.parent)
    assert door("text_lm", ["test"]) == 1 and capsys.readouterr().err.endswith("such as --config configs/enwik8.yaml\n")


@pytest.mark.parametrize(
    "data, config, source",
    [
        (TextData("no/text.xz"), "enwik8", "no/text.xz"),
        (SeriesData("no", "hours.csv"), "ett", "no/hours.csv"),
        (SignalData("no"), "spoken_digits", "no"),
        (VolumeFolders("no", [8, 8, 8]), "adrenal28", "no"),
    ],
)
def test_data_that_are_missing(data, config, source, tmp_path):
    """A config without a line on its data has no more to say."""
    mine, config = tmp_path / "mine.yaml", CONFIGS / f"{config}.yaml"
    mine.write_text("data: {}")
    hint = f"; the first lines of {config} say how to get the data"
    for command, file, end in (("fit", mine, ""), ("validate", config, hint), ("test", config, hint)):
        cli = SimpleNamespace(subcommand=command, datamodule=data, config=None, _get=lambda *_, file=file: [file])
        with pytest.raises(DataError) as error:
            TaskCLI._check_source(cli)
        start = f"{source}: no such file or folder (data.root={data.root}, here or in $NDLIGHTNET_DATA)"
        assert str(error.value) == start + end
    cli.subcommand = "predict"  # needs no training data
    TaskCLI._check_source(cli)


def test_data_that_are_made_need_not_exist():
    TaskCLI._check_source(SimpleNamespace(subcommand="fit", datamodule=HandwrittenDigits()))


def test_configs_say_where_their_data_come_from():
    for file in CONFIGS.glob("*.yaml"):
        assert "\n# Data: " in file.read_text(), file


class BuildsItsNetwork(ImageTask):
    def __init__(self, width: int = 8) -> None:
        super().__init__(NDLightNet(2, 1, 10, patch_size=4, embed_dim=width, depth=1))


def test_a_task_that_builds_its_own_network(tmp_path, monkeypatch):
    """It needs no config that names one."""
    monkeypatch.setattr(sys, "argv", ["task.py"])
    words = ["--data=ndlightnet.training.HandwrittenDigits", f"--trainer.default_root_dir={tmp_path}"]
    task = TaskCLI(BuildsItsNetwork, HandwrittenDigits, run=False, args=[*words, "--model.width=16"]).model
    assert task.net.embed_dim == 16 and task.net_config is None
    words += ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert cli.run(BuildsItsNetwork, HandwrittenDigits, Path("none"), arguments=["fit", *words]) == 0

"""What stays on the screen."""

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from ndlightnet.__main__ import door
from ndlightnet.training.core import cli
from ndlightnet.training.core.cli import quiet
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
    assert cli.run(object, object, Path("none"), arguments=["test"]) == int(first)
    printed = ("29 images\n", "note: one\nerror: a.png: damaged\n") if first else ("", "")
    assert capsys.readouterr() == printed

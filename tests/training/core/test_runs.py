"""The folder of a run: what lies where, whatever logs the training, and what a second one does."""

import csv
import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import DummyLogger

from ndlightnet import NDLightNet
from ndlightnet.__main__ import door
from ndlightnet.data.errors import DataError
from ndlightnet.training import TextData, TextTask
from ndlightnet.training.core.cli import run
from ndlightnet.training.core.export import load_network
from ndlightnet.training.core.runs import FitMetrics, check_unused, find_checkpoint
from tests.training.conftest import write_text_run


class Database(DummyLogger):
    """As MLFlowLogger on a database: no folder."""

    save_dir = log_dir = None


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """launch("fit", "--option=..."): the command line of text_lm -> (status, output, errors)."""
    write_text_run(tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def call(command, *arguments):
        try:
            status = door("text_lm", [command, *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["CSVLogger", f"{__name__}.Database"])
def test_every_command_takes_a_run_of_any_logger(launch, tmp_path, logger):
    root = tmp_path / "run"
    if logger == "CSVLogger":
        logger = f"{{class_path: {logger}, init_args: {{save_dir: {root}}}}}"
    assert launch("fit", f"--config={tmp_path}/c.yaml", f"--trainer.logger={logger}")[0] == 0
    assert list(Path.cwd().iterdir()) == []
    saved = yaml.safe_load((root / "config.yaml").read_text())
    assert saved["model"]["net"]["init_args"]["embed_dim"] == 8
    net, checkpoint = load_network(root)  # what `export` writes
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert checkpoint == root / "checkpoints/best.ckpt"
    assert all(torch.equal(x, weights[f"net.{key}"]) for key, x in net.state_dict().items())
    assert launch("generate", "--ckpt_path", root, "--prompt=ab", "--length=2")[1][:2] == "ab"
    saved = (f"--config={root}/config.yaml", f"--ckpt_path={checkpoint}")
    assert launch("test", *saved)[::2] == (0, "")
    assert launch("predict", *saved, f"--data.input={tmp_path}/text")[::2] == (0, "")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_a_second_training_replaces_nothing(launch, tmp_path):
    root, last = tmp_path / "run", tmp_path / "run/checkpoints/last.ckpt"
    launch = partial(launch, "fit", f"--config={tmp_path}/c.yaml")
    assert launch()[0] == 0
    before, wider, longer = content(root), "--model.net.init_args.embed_dim=16", "--trainer.max_epochs=2"
    status, _, error = launch(wider, longer)
    assert status == 1 and error == (
        f"error: {root}: holds the checkpoints of a run, which `fit` would replace; --ckpt_path "
        f"{last} goes on with it, --trainer.default_root_dir FOLDER begins another one\n"
    )
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(last.read_bytes())  # of another run, as far as anyone can see
    below = root / "fold_0/checkpoints/last.ckpt"
    below.parent.mkdir(parents=True)
    below.write_bytes(last.read_bytes())
    for option in (f"--ckpt_path={copy}", f"--ckpt_path={below}", "--trainer.enable_checkpointing=false"):
        assert launch(option)[::2] == (1, error)
    shutil.rmtree(root / "fold_0")
    assert launch("--trainer.fast_dev_run=1", wider)[0] == 0
    assert content(root) == before

    assert launch(longer, f"--ckpt_path={last}")[0] == 0
    assert torch.load(last, weights_only=True)["epoch"] == 1
    assert (root / "config_1.yaml").read_bytes() == before["config.yaml"]
    config = yaml.safe_load((root / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 2 and config["ckpt_path"] is None
    assert launch(f"--trainer.default_root_dir={tmp_path}/new", wider)[0] == 0

    before = content(root)
    status, _, error = launch(longer, f"--ckpt_path={last}", "--model.lr=0.5")
    assert status == 0 and f"note: {last}: has been trained for 2 epochs, nothing is left" in error
    assert content(root)["config.yaml"] == before["config.yaml"]


@pytest.mark.slow
def test_the_command_without_arguments_can_be_repeated(tmp_path, launch, capsys):
    """The first call trains and tests; the second tests what is there and trains nothing."""
    lines = []
    for _ in range(2):
        assert run(TextTask, TextData, tmp_path / "c.yaml", None, []) == 0
        lines.append(capsys.readouterr())
        trained = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
        assert trained["global_step"] == 1
    assert lines[0].out == lines[1].out and lines[0].out.startswith("bits per byte ")
    assert "note: " not in lines[0].err
    assert lines[1].err.splitlines()[0] == (
        f"note: {tmp_path}/run: holds a run, which goes on unless finished; delete it to begin another"
    )


def test_the_first_process_decides_for_all(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.1.part.last.ckpt").touch()  # a draft
    check_unused(tmp_path, None)
    (tmp_path / "checkpoints/step.ckpt").touch()
    with pytest.raises(DataError, match=r"--ckpt_path \S+/checkpoints/step.ckpt goes on"):
        check_unused(tmp_path, None)
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)
    check_unused(tmp_path, None)
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 0)
    (tmp_path / "hpc_ckpt_1.ckpt").touch()  # SLURM has requeued the job
    check_unused(tmp_path, None)


def test_a_training_leaves_its_validations(launch, tmp_path):
    root, config = tmp_path / "run", f"--config={tmp_path}/c.yaml"
    assert launch("fit", config, "--trainer.max_epochs=2", "--model.lr=0.1")[0] == 0
    metrics = json.loads((root / "metrics.json").read_text())
    with (root / "logs/version_0/metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["val_score"]]
    scores = [float(row["val_score"]) for row in logged]
    best = max(range(2), key=lambda epoch: scores[epoch])
    assert list(metrics) == ["fit"]
    for name, epoch in (("last", 1), ("best", best)):
        values = metrics["fit"][name]
        assert (values["epoch"], values["step"]) == (epoch, epoch + 1)
        assert values["val_score"] == pytest.approx(scores[epoch], abs=1e-5) == -values["val_loss"]
    assert torch.load(root / "checkpoints/best.ckpt", weights_only=True)["epoch"] == best
    assert launch("test", config, f"--ckpt_path={root}/checkpoints/last.ckpt")[0] == 0
    tested = json.loads((root / "metrics.json").read_text())
    assert tested["fit"] == metrics["fit"] and "8" in tested["bits_per_byte_at"]


@pytest.mark.parametrize(
    "scores, best", [([1.0, 3.0, 2.0], 1), ([math.nan, 1.0, math.nan], 1), ([math.nan], 0), ([None, None], None)]
)
def test_the_best_validation_is_that_of_the_highest_score(scores, best):
    """Each by a new process, which resumes."""
    saved: dict = {}
    for epoch, score in enumerate(scores):
        callback = FitMetrics("score")
        callback.load_state_dict(saved)
        logged = {} if score is None else {"score": torch.tensor(score)}
        trainer = SimpleNamespace(
            is_global_zero=False,
            sanity_checking=False,
            current_epoch=epoch,
            global_step=epoch + 1,
            callback_metrics={"loss": torch.tensor(2.0), **logged},
        )
        callback.on_validation_end(trainer, None)
        saved = callback.state_dict()
    epochs = {name: metrics["epoch"] for name, metrics in saved.items()}
    assert epochs == {"last": len(scores) - 1, **({} if best is None else {"best": best})}
    assert saved["last"]["loss"] == 2 and saved["last"]["step"] == len(scores)


def test_a_folder_stands_for_its_best_checkpoint(tmp_path):
    """Where last.ckpt lies beside it, too; without it, for the last one."""
    folder, options = tmp_path / "checkpoints", {"dims": 1, "in_chans": 1, "num_classes": 2, "embed_dim": 4, "depth": 1}
    folder.mkdir()
    net = {"class_path": "ndlightnet.NDLightNet", "init_args": options}
    (tmp_path / "config.yaml").write_text(yaml.dump({"model": {"net": net}}))
    for name in ("last", "best"):  # the folder's only one, then one of two
        weights = NDLightNet(**options).state_dict()
        torch.save({"state_dict": {f"net.{key}": x for key, x in weights.items()}}, folder / f"{name}.ckpt")
        assert find_checkpoint(tmp_path) == (folder / f"{name}.ckpt", tmp_path)
        loaded, path = load_network(tmp_path)
        assert path == folder / f"{name}.ckpt"
        assert all(torch.equal(x, weights[key]) for key, x in loaded.state_dict().items())
    without_tpe = NDLightNet(**options, tpe=False).description()
    torch.save({"state_dict": {f"net.{key}": x for key, x in weights.items()}, "network": without_tpe}, path)
    with pytest.raises(DataError, match=r"config\.yaml: not the network of .*: tpe is False there, True here"):
        load_network(tmp_path)

"""The command `export`: a run's network as a file that runs without the library."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.__main__ import main
from ndlightnet.training.core import export

SMALL = {"dims": 2, "num_classes": 3, "patch_size": 4, "embed_dim": 16, "depth": 1, "tpe_states": 4}
ALONE = """
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
for path in sys.argv[2:]:
    numpy.save(path, session.run(["output"], {"input": numpy.load(path)})[0])
assert "torch" not in sys.modules and "ndlightnet" not in sys.modules
"""


def run(folder: Path, kind: type, arguments: dict, name: str = "best") -> tuple[torch.nn.Module, Path]:
    """A network, and the folder that a `fit` of it leaves."""
    net = kind(**arguments).eval()
    (folder / "checkpoints").mkdir(parents=True)
    entry = {"class_path": f"ndlightnet.{kind.__name__}", "init_args": arguments}
    (folder / "config.yaml").write_text(yaml.dump({"model": {"lr": 0.1, "net": entry}}))
    saved = {f"net.{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": saved}, folder / "checkpoints" / f"{name}.ckpt")
    return net, folder


@pytest.mark.slow
def test_onnx_runs_without_us(tmp_path, capfd):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    net, folder = run(tmp_path / "run", NDLightNet, {**SMALL, "dims": 1, "patch_size": 1, "vocab_size": 50})
    assert main(["export", str(folder), "--to", "onnx"]) == 0
    out = capfd.readouterr().out
    assert out.count(", ok") == 3 and f"wrote {folder / 'model.onnx'}" in out
    inputs = {tmp_path / f"{size}.npy": torch.randint(50, size) for size in ((2, 71), (1, 200))}  # not the command's
    for path, x in inputs.items():
        np.save(path, x.numpy())
    subprocess.run([sys.executable, "-c", ALONE, folder / "model.onnx", *inputs], check=True)
    for path, x in inputs.items():
        with torch.no_grad():
            expected = net(x)
        # roundings of 6e-8 that a few hundred operations grow; outputs are of order 1
        assert (torch.from_numpy(np.load(path)) - expected).abs().max() < 2e-5


@pytest.mark.exhaustive
def test_pt2_of_a_segmentation_network(tmp_path, capfd):
    arguments = {"dims": 2, "in_channels": 1, "out_channels": 3, "widths": [4, 8], "convs": [1, 1], "depths": [0, 1]}
    _, folder = run(tmp_path / "run", NDLightUNet, arguments, "last")
    ckpt = folder / "checkpoints" / "last.ckpt"
    assert main(["export", str(ckpt), "--to", "pt2"]) == 0
    assert capfd.readouterr().out.count(", ok") == 3 and (ckpt.parent / "model.pt2").is_file()


@pytest.fixture
def trained(tmp_path):
    return run(tmp_path / "run", NDLightNet, SMALL)


@pytest.mark.parametrize("factor, status, contents", [(1.001, 1, ["old"]), (1.0, 0, ["data", "new"])])
def test_only_a_file_that_equals_the_network_is_kept(trained, monkeypatch, capsys, factor, status, contents):
    net, folder = trained
    (folder / "model.onnx").write_text("old")

    def write(net, path):
        path.write_text("new")
        path.with_suffix(".onnx.data").write_text("data")

    monkeypatch.setattr(export, "write_onnx", write)
    monkeypatch.setattr(export, "load_onnx", lambda path: lambda x: net(x) * (factor if len(x) == 3 else 1))
    assert main(["export", str(folder), "--to", "onnx"]) == status
    out, err = capsys.readouterr()
    assert ("NOT EQUAL" in out) == ("differs from the network" in err) == bool(status)
    assert sorted(file.read_text() for file in folder.glob("model.*")) == contents
    assert {entry.name.partition(".")[0] for entry in folder.iterdir()} == {"checkpoints", "config", "model"}


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_a_missing_library_is_named_and_onnx_for_onnx_only(trained, monkeypatch, capsys, to):
    def write(net, path):
        raise ImportError("No module named 'missing'")

    monkeypatch.setattr(export, f"write_{to}", write)
    assert main(["export", str(trained[1]), "--to", to]) == 1
    err = capsys.readouterr().err
    assert f"--to {to}: " in err and "No module named 'missing'" in err
    assert ("pip install onnx" in err) == (to == "onnx")


def test_a_missing_compiler_is_one_line(trained, monkeypatch, capsys):
    def compiled(*args, **kwargs):
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    assert main(["export", str(trained[1]), "--to", "pt2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --to pt2: needs a C++ compiler, such as g++")
    assert not (trained[1] / "model.pt2").exists()


def test_a_checkpoint_is_found_from_its_own_folder(trained, monkeypatch):
    monkeypatch.chdir(trained[1] / "checkpoints")
    net, ckpt = export.load_network(Path("best.ckpt"))
    assert ckpt == Path("best.ckpt")
    torch.testing.assert_close(net.state_dict(), trained[0].state_dict(), rtol=0, atol=0)


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    _, folder = run(tmp_path / "run", NDLightNet, SMALL)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("16", "32"))
    (tmp_path / "empty").mkdir()
    (folder / "wrong.ckpt").write_text("x")
    for path, line in (
        (folder, "not the network of"),
        (tmp_path / "empty", f"{tmp_path / 'empty'}: a folder, expected a checkpoint that `fit` has"),
        (folder / "wrong.ckpt", f"{tmp_path / 'config.yaml'}: no such file"),
    ):
        assert main(["export", str(path), "--to", "onnx"]) == 1
        assert re.fullmatch(f"error: .*{re.escape(line)}.*\n", capsys.readouterr().err)
    ckpt = folder / "checkpoints" / "best.ckpt"
    ckpt.write_text("x")
    assert main(["export", str(folder), "--to", "onnx"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {ckpt}: not a checkpoint")
    with pytest.raises(SystemExit):
        main(["export", str(folder), "--to", "onn"])
    assert capsys.readouterr().err == "error: to: onn, expected Literal['onnx', 'pt2']\n"

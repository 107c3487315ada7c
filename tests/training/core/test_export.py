"""The command `export`: a run's network as a file that runs without the library."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError, InvalidCxxCompiler

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.__main__ import main
from ndlightnet.training.core import export

CONFIG = """
model:
  net:
    class_path: ndlightnet.{}
    init_args: {}
  lr: 0.1
"""
SMALL = "{dims: 2, num_classes: 3, patch_size: 4, embed_dim: 16, depth: 1, tpe_states: 4}"
ALONE = """
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
x = numpy.load(sys.argv[2])
numpy.save(sys.argv[2], session.run(["output"], {"input": x})[0])
assert "torch" not in sys.modules and "ndlightnet" not in sys.modules
"""


def run(folder: Path, net: torch.nn.Module, arguments: str, name: str = "best") -> Path:
    """What `fit` leaves."""
    (folder / "checkpoints").mkdir(parents=True)
    config = CONFIG.format(type(net).__name__, arguments)
    (folder / "config.yaml").write_text(config)
    saved = {f"net.{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": saved}, folder / "checkpoints" / f"{name}.ckpt")
    return folder


@pytest.mark.slow
def test_onnx_runs_without_us(tmp_path, capfd):
    np = pytest.importorskip("numpy")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    net = NDLightNet(1, num_classes=3, vocab_size=50, embed_dim=16, depth=1, tpe_states=4).eval()
    words = "{dims: 1, num_classes: 3, vocab_size: 50, embed_dim: 16, depth: 1, tpe_states: 4}"
    folder = run(tmp_path / "run", net, words)
    assert main(["export", str(folder), "--to", "onnx"]) == 0
    out = capfd.readouterr().out
    assert out.count(", ok") == 3 and f"wrote {folder / 'model.onnx'}" in out
    for size in ((2, 71), (1, 200)):  # none that the command tries
        x = torch.randint(50, size)
        np.save(tmp_path / "x.npy", x.numpy())
        arguments = [folder / "model.onnx", tmp_path / "x.npy"]
        subprocess.run([sys.executable, "-c", ALONE, *map(str, arguments)], check=True)
        with torch.no_grad():
            expected = net(x)
        # roundings of 6e-8 that a few hundred operations grow; outputs are of order 1
        assert (torch.from_numpy(np.load(tmp_path / "x.npy")) - expected).abs().max() < 2e-5


@pytest.mark.exhaustive
def test_pt2_of_a_segmentation_network(tmp_path, capfd):
    net = NDLightUNet(2, 1, 3, widths=(4, 8), convs=(1, 1), depths=(0, 1)).eval()
    arguments = "{dims: 2, in_channels: 1, out_channels: 3, widths: [4, 8], convs: [1, 1], depths: [0, 1]}"
    folder = run(tmp_path / "run", net, arguments, "last")
    ckpt = folder / "checkpoints" / "last.ckpt"
    assert main(["export", str(ckpt), "--to", "pt2"]) == 0
    assert capfd.readouterr().out.count(", ok") == 3 and (ckpt.parent / "model.pt2").is_file()


@pytest.fixture
def made(tmp_path):
    net = NDLightNet(2, 3, patch_size=4, num_classes=3, embed_dim=16, depth=1, tpe_states=4)
    return net.eval(), run(tmp_path / "run", net, SMALL)


@pytest.mark.parametrize("factor, status, kept", [(1.001, 1, ["old"]), (1.0, 0, ["data", "new"])])
def test_only_a_file_that_equals_the_network_is_kept(made, monkeypatch, capsys, factor, status, kept):
    net, folder = made
    (folder / "model.onnx").write_text("old")

    def write(net, path):
        path.write_text("new")
        path.with_suffix(".onnx.data").write_text("data")

    monkeypatch.setattr(export, "write_onnx", write)
    monkeypatch.setattr(export, "load_onnx", lambda path: lambda x: net(x) * factor)
    assert main(["export", str(folder), "--to", "onnx"]) == status
    said = capsys.readouterr()
    assert ("NOT EQUAL" in said.out) == ("differs from the network" in said.err) == bool(status)
    assert sorted(file.read_text() for file in folder.glob("model.*")) == kept
    assert {entry.name.partition(".")[0] for entry in folder.iterdir()} == {"checkpoints", "config", "model"}


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_a_missing_library_is_named_and_onnx_for_onnx_only(made, monkeypatch, capsys, to):
    def write(net, path):
        raise ImportError("No module named 'parts'")

    monkeypatch.setattr(export, f"write_{to}", write)
    assert main(["export", str(made[1]), "--to", to]) == 1
    said = capsys.readouterr().err
    assert f"--to {to}: " in said and "No module named 'parts'" in said
    assert ("pip install onnx" in said) == (to == "onnx")


def test_a_missing_compiler_is_one_line(made, monkeypatch, capsys):
    def compiled(*args, **kwargs):
        raise InductorError(InvalidCxxCompiler(), None)

    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiled)
    assert main(["export", str(made[1]), "--to", "pt2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --to pt2: needs a C++ compiler, such as g++")
    assert not (made[1] / "model.pt2").exists()


def test_a_checkpoint_is_found_from_its_own_folder(made, monkeypatch):
    monkeypatch.chdir(made[1] / "checkpoints")
    net, ckpt = export.load_network(Path("best.ckpt"))
    assert ckpt == Path("best.ckpt")
    torch.testing.assert_close(net.state_dict(), made[0].state_dict(), rtol=0, atol=0)


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    net = NDLightNet(2, 3, patch_size=4, num_classes=3, embed_dim=16, depth=1, tpe_states=4)
    folder = run(tmp_path / "run", net, SMALL.replace("16", "32"))
    (tmp_path / "empty").mkdir()
    (folder / "wrong.ckpt").write_text("x")
    for given, said in (
        (folder, "not the network of"),
        (tmp_path / "empty", f"{tmp_path / 'empty'}: a folder, expected a checkpoint that `fit` has"),
        (folder / "wrong.ckpt", f"{tmp_path / 'config.yaml'}: no such file"),
    ):
        assert main(["export", str(given), "--to", "onnx"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line

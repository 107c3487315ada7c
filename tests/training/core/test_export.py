"""The command `export`: a run's network as a file that runs without the library."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.__main__ import main

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
    for part in ("checkpoints", "logs/version_0"):
        (folder / part).mkdir(parents=True)
    config = CONFIG.format(type(net).__name__, arguments)
    (folder / "logs/version_0/config.yaml").write_text(config)
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
    net = NDLightUNet(2, 1, 3, widths=(8, 16), depths=(0, 1)).eval()
    arguments = "{dims: 2, in_channels: 1, out_channels: 3, widths: [8, 16], depths: [0, 1]}"
    folder = run(tmp_path / "run", net, arguments, "last")
    ckpt = folder / "checkpoints" / "last.ckpt"
    assert main(["export", str(ckpt), "--to", "pt2"]) == 0
    assert capfd.readouterr().out.count(", ok") == 3 and (ckpt.parent / "model.pt2").is_file()


def test_a_file_that_differs_is_an_error(tmp_path, monkeypatch, capsys):
    from ndlightnet.training.core import export

    net = NDLightNet(2, 3, patch_size=4, num_classes=3, embed_dim=16, depth=1, tpe_states=4)
    folder = run(tmp_path / "run", net, SMALL)
    monkeypatch.setattr(export, "write_onnx", lambda net, path: None)
    monkeypatch.setattr(export, "load_onnx", lambda path: lambda x: net.eval()(x) * 1.001)
    assert main(["export", str(folder), "--to", "onnx"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    net = NDLightNet(2, 3, patch_size=4, num_classes=3, embed_dim=16, depth=1, tpe_states=4)
    folder = run(tmp_path / "run", net, SMALL.replace("16", "32"))
    (tmp_path / "empty").mkdir()
    (folder / "wrong.ckpt").write_text("x")
    for given, said in (
        (folder, "not the network of"),
        (tmp_path / "empty", "no such checkpoint"),
        (folder / "wrong.ckpt", "no logs/version_"),
    ):
        assert main(["export", str(given), "--to", "onnx"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line

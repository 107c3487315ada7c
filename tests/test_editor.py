"""What a user's editor knows after `pip install -e`: mypy and pyright on a user's file."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = ("PYTHONPATH", "MYPYPATH")
CACHE = ROOT / ".mypy_cache" / "user"
USER = '''
"""Lines that end in `wrong` have an error each, all others have none."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import ndlightnet as nd
from ndlightnet import NDLightNet, NDLightUNet, Packed, State, mixers, ops
from ndlightnet.layout import Grid
from ndlightnet.models.stream import Stream

x = torch.randn(1, 3, 32, 32)
net = NDLightNet(dims=2, num_classes=10, patch_size=8, mixer=mixers.GLA)
NDLightNet(dims=2, mixer=partial(mixers.Mamba, scan="axes"))
NDLightNet(dims=2, mixer=[mixers.GLA, mixers.Identity], depth=2)
NDLightNet(dims=2, mixer="GLA", device="meta", dtype=torch.bfloat16)
NDLightNet(dims=2, mixer={"Mamba": {"scan": "axes"}})
NDLightNet(dims=1, vocab_size=256, causal=True, mixer=mixers.text_mixer)
NDLightNet(dims=2, patchsize=8)  # wrong
NDLightNet(dims=2, patch_size="8")  # wrong
assert_type(net(x), Tensor)
assert_type(net(net.pack([x])), Tensor)
assert_type(net.forward_features(x), Tensor)
assert_type(net.forward_features(net.pack([x])), Packed)
assert_type(net.embed_dim, int)
config: dict[str, Any] = net.config
assert_type(NDLightNet.from_pretrained("folder"), NDLightNet)
assert_type(NDLightUNet.from_checkpoint("last.ckpt", device="cpu"), NDLightUNet)
assert_type(net.stream(), Stream)
assert_type(net.stream()(x), Tensor)
net(x, msk=None)  # wrong
NDLightUNet(2, 1, 2, widths=(8, 16))(x)
NDLightUNet(2, 1, 2, width=(8, 16))  # wrong
assert_type(NDLightUNet(2, 1, 2).encode(x), list[Tensor])
assert_type(nd.ndlightnet_tiny(2, num_classes=3), NDLightNet)
nd.ndlightnet_small(2, patchsize=8)  # wrong
nd.ndlightnet_base()  # wrong
nd.ndlightnet_huge  # wrong
layer = nd.MultiheadAttention(8, 2, batch_first=True)
assert_type(layer(x, x, x)[0], Tensor)
layer(x, x)  # wrong
nd.MultiheadAttention(8, 2, batchfirst=True)  # wrong
assert_type(mixers.GLA(8)(x, causal=True), Tensor)
mixers.GLA(8)(x, casual=True)  # wrong
mixers.GLA(8, head=4)  # wrong
mixers.GAL(8)  # wrong
state: State = nd.merge(nd.summarize(x, x), nd.summarize(x, x))
assert_type(nd.read(x, state), Tensor)
assert_type(ops.global_attention(x, x, x, impl="torch"), Tensor)
ops.global_attention(x, x, x, impl="cuda")  # wrong
assert_type(Grid((2, 3)).length, int)
'''.lstrip()


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Python of an environment with the library as after `pip install -e`, and our packages."""
    backend = Path(pytest.importorskip("hatchling").__file__).parents[1]
    venv = tmp_path_factory.mktemp("editor") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    interpreter = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [sys.executable, "-m", "pip", "-q", "--python", interpreter, "install"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--no-index", "-e", ROOT],
        check=True,
        env={**os.environ, "PYTHONPATH": str(backend)},  # the new environment has none
    )
    (installed,) = venv.rglob("_ndlightnet.pth")
    torch = importlib.util.find_spec("torch")
    (installed.parent / "others.pth").write_text(str(Path(torch.origin).parents[1]))
    return interpreter


def ask(checker: str, folder: Path, *options: str | Path) -> str:
    """Return what a type checker says of the user's file, in a folder without our sources."""
    pytest.importorskip(checker)
    (folder / "user.py").write_text(USER)
    env = {key: value for key, value in os.environ.items() if key not in PATHS}
    command = [sys.executable, "-m", checker, *options, "user.py"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True).stdout


def check(lines_with_errors: Iterable[int]) -> None:
    lines = USER.splitlines()
    wrong = [lines[i - 1] for i in sorted(set(lines_with_errors))]
    assert wrong == [line for line in lines if line.endswith("# wrong")]


@pytest.mark.exhaustive
def test_mypy(python, tmp_path):
    """Torch takes it half a minute to read, once: later runs find the cache in the clone."""
    out = ask("mypy", tmp_path, "--python-executable", python, "--strict", "--cache-dir", CACHE)
    check(map(int, re.findall(r"^user.py:(\d+): error", out, re.MULTILINE)))


@pytest.mark.slow
def test_pyright_which_is_what_pylance_runs_and_a_package_kernels_of_somebody_else(python, tmp_path):
    """The clone is on the path: its folder `kernels` is no package and stands behind PyPI's."""
    report = json.loads(ask("pyright", tmp_path, "--pythonpath", python, "--outputjson"))
    check(x["range"]["start"]["line"] + 1 for x in report["generalDiagnostics"] if x["severity"] == "error")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("name = 'of PyPI'\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.name)"
    done = subprocess.run([python, "-Ic", code], cwd="/", capture_output=True, text=True)
    assert done.stdout == "of PyPI\n", done.stderr

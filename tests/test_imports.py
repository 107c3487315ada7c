"""Who may import whom (house order), and what `import ndlightnet` brings along."""

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# each room may import from its own line and from the lines below it
ORDER = (
    ("tasks", "ndlightnet.__main__"),
    ("ndlightnet.training",),
    ("ndlightnet", "ndlightnet.public", "ndlightnet.models", "ndlightnet.inference", "ndlightnet.integrations"),
    ("ndlightnet.nn",),
    ("ndlightnet.ops",),
    ("ndlightnet.parallel",),
    ("ndlightnet_kernels", "ndlightnet.version"),
)
# room -> the only rooms of ours that it may import; `data` is imported by training, integrations and tasks alone
CLOSED = {
    "ndlightnet.data": {"ndlightnet.data", "ndlightnet.layout"},
    "ndlightnet.layout": {"ndlightnet.layout"},
    "ndlightnet.parallel": {"ndlightnet.parallel", "ndlightnet.layout", "ndlightnet_kernels"},
    "ndlightnet_kernels": {"ndlightnet_kernels"},
}
ONLY_UNDER = {
    "lightning": ("ndlightnet.training", "tasks"),
    "monai": ("ndlightnet.data", "ndlightnet.inference", "ndlightnet.integrations", "ndlightnet.training", "tasks"),
    **dict.fromkeys(("timm", "transformers", "lm_eval"), ("ndlightnet.integrations", "tasks")),
    "diffusers": ("ndlightnet.integrations", "ndlightnet.training", "tasks"),
    **dict.fromkeys(("decord", "torchcodec"), ("ndlightnet.data", "ndlightnet.inference")),
    "av": ("ndlightnet.data", "ndlightnet.inference"),
    "triton": ("ndlightnet_kernels",),
}
PACKAGES = ("kernels/ndlightnet_kernels", "tasks/evidence/ndlightnet_evidence")  # others than ndlightnet
ALIASES = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning", "ndlightnet_evidence": "tasks"}


@cache
def imported(path: Path, source: str) -> set[str]:
    """Dotted names of all that a file imports: also in functions, relative, or by import_module."""
    package = path.with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*up, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return names


def room(name: str) -> str:
    """The room of a dotted name: `ndlightnet.nn.block` -> `ndlightnet.nn`; else its first word."""
    first, *rest = name.split(".")
    if first == "ndlightnet" and rest:
        folder = ROOT / "ndlightnet" / rest[0]
        if f"ndlightnet.{rest[0]}" in CLOSED or folder.is_dir() or folder.with_suffix(".py").exists():
            return f"ndlightnet.{rest[0]}"
    return ALIASES.get(first, first)


def inside(path: Path) -> Path:
    """A file's path from the folder that its package is imported from."""
    folders = (Path(package).parent for package in PACKAGES if path.is_relative_to(package))
    return path.relative_to(next(folders, "."))


def violations(path: Path, source: str) -> list[str]:
    rank = {name: i for i, names in enumerate(ORDER) for name in names}
    path_inside = inside(path)
    importer = room(".".join(path_inside.with_suffix("").parts).removesuffix(".__init__"))
    wrong = []
    for target in {room(name) for name in imported(path_inside, source)}:
        if target in ONLY_UNDER:
            allowed = importer in ONLY_UNDER[target]
        elif target not in rank and target not in CLOSED:
            allowed = True  # not ours, and nothing special
        elif importer in CLOSED:
            allowed = target in CLOSED[importer]
        elif target == "ndlightnet.layout":
            allowed = True  # all of the library may import it
        elif target == "ndlightnet.data":
            allowed = importer == "ndlightnet.integrations" or rank[importer] <= rank["ndlightnet.training"]
        else:
            allowed = rank[importer] <= rank[target]
        wrong += [] if allowed else [f"{path}: {importer} imports {target}"]
    return wrong


def circle(sources: dict[Path, str]) -> list[str]:
    """Modules that import each other in turn, imports in functions included; [] if there are none. A
    module does not count as importing the packages that it lies in."""
    files = {".".join(inside(path).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}

    def module(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    graph = {
        name: {module(x) for x in imported(inside(path), sources[path])} - {"", name} for name, path in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][1:]
    return []


def files() -> list[Path]:
    paths = [p for top in ("ndlightnet", "kernels", "tasks") for p in (ROOT / top).rglob("*.py")]
    return [p.relative_to(ROOT) for p in sorted(paths)]


@pytest.mark.slow
def test_every_import_goes_downward_and_no_modules_import_each_other():
    sources_of = {path: (ROOT / path).read_text() for path in files()}
    assert len(sources_of) > 20
    assert [w for path, source in sources_of.items() for w in violations(path, source)] == []
    assert circle(sources_of) == []


CIRCLES = """
ndlightnet/ops/x.py: from ndlightnet.ops.y import f
ndlightnet/ops/y.py: import ndlightnet.ops.x

ndlightnet/ops/x.py: from . import y
ndlightnet/ops/y.py: def f(): from .x import g

ndlightnet/nn/__init__.py: from ndlightnet.nn.x import f
ndlightnet/nn/x.py: from ndlightnet import nn

kernels/ndlightnet_kernels/x.py: import ndlightnet_kernels.y
kernels/ndlightnet_kernels/y.py: from . import x

tasks/evidence/ndlightnet_evidence/x.py: from ndlightnet_evidence import y
tasks/evidence/ndlightnet_evidence/y.py: from ndlightnet_evidence.z import f
tasks/evidence/ndlightnet_evidence/z.py: from ndlightnet_evidence.x import f
"""
# a package imports its modules, which import each other in one direction
NO_CIRCLE = """
ndlightnet/nn/__init__.py: from ndlightnet.nn import x, y
ndlightnet/nn/x.py: from ndlightnet.nn import y
ndlightnet/nn/y.py: import torch
"""


def sources(text: str) -> dict[Path, str]:
    lines = (line.split(": ", 1) for line in text.strip().splitlines())
    return {Path(path): source for path, source in lines}


@pytest.mark.parametrize("text", CIRCLES.split("\n\n"))
def test_a_circle_is_caught(text):
    assert len(circle(sources(text))) == len(sources(text)) and circle(sources(NO_CIRCLE)) == []


@pytest.mark.parametrize(
    "path, source, wrong",
    [
        ("ndlightnet/ops/x.py", "from ndlightnet.nn import Block", 1),
        ("ndlightnet/ops/x.py", "def f():\n    from ndlightnet.models.unet import NDLightUNet", 1),
        ("ndlightnet/ops/x.py", "from ..nn.block import GLU", 1),
        ("ndlightnet/ops/x.py", "from ndlightnet import nn", 1),
        ("ndlightnet/nn/mixers/x.py", "from ndlightnet import NDLightNet", 1),
        ("ndlightnet/nn/x.py", "import ndlightnet.models.backbone as b", 1),
        ("ndlightnet/models/x.py", "import_module('ndlightnet.training')", 1),
        ("ndlightnet/models/x.py", "from ndlightnet.data import video", 1),
        ("ndlightnet/layout/x.py", "from ndlightnet.ops import State", 1),
        ("ndlightnet/layout/x.py", "from ndlightnet.nn.embedding import Patchify", 1),
        ("ndlightnet/parallel/x.py", "from ndlightnet.ops import State", 1),
        ("ndlightnet/layout/x.py", "from ndlightnet.parallel import Slab", 1),
        ("ndlightnet/data/x.py", "from ndlightnet.inference import predict_volume", 1),
        ("ndlightnet/training/x.py", "from tasks.video_cls import main", 1),
        ("kernels/ndlightnet_kernels/x.py", "from ndlightnet.ops.lightnet.state import State", 1),
        ("kernels/ndlightnet_kernels/x.py", "from ndlightnet.layout import Ragged", 1),
        ("ndlightnet/training/x.py", "from ndlightnet_evidence.bench import timing", 1),
        ("ndlightnet/models/x.py", "import lightning.pytorch as pl", 1),
        ("ndlightnet/models/x.py", "import pytorch_lightning", 1),
        ("ndlightnet/models/x.py", "from monai.transforms import Compose", 1),
        ("ndlightnet/training/x.py", "import av", 1),
        ("ndlightnet/nn/x.py", "from ndlightnet.integrations import replace_attention", 1),
        ("ndlightnet/models/x.py", "import timm", 1),
        ("ndlightnet/ops/x.py", "def f():\n    import triton.language as tl", 1),
        ("ndlightnet/ops/x.py", "from ndlightnet.layout import Grid\nimport ndlightnet_kernels", 0),
        ("ndlightnet/ops/x.py", "from ndlightnet.ops import fla\nfrom .state import State", 0),
        ("ndlightnet/training/x.py", "import lightning\nfrom ndlightnet.models import NDLightNet", 0),
        ("ndlightnet/data/x.py", "import monai\nfrom ndlightnet.layout import per_axis", 0),
        ("ndlightnet/data/x.py", "from ndlightnet.layout import pack", 0),
        ("ndlightnet/ops/x.py", "from ndlightnet.layout import Ragged", 0),
        ("ndlightnet/ops/x.py", "from ndlightnet.parallel import add_planes", 0),
        ("ndlightnet/bench/x.py", "from ndlightnet.layout import Grid", 0),
        ("kernels/ndlightnet_kernels/x.py", "import triton", 0),
        ("tasks/x.py", "from ndlightnet.training import run", 0),
    ],
)
def test_an_upward_import_is_caught_and_a_downward_one_passes(path, source, wrong):
    assert len(violations(Path(path), source)) == wrong


CHILD = """
import json, sys
import ndlightnet
assert ndlightnet.__version__ and "torch" not in sys.modules
import torch
before = set(sys.modules)
from ndlightnet import NDLightNet
assert set(ndlightnet.__all__) < set(vars(ndlightnet)) and ndlightnet.nn.mixers is ndlightnet.mixers
ndlightnet.NDLightNet = "of a test"
assert not hasattr(ndlightnet, "NDLightNets") and ndlightnet.NDLightNet == "of a test"
print(json.dumps(sorted({m.split(".")[0] for m in set(sys.modules) - before})))
"""


@pytest.mark.slow
def test_names_are_listed_before_one_is_used():
    code = "import ndlightnet; assert 'NDLightNet' in dir(ndlightnet)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_import_is_light():
    """Nothing is loaded before a name is used, and then, beyond `import torch`, einops and itself, no other package nor
    part of torch."""
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) - sys.stdlib_module_names == {"ndlightnet", "ndlightnet_kernels", "einops"}


def test_kernels_is_a_source_folder_and_no_package():
    """PyPI has a package `kernels` that transformers imports: ours must not shadow it."""
    assert (ROOT / "kernels" / "ndlightnet_kernels" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()

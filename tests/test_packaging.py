"""What is installed, and what the files around the code say about it."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import ndlightnet

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_library_and_its_kernels_are_installed_and_nothing_else(project):
    find = pytest.importorskip("setuptools").find_namespace_packages
    where = project["tool"]["setuptools"]["packages"]["find"]
    found = {name for top in where["where"] for name in find(ROOT / top, include=where["include"])}
    assert {name.split(".")[0] for name in found} == {"ndlightnet", "ndlightnet_kernels"}
    folders = {path.parent for path in (ROOT / "ndlightnet").rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in folders}
    assert names | {"ndlightnet_kernels"} <= found
    files = project["tool"]["setuptools"]["package-data"]["ndlightnet"]
    assert "py.typed" in files
    assert all(list((ROOT / "ndlightnet").glob(pattern)) for pattern in files)


def test_the_versions_agree(project):
    citation = yaml.safe_load((ROOT / ".github" / "CITATION.cff").read_text())
    changes = (ROOT / ".github" / "CHANGELOG.md").read_text()
    assert project["project"]["version"] == ndlightnet.__version__ == citation["version"]
    assert re.findall(r"^## \[(.+?)\]", changes, re.MULTILINE)[0] == ndlightnet.__version__


def test_ci_runs_every_python_that_may_be_installed(project):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    tested = jobs["tests"]["strategy"]["matrix"]["python"]
    said = [name.rsplit(" ")[-1] for name in project["project"]["classifiers"]
            if "Python :: 3." in name]  # fmt: skip
    assert tested == said
    low, high = re.fullmatch(
        r">=(3\.\d+),<3\.(\d+)", project["project"]["requires-python"]
    ).groups()
    assert low == tested[0] and int(high) == int(tested[-1].split(".")[1]) + 1
    assert {"run": ".ci/run"} in jobs["tests"]["steps"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_where_its_data_come_from(config):
    text = config.read_text()
    comment = re.match(r"(#.*\n)+", text)[0]
    assert "# Data: " in comment
    root = Path(yaml.safe_load(text)["data"]["init_args"]["root"])
    assert not root.is_absolute() and ".." not in root.parts
    if root.parts[0] != "runs" and config.stem != "scans":  # made by the run; the user's
        assert "http" in comment

"""What is installed, and what the files around the code say about it."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import ndlightnet
from ndlightnet import __main__ as command

ROOT = Path(__file__).parents[1]
RUN = [sys.executable, "-m"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the sdist and the wheel made of it, as `python -m build` makes them."""
    pytest.importorskip("hatchling")
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([*RUN, "build", "-q", "--no-isolation", "-o", out, ROOT], check=True)
    return out


@pytest.mark.slow
def test_what_is_in_a_wheel_and_in_an_sdist_and_that_pypi_can_show_the_readme(built, project):
    """The wheel: the library, its kernels and the configs, and nothing else. The sdist: what its tests need."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    kernels = ROOT / "kernels"
    expected = [path.relative_to(ROOT) for path in (ROOT / "ndlightnet").rglob("*.py")]
    expected += [path.relative_to(kernels) for path in kernels.rglob("*.py")]
    expected += [Path("ndlightnet", path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml")]
    expected += [Path(name, "py.typed") for name in ("ndlightnet", "ndlightnet_kernels")]
    assert sorted(names) == sorted(path.as_posix() for path in expected)
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"README.md", "LICENSE", ".github/CHANGELOG.md", ".ci/run", "configs/README.md"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")} <= names
    assert {name.split("/")[0] for name in names if "/" in name} == set(
        project["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    )
    pytest.importorskip("twine")
    done = subprocess.run([*RUN, "twine", "check", "--strict", *built.iterdir()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


ELSEWHERE = """
from pathlib import Path
from ndlightnet import __main__ as command
print(command.main([]), Path(command.__file__).parent)
assert all((command.CONFIGS / f"{door.config}.yaml").is_file() for door in command.DOORS.values())
"""
PRINTED = 'command.door("text_lm", ["fit", "--config", str(command.CONFIGS / "enwik8.yaml"), "--print_config"])'


@pytest.mark.parametrize(
    "more", [pytest.param("", marks=pytest.mark.slow), pytest.param(PRINTED, marks=pytest.mark.exhaustive)]
)
def test_the_command_line_of_a_wheel_in_another_folder(built, tmp_path, more):
    """It lists the tasks, and one of them reads its default config."""
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE + more], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    listed, _, config = done.stdout.partition(
        f"\nconfigs: {site / 'ndlightnet' / 'configs'}\n0 {site / 'ndlightnet'}\n"
    )
    assert all(f"  {name}" in listed for name in command.DOORS)
    assert not more or "vocab_size" in yaml.safe_load(config)["model"]["net"]["init_args"]


def test_the_versions_agree(project):
    citation = yaml.safe_load((ROOT / ".github" / "CITATION.cff").read_text())
    changes = (ROOT / ".github" / "CHANGELOG.md").read_text()
    assert project["project"]["version"] == ndlightnet.__version__ == citation["version"]
    assert re.findall(r"^## \[(.+?)\]", changes, re.MULTILINE)[0] == ndlightnet.__version__


def test_ci_runs_every_python_that_may_be_installed(project):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    tested = jobs["tests"]["strategy"]["matrix"]["python"]
    classifiers = [name.rsplit(" ")[-1] for name in project["project"]["classifiers"] if "Python :: 3." in name]
    assert tested == classifiers
    low, high = re.fullmatch(r">=(3\.\d+),<3\.(\d+)", project["project"]["requires-python"]).groups()
    assert low == tested[0] and int(high) == int(tested[-1].split(".")[1]) + 1
    assert {"run": ".ci/run"} in jobs["tests"]["steps"]


@pytest.mark.skipif(sys.platform != "linux", reason="lines for GNU's sed")
def test_a_release_makes_the_links_of_the_readme_absolute(tmp_path):
    """The workflow's own lines, on copies: PyPI has neither our folders nor our pictures."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    (lines,) = (s["run"] for s in jobs["build"]["steps"] if "links" in s.get("name", ""))
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    place = {"SERVER_URL": "https://github.com", "REPOSITORY": "someone/nd", "REF_NAME": "v0.1.0"}
    env = os.environ | {f"GITHUB_{key}": value for key, value in place.items()}
    subprocess.run(["bash", "-euc", lines], cwd=tmp_path, env=env, check=True)
    base = "https://github.com/someone/nd"
    targets = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text())
    assert f"{base}/raw/v0.1.0/.github/phantoms.png" in targets
    assert f"{base}/blob/v0.1.0/ndlightnet/README.md#larger-than-one-device" in targets
    assert all(target.startswith("https://") for target in targets)
    assert f'[project.urls]\nSource = "{base}"\n' in (tmp_path / "pyproject.toml").read_text()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_where_its_data_come_from(config):
    text = config.read_text()
    comment = re.match(r"(#.*\n)+", text)[0]
    assert "# Data: " in comment
    # without a root: the digits that scikit-learn ships
    root = Path(yaml.safe_load(text)["data"]["init_args"].get("root", "runs"))
    assert not root.is_absolute() and ".." not in root.parts
    if root.parts[0] != "runs" and config.stem not in ("scan_classes", "video_classes"):  # made by the run; the user's
        assert "http" in comment

"""The READMEs: their Python blocks run, each on its own, and give what their comments say; their
links and paths lead somewhere; the first page stays short."""

import ast
import re
from pathlib import Path

import pytest
import torch

from ndlightnet.__main__ import DOORS
from ndlightnet.nn import mixers

ROOT = Path(__file__).parents[1]
ROOM_NAMES = ("", "ndlightnet", "ndlightnet/integrations", "kernels", "tasks", "configs")
ROOMS = [ROOT / room / "README.md" for room in ROOM_NAMES]
PAGES = [
    *ROOMS,
    ROOT / "ndlightnet" / "DESIGN.md",
    ROOT / "ndlightnet" / "PAPERS.md",
    ROOT / "tasks" / "evidence" / "README.md",
    ROOT / "tests" / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
]
CODE = ROOMS[:3]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", CODE, ids=lambda page: page.parent.name)
def test_the_examples_do_what_they_say(page, tmp_path, monkeypatch, close):
    """A line that ends in `# (1, 2)` gives that shape, one in `# equals x` the same as x."""
    monkeypatch.chdir(tmp_path)  # one of them saves a file
    checked = 0
    for block in blocks(page, "python"):
        names, lines = {}, block.splitlines()  # a block runs on its own, as pasted into a new file
        for statement in ast.parse(block).body:
            source = ast.unparse(statement)
            if not isinstance(statement, ast.Expr):
                exec(source, names)
                continue
            with torch.no_grad():
                value, line = eval(source, names), lines[statement.end_lineno - 1]
                if shape := re.search(r"# (\([\d, ]+\))", line):
                    assert tuple(value.shape) == ast.literal_eval(shape[1]), line
                if same := re.search(r"# equals (.+)", line):
                    close(value, eval(same[1], names), 1e-5)
            checked += bool(shape or same)
    assert checked >= 4


def test_the_pictures_config_is_one(tmp_path):
    """The YAML of `Pictures to segment` builds its network and data."""
    from ndlightnet.training import SegmentationTask, VolumeData
    from ndlightnet.training.core.cli import task_cli

    (block,) = (one for one in blocks(ROOT / "tasks" / "README.md", "yaml") if "runs/pictures" in one)
    (tmp_path / "c.yaml").write_text(block)
    arguments = ["--config", str(tmp_path / "c.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    cli = task_cli(SegmentationTask, VolumeData, [*arguments, "--trainer.accelerator=cpu"], run=False)
    assert cli.model.net.dims == len(cli.datamodule.patch) == 2 and cli.datamodule.plane


def test_the_first_page_is_short_and_has_a_door_for_each_kind_of_data():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 700
    rows = re.findall(r"^\| \*\*.+?\*\* \|(.+?)\|", text, re.MULTILINE)
    assert len(rows) == 6 and all(re.search(r"\w+\.py|replace_attention", row) for row in rows)
    assert set(re.findall(r"(\w+\.py)", "".join(rows))) <= {path.name for path in (ROOT / "tasks").glob("*.py")}


# of each page: what its tables name
LISTED = {
    "ndlightnet/README.md": mixers.__all__,
    "tasks/README.md": [f"{name}.py" for name in DOORS],
    "configs/README.md": [path.stem for path in (ROOT / "configs").glob("*.yaml")],
    "kernels/README.md": [path.stem for path in (ROOT / "kernels" / "ndlightnet_kernels").glob("[!_]*.py")],
}


@pytest.mark.parametrize("page", LISTED)
def test_the_tables_name_everything(page):
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    missing = {*LISTED[page]} - {*re.findall(r"`(.+?)`", "\n".join(rows))}
    assert not missing, f"a row of a table in {page} has to name {sorted(missing)}"


def test_the_pages_can_be_read():
    words = {page: len(page.read_text().split()) for page in PAGES}
    assert words[ROOT / "configs" / "README.md"] <= 2500
    assert sum(words.values()) <= 16000


def test_two_commands_set_up_a_fresh_machine():
    """One runs the main task, one passes the tests; .ci/run calls the second as it stands."""
    lines = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    assert [line for line in lines if line.startswith("pip install")] == [
        'pip install -e ".[tasks]" && python tasks/ct_segmentation.py',
        'pip install -e ".[test]" && pytest -n auto',
    ]
    assert lines[1] in (ROOT / ".ci" / "run").read_text().splitlines()


@each_page
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


@each_page
def test_paths_exist(page):
    """Paths of the tree in commands and in code marks, from the top or from the page's room."""
    text = page.read_text()
    rooms = r"(?:ndlightnet|kernels|tasks|configs|tests|\.ci|\.github)"
    paths = set(re.findall(rf"(?<![\w./-]){rooms}/[\w./-]*\w/?", text))
    paths = {path for path in paths if not re.search(r"/[A-Z]+\.", path)}  # tasks/TASK.py
    assert [path for path in sorted(paths) if not ((ROOT / path).exists() or (page.parent / path).exists())] == []

"""The examples of the README run, in order, and give what their comments say."""

import ast
import re
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_do_what_they_say(tmp_path, monkeypatch, close):
    """A line that ends in `# (1, 2)` gives that shape, one in `# equals x` the same as x."""
    monkeypatch.chdir(tmp_path)  # one of them saves a file
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    names, checked = {}, 0
    for block in blocks:
        lines = block.splitlines()
        for statement in ast.parse(block).body:
            source = ast.unparse(statement)
            if not isinstance(statement, ast.Expr):
                exec(source, names)
                continue
            found, line = eval(source, names), lines[statement.end_lineno - 1]
            if shape := re.search(r"# (\([\d, ]+\))", line):
                assert tuple(found.shape) == ast.literal_eval(shape[1]), line
            if same := re.search(r"# equals (.+)", line):
                close(found, eval(same[1], names), 1e-5)
            checked += bool(shape or same)
    assert checked >= 7
    assert (tmp_path / "stream.pt").is_file() and isinstance(names["video"], torch.nn.Module)

"""Tables of texts: every format, and one line for each that cannot be read."""

import gzip
import json
import lzma

import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tables import number_of, read_pairs, read_table

ROWS = [("one\u2028, two", 'says "no', "1"), (" \u00e9 ", "x", "0.5"), ("", "y\rz", "a b")]
LINES = ["\t".join(row) for row in ROWS]


def texts_of(rows):
    return [(*row.texts, row.label) for row in rows]


@pytest.mark.parametrize("ending, opener", [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_tsv_without_quotes(tmp_path, ending, opener):
    """A quotation mark and a carriage return are text; a byte order mark and Windows' line ends are not."""
    path = tmp_path / f"a.tsv{ending}"
    with opener(path, "wb") as file:
        file.write("\r\n".join(["\ufeffa\tb\tlabel", *LINES, ""]).encode())
    rows = read_table(path, ["a", "b"], "label")
    assert texts_of(rows) == ROWS and [row.line for row in rows] == [2, 3, 4]
    assert read_table(path, ["1"], None)[0] == (('says "no',), "", 2)


def test_a_table_without_names(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("\n".join([*LINES, ""]).encode())
    assert texts_of(read_table(path, ["0", "1"], "2", header=False)) == ROWS
    with pytest.raises(DataError, match="line 1: has no column 3, expected a number from 0 to 2"):
        read_table(path, ["3"], None, header=False)


def test_two_columns_of_one_name(tmp_path):
    (tmp_path / "a.tsv").write_text("a\ta\n1\t2\n")
    with pytest.raises(DataError, match=f"^{tmp_path}/a.tsv, line 1: has the column a twice"):
        read_table(tmp_path / "a.tsv", ["a"], None)
    assert len(read_table(tmp_path / "a.tsv", ["0"], "1", header=False)) == 2


def test_quoted(tmp_path):
    """A field may hold separators, line ends and doubled quotation marks; lines are those of the file."""
    lines = [["a", "label"], ['"x,\ty\nz ""q"""', "1"], [], ["b", '"2"'], ["c"]]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(map(",".join, lines[:-1])) + "\n")
    rows = read_table(path, ["a"], "label")
    assert rows == [(('x,\ty\nz "q"',), "1", 2), (("b",), "2", 5)]
    path.write_text("\n".join(map(",".join, lines)) + "\n")
    with pytest.raises(DataError, match=f"^{path}, line 6: 1 fields, expected 2"):
        read_table(path, ["a"], "label")
    path.write_text('a\n"b" c\n')
    with pytest.raises(DataError, match=f"^{path}, line 2: "):
        read_table(path, ["a"], None)


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"a": "x\n\u00e9", "label": 1}, {"a": "y", "label": "1", "more": []}, {"a": "z", "label": True}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_table(path, ["a"], "label") == [(("x\n\u00e9",), "1", 1), (("y",), "1", 3), (("z",), "true", 5)]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.tsv", b"a\tlabel\nx\t1\ny\n", ", line 3: 1 fields, expected 2$"),
        ("a.tsv", b"a\tb\nx\t1\n", ", line 1: has no column label, expected one of a, b$"),
        ("a.tsv", b"a\tlabel\nx\t1\n\xff\t1\n", ", line 3: is not UTF-8, byte 0xff$"),
        ("a.tsv", b"", ": is empty$"),
        ("a.tsv", b"a\tlabel\n\n", ": has no rows$"),
        ("a.tsv.gz", b"a\tlabel\n", ": cannot be read"),
        ("a.jsonl", b'{"a": "x", "label": 1}\n{"a": "x"}\n', ", line 2: has no field label$"),
        ("a.jsonl", b'{"a": null, "label": 1}\n', ", line 1: has no field a$"),
        ("a.jsonl", b"[1]\n", ", line 1: has no field a$"),
        ("a.jsonl", b"\n{\n", ", line 2: is not JSON"),
        ("a.jsonl", b'{"a": "\\ud800", "label": 1}\n', ", line 1: is not JSON"),
        ("a.pdf", b"a", ": expected a table, .tsv, .csv or .jsonl"),
        ("gone.tsv", None, ": no such file$"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}{message}"):
        read_table(path, ["a"], "label")


@pytest.mark.parametrize("label", ["", "one", "nan", "inf"])
def test_a_label_that_is_no_number(tmp_path, label):
    path = tmp_path / "a.tsv"
    path.write_text(f"a\tlabel\nx\t-1.5e1\ny\t{label}\n")
    good, bad = read_table(path, ["a"], "label")
    assert number_of(path, good) == -15
    with pytest.raises(DataError, match=f"^{path}, line 3: the label '{label}', expected a number"):
        number_of(path, bad)


# --------------------------------------------------------------------- texts and summaries
def test_references(tmp_path):
    """A list is a source of several sentences, and a target of several references."""
    rows = [{"a": "one", "b": "x"}, {"a": ["two.", " ", "three"], "b": ["y", "", "z"]}]
    path = tmp_path / "a.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.write("\n".join(["", *map(json.dumps, rows), ""]))
    assert read_pairs(path, "a", "b") == [
        ("one", ("x",), f"{path}, line 2"),
        ("two. three", ("y", "z"), f"{path}, line 3"),
    ]
    assert read_pairs(path, "a", None) == [("one", (), f"{path}, line 2"), ("two. three", (), f"{path}, line 3")]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"a": "x"}', "line 1: has no field b"),
        ('{"a": "x", "b": []}', "line 1: the field b is blank, expected a text"),
        ('{"a": " ", "b": "x"}', "line 1: the field a is blank"),
        ('{"a": 3, "b": "x"}', "line 1: the field a, expected a text"),
        ('{"a": "x", "b": ["y", 3]}', "line 1: the field b, expected a text, or a list of texts"),
        ('{"a": ' + 100_000 * "[", "line 1: is not JSON"),
        ("[", "line 1: is not JSON"),
        ("\n", "has no rows"),
    ],
)
def test_bad_references(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(DataError, match=f"a.jsonl.*{message}"):
        read_pairs(tmp_path / "a.jsonl", "a", "b")


def test_references_are_jsonl(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: expected \.jsonl"):
        read_pairs(tmp_path / "a.csv", "a", "b")

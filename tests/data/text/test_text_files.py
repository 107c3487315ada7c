"""Reading a file: its bytes, and the documents in it, in pieces that can be tokenised one by one."""

import gzip
import json
import lzma

import pytest
import torch

from ndlightnet.data.text import text_files
from ndlightnet.data.text.text_files import read_bytes, read_pieces

from ..refusals import refuses

CONTENT = bytes(range(256)) * 3 + b"and the rest\n"


@pytest.mark.parametrize(
    "name, pack", [("a.txt", bytes), ("a", bytes), ("a.txt.gz", gzip.compress), ("a.xz", lzma.compress)]
)
def test_every_byte_is_read(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(CONTENT))
    text = read_bytes(tmp_path / name)
    assert (text.dtype, text.shape) == (torch.uint8, (len(CONTENT),))
    assert bytes(text.tolist()) == CONTENT


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.gz", CONTENT, "cannot be read"),
        ("a.gz", gzip.compress(CONTENT, mtime=0)[:-20], "cannot be read"),
        ("a.gz", gzip.compress(CONTENT, mtime=0)[:30] + b"?" * 30, "cannot be read"),
        ("a.xz", CONTENT, "cannot be read"),
        ("a.xz", lzma.compress(CONTENT)[:-20], "cannot be read"),
        ("a.txt", b"", "is empty"),
        ("a.gz", gzip.compress(b"", mtime=0), "is empty"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refuses(lambda: read_bytes(tmp_path / name), tmp_path / name, message)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path / "none.xz", tmp_path):
        refuses(lambda path=path: read_bytes(path), path, "no such file$")


@pytest.mark.parametrize("ending, pack", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_file_is_cut_before_the_spaces_at_the_end_of_a_line(tmp_path, monkeypatch, ending, pack):
    """Of lines that end in a space, too, as all of WikiText do: no piece is much longer than asked for."""
    monkeypatch.setattr(text_files, "PIECE", 50)
    for line in ("words and more .\n", " words and more . \n", "words\r\n", "\u6570\u5b66\u3002\n"):
        text = line * 40
        (tmp_path / f"a{ending}").write_bytes(pack(("\ufeff" + text).encode()))  # with a byte order mark
        pieces = list(read_pieces(tmp_path / f"a{ending}"))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert len(pieces) > len(text) // 150 and max(len(piece.text) for piece in pieces) <= 150
        assert all(piece.text[-1].strip() and piece.text.strip() for piece in pieces[:-1])
        progress = [piece.progress for piece in pieces]
        assert progress == sorted(progress) and progress[0] > 0 and progress[-1] == 1


@pytest.mark.parametrize("text", ["a" * 500, " " * 500, "\n" * 500, "a", "\n", "a \n" + "b" * 500])
def test_a_text_without_places_to_cut(tmp_path, monkeypatch, text):
    monkeypatch.setattr(text_files, "PIECE", 50)
    (tmp_path / "a.txt").write_text(text, newline="")
    pieces = list(read_pieces(tmp_path / "a.txt"))
    assert "".join(piece.text for piece in pieces) == text and pieces[-1].last


@pytest.mark.parametrize(
    "name, pack", [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.xz", lzma.compress)]
)
def test_documents_of_json_lines(tmp_path, name, pack):
    """Those without characters, too; a pair of surrogates is a character."""
    texts = ["one\n", "", "\u2028 \u6570\u5b66 \U0001f600"]
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    (tmp_path / name).write_bytes(pack("\n\n".join(lines).encode()))
    pieces = list(read_pieces(tmp_path / name))
    assert [piece.text for piece in pieces] == texts and all(piece.last for piece in pieces)


@pytest.mark.parametrize(
    "line", [b"{", b'{"words": "a"}', b'["text"]', b"5", b'{"text": null}', b'{"text": 5}', b'{"text": "\\ud800"}']
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    message = refuses(lambda: list(read_pieces(path)), None, "expected JSON with a field text")
    assert message.startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "cannot be read .*utf-8"),
        ("a.txt", b"a\xff", "cannot be read .*utf-8"),
        ("a.txt", b"", "is empty$"),
        ("a.jsonl", b"\n\n", "is empty$"),
        ("a.txt.gz", gzip.compress(CONTENT, mtime=0)[:-20], "cannot be read"),
        ("a.jsonl.xz", b"{}", "cannot be read"),
        ("gone.jsonl", None, "no such file or folder$"),
    ],
)
def test_texts_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refuses(lambda: list(read_pieces(tmp_path / name)), tmp_path / name, message)


@pytest.mark.slow
def test_rows_of_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one", "two\n"], "id": [1, 2]}).save_to_disk(tmp_path / "rows")
    assert list(read_pieces(tmp_path / "rows")) == [("one", True, 0.5), ("two\n", True, 1.0)]
    datasets.Dataset.from_dict({"words": ["one"]}).save_to_disk(tmp_path / "words")
    datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "nothing")
    halves = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["one"]})})
    halves.save_to_disk(tmp_path / "halves")
    for name, words in (
        ("words", "column text"),
        ("nothing", "text"),
        ("halves", "one split"),
        ("none", "cannot be read"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        refuses(lambda name=name: list(read_pieces(tmp_path / name)), tmp_path / name, words)

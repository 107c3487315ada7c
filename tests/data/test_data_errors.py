"""Messages are one line that a terminal can show, whatever a file is called."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError, atomic_write, cell, file_name, fitting, one_line, printable, readable

NASTY = "two\nlines \x1b[31mred\x1b[0m \u202egpj \x00\u2028 \x85"


def test_printable_escapes_what_a_terminal_would_obey_and_nothing_else() -> None:
    plain = "Größe 脳 é e\u0301 'quoted' \\n 🧠.nii.gz"
    assert printable(plain) == plain
    assert printable(Path(plain)) == plain
    assert printable("a\nb") == r"a\nb"
    escaped = printable(NASTY)
    assert escaped == r"two\nlines \x1b[31mred\x1b[0m \u202egpj \x00\u2028 \x85"
    assert printable(escaped) == escaped
    assert escaped.isprintable()


def test_printable_of_a_name_that_is_not_utf8() -> None:
    name = os.fsdecode(b"caf\xe9.nii")
    assert printable(name) == r"caf\udce9.nii"
    printable(name).encode("utf-8")  # the name itself cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        name.encode("utf-8")


def test_a_data_error_is_one_line_also_from_a_worker(tmp_path: Path) -> None:
    file = tmp_path / "evil\n\x1b[2Jname.nii"
    with pytest.raises(DataError) as raised, readable(file):
        raise RuntimeError("first\nsecond \x1b[31m")
    expected = rf"{tmp_path}/evil\n\x1b[2Jname.nii: cannot be read (first second \x1b[31m)"
    assert str(raised.value) == expected
    assert str(pickle.loads(pickle.dumps(raised.value))) == expected
    (tmp_path / "a\nfile").touch()
    with pytest.raises(DataError) as raised, atomic_write(tmp_path / "a\nfile" / "x") as draft:
        draft.touch()
    assert "\n" not in str(raised.value) and r"a\nfile" in str(raised.value)
    assert one_line("a\x1bb\nc") == r"a\x1bb c"


def test_long_messages_keep_their_ends(tmp_path: Path) -> None:
    text = one_line("begin " + 1000 * "a" + " end")
    assert text.startswith("begin a") and text.endswith("a end") and len(text) <= 160
    assert one_line(160 * "a") == 160 * "a"
    long = str(DataError(tmp_path / ("a" * 5000) / "b"))
    assert long.startswith(str(tmp_path)) and long.endswith("/b") and len(long) <= 1000


def test_cells_are_no_formulas() -> None:
    for formula in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\uff1d1", "=", "-"):
        assert cell(formula) == "'" + formula
    for number in ("-1.5", "+3", "-1e-05", "nan", "-inf", "0", -1.5, 3, float("-inf"), None):
        assert cell(number) == number
    for text in ("liver", "a=b", "5% -x", "'quoted", "", "/data/=x.nii"):
        assert cell(text) == text
    assert cell("\t=1+1") == r"\t=1+1" and cell("\r\n@x") == r"\r\n@x"


@pytest.mark.parametrize("name", ["n" * 161, "ö" * 100, "two\nlines", os.fsdecode(b"caf\xe9"), "a/b", "\ud800"])
def test_a_name_that_no_file_can_have_gets_a_hash(tmp_path: Path, name: str) -> None:
    changed = file_name(name)
    assert changed == file_name(name) != name
    assert changed.isprintable() and "/" not in changed and len(changed.encode()) <= 160
    (tmp_path / f".1234567.part.{changed}.nii.gz").touch()
    # another one for every name, be it one that looks like the changed one
    others = {name + "n", name[:-1], printable(name), changed} - {name}
    assert changed not in map(file_name, others) and len({*map(file_name, others)}) == len(others)


@pytest.mark.parametrize("name", ["", "a b", r"b$\frac$", "=1+1", "脳🧠", "n" * 160, "ö" * 80])
def test_other_names_stay(name: str) -> None:
    assert file_name(name) == name


def test_memory_that_runs_out_is_said_in_a_line() -> None:
    for huge in (lambda: np.empty(2**58), lambda: torch.empty(2**58)):
        with pytest.raises(DataError, match=r"^a.nii: does not fit into memory"), fitting("a.nii"):
            huge()
    with pytest.raises(DataError, match=r"^a.nii: does not fit into memory"), readable(Path("a.nii")):
        np.empty(2**58)
    for error in (RuntimeError("mat1 and mat2"), TypeError("ours"), DataError("b.nii: gone")):
        with pytest.raises(type(error), match=str(error)), fitting("a.nii"):
            raise error

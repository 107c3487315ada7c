"""ListOps: values follow from the expressions, which are made once and have the lengths that were asked for."""

import statistics
from random import Random

import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.list_ops import draw_expression, make_list_ops
from ndlightnet.data.text.tables import read_table


def value_of(text: str) -> int:
    """By Python: an expression is a call."""
    calls = {"M": "max", "m": "min", "d": "median_low", "s": "total"}
    parts = []
    for symbol, after in zip(text, [*text[1:], ""], strict=True):
        if symbol == "[":
            parts.append(f"{calls[after]}([")
        elif symbol == "]":
            parts.append("]),")
        elif symbol.isdigit():
            parts.append(f"{symbol},")
    names = {"max": max, "min": min, "median_low": statistics.median_low, "total": lambda values: sum(values) % 10}
    return eval("".join(parts).removesuffix(","), {"__builtins__": {}}, names)


def test_values_are_those_of_the_expressions():
    rng = Random(0)
    drawn = [draw_expression(rng, 20, 200) for _ in range(300)]
    assert all(20 <= len(text) <= 200 and value_of(text) == value for text, value in drawn)
    assert {value for _, value in drawn} == set(range(10))
    depths = [max(text[:n].count("[") - text[:n].count("]") for n in range(len(text))) for text, _ in drawn]
    assert 2 < max(depths) <= 10
    assert value_of("[M29[m47]0]") == 9 and value_of("[s99[d1234]]") == 0


def test_sets_are_made_once(tmp_path):
    sets = [make_list_ops(tmp_path / str(n), 40, 9, (10, 60), progress=False) for n in range(2)]
    train, test = (
        [read_table(folder / f"{name}.tsv", ["expression"], "value") for folder in sets] for name in ("train", "test")
    )
    assert train[0] == train[1] and test[0] == test[1]
    assert (len(train[0]), len(test[0])) == (40, 9) and len({row.texts for row in train[0] + test[0]}) == 49
    assert make_list_ops(sets[0], 40, 9, (10, 60)) == sets[0]
    with pytest.raises(DataError, match="drawn with other arguments"):
        make_list_ops(sets[0], 40, 9, (10, 61))
    for wrong in ({"train": 0}, {"lengths": (4, 9)}, {"lengths": (9, 8)}):
        with pytest.raises(ValueError, match=r"lengths=\(\d+, \d+\): expected 1 or more, and 5 <= least <= most"):
            make_list_ops(tmp_path / "none", **wrong)


def test_lengths_that_too_few_expressions_have(tmp_path, monkeypatch):
    """There are 400 of five symbols."""
    monkeypatch.setattr("ndlightnet.data.made.list_ops.ATTEMPTS", 500)
    with pytest.raises(ValueError, match=r"lengths=\(5, 5\): expected more than \d+ expressions to exist"):
        make_list_ops(tmp_path / "short", 450, 9, (5, 5), progress=False)
    with pytest.raises(ValueError, match="no expression in 500 attempts"):
        draw_expression(Random(0), 20000, 20010)
    assert not list(tmp_path.iterdir())

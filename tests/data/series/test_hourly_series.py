"""Hourly series: reading, damage, the split's windows, scaling, time features, simple forecasts."""

import gzip
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ndlightnet.data.series import hourly_series as hourly
from ndlightnet.data.series.hourly_series import HOUR, Series, Windows, read_series, time_features, write_series

from ..refusals import refuses

START = datetime(2016, 2, 28, 22)


def text(rows=30):
    lines = [f"{START + i * HOUR:%Y-%m-%d %H:%M:%S},{i},{i + 0.5},-{i}" for i in range(rows)]
    return "\n".join(["date,A,B,OT", *lines]) + "\n"


def test_reading(tmp_path):
    path = tmp_path / "hours.csv"
    path.write_text(text())
    series = read_series(path)
    assert (series.columns, series.start) == (("A", "B", "OT"), START)
    assert series.values.shape == (30, 3) and series.values.dtype == torch.float64
    assert series.values[7].tolist() == [7.0, 7.5, -7.0]
    some = read_series(path, ["OT", "A"])
    assert some.columns == ("OT", "A") and torch.equal(some.values, series.values[:, [2, 0]])
    refuses(lambda: read_series(path, ["A", "A"]), None, r"^columns=\['A', 'A'\]: has the column A twice")
    refuses(lambda: read_series("/gone.csv"), Path("/gone.csv"), "no such file$")


def test_written_files_are_read_again_and_hold_no_formulas(tmp_path):
    values = torch.randn(50, 5, dtype=torch.float64) * 1000
    values[0] = -1.5
    write_series(tmp_path / "x.csv", Series(("=A", "-B", "@", "'c", "d"), START, values))
    head, line, *_ = (tmp_path / "x.csv").read_text().splitlines()
    assert head == "date,'=A,'-B,'@,'c,d" and line.endswith(",-1.5,-1.5,-1.5,-1.5,-1.5")
    read = read_series(tmp_path / "x.csv")
    assert (read.columns, read.start) == (("=A", "-B", "@", "'c", "d"), START)
    assert ((read.values - values).abs() <= 5e-6 * values.abs()).all()  # six digits are written


HEADLESS = {"empty": "", "no rows": "date,A\n", "no date": "time,A\n1,2\n"}
DAMAGE = {
    **{name: (content, "expected a header") for name, content in HEADLESS.items()},
    "a gap": (text().replace("2016-02-29 03:00:00", "2016-02-29 04:00:00"), r"line 7: .*03:00"),
    "another date": (text().replace("2016-02-28 23:00:00", "28.2.2016 23:00"), r"line 3: .*28\.2"),
    "a word": (text().replace(",7.5,", ",much,"), r"line 9: .*3 numbers, .*much"),
    "a short line": (text().replace(",7.5,", ","), r"line 9: "),
    "not a number": (text().replace(",7.5,", ",nan,"), r"line 9: .*not finite"),
    "no column": (text().replace("OT", "OIL"), r"no column OT, but A, B, OIL"),
    "a name twice": (text().replace("B", "A"), r"has the column A twice, expected each name once"),
    "two dates": (text().replace("B", "date"), r"has the column date twice"),
    "semicolons": (text().replace(",", ";"), r"has semicolons between its columns, expected comma"),
    "a blank line": (text().replace("2016-02-29 03", "\n2016-02-29 03"), r"line 7: .*got ''"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(tmp_path, damage):
    content, words = DAMAGE[damage]
    (path := tmp_path / "x.csv").write_text(content)
    refuses(lambda: read_series(path, ["OT"] if damage == "no column" else None), path, words)


GOOD = {
    "plain.csv": str.encode,
    "mark.csv": lambda content: content.encode("utf-8-sig"),
    "blank.csv": lambda content: f"{content}\n\n".encode(),
    "no_end.csv": lambda content: content.strip().encode(),
    "windows.csv": lambda content: content.replace("\n", "\r\n").encode("utf-8-sig"),
    "quotes.csv": lambda content: content.replace("date,A", '"date","A"').encode(),
    "named.csv": lambda content: content.replace("OT", "\u6e29\u5ea6").encode(),
    "packed.csv.gz": lambda content: gzip.compress(content.encode("utf-8-sig"), mtime=0),
}


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("name", GOOD)
def test_good_tables(tmp_path, name, rows):
    """Against the lines, split by hand."""
    content = GOOD[name](text(rows))
    (tmp_path / name).write_bytes(content)
    plain = gzip.decompress(content) if name.endswith(".gz") else content
    head, *lines = plain.decode("utf-8-sig").split("\n")
    read = read_series(tmp_path / name)
    assert read.columns == tuple(head.strip().replace('"', "").split(",")[1:])
    expected = [[float(x) for x in line.split(",")[1:]] for line in lines if line.strip()]
    assert read.values.tolist() == expected and read.start == START


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(text().encode(), mtime=0)[:60],
        gzip.compress(b"\xff\xfe\x00\xff", mtime=0),
        b"\0" * 9,
        text().encode("utf-16"),
    ],
)
def test_bytes_that_are_no_series(tmp_path, content):
    for name in ("x.csv.gz", "x.csv"):
        (path := tmp_path / name).write_bytes(content)
        refuses(lambda path=path: read_series(path), path)


def test_time_features_of_known_dates():
    """2016 is a leap year, 1 March 2016 a Tuesday and its day 61."""
    features = time_features(datetime(2016, 3, 1, 0), 25)
    assert features.shape == (25, 4) and features.dtype == torch.float32
    assert features[0].tolist() == pytest.approx([-0.5, 1 / 6 - 0.5, -0.5, 60 / 365 - 0.5])
    assert features[23].tolist() == pytest.approx([0.5, 1 / 6 - 0.5, -0.5, 60 / 365 - 0.5])
    assert features[24].tolist() == pytest.approx([-0.5, 2 / 6 - 0.5, 1 / 30 - 0.5, 61 / 365 - 0.5])
    last = time_features(datetime(2016, 12, 31, 23), 1)[0]
    assert last.tolist() == pytest.approx([0.5, 5 / 6 - 0.5, 0.5, 0.5])


def test_scale(close):
    values = torch.randn(100, 3, dtype=torch.float64) * 5 + 2
    values[:, 1] = 7
    mean, deviation = hourly.scale_of(values)
    close(mean, values.sum(0) / 100, 1e-12)
    square = (values - mean).square().sum(0) / 100
    close(deviation, torch.stack([square[0].sqrt(), torch.ones_like(square[1]), square[2].sqrt()]), 1e-12)


def windows_of(rows, first, last, length, horizon):
    """Windows of a series whose value is its row."""
    values = torch.arange(float(rows))[:, None]
    return Windows(values, values.expand(-1, 4), first, last, length, horizon)


@pytest.mark.parametrize("horizon, counts", [(96, (8209, 2785, 2785)), (720, (7585, 2161, 2161))])
def test_windows_of_the_usual_split(horizon, counts):
    """Training targets lie in rows 336 to 8639, those to test in 11520 to 14399, all of them."""
    ends = (0, *hourly.MONTHS_12_4_4)
    assert ends == (0, 8640, 11520, 14400)
    assert [len(windows_of(rows, 0, rows, 6, 4)) for rows in (3, 9, 10, 13)] == [0, 0, 1, 4]
    splits = [windows_of(17420, a, b, 336, horizon) for a, b in pairwise(ends)]
    assert tuple(map(len, splits)) == counts
    for split, first, last in zip(splits, (336, 8640, 11520), ends[1:], strict=True):
        for i, begin in ((0, first), (len(split) - 1, last - horizon)):
            values, times, target, number = split[i]
            assert number == i
            assert torch.equal(values[:, 0], torch.arange(begin - 336.0, begin))
            assert torch.equal(target[:, 0], torch.arange(float(begin), begin + horizon))
            assert torch.equal(times[:, 3], torch.cat([values, target])[:, 0])


@pytest.mark.parametrize("length", [24, 30, 71, 72])
def test_simple_forecasts(length):
    values = torch.randn(2, length, 3)
    forecasts = hourly.simple_forecasts(values, 50)
    assert list(forecasts) == ["last_value", "last_day", "mean_day"]
    for hour in range(50):
        back = length - 24 + hour % 24
        days = [values[:, row] for row in range(back, -1, -24)][: length // 24]
        assert torch.equal(forecasts["last_value"][:, hour], values[:, -1])
        assert torch.equal(forecasts["last_day"][:, hour], values[:, back])
        assert torch.allclose(forecasts["mean_day"][:, hour], sum(days) / len(days), atol=1e-6)


def test_errors_by_hand():
    prediction = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    target = torch.tensor([[[2.0, 5.0]], [[0.0, -4.0]]])
    errors = hourly.window_errors(prediction, target)
    assert errors.dtype == torch.float64 and errors.tolist() == [[5.0, 2.0], [8.0, 2.0]]
    assert hourly.mean_errors(errors) == {"mse": 6.5, "mae": 2.0}

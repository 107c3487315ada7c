"""Regular series: reading, steps, damage, windows, scaling, time features, simple forecasts."""

import gzip
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch

from ndlightnet.data.series import regular_series
from ndlightnet.data.series.regular_series import Windows, read_series, time_features, write_series

from ..refusals import refuses

START = datetime(2016, 2, 28, 22)


def dates(rows=30, freq="h", start=START):
    return pd.date_range(start, periods=rows, freq=freq)


def text(rows=30):
    lines = [f"{date:%Y-%m-%d %H:%M:%S},{i},{i + 0.5},-{i}" for i, date in enumerate(dates(rows))]
    return "\n".join(["date,A,B,OT", *lines]) + "\n"


def test_reading(tmp_path):
    path = tmp_path / "hours.csv"
    path.write_text(text())
    series = read_series(path)
    assert series.columns == ("A", "B", "OT") and (series.dates == dates()).all()
    assert (series.dates_from(28, 5) == dates(33)[28:]).all() and (series.dates_from(2, 5) == dates()[2:7]).all()
    assert series.values.shape == (30, 3) and series.values.dtype == torch.float64
    assert series.values[7].tolist() == [7.0, 7.5, -7.0]
    some = read_series(path, ["OT", "A"])
    assert some.columns == ("OT", "A") and torch.equal(some.values, series.values[:, [2, 0]])
    refuses(lambda: read_series(path, ["A", "A"]), None, r"^columns=\['A', 'A'\]: has the column A twice")
    refuses(lambda: read_series("/gone.csv"), Path("/gone.csv"), "no such file$")


def test_written_files_are_read_again_and_hold_no_formulas(tmp_path):
    values = torch.randn(50, 5, dtype=torch.float64) * 1000
    values[0] = -1.5
    write_series(tmp_path / "x.csv", ("=A", "-B", "@", "'c", "d"), dates(50), values)
    head, line, *_ = (tmp_path / "x.csv").read_text().splitlines()
    assert head == "date,'=A,'-B,'@,'c,d" and line.endswith(",-1.5,-1.5,-1.5,-1.5,-1.5")
    read = read_series(tmp_path / "x.csv")
    assert read.columns == ("=A", "-B", "@", "'c", "d") and (read.dates == dates(50)).all()
    assert ((read.values - values).abs() <= 5e-6 * values.abs()).all()  # six digits are written


HEADLESS = {"empty": "", "no rows": "date,A\n", "one row": "date,A\n2016-07-01,2\n", "no date": "time,A\n1,2\n3,4\n"}
DAMAGE = {
    **{name: (content, "expected a header") for name, content in HEADLESS.items()},
    "a date twice": (
        text().replace("2016-02-29 03:00:00", "2016-02-29 04:00:00"),
        r"line 8: 2016-02-29 04:00:00 is not after 2016-02-29 04",
    ),
    "another date": (text().replace("2016-02-28 23:00:00", "28.2.2016 23:00"), r"line 3: .*like 2016-07-01 .*28\.2"),
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


@pytest.mark.parametrize("rows", [2, 30])
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
    assert read.values.tolist() == expected and (read.dates == dates(rows)).all()


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


STEPS = {  # pandas' name for a step, a first date, and the rows of a season
    "10min": ("2020-01-14 00:10", 144),
    "15min": ("2016-07-14", 96),
    "h": ("2016-07-01", 24),
    "5h": ("2016-07-01", 1),
    "D": ("2015-12-25", 7),
    "B": ("2015-12-25", 5),
    "W-SUN": ("2015-12-20", 52),
    "MS": ("2015-12-01", 12),
    "ME": ("2015-11-30", 12),
    "QS": ("2015-10-01", 4),
    "YS": ("2012-01-01", 1),
}
FORMS = {
    "iso": "%Y-%m-%dT%H:%M:%S",
    "zone": "%Y-%m-%d %H:%M:%S+02:00",
    "day first": "%d/%m/%Y %H:%M",
    "month first": "%m/%d/%Y %H:%M",
    "named": "%d %b %Y %H:%M",
}


def write_dates(path, when, form="%Y-%m-%d %H:%M:%S"):
    path.write_text("date,A\n" + "".join(f"{date.strftime(form)},{number}\n" for number, date in enumerate(when)))
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("freq", STEPS)
def test_steps_are_inferred(tmp_path, freq, form):
    start, season = STEPS[freq]
    if form == "zone" and freq in ("B", "MS", "ME", "QS", "YS"):
        return  # where it is another hour, a month begins on another day
    when = dates(60, freq, start)
    read = read_series(write_dates(tmp_path / "x.csv", when, FORMS[form]))
    shift = pd.Timedelta(hours=2 if form == "zone" else 0)  # read in UTC
    assert (read.dates + shift == when).all() and read.step.season == season
    assert (read.dates_from(58, 30) + shift == dates(88, freq, start)[58:]).all()


def test_summer_time_is_read_in_utc(tmp_path):
    lines = [
        date.tz_localize("UTC").tz_convert("Europe/Paris").isoformat() for date in dates(30, "h", "2016-03-26 12:00")
    ]
    assert {line[-6:] for line in lines} == {"+01:00", "+02:00"}
    (path := tmp_path / "x.csv").write_text("date,A\n" + "".join(f"{line},1\n" for line in lines))
    assert (read_series(path).dates == dates(30, "h", "2016-03-26 12:00")).all()


def test_dates_that_may_be_read_two_ways_are_refused(tmp_path):
    for form in ("%m/%d/%Y", "%d/%m/%Y"):
        path = write_dates(tmp_path / "x.csv", [datetime(2016, n, n) for n in (1, 2)], form)
        assert len(read_series(path).dates) == 2  # both ways are one
    path = write_dates(
        tmp_path / "x.csv", [datetime(2016, 1, 2), datetime(2016, 2, 2), datetime(2016, 3, 2)], "%m/%d/%Y"
    )
    refuses(lambda: read_series(path), path, r"'01/02/2016' may have the month or the day first, expected dates like")


def test_gaps_are_refused_or_filled(tmp_path):
    when = dates(40, "15min").delete([3, 4, 20])
    path = write_dates(tmp_path / "x.csv", when)
    refuses(
        lambda: read_series(path),
        path,
        "line 5: got 2016-02-28 23:15:00 where 2016-02-28 22:45:00 comes, in steps of 15min",
    )
    read = read_series(path, fill_gaps=True)
    assert (read.dates == dates(40, "15min")).all()
    assert read.values[:7, 0].tolist() == pytest.approx([0, 1, 2, 2 + 1 / 3, 2 + 2 / 3, 3, 4])
    for wrong in (
        when.insert(5, when[4]),
        when[[1, 0, *range(2, 30)]],
        when.insert(3, when[2] + pd.Timedelta(minutes=7)),
    ):
        path = write_dates(tmp_path / "x.csv", wrong)
        refuses(partial(read_series, path, fill_gaps=True), path, r"line \d: (got )?2016-02-28")


@pytest.mark.parametrize("day", [28, 29, 30, 31])
def test_months_count_from_the_first(tmp_path, day):
    when = [pd.Timestamp(2019, 12, day) + pd.DateOffset(months=month) for month in range(9)]
    read = read_series(write_dates(tmp_path / "x.csv", when))
    assert read.step.season == 12
    assert (read.dates_from(5, 12) == [when[0] + pd.DateOffset(months=month) for month in range(5, 17)]).all()


def test_a_step_that_is_preferred(tmp_path):
    week = write_dates(tmp_path / "x.csv", dates(5, "B", "2021-03-01"))
    assert read_series(week).step.season == 7 and read_series(week, step="B").step.season == 5
    years = write_dates(tmp_path / "y.csv", dates(4, "YS", "2021-01-01"))
    assert read_series(years).dates_from(4, 1)[0] == pd.Timestamp(2025, 1, 1)


def test_gaps_of_dates_that_may_be_read_two_ways(tmp_path):
    for form in ("%d.%m.%Y %H:%M", "%d/%m/%Y %I:%M %p"):
        when = dates(199, "h", "2020-03-01").delete(40)
        read = read_series(write_dates(tmp_path / "x.csv", when, form), fill_gaps=True)
        assert (read.dates == dates(199, "h", "2020-03-01")).all()
    path = write_dates(tmp_path / "x.csv", dates(12, "D", "2020-01-01").delete(5), "%d/%m/%Y")
    refuses(lambda: read_series(path, fill_gaps=True), path, "may have the month or the day first")


ODD = {
    "a far year": (
        ["2020-01-01 00:00", "2020-01-01 00:01", "2020-01-01 00:02", "2106-01-01"],
        "line 5: 2106-01-01 is far from 2020-01-01 00:02",
    ),
    "no year": (["160701", "160702", "160703"], "line 2: expected a date like"),
    "hours alone": (["00:00", "01:00", "02:00"], "line 2: expected a date like"),
    "descending": (["2020-01-02", "2020-01-01"], "line 3: 2020-01-01 is not after 2020-01-02"),
    "parts of a second": (["2020-01-01 00:00:00", "2020-01-01 00:00:00.5"], "steps of 0.5 s, expected whole seconds"),
    "empty": (["2020-01-01", ""], "line 3: expected a date like .*''"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_dates(tmp_path, name):
    texts, words = ODD[name]
    (path := tmp_path / "x.csv").write_text("date,A\n" + "".join(f"{text},1\n" for text in texts))
    refuses(lambda: read_series(path, fill_gaps=True), path, words)


def test_time_features_of_known_dates():
    """2016 is a leap year, 1 March 2016 a Tuesday and its day 61."""
    features = time_features(dates(25, start="2016-03-01"))
    assert features.shape == (25, 4) and features.dtype == torch.float32
    assert features[0].tolist() == pytest.approx([-0.5, 1 / 6 - 0.5, -0.5, 60 / 365 - 0.5])
    assert features[23].tolist() == pytest.approx([0.5, 1 / 6 - 0.5, -0.5, 60 / 365 - 0.5])
    assert features[24].tolist() == pytest.approx([-0.5, 2 / 6 - 0.5, 1 / 30 - 0.5, 61 / 365 - 0.5])
    last = time_features(dates(1, start="2016-12-31 23:00"))[0]
    assert last.tolist() == pytest.approx([0.5, 5 / 6 - 0.5, 0.5, 0.5])
    assert time_features(dates(1, start="2016-12-31 11:30"))[0, 0] == 0


def test_scale(close):
    values = torch.randn(100, 3, dtype=torch.float64) * 5 + 2
    values[:, 1] = 7
    mean, deviation = regular_series.scale_of(values)
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
    ends = (0, 8640, 11520, 14400)
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


@pytest.mark.parametrize("length, season", [(24, 24), (30, 24), (71, 24), (72, 24), (10, 7), (3, 1), (5, 7)])
def test_simple_forecasts(length, season):
    values = torch.randn(2, length, 3)
    forecasts = regular_series.simple_forecasts(values, 50, season)
    season = 1 if season > length else season
    assert list(forecasts) == ["last_value", "last_season", "mean_season"]
    for step in range(50):
        back = length - season + step % season
        seasons = [values[:, row] for row in range(back, -1, -season)][: length // season]
        assert torch.equal(forecasts["last_value"][:, step], values[:, -1])
        assert torch.equal(forecasts["last_season"][:, step], values[:, back])
        assert torch.allclose(forecasts["mean_season"][:, step], sum(seasons) / len(seasons), atol=1e-6)


def test_errors_by_hand():
    prediction = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    target = torch.tensor([[[2.0, 5.0]], [[0.0, -4.0]]])
    errors = regular_series.window_errors(prediction, target)
    assert errors.dtype == torch.float64 and errors.tolist() == [[5.0, 2.0], [8.0, 2.0]]
    assert regular_series.mean_errors(errors) == {"mse": 6.5, "mae": 2.0}

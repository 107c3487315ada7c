"""Regular series of several columns, such as ETT: reading, scaling, windows.

A file is a CSV (or CSV.gz) with a header `date,NAME,NAME,...` and rows at equal steps, of minutes, hours, days, working
days, weeks or months: `2016-07-01 00:00:00,5.827,...`. Blank lines at its end do not count. (Numbers are not read by
pandas: it would take a damaged row for text or NaN, and errors could not name its line.)
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, cell, check_unique, readable

DATES = "%Y-%m-%d %H:%M:%S"
DAY = pd.Timedelta(days=1)


@dataclass(frozen=True)
class Step:
    """The distance of two rows. offset: pandas' own for it. season: rows after which a series usually repeats: a day of
    parts of one, a week of days, a year of weeks or months; 1 for others."""

    offset: Any
    season: int


@dataclass(frozen=True)
class Series:
    """A regular series: values (rows, columns) float64 at `dates`; known (rows or more, known columns) float64."""

    columns: tuple[str, ...]
    dates: pd.DatetimeIndex
    step: Step
    values: Tensor
    known: Tensor

    def dates_from(self, first: int, rows: int) -> pd.DatetimeIndex:
        """Return the dates of `rows` rows from number `first` on, which may lie after the series."""
        return _dates(self.dates[0], max(len(self.dates), first + rows), self.step.offset)[first : first + rows]


def read_series(
    path: str | Path,
    columns: Sequence[str] | None = None,
    fill_gaps: bool = False,
    step: str = "",
    known: Sequence[str] = (),
) -> Series:
    """Read all columns of a file, or `columns` in that order. known: columns apart from these; the last rows may have
    values of them only, and empty cells else. fill_gaps: rows that are missing are put on a line
    between their neighbours; else they are an error. step: pandas' name of the one that is preferred where dates fit
    several, as those of a week of working days do. Dates with a time zone are read in UTC. DataError says what
    is wrong."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with readable(path), opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file))
    header = rows.pop(0) if rows else []
    # undo the quoting of `write_series`
    header = [name[1:] if name == cell(name[1:]) else name for name in header]
    while rows and not rows[-1]:
        rows.pop()
    if len(header) == 1 and ";" in header[0]:
        raise DataError(f"{path}: has semicolons between its columns, expected commas")
    if header[:1] != ["date"] or len(header) < 2 or len(rows) < 2:
        raise DataError(f"{path}: expected a header date,NAME,... and two rows or more below it")
    check_unique(path, header)
    names = tuple(columns or [name for name in header[1:] if name not in known])
    check_unique(f"columns={[*names, *known]}", [*names, *known])
    if missing := [name for name in (*names, *known) if name not in header[1:]]:
        raise DataError(f"{path}: has no column {', '.join(missing)}, but {', '.join(header[1:])}")
    if not names:
        raise DataError(f"{path}: known={[*known]} are all its columns, expected others to forecast")
    places, more = ([header.index(name) for name in some] for some in (names, known))
    later = len(rows)  # number of the first row of known columns only
    while more and later and len(rows[later - 1]) == len(header) and not any(rows[later - 1][n] for n in places):
        later -= 1
    values = []
    for line, row in enumerate(rows, 2):
        try:
            if len(row) != len(header):
                raise ValueError
            read = more if line - 2 >= later else [*more, *places]
            values.append([float(row[place]) for place in read])
        except ValueError:
            expected = f"expected a date and {len(header) - 1} numbers, got {','.join(row)[:80]!r}"
            raise DataError(f"{path}: line {line}: {expected}") from None
        if not all(map(math.isfinite, values[-1])):
            raise DataError(f"{path}: line {line}: a number that is not finite")
    if not later:
        raise DataError(f"{path}: has no row with values of {', '.join(names)}")
    dates, every, chosen = _regular(path, [row[0] for row in rows], fill_gaps, step)
    table = pd.DataFrame(values, index=dates).reindex(every).interpolate("time")
    numbers = torch.tensor(table.to_numpy(), dtype=torch.float64)
    complete = int((every <= dates[later - 1]).sum())
    return Series(names, every[:complete], chosen, numbers[:complete, len(more) :], numbers[:, : len(more)])


def _regular(
    path: Path, texts: list[str], fill_gaps: bool, preferred: str
) -> tuple[pd.DatetimeIndex, pd.DatetimeIndex, Step]:
    """Return the dates of all lines, those from the first to the last at the step of most of them, and the step."""
    readings = [_parse(texts, format="ISO8601", utc=True)]
    if readings[0].hasnans and all(re.search(r"(?<!\d)\d{4}(?!\d)", text) for text in texts):  # a whole year
        readings += [_parse(texts), _parse(texts, dayfirst=True)]
    complete = [dates for dates in readings if not dates.hasnans]
    if not complete:
        line = int(min(readings, key=lambda dates: len(dates) - len(dates.dropna())).isna().argmax())
        raise DataError(f"{path}: line {line + 2}: expected a date like 2016-07-01 00:00:00, got {texts[line][:40]!r}")
    ascending = [dates for dates in complete if dates.is_monotonic_increasing and dates.is_unique]
    if not ascending:
        line = int((complete[0][1:] <= complete[0][:-1]).argmax())
        raise DataError(f"{path}: line {line + 3}: {texts[line + 1]} is not after {texts[line]}")
    plans = [(dates, *plan) for dates in ascending for plan in _plans(path, dates)]
    if not plans:
        dates = ascending[0]
        line = int((dates[1:] - dates[:-1]).argmax())
        raise DataError(f"{path}: line {line + 3}: {texts[line + 1]} is far from {texts[line]}, other lines are nearer")
    fitting = [plan for plan in plans if len(plan[1]) == len(texts) and (plan[0] == plan[1]).all()]
    if not fitting and fill_gaps:
        fitting = sorted((plan for plan in plans if plan[0].isin(plan[1]).all()), key=lambda plan: len(plan[1]))
    if any((dates != fitting[0][0]).any() for dates, *_ in fitting):
        raise DataError(f"{path}: {texts[0]!r} may have the month or the day first, expected dates like 2016-07-01")
    if fitting:
        return next((plan for plan in fitting if plan[2].offset.freqstr == preferred), fitting[0])
    dates, every, step = max(plans, key=lambda plan: int(plan[0].isin(plan[1]).sum()))
    line = next(n for n, date in enumerate(dates) if n == len(every) or date != every[n])
    expected = f"{every[line]:{DATES}} comes" if line < len(every) else "none comes"
    raise DataError(f"{path}: line {line + 2}: got {texts[line]} where {expected}, in steps of {step.offset.freqstr}")


def _parse(texts: list[str], **options: Any) -> pd.DatetimeIndex:
    with warnings.catch_warnings():  # of forms that pandas guesses date by date
        warnings.simplefilter("ignore")
        try:
            return pd.DatetimeIndex(pd.to_datetime(pd.Index(texts), errors="coerce", **options)).tz_localize(None)
        except ValueError:  # time zones that change, in a form that is not ISO 8601
            return pd.DatetimeIndex([pd.NaT] * len(texts))


def _plans(path: Path, dates: pd.DatetimeIndex) -> list[tuple[pd.DatetimeIndex, Step]]:
    """Return the dates from the first to the last, and the step, for each step that the most common distance may be;
    none if dates are much further apart."""
    common = pd.Series(dates[1:] - dates[:-1]).mode()[0]
    if common % pd.Timedelta(seconds=1) != pd.Timedelta(0):
        raise DataError(f"{path}: steps of {common.total_seconds()} s, expected whole seconds")
    if (dates[-1] - dates[0]) // common > 2 * len(dates) + 100:
        return []
    seasons = {DAY: 7, 7 * DAY: 52}
    season = DAY // common if common < DAY and DAY % common == pd.Timedelta(0) else seasons.get(common, 1)
    days = common % DAY == pd.Timedelta(0)
    steps = [Step(pd.offsets.Day(common // DAY) if days else pd.tseries.frequencies.to_offset(common), season)]
    if months := round(common / (30.4 * DAY)):
        ends = bool(dates.is_month_end.all())
        offset = pd.offsets.MonthEnd(months) if ends else pd.DateOffset(months=months)
        steps.insert(0, Step(offset, 1 if 12 % months else 12 // months))
    elif common == DAY and (dates.day_of_week < 5).all():
        steps.append(Step(pd.offsets.BDay(), 5))
    rows = round(1.1 * ((dates[-1] - dates[0]) / common)) + 2
    grids = [(_dates(dates[0], rows, step.offset), step) for step in steps]
    return [(grid[grid <= dates[-1]], step) for grid, step in grids]


def _dates(first: pd.Timestamp, rows: int, offset: Any) -> pd.DatetimeIndex:
    if type(offset) is pd.DateOffset:  # months from the first: the 30th is the 28th in February alone
        return pd.DatetimeIndex([first + offset * row for row in range(rows)])
    return pd.date_range(first, periods=rows, freq=offset)


def write_series(path: Path, columns: Sequence[str], dates: pd.DatetimeIndex, values: Tensor) -> None:
    """Write a file that `read_series` reads."""
    table = pd.DataFrame(values.numpy(), dates, [*map(cell, columns)])
    options: Any = {"float_format": "%.6g", "date_format": DATES, "na_rep": "nan", "lineterminator": "\n"}
    table.to_csv(path, index_label="date", **options)


def time_features(dates: pd.DatetimeIndex) -> Tensor:
    """Return the place of each date in its day, week, month and year, from -0.5 to 0.5: (rows, 4) float32 (Informer's
    features of an hourly series; minutes and seconds are fractions of an hour)."""
    places = (
        dates.hour + dates.minute / 60 + dates.second / 3600,
        dates.day_of_week,
        dates.day - 1,
        dates.day_of_year - 1,
    )
    columns = [torch.tensor(place.to_numpy(dtype="float32", copy=True)) for place in places]
    return torch.stack(columns, 1) / torch.tensor([23, 6, 30, 365]) - 0.5


def scale_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (columns,) of values (rows, columns). A column that does
    not change has a standard deviation of 1."""
    std = values.std(0, correction=0)
    return values.mean(0), torch.where(std > 0, std, 1.0)


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor, int]]):
    """Windows of a series: item i is (values (input_length, columns), times (input_length +
    horizon, 4 or more), target (horizon, columns), i).

    These are all windows whose target lies in the rows [first, last); their input may begin before
    `first`. `values` (rows, columns) and `times` (rows, 4 or more) are those of the whole series.
    """

    def __init__(self, values: Tensor, times: Tensor, first: int, last: int, input_length: int, horizon: int) -> None:
        self.values, self.times = values, times
        self.input_length, self.length = input_length, input_length + horizon
        self.starts = range(max(0, first - input_length), last - self.length + 1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, int]:
        start = self.starts[index]
        rows, now = slice(start, start + self.length), self.input_length
        values = self.values[rows]
        return values[:now], self.times[rows], values[now:], index


def simple_forecasts(values: Tensor, horizon: int, season: int) -> dict[str, Tensor]:
    """Return baseline forecasts, each (batch, horizon, columns), from values (batch, input_length, columns): the last
    value, the last season and the mean season, repeated. season: rows of one; 1 in place of more than input_length."""
    length = values.shape[1]
    season = season if season <= length else 1
    rows = torch.arange(horizon) % season
    # seasons are counted back from the end of the input: row r of the forecast is row r of a season
    seasons = values[:, length % season :].unflatten(1, (-1, season))
    return {
        "last_value": values[:, -1:].expand(-1, horizon, -1),
        "last_season": seasons[:, -1, rows],
        "mean_season": seasons.mean(1)[:, rows],
    }


def window_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Return mean square and mean absolute error of each window: (batch, horizon, columns) -> (batch, 2) float64."""
    difference = prediction.double() - target.double()
    return torch.stack([difference.square().mean((1, 2)), difference.abs().mean((1, 2))], -1)


def mean_errors(windows: Iterable[Tensor]) -> dict[str, float]:
    """Average over windows of one size, (2,) each of `window_errors`: all values count equally."""
    mse, mae = torch.stack(list(windows)).mean(0).tolist()
    return {"mse": mse, "mae": mae}

"""Hourly series of several columns, such as ETT: reading, the usual split, scaling, windows.

A file is a CSV (or CSV.gz) with a header `date,NAME,NAME,...` and one row per hour, without gaps:
`2016-07-01 00:00:00,5.827,...`. Blank lines at its end do not count. (Not read by pandas: it would
take a damaged row for text or NaN, and errors could not name its line.)
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, cell, check_unique, readable

DATES = "%Y-%m-%d %H:%M:%S"
HOUR = timedelta(hours=1)
DAY = 24  # rows
# ETT's usual split: where training, validation and test end, 12, 4 and 4 months of 30 days
MONTHS_12_4_4 = (12 * 30 * DAY, 16 * 30 * DAY, 20 * 30 * DAY)


@dataclass(frozen=True)
class Series:
    """An hourly series: values (rows, columns) float64, one row per hour from `start` on."""

    columns: tuple[str, ...]
    start: datetime
    values: Tensor


def read_series(path: str | Path, columns: Sequence[str] | None = None) -> Series:
    """Read all columns of a file, or `columns` in that order. DataError says what is wrong."""
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
    if header[:1] != ["date"] or len(header) < 2 or not rows:
        raise DataError(f"{path}: expected a header date,NAME,... and rows below it")
    names = tuple(columns or header[1:])
    check_unique(path, header)
    check_unique(f"columns={[*names]}", names)
    if missing := [name for name in names if name not in header[1:]]:
        raise DataError(f"{path}: has no column {', '.join(missing)}, but {', '.join(header[1:])}")
    places = [header.index(name) for name in names]
    dates, values = [], []
    for line, row in enumerate(rows, 2):
        try:
            if len(row) != len(header):
                raise ValueError
            dates.append(datetime.strptime(row[0], DATES))
            values.append([float(row[place]) for place in places])
        except ValueError:
            raise DataError(
                f"{path}: line {line}: expected a date like 2016-07-01 00:00:00 and "
                f"{len(header) - 1} numbers, got {','.join(row)[:80]!r}"
            ) from None
        if not all(map(math.isfinite, values[-1])):
            raise DataError(f"{path}: line {line}: a number that is not finite")
        if dates[-1] != dates[0] + HOUR * (line - 2):
            raise DataError(
                f"{path}: line {line}: expected a row an hour, got {row[0]} where {dates[0] + HOUR * (line - 2)} comes"
            )
    return Series(names, dates[0], torch.tensor(values, dtype=torch.float64))


def write_series(path: Path, series: Series) -> None:
    """Write a file that `read_series` reads."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["date", *map(cell, series.columns)])
        for hour, row in enumerate(series.values.tolist()):
            date = (series.start + hour * HOUR).strftime(DATES)
            writer.writerow([date, *(f"{value:.6g}" for value in row)])


def time_features(start: datetime, hours: int) -> Tensor:
    """Return the position of each hour in its day, week, month and year, from -0.5 to 0.5: (hours,
    4) float32 (Informer's features of an hourly series)."""
    dates = [start + hour * HOUR for hour in range(hours)]
    places = [(d.hour, d.weekday(), d.day - 1, d.timetuple().tm_yday - 1) for d in dates]
    return torch.tensor(places).reshape(-1, 4) / torch.tensor([23, 6, 30, 365]) - 0.5


def scale_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (columns,) of values (rows, columns). A column that does
    not change has a standard deviation of 1."""
    std = values.std(0, correction=0)
    return values.mean(0), torch.where(std > 0, std, 1.0)


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor, int]]):
    """Windows of a series: item i is (values (input_length, columns), times (input_length +
    horizon, 4), target (horizon, columns), i).

    These are all windows whose target lies in the rows [first, last); their input may begin before
    `first`. `values` (rows, columns) and `times` (rows, 4) are those of the whole series.
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


def simple_forecasts(values: Tensor, horizon: int) -> dict[str, Tensor]:
    """Return baseline forecasts, each (batch, horizon, columns), from values (batch, input_length,
    columns): the last value, the last day and the mean day, repeated."""
    length = values.shape[1]
    hours = torch.arange(horizon) % DAY
    # days are counted back from the end of the input: hour h of the forecast is row h of a day
    days = values[:, length % DAY :].unflatten(1, (-1, DAY))
    return {
        "last_value": values[:, -1:].expand(-1, horizon, -1),
        "last_day": days[:, -1, hours],
        "mean_day": days.mean(1)[:, hours],
    }


def window_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Return mean square and mean absolute error of each window: (batch, horizon, columns) -> (batch, 2) float64."""
    difference = prediction.double() - target.double()
    return torch.stack([difference.square().mean((1, 2)), difference.abs().mean((1, 2))], -1)


def mean_errors(windows: Iterable[Tensor]) -> dict[str, float]:
    """Average over windows of one size, (2,) each of `window_errors`: all values count equally."""
    mse, mae = torch.stack(list(windows)).mean(0).tolist()
    return {"mse": mse, "mae": mae}

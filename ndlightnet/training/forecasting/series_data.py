"""Windows of a regular series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.series.regular_series import Windows, read_series, scale_of, time_features
from ndlightnet.training.core.data_module import DataModule
from ndlightnet.training.core.options import check


class SeriesData(DataModule):
    """Windows of a regular series, as ndlightnet.data.series.regular_series reads it.

    Args:
        root: the folder. file: a CSV or CSV.gz in it.
        columns: columns that are read and forecast; default: all but `known`.
        targets: those of them that are forecast, while all are read; default: all.
        known: further columns, known for the rows that are forecast, such as holidays or a price: features beside those
            of the time. A file to predict goes on with them for `horizon` rows, with empty cells else.
        input_length, horizon: rows of input, and rows after them that are forecast.
        split: where training, validation and test end: rows, or fractions of all rows.
        fill_gaps: whether rows that are missing are put on a line between their neighbours, before the split; else they
            are an error.
        batch_size: windows per batch.
        workers: processes that prepare batches.
        input: for predict: a file, whose last rows are the input.
    """

    def __init__(
        self,
        root: str,
        file: str = "ETTh1.csv.gz",
        columns: list[str] | None = None,
        targets: list[str] | None = None,
        known: list[str] | None = None,
        input_length: int = 336,
        horizon: int = 720,
        split: tuple[float, float, float] = (0.7, 0.8, 1.0),
        fill_gaps: bool = False,
        batch_size: int = 32,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        self.file, self.chosen_columns = file, columns
        self.input_length, self.horizon, self.split, self.fill_gaps = input_length, horizon, split, fill_gaps
        check("data.split", split, 0 < split[0] < split[1] < split[2], "three numbers in order, rows or fractions")
        self.known, self.chosen_targets = tuple(known or ()), targets
        # from the file or the checkpoint: names, step, mean and std of the training rows, of `columns`, then `known`
        self.columns: tuple[str, ...] = ()
        self.targets: tuple[str, ...] = ()
        self.step = ""
        self.scale: tuple[Tensor, Tensor] | None = None

    @property
    def source(self) -> Path:
        return self.root / self.file

    def setup(self, stage: str) -> None:
        length, horizon = self.input_length, self.horizon
        if length < 1 or horizon < 1:
            raise DataError(f"input_length={length}, horizon={horizon}: expected 1 row or more")
        if stage == "predict":
            return  # names and scale come with the checkpoint
        super().setup(stage)
        path = self.source
        self.series = read_series(path, self.chosen_columns, self.fill_gaps, known=self.known)
        values, rows = self.series.values, len(self.series.values)
        first, second, last = (round(end * rows) if self.split[2] <= 1 else int(end) for end in self.split)
        if rows < last:
            raise DataError(f"{path}: {rows} rows, expected {last} or more, as split={self.split}")
        self.columns, self.step = self.series.columns, self.series.step.offset.freqstr
        self.targets = tuple(self.chosen_targets or self.columns)
        within = {*self.targets} <= {*self.columns} and len({*self.targets}) == len(self.targets)
        check("data.targets", self.chosen_targets, within, f"some of {', '.join(self.columns)}, each once")
        self.scale = scale_of(torch.cat([values[:first], self.series.known[:first]], 1))
        scaled, times = self.scaled(values), self._times(0, rows)
        self.train_set, self.val_set, self.test_set = (
            Windows(scaled, times, a, b, length, horizon) for a, b in ((0, first), (first, second), (second, last))
        )
        if not all(map(len, (self.train_set, self.val_set, self.test_set))):
            raise DataError(f"{path}: split={self.split} has no room for input_length={length} and horizon={horizon}")

    def _times(self, first: int, rows: int) -> Tensor:
        """Return the features of `rows` rows from number `first` on, (rows, 4 + known)."""
        times = time_features(self.series.dates_from(first, rows))
        if not self.known:
            return times
        known = self._scaled(self.series.known[first : first + rows], slice(len(self.columns), None))
        return torch.cat([times, known], 1)

    def _scaled(self, values: Tensor, columns: slice) -> Tensor:
        assert self.scale is not None
        mean, std = (numbers[columns] for numbers in self.scale)
        return ((values - mean) / std).float()

    def scaled(self, values: Tensor) -> Tensor:
        """Scale (..., columns) float64 as in the file to float32 for the network."""
        return self._scaled(values, slice(len(self.columns)))

    @property
    def target_places(self) -> list[int]:
        """The targets' places in `columns`."""
        return [self.columns.index(name) for name in self.targets]

    def unscaled(self, values: Tensor) -> Tensor:
        """Invert `scaled` for (..., targets): return float64 on the CPU."""
        assert self.scale is not None
        mean, std = (numbers[self.target_places] for numbers in self.scale)
        return values.double().cpu() * std + mean

    def predict_dataloader(self) -> Any:
        file = self.check_input("a CSV file to go on from", bool(self.columns))
        self.series = read_series(file, self.columns, self.fill_gaps, self.step, self.known)
        step, rows = self.series.step.offset.freqstr, len(self.series.values)
        if step != self.step:
            raise DataError(f"{file}: in steps of {step}, expected {self.step}, as in training")
        if rows < self.input_length:
            raise DataError(f"{file}: {rows} rows, expected input_length={self.input_length} or more")
        self.first = rows - self.input_length
        if self.known and len(self.series.known) < rows + self.horizon:
            rest = f"{len(self.series.known) - rows} rows of {', '.join(self.known)} after the last values"
            raise DataError(f"{file}: {rest}, expected horizon={self.horizon}")
        times = self._times(self.first, self.input_length + self.horizon)
        window: Any = [(self.scaled(self.series.values[self.first :]), times)]
        return DataLoader(window)

    def names(self) -> dict[str, list[str]]:
        step = [self.step] if self.step else []
        return {"columns": [*self.columns], "targets": [*self.targets], "known": [*self.known], "step": step}

    def set_names(self, names: dict[str, list[str]]) -> None:
        self.columns, self.step = tuple(names["columns"]), "".join(names["step"])
        self.targets, self.known = tuple(names["targets"]), tuple(names["known"])

"""Windows of an hourly series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError
from ndlightnet.data.series.hourly_series import DAY, HOUR, MONTHS_12_4_4, Windows, read_series, scale_of, time_features
from ndlightnet.training.core.data_module import DataModule


class SeriesData(DataModule):
    """Windows of an hourly series, as ndlightnet.data.series.hourly_series reads it.

    Args:
        root: the folder. file: a CSV or CSV.gz in it.
        columns: columns that are read and forecast; default: all.
        input_length, horizon: hours of input, and hours after them that are forecast.
        split: the rows where training, validation and test end.
        batch_size: windows per batch.
        workers: processes that prepare batches.
        input: for predict: a file, whose last hours are the input.
    """

    def __init__(
        self,
        root: str,
        file: str = "ETTh1.csv.gz",
        columns: list[str] | None = None,
        input_length: int = 336,
        horizon: int = 720,
        split: tuple[int, int, int] = MONTHS_12_4_4,
        batch_size: int = 32,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        self.file, self.chosen_columns = file, columns
        self.input_length, self.horizon, self.split = input_length, horizon, split
        # from the file or the checkpoint: names, mean and std of the training rows
        self.columns: tuple[str, ...] = ()
        self.scale: tuple[Tensor, Tensor] | None = None

    @property
    def source(self) -> Path:
        return self.root / self.file

    def setup(self, stage: str) -> None:
        length, horizon = self.input_length, self.horizon
        if length < DAY or horizon < 1:
            raise DataError(
                f"input_length={length}, horizon={horizon}: expected a day of {DAY} hours or more, and 1 or more"
            )
        if stage == "predict":
            return  # names and scale come with the checkpoint
        super().setup(stage)
        path = self.source
        series = read_series(path, self.chosen_columns)
        rows, (first, second, last) = len(series.values), self.split
        if rows < last:
            raise DataError(f"{path}: {rows} rows, expected {last} or more, as split={self.split}")
        self.columns, self.start = series.columns, series.start
        self.scale = scale_of(series.values[:first])
        values, times = self.scaled(series.values), time_features(series.start, rows)
        self.train_set, self.val_set, self.test_set = (
            Windows(values, times, a, b, length, horizon) for a, b in ((0, first), (first, second), (second, last))
        )
        if not all(map(len, (self.train_set, self.val_set, self.test_set))):
            raise DataError(f"{path}: split={self.split} has no room for input_length={length} and horizon={horizon}")

    def scaled(self, values: Tensor) -> Tensor:
        """Scale (..., columns) float64 as in the file to float32 for the network."""
        assert self.scale is not None
        mean, std = self.scale
        return ((values - mean) / std).float()

    def unscaled(self, values: Tensor) -> Tensor:
        """Invert `scaled`: return float64 on the CPU."""
        assert self.scale is not None
        mean, std = self.scale
        return values.double().cpu() * std + mean

    def predict_dataloader(self) -> Any:
        file = self.check_input("a CSV file to go on from", bool(self.columns))
        series = read_series(file, self.columns)
        before = len(series.values) - self.input_length
        if before < 0:
            raise DataError(f"{file}: {len(series.values)} rows, expected input_length={self.input_length} or more")
        self.start = series.start + before * HOUR
        times = time_features(self.start, self.input_length + self.horizon)
        window: Any = [(self.scaled(series.values[before:]), times)]
        return DataLoader(window)

    def names(self) -> dict[str, list[str]]:
        return {"columns": list(self.columns)}

    def set_names(self, names: dict[str, list[str]]) -> None:
        self.columns = tuple(names["columns"])

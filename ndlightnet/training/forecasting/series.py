"""Forecasts of hourly series: data, task, pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError, file_name, whole_file
from ndlightnet.data.series import (
    DAY,
    HOUR,
    MONTHS_12_4_4,
    Series,
    Windows,
    mean_errors,
    read_series,
    scale_of,
    simple_forecasts,
    time_features,
    window_errors,
    write_series,
)
from ndlightnet.data.visits import Visits
from ndlightnet.training.core.loading import training_loader
from ndlightnet.training.core.measures import MeasuredTask
from ndlightnet.training.core.report import COLORS, save_figure, write_json

PANELS = 4


class SeriesData(L.LightningDataModule):
    """Windows of an hourly series, as ndlightnet.data.series reads it.

    Args:
        root: the folder. file: a CSV or CSV.gz in it.
        columns: those that are seen and forecast; default: all.
        input_length, horizon: hours that are seen and hours after them that are forecast.
        split: the rows where training, validation and test end.
        batch_size: windows per batch.
        workers: processes that prepare batches.
        input: for predict: a file, whose last hours are seen.
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
        super().__init__()
        self.root, self.file, self.wanted = Path(root), file, columns
        self.input_length, self.horizon, self.split = input_length, horizon, split
        self.batch_size, self.workers, self.input = batch_size, workers, input
        # of what was read, or of the checkpoint: names, mean and deviation of the training rows
        self.columns: tuple[str, ...] = ()
        self.scale: tuple[Tensor, Tensor] | None = None

    def setup(self, stage: str) -> None:
        length, horizon = self.input_length, self.horizon
        if length < DAY or horizon < 1:
            raise DataError(
                f"input_length={length}, horizon={horizon}: expected a day of {DAY} hours or more, "
                "and 1 or more"
            )
        if stage == "predict":
            return  # names and scale come with the checkpoint
        self.seed = torch.initial_seed()
        path = self.root / self.file
        series = read_series(path, self.wanted)
        rows, (first, second, last) = len(series.values), self.split
        if rows < last:
            raise DataError(f"{path}: {rows} rows, expected {last} or more, as split={self.split}")
        self.columns, self.start = series.columns, series.start
        self.scale = scale_of(series.values[:first])
        values, times = self.scaled(series.values), time_features(series.start, rows)
        self.train_set, self.val_set, self.test_set = (
            Windows(values, times, a, b, length, horizon)
            for a, b in ((0, first), (first, second), (second, last))
        )
        if not all(map(len, (self.train_set, self.val_set, self.test_set))):
            raise DataError(
                f"{path}: split={self.split} has no room for input_length={length} and "
                f"horizon={horizon}"
            )

    def scaled(self, values: Tensor) -> Tensor:
        """(..., columns) float64 as in the file -> float32 as the network sees it."""
        assert self.scale is not None
        mean, deviation = self.scale
        return ((values - mean) / deviation).float()

    def unscaled(self, values: Tensor) -> Tensor:
        """The inverse of `scaled`."""
        assert self.scale is not None
        mean, deviation = self.scale
        return values.double().cpu() * deviation + mean

    def train_dataloader(self) -> Any:
        windows, count = Visits(self.train_set, self.seed), len(self.train_set)
        return training_loader(windows, count, self.batch_size, self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test_set, batch_size=self.batch_size)

    def predict_dataloader(self) -> Any:
        if self.input is None:
            raise DataError("data.input: expected a CSV file to go on from, got none")
        if not self.columns:
            raise DataError("--ckpt_path: predict expects the checkpoint of a training, got none")
        series = read_series(self.input, self.columns)
        before = len(series.values) - self.input_length
        if before < 0:
            raise DataError(
                f"{self.input}: {len(series.values)} rows, expected input_length="
                f"{self.input_length} or more"
            )
        self.start = series.start + before * HOUR
        times = time_features(self.start, self.input_length + self.horizon)
        one: Any = [(self.scaled(series.values[before:]), times)]
        return DataLoader(one)

    def names(self) -> dict[str, list[str]]:
        return {"columns": list(self.columns)}

    def set_names(self, names: dict[str, list[str]]) -> None:
        self.columns = tuple(names["columns"])


class ForecastTask(MeasuredTask):
    """Trains `net`, values `(batch, input_length, columns)` and times `(batch, input_length +
    horizon, 4)` -> `(batch, horizon, columns)`, on the mean square error of scaled values.

    Args:
        net: the network.
        lr, weight_decay: of AdamW, with warm-up and a cosine.
    """

    saved = (*MeasuredTask.saved, "scale")
    monitor = "val_score"  # the best checkpoint has the highest

    def __init__(self, net: nn.Module, lr: float = 1e-3, weight_decay: float = 0.05) -> None:
        super().__init__()
        self.net, self.lr, self.weight_decay = net, lr, weight_decay

    def setup(self, stage: str) -> None:
        data = self.data()
        for name in ("label_length", "period"):
            least = getattr(self.net, name, 0)
            if least > data.input_length:
                raise DataError(
                    f"input_length={data.input_length}: shorter than the network's {name}={least}"
                )
        here = len(data.columns)
        if stage != "predict" and getattr(self.net, "in_chans", here) != here:
            raise DataError(
                f"{data.root / data.file}: expected a network with in_chans={here}, got "
                f"{self.net.in_chans}"
            )

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        values, times, target, _index = batch
        loss = nn.functional.mse_loss(self.net(values, times).float(), target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Any, ...], _: int) -> None:
        values, times, target, _index = batch
        mse = window_errors(self.net(values, times), target)[:, 0].mean()
        how: dict[str, Any] = {"batch_size": len(target), "sync_dist": True}
        self.log("val_mse", mse, prog_bar=True, **how)
        self.log("val_score", -mse, **how)

    def on_test_epoch_start(self) -> None:
        self.seen: dict[int, dict[str, Tensor]] = {}  # errors of each window, ours and simple ones
        self.panels: dict[int, Panel] = {}
        last = len(self.data().test_set) - 1
        self.shown = {round(i * last / (PANELS - 1)) for i in range(PANELS)}

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        values, times, target, index = batch
        data = self.data()
        forecasts = {"net": self.net(values, times), **simple_forecasts(values, data.horizon)}
        found = {name: window_errors(y, target).cpu() for name, y in forecasts.items()}
        for row, number in enumerate(index.tolist()):
            self.seen[number] = {name: pair[row] for name, pair in found.items()}
            if number in self.shown:
                start = data.start + data.test_set.starts[number] * HOUR
                title = f"{data.columns[-1]}, window {number + 1} of {len(data.test_set)}"
                known, guess, truth = (
                    data.unscaled(part[row])[:, -1] for part in (values, forecasts["net"], target)
                )
                self.panels[number] = Panel(title, start, known, guess, truth)

    def on_test_epoch_end(self) -> None:
        data, seen = self.data(), list(self.gathered(self.seen).values())
        panels = self.gathered(self.panels)
        found = {name: mean_errors([window[name] for window in seen]) for name in seen[0]}
        ours = found.pop("net")
        metrics = {
            **ours,
            **found,
            "windows": len(seen),
            "columns": list(data.columns),
            "input_length": data.input_length,
            "horizon": data.horizon,
            **self.costs(),
        }
        self.log("test_mse", ours["mse"], rank_zero_only=True)
        if not self.trainer.is_global_zero:
            return
        write_json(self.out() / "metrics.json", metrics)
        save_forecasts(self.out() / "test_windows.png", list(panels.values()))
        simple = min(found, key=lambda name: found[name]["mse"])
        self.summary = (
            f"MSE {ours['mse']:.3f}, MAE {ours['mae']:.3f} over {len(seen)} windows, scaled "
            f"({simple.replace('_', ' ')} repeated: {found[simple]['mse']:.3f}, "
            f"{found[simple]['mae']:.3f}); see {self.out()}"
        )

    def predict_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        data, (values, times) = self.data(), batch
        known, guess = data.unscaled(values[0]), data.unscaled(self.net(values, times)[0])
        name = re.sub(r"(?i)(\.csv)?(\.gz)?$", "", Path(data.input).name, count=1)
        file = self.out() / "predictions" / f"{file_name(name)}.csv"
        with whole_file(file) as draft:
            write_series(draft, Series(data.columns, data.start + len(known) * HOUR, guess))
        panels = [
            Panel(column, data.start, known[:, i], guess[:, i])
            for i, column in enumerate(data.columns)
        ]
        save_forecasts(file.with_suffix(".png"), panels)
        self.summary = f"the {data.horizon} hours after {data.input} are in {file}"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["scale"] = [values.tolist() for values in self.data().scale]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.data().scale is None:  # predict: nothing was read to scale by
            mean, deviation = checkpoint["scale"]
            self.data().scale = tuple(
                torch.tensor(x, dtype=torch.float64) for x in (mean, deviation)
            )


class Panel(NamedTuple):
    """One column of a window: what is known from `start` on, the forecast of the hours after it,
    and the truth of those where there is one."""

    title: str
    start: datetime
    known: Tensor
    forecast: Tensor
    truth: Tensor | None = None


def save_forecasts(path: Path, panels: Sequence[Panel]) -> None:
    """One row per panel, each over its own dates."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.9 * len(panels) + 0.5), layout="constrained", facecolor="white")
    for axis, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        now, hours = len(panel.known), len(panel.known) + len(panel.forecast)
        dates = [panel.start + hour * HOUR for hour in range(hours)]
        axis.axvspan(dates[now], dates[-1], color="#F3F3F3", linewidth=0)
        lines = (
            (dates[:now], panel.known, "input", "#777777"),
            (dates[now:], panel.truth, "truth", COLORS[0]),
            (dates[now:], panel.forecast, "forecast", COLORS[4]),
        )
        for when, values, label, color in lines:
            if values is not None:
                axis.plot(when, values.numpy(), label=label, color=color, linewidth=1.1)
        locator = AutoDateLocator()
        axis.xaxis.set_major_locator(locator)
        axis.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axis.set_title(panel.title, loc="left", fontsize=9)
        axis.margins(x=0)
        axis.tick_params(labelsize=8)
        axis.xaxis.get_offset_text().set_size(8)
        axis.grid(color="#DDDDDD", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)

"""Forecasts of a regular series, compared with simple ones that need no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ndlightnet.data.errors import DataError, atomic_write, file_name
from ndlightnet.data.series.regular_series import mean_errors, simple_forecasts, window_errors, write_series
from ndlightnet.models.forecaster import TIME_FEATURES
from ndlightnet.training.core.task import Task
from ndlightnet.training.forecasting.forecast_figure import Panel, save_forecasts
from ndlightnet.training.report.results import write_metrics

PANELS = 4


def quantile_loss(forecast: Tensor, target: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Return the quantile (pinball) loss, (..., quantiles), of a forecast of that shape of a target (...): q times what
    it is too low by, 1 - q times what it is too high by."""
    low = target[..., None] - forecast
    levels = torch.tensor(quantiles, dtype=low.dtype, device=low.device)
    return torch.maximum(levels * low, (levels - 1) * low)


class ForecastTask(Task):
    """Trains `net`, values `(batch, input_length, columns)` and times `(batch, input_length + horizon, 4 + known)` ->
    `(batch, horizon, columns)`, on the mean square error of the scaled targets; one with `quantiles`, whose result has
    them last, on the quantile loss. Then errors are those of the median, by whose square the best checkpoint is chosen,
    too; `test` gives the quantile loss and, of several, the coverage, the fraction of values between the outermost
    quantiles; `predict` writes a column `NAME 0.1` of each quantile and column.

    Args:
        all: as in Task.
    """

    saved = (*Task.saved, "scale")

    def setup(self, stage: str) -> None:
        data = self.data()
        for name in ("label_length", "period"):
            least = getattr(self.net, name, 0)
            if least > data.input_length:
                raise DataError(f"input_length={data.input_length}: shorter than the network's {name}={least}")
        if stage != "predict":
            self.expect(in_chans=len(data.columns), covariates=len(data.known))

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        steps = data.input_length + data.horizon
        values = torch.zeros(data.batch_size, data.input_length, len(data.columns))
        times = torch.zeros(data.batch_size, steps, TIME_FEATURES + len(data.known))
        return values.to(self.device), times.to(self.device)

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        values, times, target, _index = batch
        forecast, target = self._targets(self(values, times).float()), target[..., self.data().target_places]
        quantiles = self._quantiles()
        loss = quantile_loss(forecast, target, quantiles).mean() if quantiles else mse_loss(forecast[..., 0], target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Any, ...], _: int) -> None:
        values, times, target, _index = batch
        target = target[..., self.data().target_places]
        mse = window_errors(self._median(self._targets(self.net(values, times))), target)[:, 0].mean()
        self.log("val_mse", mse, prog_bar=True, batch_size=len(target), sync_dist=True)
        self.log("val_score", -mse, batch_size=len(target), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        # errors of each window, of the network and of the simple forecasts
        self.tested: dict[int, dict[str, Tensor]] = {}
        self.spreads: dict[int, Tensor] = {}  # of each window, with quantiles: their loss, and the coverage
        self.panels: dict[int, Panel] = {}
        last = len(self.data().test_set) - 1
        self.shown = {round(i * last / (PANELS - 1)) for i in range(PANELS)}

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        values, times, target, index = batch
        data, output, quantiles = self.data(), self._targets(self.net(values, times)), self._quantiles()
        values, target = (x[..., data.target_places] for x in (values, target))
        if quantiles:
            within = (output[..., 0] <= target) & (target <= output[..., -1])
            losses = quantile_loss(output, target, quantiles).flatten(1).double().mean(1)
            spreads = torch.stack([losses, within.flatten(1).double().mean(1)], 1).cpu()
            self.spreads |= dict(zip(index.tolist(), spreads, strict=True))
        forecasts = {"net": self._median(output), **simple_forecasts(values, data.horizon, data.series.step.season)}
        errors = {name: window_errors(y, target).cpu() for name, y in forecasts.items()}
        for row, number in enumerate(index.tolist()):
            self.tested[number] = {name: pair[row] for name, pair in errors.items()}
            if number in self.shown:
                dates = data.series.dates_from(data.test_set.starts[number], data.test_set.length)
                title = f"{data.targets[-1]}, window {number + 1} of {len(data.test_set)}"
                inputs, forecast, truth = (data.unscaled(x[row])[:, -1] for x in (values, forecasts["net"], target))
                band = self._unscaled(output[row])[:, -1, [0, -1]] if quantiles else None
                self.panels[number] = Panel(title, dates, inputs, forecast, truth, band)

    def on_test_epoch_end(self) -> None:
        data, tested = self.data(), list(self.gathered(self.tested).values())
        panels, spreads = self.gathered(self.panels), list(self.gathered(self.spreads).values())
        measures = ("quantile_loss", "coverage")[: len(self._quantiles() or ())]  # one quantile covers nothing
        spread = dict(zip(measures, torch.stack(spreads).mean(0).tolist(), strict=False)) if spreads else {}
        errors = {name: mean_errors([window[name] for window in tested]) for name in tested[0]}
        ours = errors.pop("net")
        metrics = {
            **ours,
            **spread,
            **errors,
            "windows": len(tested),
            "columns": list(data.columns),
            "targets": list(data.targets),
            "known": list(data.known),
            "input_length": data.input_length,
            "horizon": data.horizon,
            **self.costs(),
        }
        self.log("test_mse", ours["mse"], rank_zero_only=True)
        if not self.trainer.is_global_zero:
            return
        write_metrics(self.out(), metrics)
        save_forecasts(self.out() / "test_windows.png", list(panels.values()))
        simple = min(errors, key=lambda name: errors[name]["mse"])
        self.summary = (
            f"MSE {ours['mse']:.3f}, MAE {ours['mae']:.3f} over {len(tested)} windows, scaled "
            f"({simple.replace('_', ' ')} repeated: {errors[simple]['mse']:.3f}, "
            f"{errors[simple]['mae']:.3f}); see {self.out()}"
        )

    def predict_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        data, (values, times) = self.data(), batch
        forecasts, quantiles = self._unscaled(self._targets(self.net(values, times))[0]), self._quantiles()
        inputs, forecast = data.unscaled(values[0, :, data.target_places]), self._median(forecasts)
        dates = data.series.dates_from(data.first, data.input_length + data.horizon)
        name = re.sub(r"(?i)(\.csv)?(\.gz)?$", "", Path(data.input).name, count=1)
        file = self.out() / "predictions" / f"{file_name(name)}.csv"
        with atomic_write(file) as draft:
            columns = [f"{column} {level}" for column in data.targets for level in quantiles or ()]
            write_series(draft, columns or data.targets, dates[len(inputs) :], forecasts.flatten(1))
        panels = [
            Panel(column, dates, inputs[:, i], forecast[:, i], None, forecasts[:, i, [0, -1]] if quantiles else None)
            for i, column in enumerate(data.targets)
        ]
        save_forecasts(file.with_suffix(".png"), panels)
        self.summary = f"the {data.horizon} rows after {data.input} are in {file}"

    def _quantiles(self) -> tuple[float, ...] | None:
        quantiles: tuple[float, ...] | None = getattr(self.net, "quantiles", None)
        return quantiles

    def _targets(self, output: Tensor) -> Tensor:
        """Return what the network gives of the targets, (..., targets, quantiles), 1 if it gives none."""
        output = output if self._quantiles() else output[..., None]
        return output[..., self.data().target_places, :]

    def _median(self, forecasts: Tensor) -> Tensor:
        return forecasts[..., (self._quantiles() or (0.5,)).index(0.5)]

    def _unscaled(self, quantiles: Tensor) -> Tensor:
        """Return quantiles (horizon, columns, quantiles) in the units of the file."""
        unscaled: Tensor = self.data().unscaled(quantiles.mT).mT
        return unscaled

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["scale"] = [values.tolist() for values in self.data().scale]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.data().scale is None:  # predict: no training rows were read
            mean, std = checkpoint["scale"]
            self.data().scale = tuple(torch.tensor(x, dtype=torch.float64) for x in (mean, std))

"""Forecasts of series."""

from ndlightnet.training.forecasting.data import SeriesData
from ndlightnet.training.forecasting.task import ForecastTask

__all__ = ["ForecastTask", "SeriesData"]

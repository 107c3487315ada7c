"""Forecasts of series."""

COMMANDS = {
    "forecast": {
        "line": "forecast a regular series",
        "task": "forecasting.forecast_task:ForecastTask",
        "data": "forecasting.series_data:SeriesData",
        "config": "ett",
    }
}

"""Forecasts of series."""

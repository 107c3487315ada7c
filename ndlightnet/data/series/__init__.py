"""Hourly series of several columns."""

"""Clouds of points."""

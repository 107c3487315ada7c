"""Signals: recordings of different lengths, and their spectra."""

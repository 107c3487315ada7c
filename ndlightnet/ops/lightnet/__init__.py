"""LightNet attention; attention.py and frames.py describe arguments and results."""

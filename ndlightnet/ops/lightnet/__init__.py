"""LightNet attention: what its functions take and return is in attention.py and frames.py."""

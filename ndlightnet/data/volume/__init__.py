"""Volumes: from medical files to a batch, and from labels back onto the grid of their file."""

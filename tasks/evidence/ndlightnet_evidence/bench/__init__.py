"""Benchmark of the library beside the memory's speed and other libraries."""

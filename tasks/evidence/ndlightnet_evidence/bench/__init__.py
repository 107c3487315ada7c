"""Benchmark of the library beside the memory's speed and other libraries.

timing     milliseconds of a call
rows       classes of a comparison: Case, Contender, Cell, Bench
peers      the same work by other libraries
attention, frames, mixers, tpe, local, norm, generation, decode, step, stream    the groups of rows
output     tables, CSV, JSON
"""

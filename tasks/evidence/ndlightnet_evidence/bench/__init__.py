"""Benchmark of the library beside the memory's speed and other libraries.

timing           milliseconds of a call
rows             classes of a comparison: Case, Contender, Cell, Bench
rival_kernels    the same work by other libraries
attention_rows, operator_rows, network_rows    the groups of rows
output           tables, CSV, JSON
"""

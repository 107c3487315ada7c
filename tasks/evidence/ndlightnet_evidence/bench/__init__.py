"""How fast the library is, beside the memory's speed and its peers.

timing     a call -> milliseconds
rows       who is compared on what: Case, Contender, Cell, Bench
peers      the same work by others
attention, frames, mixers, tpe, decode, step, stream    the groups of rows
output     tables, CSV, JSON, the figure
"""

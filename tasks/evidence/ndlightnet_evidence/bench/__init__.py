"""How fast the library is, beside the memory's speed and its peers: `python tasks/evidence/bench.py`.

timing     a call -> milliseconds
rows       who is compared on what: Case, Contender, Cell, Bench
peers      the same work by others
attention, tpe, decode, step    the groups of rows
output     tables, CSV, JSON, the figure
"""

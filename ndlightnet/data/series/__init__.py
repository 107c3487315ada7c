"""Regular series of several columns."""

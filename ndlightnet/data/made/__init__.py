"""Small data sets that are drawn on this machine: digits and phantoms."""

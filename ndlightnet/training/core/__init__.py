"""Shared parts of all tasks: the module, the command line, the optimiser, costs, reports."""

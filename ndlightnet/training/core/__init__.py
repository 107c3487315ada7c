"""What every task shares: the module, the command line, the optimiser, costs, reports."""

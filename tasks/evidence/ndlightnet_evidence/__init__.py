"""Modules that the commands of tasks/evidence share. They are not in the wheel."""

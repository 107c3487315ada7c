"""What the commands of tasks/evidence share. It is not in the wheel."""

"""Learning without labels."""

"""Language models of bytes."""

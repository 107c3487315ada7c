"""Text: bytes of files, and windows of them."""

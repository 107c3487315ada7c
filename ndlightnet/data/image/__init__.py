"""Images: from files of any size and depth, or arrays of one size, to batches."""

"""Videos: from a file, a pipe or a folder of classes to clips."""

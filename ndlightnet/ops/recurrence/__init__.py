"""Linear recurrences along tokens: one scan, and the memories of other mixers on top of it."""

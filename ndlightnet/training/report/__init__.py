"""Results for people: figures in one style, HTML pages, JSON and CSV files. A file appears complete or not at all."""

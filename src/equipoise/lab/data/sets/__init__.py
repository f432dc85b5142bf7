"""Data sets, one reader per file format."""

"""The map whose fixed points are sought, as solvers see it: rows to rows, one sample per row."""

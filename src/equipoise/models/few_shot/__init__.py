"""Classifiers for learning new classes from a few images: by a task vector (JIIO), or by adapting all weights."""

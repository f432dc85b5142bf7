"""Recipes of the library itself, which belong to no paper."""

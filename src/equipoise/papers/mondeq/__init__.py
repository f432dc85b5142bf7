"""Recipes, tables and figures of the monDEQ paper (Winston and Kolter 2020)."""

# Functions in figures.py that recipes name, as "mondeq-accuracy".
FIGURES = ("accuracy", "iterations", "convergence")

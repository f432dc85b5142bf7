"""Recipes and figures of the MDEQ paper (Bai, Koltun and Kolter 2020)."""

# Functions in figures.py that recipes name, as "mdeq-convergence".
FIGURES = ("convergence", "scales")

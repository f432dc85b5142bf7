"""Recipes, tables and figures of the OptEq paper (Li et al. 2022)."""

# Functions in figures.py that recipes name, as "opteq-coupling".
FIGURES = ("coupling", "perturbation", "attack", "augmented", "diversity", "solvers")

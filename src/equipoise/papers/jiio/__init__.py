"""Recipes, tables and figures of the JIIO paper (Gurumurthy, Bai, Manchester and Kolter 2021)."""

# Functions that recipes name, as "jiio-attack_time": in figures.py, or "file:name" in another file.
FIGURES = (
    "attack_figures:attack_time",
    "restoration_figures:restorations",
    "generation_figures:cost_over_time",
    "generation_figures:fitting_time",
    "sample_figures:generated",
    "hyperparameter_figures:hyperparameters",
    "few_shot_figures:inner_steps",
    "few_shot_figures:inner_time",
)

"""Training a model by a recipe, and measuring it."""

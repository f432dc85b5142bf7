"""Recipes: their schema, reading them from TOML with line numbers, building objects from them."""

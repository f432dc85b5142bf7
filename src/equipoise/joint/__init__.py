"""Optimise the input of an equilibrium jointly with the equilibrium itself."""

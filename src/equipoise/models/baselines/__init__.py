"""Neighbours of equilibrium models, for comparison: Neural ODEs, unconstrained DEQs, unrolled and residual networks."""

"""Generators: images from a latent vector through a multiscale equilibrium (JIIO)."""

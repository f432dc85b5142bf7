"""MDEQ: multiscale deep equilibrium models (Bai, Koltun and Kolter 2020)."""

"""monDEQ: monotone operator equilibrium networks (Winston and Kolter 2020)."""

"""OptEq, POptEq and MOptEq: equilibria that are stationary points of an explicit objective (Li et al. 2022)."""

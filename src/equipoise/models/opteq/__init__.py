"""OptEq, POptEq and MOptEq: equilibria that minimise a hidden objective (Li et al. 2022)."""

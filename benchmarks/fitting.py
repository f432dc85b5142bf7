"""Fit a sum of named terms to measurements, such as seconds = a E + b B E P C^2 with a, b >= 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch

Variables = Mapping[str, float]


def value(term: str, variables: Variables) -> float:
    """Return a product such as "B E P C^2"; "1" is the constant term."""
    factors = (factor.partition("^") for factor in term.split() if factor != "1")
    return prod(variables[name] ** float(power or 1) for name, _, power in factors)


@dataclass(frozen=True)
class Fit:
    """The terms of a fitted sum with their coefficients."""

    coefficients: dict[str, float]

    def __call__(self, variables: Variables) -> float:
        return sum(c * value(term, variables) for term, c in self.coefficients.items())

    def __str__(self) -> str:
        return " + ".join(f"{c:.2g}" if term == "1" else f"{c:.2g} {term}" for term, c in self.coefficients.items())


def fit(terms: Sequence[str], points: Sequence[Variables], values: Sequence[float]) -> Fit:
    """Return the sum of terms with coefficients above zero that has the least squared relative error.

    With the few terms here, every subset can be tried: the best one whose coefficients are all positive is the
    solution with coefficients of at least zero.
    """
    rows = [[value(term, p) / v for term in terms] for p, v in zip(points, values, strict=True)]
    table = torch.tensor(rows, dtype=torch.float64)
    best, least = Fit({}), float("inf")
    for count in range(1, len(terms) + 1):
        for chosen in combinations(range(len(terms)), count):
            columns = table[:, list(chosen)]
            scale = columns.amax(dim=0)  # coefficients differ by many orders of magnitude
            found = torch.linalg.lstsq(columns / scale, torch.ones(len(points), 1).double()).solution
            error = float((columns / scale @ found - 1).square().sum())
            if bool((found > 0).all()) and error < least - 1e-12:
                numbers = (found[:, 0] / scale).tolist()
                best, least = Fit({terms[i]: c for i, c in zip(chosen, numbers, strict=True)}), error
    return best

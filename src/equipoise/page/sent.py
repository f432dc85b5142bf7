"""The fields of a request, checked as they are read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from equipoise.lab.files import parse
from equipoise.lab.printable import printable
from equipoise.options import is_number
from equipoise.page.pictures import from_table
from equipoise.page.refused import Refused


class Sent:
    """The fields of a request. Every error names the field, which is also the name of its control on the page."""

    def __init__(self, fields: dict[str, Any]):
        self.fields, self.read = fields, set[str]()

    @classmethod
    def of(cls, body: bytes) -> Sent:
        """Parse the body of a request."""
        try:
            fields = parse(body)
        except ValueError as error:
            raise Refused(f"The request is not JSON: {printable(error)}.") from None
        if not isinstance(fields, dict):
            raise Refused("The request must be a table of fields.")
        return cls(fields)

    def take(self, name: str) -> Any:
        self.read.add(name)
        if name not in self.fields:
            raise Refused(f"The request has no field {name!r}.", name)
        return self.fields[name]

    def number(self, name: str, least: float, most: float) -> float:
        """Return a number between two bounds."""
        if not is_number(value := self.take(name), at_least=least, at_most=most):
            raise Refused(f"{name} is {shown(value)}; it must be a number from {least:g} to {most:g}.", name)
        return float(value)

    def count(self, name: str, least: int, most: int) -> int:
        """Return a whole number between two bounds."""
        if not is_number(value := self.take(name), at_least=least, at_most=most, whole=True):
            raise Refused(f"{name} is {shown(value)}; it must be a whole number from {least} to {most}.", name)
        return value

    def choice(self, name: str, among: Collection[str]) -> str:
        """Return one of several words."""
        value = self.take(name)
        if not isinstance(value, str) or value not in among:
            raise Refused(f"{name} is {shown(value)}; allowed: {', '.join(among)}.", name)
        return value

    def image(self, name: str, shape: Sequence[int | None]) -> Tensor:
        """Return an image as uint8 (channels, height, width); None in ``shape`` allows any length."""
        return from_table(self.take(name), shape, name)

    def done(self) -> None:
        """Raise for a field that nothing has read."""
        for name in self.fields:
            if name not in self.read:
                raise Refused(f"There is no field {shown(name)}; fields: {', '.join(sorted(self.read))}.")


def shown(value: object) -> str:
    """Return a value as part of a sentence, shortened."""
    words = printable(repr(value))
    return words if len(words) <= 40 else f"{words[:37]}..."
